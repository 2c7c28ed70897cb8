"""The supervisor's decisions in virtual time: one run at a time, back-off, and nothing written that is not so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.pipelines import machine
from pydanube.core.pipelines.declaration import Declaration
from pydanube.core.pipelines.machine import (
    Claim,
    ClaimAnswered,
    ClaimLost,
    DeclaredPipeline,
    Effect,
    Event,
    Kill,
    LeaseEnded,
    LeaseGranted,
    Listed,
    Moment,
    Release,
    Report,
    RunEnded,
    RunProgressed,
    ShutDown,
    Start,
    StopRun,
    Supervision,
    SupervisorTicked,
)
from pydanube.core.pipelines.status import PipelineState, PipelineStatus, RunOutcome

SECOND = 1_000_000
EPOCH_US = 1_800_000_000 * SECOND


def declared(name: str = "orders", **change: Any) -> Declaration:
    when = {} if {"every", "cron"} & change.keys() else {"follow": "30s"}
    return Declaration.parse({"name": name, "job": "lake", "changed_us": EPOCH_US, **when, **change})


class World:
    """A supervisor, the broker that it asks, and children that do what the test says. Time is the test's."""

    def __init__(self, *declarations: Declaration, runs_max: int = 10, status: PipelineStatus | None = None) -> None:
        self.supervision = Supervision("here", runs_max=runs_max)
        self.now = 1000.0
        self.stored: dict[str, DeclaredPipeline] = {each.name: DeclaredPipeline(each, 1) for each in declarations}
        self.status: dict[str, PipelineStatus] = {each.name: status for each in declarations if status is not None}
        self.told: list[PipelineStatus] = []
        self.children: dict[str, int] = {}
        self.killed: set[int] = set()
        self.claims: dict[str, int] = {}  # by whom: our leases, or -1: another supervisor
        self.lease = 0
        self.released: list[str] = []

    def begin(self, lease: int = 1) -> World:
        self.lease = lease
        self.do(LeaseGranted(lease))
        self.do(Listed(self.stored))
        return self

    @property
    def moment(self) -> Moment:
        return Moment(self.now, EPOCH_US + int((self.now - 1000.0) * SECOND))

    def do(self, event: Event) -> list[Effect]:
        effects = self.supervision.step(event, self.moment)
        for each in effects:
            self.carry_out(each)
        return effects

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Claim(name, lease):
                granted = lease == self.lease and self.claims.setdefault(name, lease) == lease
                self.do(ClaimAnswered(name, lease, granted, self.status.get(name) if granted else None))
            case Release(name, lease):
                assert self.claims.pop(name) == lease and name not in self.children
                self.released.append(name)
            case Start(name, run, _):
                assert name not in self.children, "two runs of one pipeline"
                assert self.claims.get(name) == self.lease, "a run of what is not claimed"
                self.children[name] = run
            case StopRun(name, run):
                assert self.children[name] == run
            case Kill(name, run):
                assert self.children[name] == run
                self.killed.add(run)
            case Report(name, lease, status):
                assert lease == self.lease and self.claims.get(name) == lease
                self.status[name] = status
                self.told.append(status)

    def wait(self, seconds: float, step: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            self.do(SupervisorTicked())

    def end(self, outcome: RunOutcome, error: str = "", name: str = "orders", **facts: int) -> None:
        run = self.children.pop(name)
        self.do(RunEnded(name, run, outcome, error, facts))

    def progress(self, name: str = "orders", **facts: int) -> None:
        self.do(RunProgressed(name, self.children[name], facts))

    def change(self, declaration: Declaration | None, name: str = "orders") -> None:
        if declaration is None:
            del self.stored[name]
        else:
            before = self.stored.get(name)
            self.stored[name] = DeclaredPipeline(declaration, before.revision + 1 if before else 1)
        self.do(Listed(dict(self.stored)))

    def starts_in(self, seconds: float) -> float | None:
        """How long it takes until the next run begins."""
        began = self.now
        while self.now - began < seconds:
            self.wait(1.0)
            if self.children:
                return self.now - began
        return None


def test_a_follower_is_claimed_and_started_at_once() -> None:
    world = World(declared()).begin()
    assert world.children == {"orders": 1} and world.status["orders"].state is PipelineState.RUNNING


def test_a_failed_run_is_started_again_later_each_time_and_says_so_until_one_has_recovered() -> None:
    world = World(declared()).begin()
    pauses = []
    for failures in range(1, 10):
        world.end(RunOutcome.FAILED, "no such bucket")
        status = world.status["orders"]
        assert (status.failures, status.error, status.state) == (failures, "no such bucket", PipelineState.WAITING)
        assert status.next_us is not None and status.next_us > world.moment.time_us
        pauses.append(world.starts_in(700))
        assert world.status["orders"].failures == failures, "that it runs again does not mean that it is well"
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    world.progress(fresh_us=world.moment.time_us + 1)
    assert world.status["orders"].failures == 9, "a moment of progress is not health"
    world.wait(70)
    world.progress(fresh_us=world.moment.time_us)
    world.wait(1)
    assert world.status["orders"].failures == 0 and world.status["orders"].restarts == 9


def test_progress_without_fresh_data_is_no_recovery() -> None:
    world = World(declared()).begin()
    world.end(RunOutcome.FAILED, "boom")
    world.wait(100)
    world.progress(messages=1_000)
    world.wait(20)
    assert world.status["orders"].failures == 1


def test_refused_settings_are_tried_again_seldom_and_at_once_when_they_change() -> None:
    world = World(declared()).begin()
    world.end(RunOutcome.REFUSED, "token.file: no such file")
    assert world.starts_in(590) is None
    world.change(declared(settings={"topic": "/default/x"}))
    assert world.children


def test_a_scheduled_run_that_found_something_wrong_waits_for_its_next_time() -> None:
    world = World(declared(every="1h")).begin()
    world.end(RunOutcome.NOT_GOOD, "3 offsets are in no object")
    assert world.status["orders"].failures == 1
    assert world.starts_in(4000) == pytest.approx(3600, abs=2)


def test_a_scheduled_run_that_crashed_is_tried_again_before_its_next_time() -> None:
    world = World(declared(every="1h")).begin()
    world.end(RunOutcome.FAILED, "out of memory")
    assert world.starts_in(4000) == 5
    world.end(RunOutcome.GOOD)
    status = world.status["orders"]
    assert status.failures == 0 and not status.error and status.fresh_us == status.started_us


def test_cron_starts_once_at_its_minute_however_long_the_last_run_took() -> None:
    world = World(declared(cron="*/10 * * * *")).begin()
    assert not world.children
    first = world.starts_in(1200)
    assert first is not None and (world.moment.time_us // SECOND) % 600 < 2
    world.wait(1500)  # two slots pass while it runs
    world.end(RunOutcome.GOOD)
    assert world.starts_in(1200) == 1, "one run makes up for what was missed"
    world.end(RunOutcome.GOOD)
    again = world.starts_in(1200)
    assert again is not None and again > 1


def test_a_changed_declaration_ends_the_run_and_starts_the_new_one() -> None:
    world = World(declared()).begin()
    new = declared(settings={"topic": "/default/other"})
    world.change(new)
    assert world.status["orders"].state is PipelineState.STOPPING and world.children == {"orders": 1}
    world.end(RunOutcome.GOOD)
    assert world.children == {"orders": 2} and world.status["orders"].outcome is RunOutcome.STOPPED


def test_a_changed_goal_disturbs_nothing() -> None:
    world = World(declared()).begin()
    world.change(declared(freshness="1m"))
    assert world.children == {"orders": 1} and world.status["orders"].state is PipelineState.RUNNING


def test_a_pipeline_that_is_paused_ends_and_goes_on_when_it_is_resumed() -> None:
    world = World(declared()).begin()
    world.change(declared(paused=True))
    world.end(RunOutcome.GOOD)
    assert world.status["orders"].state is PipelineState.PAUSED and world.starts_in(100) is None
    world.change(declared())
    assert world.children


def test_a_deleted_pipeline_is_given_back_only_when_its_child_has_ended() -> None:
    world = World(declared()).begin()
    world.change(None)
    assert world.claims == {"orders": 1}
    world.wait(29)
    assert not world.killed
    world.wait(2)
    assert world.killed == {1}
    world.end(RunOutcome.FAILED, "killed")
    assert not world.claims and world.supervision.is_idle


def test_declared_anew_while_the_old_one_ends_it_goes_on_with_the_new_one() -> None:
    world = World(declared()).begin()
    world.change(None)
    world.change(declared(settings={"topic": "/default/new"}))
    world.end(RunOutcome.GOOD)
    assert world.children == {"orders": 2} and world.claims == {"orders": 1}


def test_at_the_end_all_children_are_stopped_and_all_claims_given_back() -> None:
    world = World(declared("a"), declared("b"), declared("c", every="1h")).begin()
    assert sorted(world.children) == ["a", "b", "c"]
    world.end(RunOutcome.GOOD, name="c")
    effects = world.do(ShutDown())
    assert {each.name for each in effects if isinstance(each, StopRun)} == {"a", "b"}
    assert world.released == ["c"] and not world.supervision.is_idle
    world.end(RunOutcome.GOOD, name="a")
    world.end(RunOutcome.FAILED, "killed", name="b")
    assert world.supervision.is_idle and not world.claims
    assert {status.state for status in world.status.values()} == {PipelineState.RELEASED}
    world.wait(100)
    assert not world.children


def test_when_the_lease_has_ended_children_are_killed_and_nothing_is_written() -> None:
    world = World(declared()).begin()
    told = len(world.told)
    world.claims.clear()
    world.lease = 0
    effects = world.do(LeaseEnded())
    assert effects == [Kill("orders", 1)]
    world.lease = 2
    world.do(LeaseGranted(2))
    world.wait(10)
    assert not world.claims, "its child lives: it is not claimed again"
    world.end(RunOutcome.FAILED, "killed")
    assert len(world.told) > told and world.status["orders"].outcome is RunOutcome.LOST, (
        "the new claim knows it as lost"
    )
    assert world.children == {"orders": 2}


def test_a_run_whose_supervisor_died_is_lost_and_begins_again() -> None:
    found = PipelineStatus(state=PipelineState.RUNNING, supervisor="elsewhere", started_us=EPOCH_US - SECOND, runs=3)
    world = World(declared(every="1h"), status=found).begin()
    assert world.children == {"orders": 1}
    status = world.status["orders"]
    assert (status.runs, status.restarts, status.outcome) == (4, 1, RunOutcome.LOST) and "elsewhere" in status.error


def test_what_another_supervisor_has_is_left_alone_until_it_is_free() -> None:
    world = World(declared())
    world.claims["orders"] = -1
    world.begin()
    world.wait(60)
    assert not world.children and not world.told
    del world.claims["orders"]
    world.wait(6)
    assert world.children


def test_a_claim_that_the_broker_no_longer_knows_kills_the_run() -> None:
    world = World(declared()).begin()
    world.claims["orders"] = -1
    assert world.do(ClaimLost("orders", 1)) == [Kill("orders", 1)]
    world.end(RunOutcome.GOOD)
    world.wait(20)
    assert not world.children and world.claims == {"orders": -1}


def test_no_more_runs_at_once_than_allowed_and_those_that_wait_longest_come_first() -> None:
    world = World(*(declared(f"p{n}", every="1h") for n in range(5)), runs_max=2).begin()
    seen: list[str] = []
    while len(seen) < 5:
        assert len(world.children) <= 2
        name = min(world.children)
        seen.append(name)
        world.wait(10)
        world.end(RunOutcome.GOOD, name=name)
    assert len(set(seen)) == 5


def test_progress_is_written_every_ten_seconds_at_most() -> None:
    world = World(declared()).begin()
    before = len(world.told)
    for number in range(60):
        world.progress(messages=number, fresh_us=world.moment.time_us)
        world.wait(1)
    assert 5 <= len(world.told) - before <= 7


def test_what_was_put_aside_is_summed_over_runs() -> None:
    world = World(declared(every="1h")).begin()
    world.progress(quarantined=2)
    world.end(RunOutcome.GOOD, quarantined=3)
    assert world.starts_in(4000)
    world.end(RunOutcome.GOOD, quarantined=4)
    status = world.status["orders"]
    assert (status.quarantined, status.quarantined_total) == (4, 7)


# --- anything at all --------------------------------------------------------------------------------------------


def actions() -> st.SearchStrategy[list[tuple[str, int]]]:
    kinds = ("wait", "end", "progress", "change", "pause", "delete", "declare", "lose", "lease", "steal", "free")
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 5)), max_size=60)


