"""Faults that hit one call: "the third transaction on a reservation from now on: made, and its answer lost".

    aims = Aims()
    aims.arm(Aim("transact reserve", left=3, what="lose"))
    shot = aims.meet(node, "transact", [keys])       what a port asks before every call; None nearly always
    if shot is not None:
        return await shot.around(call, fail)

Rates meet what happens often. What happens once in a run, and for a few milliseconds, is met by aiming at it: every
kind of call that a broker makes to its disk, the metadata store and the object store is a target (`TARGETS`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from pydanube.core import keys

T = TypeVar("T")

# What happens at the call. "behind": it is made first, and the caller does not get on.
ACTIONS: Final = ("fail", "lose", "late", "delay", "delay_behind", "kill", "kill_behind", "pause", "pause_behind")
# A disk does what it was asked to before it answers, or not at all: nothing comes late.
DISK_ACTIONS: Final = tuple(each for each in ACTIONS if each != "late")

_WRITTEN: Final = (
    *("owner", "reserve", "seal", "history", "object", "sessions", "orphan", "void"),
    *("cursor", "holes", "subscription", "consumer", "topic", "marker", "assignment"),
    *("registration", "state", "lost", "leader", "rescue", "load"),
)
_GOT: Final = ("owner", "seal", "history", "reserve", "registration", "state", "lost", "rescue", "leader", "policy")
_LISTED: Final = ("storage", "topic", "assignment", "orphan", "void", "rescue", "cluster")
_OFTEN: Final = (
    *(f"transact {kind}" for kind in _WRITTEN),
    *(f"get {kind}" for kind in _GOT),
    *(f"list {kind}" for kind in _LISTED),
    *("grant", "renew", "revoke"),
)
# What little depends on, drawn seldom and from its own generator: a seed that does not aim at them is what it was.
_SELDOM: Final = (
    *("transact seen", "transact events", "transact policy", "transact rebalancing_history"),
    *("get topic", "get subscription", "get cursor", "get marker", "get assignment", "get seen"),
    *("list subscription", "list events"),
)
SELDOM_SHARE: Final = 0.08
METADATA_TARGETS: Final = (*_OFTEN, *_SELDOM)
OBJECT_TARGETS: Final = ("object put", "object get", "object head", "object delete", "object list")
DISK_TARGETS: Final = (
    *("disk create", "disk write", "disk sync", "disk sync_directory", "disk rename", "disk remove"),
    *("disk truncate", "disk make_directory", "disk read", "disk list", "disk size"),
)
TARGETS: Final = (*METADATA_TARGETS, *OBJECT_TARGETS, *DISK_TARGETS)

# Where a moment decides who has an offset, or what is history: drawn more often.
_HOT: Final = ("transact reserve", "transact owner", "transact seal", "transact history", "list storage") * 4
# A call of these is made rarely: of the others the n-th is drawn from a wider range.
_RARE: Final = frozenset(
    f"transact {kind}" for kind in ("orphan", "void", "lost", "leader", "rescue", "seal", "registration", "state")
) | {"get rescue", "get seal", "get reserve", "list orphan", "list void", "list assignment", "grant", "revoke"}


def kind_of(key: str) -> str:
    """What a key, or a prefix that is listed, is about; see core/keys.py."""
    parts = key.strip("/").split("/")
    if key.startswith(keys.STORAGE):
        below = parts[4] if len(parts) > 4 else "storage"
        return {"state": "seal", "objects": "object", "orphans": "orphan", "voids": "void"}.get(below, below)
    if key.startswith(keys.TOPICS):
        last = {"ack_holes": "holes", "cursor": "cursor", "policy": "policy"}.get(parts[-1])
        if last is not None:
            return last
        return "consumer" if "consumers" in parts else "subscription" if len(parts) > 4 else "topic"
    if key.startswith(keys.BROKERS):
        return "state" if parts[-1] == "state" else "assignment"
    if key.startswith(keys.NAMESPACES):
        return "policy" if parts[-1] == "policy" else "topic"
    if key.startswith(keys.CLUSTER):
        second = parts[1] if len(parts) > 1 else "cluster"
        return {"register": "registration", "unassigned": "marker", "rescues": "rescue"}.get(second, second)
    return parts[0]


class AimedNode(Protocol):
    """Whose call it is."""

    number: int


@dataclass(slots=True, eq=False)
class Aim:
    """`left`: it hits the so-manieth such call from now on. `shots`: and so many in all, one after the other."""

    target: str
    left: int
    what: str
    seconds: float = 0.0
    shots: int = 1
    node: int = 0  # of this node alone; 0: of any

    def __str__(self) -> str:
        often = f", {self.shots} in a row" if self.shots > 1 else ""
        where = f" of node {self.node}" if self.node else ""
        return f"call {self.left} of {self.target!r}{where}: {self.what} {self.seconds:.2f} s{often}"


def draw(rng: Random, *, node: int, ttl_seconds: float) -> Aim:
    """Some call, and what happens to it."""
    target = rng.choice((*_OFTEN, *OBJECT_TARGETS, *DISK_TARGETS, *_HOT))
    what = rng.choice(DISK_ACTIONS if target.startswith("disk") else ACTIONS)
    if what.startswith("pause"):
        seconds = rng.choice((rng.uniform(0.1, 4.0), ttl_seconds * rng.uniform(1.1, 2.0)))
    elif what.startswith("kill"):
        seconds = rng.choice((rng.uniform(0.5, 4.0), rng.uniform(4.0, 40.0)))
    else:
        seconds = rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.3, 3.0), rng.uniform(3.0, 8.0)))
    calls = 3 if target in _RARE else 12
    # A process is killed or stopped once; a call that is not answered may stay unanswered again.
    shots = 1 if what.startswith(("kill", "pause")) else rng.choice((1, 1, 1, 2, 4))
    aim = Aim(target, rng.randint(1, calls), what, seconds, shots, node if rng.random() < 0.3 else 0)
    own = Random(str(aim))
    if own.random() < SELDOM_SHARE:
        aim.target = own.choice(_SELDOM)
    return aim


class Shot(NamedTuple):
    """One hit."""

    what: str
    seconds: float
    strike: Callable[[str, float], None]  # kills or pauses the machine, and brings it back after a while

    async def around(
        self,
        call: Callable[[], Awaitable[T]],
        fail: Callable[[], Awaitable[None]],
        send: Callable[[float], None] | None = None,
    ) -> T:
        """What becomes of `call`. `fail` raises what the caller gets when nothing comes back; `send` has the call made
        after so many seconds, whether its caller still waits or not.
        """
        what, _, behind = self.what.partition("_")
        if what in ("fail", "late"):
            if what == "late" and send is not None:
                send(self.seconds)
            await fail()
        answer: Any = None
        if behind or what == "lose":
            answer = await call()
        if what == "lose":
            await fail()
        elif what == "delay":
            await asyncio.sleep(self.seconds)
        elif what in ("kill", "pause"):
            self.strike(what, self.seconds)
            await asyncio.sleep(0)  # for good, or until it goes on
        return answer if behind else await call()


class Aims:
    """What is aimed at in one cluster. `hits` counts what was hit, by target."""

    def __init__(self, strike: Callable[[Any, str, float], None], say: Callable[[str], None]) -> None:
        self.hits: Counter[str] = Counter()
        self._armed: list[Aim] = []
        self._strike = strike
        self._say = say

    def arm(self, aim: Aim) -> None:
        self._armed.append(aim)

    def disarm(self, aim: Aim) -> None:
        """It hits no call any more."""
        if aim in self._armed:
            self._armed.remove(aim)

    def clear(self) -> None:
        self._armed.clear()

    def meet(self, node: AimedNode, call: str, about: Sequence[str]) -> Shot | None:
        """Whether this call, about these keys, is one that was aimed at."""
        if not self._armed:
            return None
        names = {f"{call} {kind_of(key)}" for key in about} if about else {call}
        for aim in self._armed:
            if aim.target in names and aim.node in (0, node.number):
                aim.left -= 1
                if aim.left <= 0:
                    return self._hit(node, aim)
        return None

    def _hit(self, node: AimedNode, aim: Aim) -> Shot:
        aim.shots -= 1
        if aim.shots == 0:
            self._armed.remove(aim)
        self.hits[aim.target] += 1
        self._say(f"hit {aim.target} of node {node.number}: {aim.what} {aim.seconds:.2f} s")
        return Shot(aim.what, aim.seconds, lambda what, seconds: self._strike(node, what, seconds))


def outside(coroutine: Any, name: str) -> asyncio.Task[None]:
    """Runs it outside of whatever simulated process asks for it."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=Context())
