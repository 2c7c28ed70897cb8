"""Faults that hit one call, and limits that are scaled down for a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from pydanube.core import keys
from pydanube.core.history import ownership as core_ownership
from pydanube.core.names import BrokerId, SubscriptionName, TopicName
from pydanube.errors import DiskFailed, DiskFull, Unreachable
from pydanube.ports import Compare, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.testing.cluster_aims import ACTIONS, METADATA_TARGETS, TARGETS, Aim, Aims, Shot, draw, kind_of
from pydanube.testing.cluster_disk import WatchedDisk
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.faulty_metadata import FaultyMetadata
from pydanube.testing.loop import SimClock
from tests.harness.logs import simulated
from tools.sim.cluster_pressure import LIMITS, Pressure, _module, under
from tools.sim.cluster_sim import planned, run_seed

TOPIC, SUB, BROKER = TopicName("/default/orders"), SubscriptionName("sub"), BrokerId(7)


class Machine:
    number = 1


def aims_at(*armed: Aim) -> tuple[Aims, list[str], Callable[[str, Any], Any]]:
    struck: list[str] = []
    aims = Aims(lambda node, what, seconds: struck.append(what), lambda told: None)
    for aim in armed:
        aims.arm(aim)
    return aims, struck, lambda call, about: aims.meet(Machine(), call, about)


def store(*armed: Aim) -> tuple[FaultyMetadata, MemoryMetadataStore, Aims, list[str]]:
    clock = SimClock()
    real = MemoryMetadataStore(clock)
    faulty = FaultyMetadata(real, clock, Random(1))
    aims, struck, faulty.aim = aims_at(*armed)
    return faulty, real, aims, struck


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (keys.owner(TOPIC), "owner"),
        (keys.reserve(TOPIC), "reserve"),
        (keys.seal(TOPIC), "seal"),
        (keys.history(TOPIC), "history"),
        (keys.sessions(TOPIC), "sessions"),
        (keys.storage_object(TOPIC, 3), "object"),
        (keys.orphan(TOPIC, 3), "orphan"),
        (keys.orphans(TOPIC), "orphan"),
        (keys.void(TOPIC, 3), "void"),
        (keys.below_storage(TOPIC), "storage"),
        (keys.below_topic(TOPIC), "topic"),
        (keys.cursor(TOPIC, SUB), "cursor"),
        (keys.ack_holes(TOPIC, SUB), "holes"),
        (keys.subscription(TOPIC, SUB), "subscription"),
        (keys.unassigned(TOPIC), "marker"),
        (keys.assignment(BROKER, TOPIC), "assignment"),
        (keys.assignments(BROKER), "assignment"),
        (keys.broker_state(BROKER), "state"),
        (keys.registration(BROKER), "registration"),
        (keys.lost(BROKER), "lost"),
        (keys.LEADER, "leader"),
        (keys.load(BROKER), "load"),
        (keys.rescue(TOPIC, 2), "rescue"),
        (keys.RESCUES, "rescue"),
        (keys.CLUSTER, "cluster"),
    ],
)
def test_a_key_is_of_a_kind_that_can_be_aimed_at(key: str, kind: str) -> None:
    assert kind_of(key) == kind
    assert any(target.split()[-1] == kind for target in METADATA_TARGETS)


def test_every_call_is_aimed_at_and_meets_every_fate() -> None:
    rng = Random(3)
    drawn = [draw(rng, node=1, ttl_seconds=16.0) for _ in range(20_000)]
    assert {aim.target for aim in drawn} == set(TARGETS)
    assert {aim.what for aim in drawn} == set(ACTIONS)
    assert all(aim.what != "late" for aim in drawn if aim.target.startswith("disk"))


@pytest.mark.slow
def test_every_call_that_brokers_make_can_be_aimed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[str] = set()
    meet = Aims.meet

    def noted(self: Aims, node: Any, call: str, about: Sequence[str]) -> Shot | None:
        made.update({f"{call} {kind_of(key)}" for key in about} if about else {call})
        return meet(self, node, call, about)

    monkeypatch.setattr(Aims, "meet", noted)
    for seed in range(2):
        run_seed(seed)
    assert made - set(TARGETS) == set()
    assert len(made) > len(TARGETS) / 2


def test_a_schedule_aims_at_something_in_nearly_every_seed() -> None:
    aimed = Counter(sum(each.kind == "aimed" for each in planned(seed)) for seed in range(300))
    assert aimed[0] <= 15


@simulated
async def test_the_third_transaction_on_a_reservation_is_hit_and_no_other() -> None:
    faulty, _, aims, _ = store(Aim("transact reserve", left=3, what="fail"))
    key = keys.reserve(TOPIC)
    for value in (b"1", b"2"):
        assert await faulty.transact([], [Put(key, value)]) is not None
    assert await faulty.transact([], [Put(keys.owner(TOPIC), b"x")]) is not None
    with pytest.raises(Unreachable):
        await faulty.transact([], [Put(key, b"3")])
    assert await faulty.transact([], [Put(key, b"4")]) is not None
    assert aims.hits == {"transact reserve": 1}


@simulated
async def test_what_is_not_aimed_at_any_more_is_not_hit() -> None:
    aim = Aim("transact owner", left=2, what="fail")
    faulty, _, aims, _ = store(aim)
    assert await faulty.transact([], [Put(keys.owner(TOPIC), b"x")]) is not None
    aims.disarm(aim)
    aims.disarm(aim)
    assert await faulty.transact([], [Put(keys.owner(TOPIC), b"y")]) is not None


@simulated
async def test_a_lost_answer_is_a_change_that_was_made() -> None:
    faulty, real, _, _ = store(Aim("transact owner", left=1, what="lose"))
    with pytest.raises(Unreachable):
        await faulty.transact([], [Put(keys.owner(TOPIC), b"x")])
    assert (await real.get(keys.owner(TOPIC))) is not None


@simulated
async def test_a_late_change_is_made_seconds_after_its_caller_gave_it_up_and_still_compared() -> None:
    faulty, real, _, _ = store(Aim("transact owner", left=1, what="late", seconds=5.0, shots=2))
    key = keys.owner(TOPIC)
    with pytest.raises(Unreachable):
        await faulty.transact([Compare(key, 0)], [Put(key, b"first")])
    with pytest.raises(Unreachable):
        await faulty.transact([Compare(key, 0)], [Put(key, b"second")])
    assert await real.get(key) is None
    await asyncio.sleep(10.0)
    item = await real.get(key)
    assert item is not None and item.value == b"first"


@simulated
@pytest.mark.parametrize(("what", "made"), [("kill", False), ("kill_behind", True), ("pause", False)])
async def test_a_broker_is_struck_before_or_behind_its_own_call(what: str, made: bool) -> None:
    faulty, real, _, struck = store(Aim("transact owner", left=1, what=what, seconds=1.0))
    seen: list[bool] = []
    inner = faulty.aim

    def looking(call: str, about: Any) -> Any:
        shot = inner(call, about)
        return shot and shot._replace(
            strike=lambda what, seconds: (struck.append(what), seen.append(keys.owner(TOPIC) in real._items))
        )

    faulty.aim = looking
    await faulty.transact([], [Put(keys.owner(TOPIC), b"x")])
    assert struck == [what.partition("_")[0]] and seen == [made]


@simulated
async def test_a_call_of_the_disk_fails_and_it_is_known_that_it_did() -> None:
    disk = FaultyDisk(Random(1))
    failed: list[str] = []
    _, _, aim = aims_at(Aim("disk create", 2, "fail"), Aim("disk sync", 1, "fail"), Aim("disk rename", 1, "lose"))
    watched = WatchedDisk(disk.process(), Random(1), aim, failed.append)
    await watched.create("a")
    with pytest.raises((DiskFailed, DiskFull)):
        await watched.create("b")
    assert (await watched.write([("a", 0, [b"text"])], sync=False)) == [None]  # type: ignore[list-item]
    assert isinstance((await watched.sync(["a"]))[0], DiskFailed)
    with pytest.raises(DiskFailed):
        await watched.rename("a", "c")
    assert disk.paths() == ["c"], "it was done all the same"
    assert failed[-2:] == ["sync", "rename"]


# --- limits -------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_seed_during_its_run_and_what_they_were_afterwards() -> None:
    before = [getattr(_module(name), constant) for names, constant, _ in LIMITS for name in names]
    with pytest.raises(RuntimeError), under(Pressure.of(5)):
        assert 4 <= core_ownership.RESERVE_OFFSETS_MIN <= 40
        raise RuntimeError
    assert before == [getattr(_module(name), constant) for names, constant, _ in LIMITS for name in names]


def test_every_limit_is_tight_in_many_seeds() -> None:
    drawn = [Pressure.of(seed).limits for seed in range(400)]
    for place, (_, name, values) in enumerate(LIMITS):
        assert sum(limits[place] == min(values) for limits in drawn) > 80, name


@pytest.mark.slow
def test_objects_are_made_apart_in_many_seeds_and_stored_by_the_broker_when_that_ends() -> None:
    seed = next(seed for seed in range(100) if Pressure.of(seed).worker_processes and not Pressure.of(seed).topics)
    outcome = run_seed(seed, count_operations=True)
    assert not outcome.problems and outcome.met["ObjectMaker.call_worker"] > 0
    assert sum(Pressure.of(seed).worker_processes for seed in range(300)) > 100