def play(world: World, steps: list[tuple[str, int]]) -> Iterator[str]:
    lease = 1
    for kind, number in steps:
        names = sorted(world.stored)
        name = names[number % len(names)] if names else ""
        running = sorted(world.children)
        one = running[number % len(running)] if running else ""
        match kind:
            case "wait":
                world.wait([1, 3, 7, 40, 100, 700][number])
            case "end" if one:
                world.end(list(RunOutcome)[number % 4], "because", name=one, quarantined=number)
            case "progress" if one:
                world.progress(one, fresh_us=world.moment.time_us, quarantined=number)
            case "change" if name:
                world.change(declared(name, settings={"x": str(number)}), name)
            case "pause" if name:
                old = world.stored[name].declaration
                world.change(replace(old, paused=not old.paused), name)
            case "delete" if name:
                world.change(None, name)
            case "declare":
                new = f"p{number}"
                world.change(declared(new, **({"every": "1m"} if number % 2 else {})), new)
            case "lose" if world.lease:
                world.claims = {name: who for name, who in world.claims.items() if who != world.lease}
                world.lease = 0
                world.do(LeaseEnded())
                assert world.killed >= set(world.children.values()), "a child outlived the lease"
            case "lease" if not world.lease:
                lease += 1
                world.lease = lease
                world.do(LeaseGranted(lease))
            case "steal" if name and name not in world.claims:
                world.claims[name] = -1
            case "free" if world.claims.get(name) == -1:
                del world.claims[name]
            case _:
                continue
        yield kind


