"""What a broker is when it registers: active or drained, and why.

    /cluster/register/<broker>        leased: this process is alive           Registration
    /cluster/brokers/<broker>/state   what it is, and its last session        BrokerState
    /cluster/lost/<broker>            the session that a leader declared dead BrokerLoss

The lease ends by time alone; whether that mattered is for the leader to say. It declares a session dead, and gives its
topics away, only while the registration is gone; a broker registers only if the record is what it read. So of the two
exactly one happens, and a broker is drained for having been away only if its own last session was declared dead:

    its registration is there, from this directory      as it was        fast_restart
    gone, the record names its last session             drained          registration_expired (it ran all the time)
                                                                         stale_restart (it was started again)
                                                                         or why an operator drained it before
    gone, the record does not                           as it was        full_cluster_restart, or nothing happened
    the cluster never saw it                            active, drained  boot, join

A session is one stretch of life that was never declared dead: a new process has a new one, and so has a process that
was. A broker that an operator drained stays so over restarts: only `activate` ends it. One that is drained for having
been away may come back by itself (`core/cluster/returning.py`). `--join` concerns a broker's first start; later starts
with the flag still given change nothing.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Self

TTL_SECONDS: Final = 32.0

BOOT: Final = "boot"
JOIN: Final = "join"
FAST_RESTART: Final = "fast_restart"
STALE_RESTART: Final = "stale_restart"
FULL_CLUSTER_RESTART: Final = "full_cluster_restart"
REGISTRATION_EXPIRED: Final = "registration_expired"
ADMIN_UNLOAD: Final = "admin_unload"
DRAIN_COMPLETE: Final = "drain_complete"
NO_TOPICS: Final = "no_topics"
ADMIN_ACTIVATE: Final = "admin_activate"
NO_ACTIVE_BROKER: Final = "no_active_broker"  # the leader activated it, because no broker was active
REJOINED: Final = "rejoined"  # it activated itself

AWAY: Final = frozenset({STALE_RESTART, REGISTRATION_EXPIRED})  # drained, and not by an operator


class BrokerMode(enum.Enum):
    """Values are the stored names. Only an active broker is given topics."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"


# --- what the store holds -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRegistration:
    """A living broker. `home` is where its data directory is, so that a restart can be distinguished from a copy."""

    broker_url: str
    connect_url: str
    admin_addr: str
    prom_exporter: str
    stream_url: str
    session: int
    home: str
    lease: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no registration."""
        try:
            found = json.loads(value)
            texts = ("broker_url", "connect_url", "admin_addr", "prom_exporter", "stream_url", "home")
            return cls(
                **{name: str(found.get(name) or "") for name in texts},
                session=int(found["session"]),
                lease=int(found.get("lease", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """How a draining broker's topics are moved away. Without `include` all namespaces are meant."""

    parallel_max: int = 4
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def covers(self, namespace: str) -> bool:
        return namespace not in self.exclude and (not self.include or namespace in self.include)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """`session` is the broker's last one. `has_left`: it is stopping or has stopped, in order, and may come back.

    `rejoins`: how often it became active without an operator, and when it last did, in milliseconds since 1970.
    `crashes`: how often it came back without having stopped in order before.
    """

    mode: BrokerMode
    reason: str = ""
    session: int = 0
    has_left: bool = False
    drain: Drain | None = None
    rejoins: int = 0
    rejoined_at: int = 0
    crashes: int = 0

    def to_bytes(self) -> bytes:
        value: dict[str, Any] = {"mode": self.mode.value, "reason": self.reason, "session": self.session}
        if self.has_left:
            value["has_left"] = True
        if self.drain is not None:
            value["drain"] = asdict(self.drain)
        if self.rejoins:
            value |= {"rejoins": self.rejoins, "rejoined_at": self.rejoined_at}
        if self.crashes:
            value["crashes"] = self.crashes
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no state."""
        try:
            found = json.loads(value)
            drain = found.get("drain")
            return cls(
                mode=BrokerMode(found["mode"]),
                reason=str(found.get("reason") or ""),
                session=int(found.get("session", 0)),
                has_left=found.get("has_left") is True,
                drain=Drain(
                    parallel_max=max(1, int(drain.get("parallel_max", 1))),
                    include=tuple(map(str, drain.get("include", ()))),
                    exclude=tuple(map(str, drain.get("exclude", ()))),
                )
                if drain
                else None,
                rejoins=max(0, int(found.get("rejoins", 0))),
                rejoined_at=int(found.get("rejoined_at", 0)),
                crashes=max(0, int(found.get("crashes", 0))),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    @property
    def takes_topics(self) -> bool:
        return self.mode is BrokerMode.ACTIVE and not self.has_left

    @property
    def is_away(self) -> bool:
        """Drained for having been away, and for nothing else."""
        return self.mode is BrokerMode.DRAINED and self.reason in AWAY

    def activated(self, reason: str) -> Self:
        """By an operator."""
        return replace(self, mode=BrokerMode.ACTIVE, reason=reason, drain=None, rejoins=0, rejoined_at=0)

    def rejoined(self, reason: str, rejoins: int, now_ms: int) -> Self:
        """By the leader, or by itself."""
        return replace(self, mode=BrokerMode.ACTIVE, reason=reason, drain=None, rejoins=rejoins, rejoined_at=now_ms)

    def draining(self, drain: Drain) -> Self:
        return replace(self, mode=BrokerMode.DRAINING, reason=ADMIN_UNLOAD, drain=drain)

    def drained(self, reason: str) -> Self:
        return replace(self, mode=BrokerMode.DRAINED, reason=reason, drain=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLoss:
    """A leader declared this session of a broker dead."""

    session: int
    timestamp: int = 0  # milliseconds since 1970

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no such record."""
        try:
            found = json.loads(value)
            return cls(session=int(found["session"]), timestamp=int(found.get("timestamp", 0)))
        except (ValueError, TypeError, KeyError):
            return None