def check(world: World) -> None:
    for name in world.children:
        assert world.children[name] in world.killed or world.claims.get(name) == world.lease
    for status in world.told:
        if status.outcome is RunOutcome.GOOD:
            assert status.failures == 0 and status.good_us is not None
        assert status.outcome is not None or status.ended_us is None


def run_plan(steps: list[tuple[str, int]], runs_max: int) -> None:
    world = World(declared("p0"), declared("p1", every="1m"), runs_max=runs_max).begin()
    for _ in play(world, steps):
        check(world)
        assert len(world.children) <= runs_max
    world.do(ShutDown())
    if not world.lease:
        world.lease = 99
    world.wait(40)
    for name in sorted(world.children):
        assert world.children[name] in world.killed, "a child outlived the end by more than it may"
        world.end(RunOutcome.FAILED, "killed", name=name)
    assert world.supervision.is_idle and not {who for who in world.claims.values() if who != -1}
    world.wait(700, step=50)
    assert not world.children, "something began after the end"


@given(actions(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_a_pipeline_has_one_child_at_most_and_only_while_it_is_claimed(
    steps: list[tuple[str, int]], runs_max: int
) -> None:
    run_plan(steps, runs_max)


def claims_again_too_early(self: Supervision, each: Any, after: float, effects: list[Effect]) -> None:
    each.lease, each.told, each.claim_at = 0, None, 0.0
    if each.phase in (machine.Phase.RUNNING, machine.Phase.STOPPING):
        effects.append(Kill(each.name, each.run))
    each.phase = machine.Phase.FREE


def never_kills(self: Supervision, each: Any, after: float, effects: list[Effect]) -> None:
    each.lease, each.told = 0, None
    if each.phase in (machine.Phase.RUNNING, machine.Phase.STOPPING):
        each.phase, each.kill_at = machine.Phase.STOPPING, float("inf")
    else:
        each.phase = machine.Phase.FREE


@pytest.mark.parametrize("defect", [claims_again_too_early, never_kills])
def test_planted_defects_of_a_lost_lease_are_found(
    defect: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervision, "_lose", defect)
    with pytest.raises((AssertionError, KeyError)):
        run_plan([("lose", 0), ("lease", 0), ("wait", 3)], 3)