# --- the decision ---------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What the store says of this broker. `registered` and `home` are those of the registration that is there."""

    state: BrokerState | None = None
    lost: BrokerLoss | None = None
    registered: int | None = None  # its session
    home: str = ""


class RegistrationVerdict(enum.Enum):
    ENTER = "enter"  # register, with the mode and reason given
    WAIT = "wait"  # another process is registered under this id: dead, and it runs out, or alive, and this is a copy
    REPLACED = "replaced"  # another process has this id now: stop


class RegistrationDecision(NamedTuple):
    """How to register. `declared_dead`: what this process served is given to others, and it needs a new session."""

    verdict: RegistrationVerdict
    mode: BrokerMode
    reason: str
    declared_dead: bool = False


def enter_running(found: Known, *, session: int) -> RegistrationDecision:
    """The lease of a process that runs has run out, or may have."""
    state = found.state or BrokerState(mode=BrokerMode.ACTIVE, reason=BOOT)
    if found.registered not in (None, session):
        return RegistrationDecision(RegistrationVerdict.REPLACED, state.mode, state.reason)
    if found.lost is not None and found.lost.session == session:
        return _entry_of_lost(state, REGISTRATION_EXPIRED)
    # However long it lasted: no leader decided anything in the meantime, so nothing has changed.
    return RegistrationDecision(RegistrationVerdict.ENTER, state.mode, state.reason)


def enter_starting(found: Known, *, home: str, join: bool) -> RegistrationDecision:
    """A process starts. `home` is its data directory, whose lock it holds: no other process lives there."""
    state = found.state
    here_before = found.registered is not None and found.home == home
    if found.registered is not None and not here_before:
        return RegistrationDecision(RegistrationVerdict.WAIT, BrokerMode.DRAINED, "")
    if state is None:
        return RegistrationDecision(
            RegistrationVerdict.ENTER, *((BrokerMode.DRAINED, JOIN) if join else (BrokerMode.ACTIVE, BOOT))
        )
    if found.lost is not None and found.lost.session == state.session:
        return _entry_of_lost(state, STALE_RESTART)
    if state.mode is not BrokerMode.ACTIVE:
        return RegistrationDecision(RegistrationVerdict.ENTER, state.mode, state.reason)
    fast = here_before or state.has_left
    return RegistrationDecision(
        RegistrationVerdict.ENTER, BrokerMode.ACTIVE, FAST_RESTART if fast else FULL_CLUSTER_RESTART
    )


def _entry_of_lost(state: BrokerState, reason: str) -> RegistrationDecision:
    """Its session was declared dead. What an operator ordered before holds: that it was away does not end it."""
    is_ordered = state.mode is not BrokerMode.ACTIVE and not state.is_away
    return RegistrationDecision(
        RegistrationVerdict.ENTER, BrokerMode.DRAINED, state.reason if is_ordered else reason, declared_dead=True
    )


# --- the times ------------------------------------------------------------------------------------------


def serve_until(sent: float, ttl_seconds: float) -> float:
    """Until when a broker may serve whose last answered renewal was sent at `sent`.

    The store counts from when it got the renewal, which was later. The quarter is for a clock that runs slower than the
    store's, and for what was begun just before.
    """
    return sent + ttl_seconds - ttl_seconds / 4


def renewal_interval(ttl_seconds: float) -> float:
    return ttl_seconds / 3


def silent_before_end(ttl_seconds: float) -> float:
    """How long before its lease ran out a broker had fallen silent, at least: it would have renewed it by then."""
    return ttl_seconds - renewal_interval(ttl_seconds)


def retry_delay(failures: int, ttl_seconds: float) -> float:
    """How long to wait after this many failed renewals in a row: 1, 2, 4, 5, 5, … seconds at the default TTL."""
    assert failures > 0
    second = ttl_seconds / TTL_SECONDS
    return min(second * 2.0 ** min(failures - 1, 16), 5 * second)


def answer_timeout(ttl_seconds: float) -> float:
    """How long a renewal may take, in which the store asks several members: there is time for a second one before the
    lease runs out.
    """
    return ttl_seconds / 2
