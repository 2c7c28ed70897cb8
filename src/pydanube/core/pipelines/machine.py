"""What a supervisor does next: which pipelines it claims, starts, stops and kills, and what it writes down.

    FREE ──claim──► CLAIMING ──granted──► HELD ──due──► RUNNING ──stop──► STOPPING
     ▲                  │ refused          ▲ ▲             │ ended            │ ended; killed after STOP_SECONDS
     ├──────────────────┘                  │ └─────────────┴──────────────────┤ changed, paused
     └──release──────────────────────────(deleted, shut down)◄────────────────┘
     ◄── the lease has ended: children are killed at once, and nothing is written any more

Invariants: a pipeline has at most one child, and only while the lease that claimed it lasts; a claim is given back
only when the child has ended; a status says `good` only of a run that said so itself.

Pure: `step` takes what happened and the moment, and returns what is to be done, in order. The shell
(`pipeline/supervisor.py`) has the processes and asks the broker.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from pydanube.core.pipelines.declaration import Declaration, next_start_us
from pydanube.core.pipelines.status import ERROR_MAX, FAILURES, PipelineState, PipelineStatus, RunOutcome

PAUSE_FIRST_SECONDS: Final = 5.0
PAUSE_MAX_SECONDS: Final = 600.0
HEALTHY_SECONDS: Final = 60.0  # a run that has shown progress for so long has recovered from what was before
STOP_SECONDS: Final = 30.0  # then it is killed
CLAIM_SECONDS: Final = 5.0  # until a claim that was refused is asked for again
TELL_SECONDS: Final = 10.0  # between two reports of progress


class Moment(NamedTuple):
    """`elapsed` never goes back; `time_us` is a date, and may."""

    elapsed: float
    time_us: int


class DeclaredPipeline(NamedTuple):
    declaration: Declaration
    revision: int  # changes with it


# --- events ---------------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """All pipelines there are."""

    pipelines: Mapping[str, DeclaredPipeline]


class LeaseGranted(NamedTuple):
    lease: int


class LeaseEnded(NamedTuple):
    """It was lost, or it is not known to last."""


class ClaimAnswered(NamedTuple):
    """`status` is what is stored of it; None: nothing."""

    name: str
    lease: int
    granted: bool
    status: PipelineStatus | None = None


class ClaimLost(NamedTuple):
    """The broker says that another supervisor has it, or none."""

    name: str
    lease: int


class RunProgressed(NamedTuple):
    name: str
    run: int
    facts: Mapping[str, int]


class RunEnded(NamedTuple):
    """`facts` as of `RunProgressed`; `error` is a sentence."""

    name: str
    run: int
    outcome: RunOutcome
    error: str = ""
    facts: Mapping[str, int] = {}


class SupervisorTicked(NamedTuple):
    """Time has passed."""


class ShutDown(NamedTuple):
    """No more runs: those that go on are stopped."""


Event: TypeAlias = (
    Listed
    | LeaseGranted
    | LeaseEnded
    | ClaimAnswered
    | ClaimLost
    | RunProgressed
    | RunEnded
    | SupervisorTicked
    | ShutDown
)


# --- effects --------------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """To be answered by ClaimAnswered."""

    name: str
    lease: int


class Release(NamedTuple):
    name: str
    lease: int


class Start(NamedTuple):
    """To be answered by RunEnded, once, also if it cannot be started."""

    name: str
    run: int
    declaration: Declaration


class StopRun(NamedTuple):
    """The child is asked to end."""

    name: str
    run: int


class Kill(NamedTuple):
    name: str
    run: int


class Report(NamedTuple):
    name: str
    lease: int
    status: PipelineStatus


Effect: TypeAlias = Claim | Release | Start | StopRun | Kill | Report


class Phase(enum.Enum):
    FREE = enum.auto()
    CLAIMING = enum.auto()
    HELD = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()


@dataclass(slots=True)
class _Pipeline:
    name: str
    declared: DeclaredPipeline | None  # None: it was deleted
    phase: Phase = Phase.FREE
    lease: int = 0  # that claimed it; 0: not ours
    status: PipelineStatus = field(default_factory=PipelineStatus)
    told: PipelineStatus | None = None  # as last reported
    told_at: float = 0.0
    run: int = 0
    runs: Declaration | None = None  # what the child was started with
    started_at: float = 0.0
    kill_at: float = 0.0
    not_before: float = 0.0
    claim_at: float = 0.0
    quarantined_before: int = 0  # in all runs before this one


class Supervision:
    """`runs_max` children at the same time; followers among them stay."""

    def __init__(self, supervisor: str, *, runs_max: int) -> None:
        self._supervisor = supervisor
        self._runs_max = runs_max
        self._pipelines: dict[str, _Pipeline] = {}
        self._lease = 0  # 0: none
        self._is_over = False
        self._last_run = 0

    def step(self, event: Event, moment: Moment) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Listed(pipelines):
                self._list(pipelines, moment, effects)
            case LeaseGranted(lease):
                assert not self._lease, "one lease at a time"
                self._lease = lease
            case LeaseEnded():
                self._lease_ended(effects)
            case ClaimAnswered():
                self._claim_answered(event, moment, effects)
            case ClaimLost(name, lease):
                if (found := self._pipelines.get(name)) is not None and found.lease == lease:
                    self._lose(found, moment.elapsed, effects)
            case RunProgressed(name, run, facts):
                self._progressed(name, run, facts, moment)
            case RunEnded():
                self._ended(event, moment)
            case ShutDown():
                self._is_over = True
            case SupervisorTicked():
                pass
        self._advance(moment, effects)
        return effects

    @property
    def is_idle(self) -> bool:
        """Nothing is claimed, and no child is left."""
        return all(each.phase is Phase.FREE for each in self._pipelines.values())

    @property
    def running(self) -> int:
        return sum(each.phase in (Phase.RUNNING, Phase.STOPPING) for each in self._pipelines.values())

    # --- what happened --------------------------------------------------------------------------------------

    def _list(self, pipelines: Mapping[str, DeclaredPipeline], moment: Moment, effects: list[Effect]) -> None:
        for name, declared in pipelines.items():
            found = self._pipelines.setdefault(name, _Pipeline(name, declared))
            if found.declared is None or found.declared.revision != declared.revision:
                found.not_before = 0.0  # what was wrong may be right now
            found.declared = declared
            wrong = found.runs is not None and not declared.declaration.runs_the_same(found.runs)
            if found.phase is Phase.RUNNING and (wrong or declared.declaration.paused):
                self._stop(found, moment, effects)
        for name in self._pipelines.keys() - pipelines.keys():
            found = self._pipelines[name]
            found.declared = None
            if found.phase is Phase.RUNNING:
                self._stop(found, moment, effects)

    def _lease_ended(self, effects: list[Effect]) -> None:
        self._lease = 0
        for each in self._pipelines.values():
            self._lose(each, 0.0, effects)

    def _lose(self, each: _Pipeline, claim_after: float, effects: list[Effect]) -> None:
        """It may be another's from now on: its child ends at once, and what it comes to is not written down."""
        each.lease, each.told = 0, None
        each.claim_at = claim_after + CLAIM_SECONDS if claim_after else 0.0
        if each.phase in (Phase.RUNNING, Phase.STOPPING):
            effects.append(Kill(each.name, each.run))
            each.phase, each.kill_at = Phase.STOPPING, float("inf")
        else:
            each.phase = Phase.FREE

    def _claim_answered(self, answer: ClaimAnswered, moment: Moment, effects: list[Effect]) -> None:
        found = self._pipelines.get(answer.name)
        if found is None or found.phase is not Phase.CLAIMING or answer.lease != self._lease or not self._lease:
            return  # of a lease that has ended: the claim ended with it
        if not answer.granted:
            found.phase, found.claim_at = Phase.FREE, moment.elapsed + CLAIM_SECONDS
            return
        found.phase, found.lease = Phase.HELD, answer.lease
        status = answer.status or PipelineStatus()
        if status.state in (PipelineState.RUNNING, PipelineState.STOPPING):  # of a supervisor that is no more
            why = f"its supervisor, {status.supervisor or 'unknown'}, ended before it did"
            status = replace(
                status,
                ended_us=moment.time_us,
                outcome=RunOutcome.LOST,
                error=status.error or why,
            )
        found.status = replace(
            status, state=PipelineState.WAITING, supervisor=self._supervisor, since_us=moment.time_us
        )
        found.not_before = 0.0

    def _progressed(self, name: str, run: int, facts: Mapping[str, int], moment: Moment) -> None:
        found = self._pipelines.get(name)
        if found is None or found.run != run or found.phase is not Phase.RUNNING:
            return
        self._take(found, facts)
        status = found.status
        has_moved = status.fresh_us is not None and status.started_us is not None
        has_moved = has_moved and (status.fresh_us or 0) >= (status.started_us or 0)
        if status.failures and has_moved and moment.elapsed - found.started_at >= HEALTHY_SECONDS:
            found.status = replace(status, failures=0, error="")

    def _take(self, found: _Pipeline, facts: Mapping[str, int]) -> None:
        status = found.status
        quarantined = facts.get("quarantined", status.quarantined)
        fresh = [each for each in (facts.get("fresh_us"), status.fresh_us) if each is not None]
        found.status = replace(
            status,
            fresh_us=max(fresh, default=None),
            behind_messages=facts.get("behind_messages", status.behind_messages),
            messages=facts.get("messages", status.messages),
            quarantined=quarantined,
            quarantined_total=found.quarantined_before + (quarantined or 0),
        )

    def _ended(self, event: RunEnded, moment: Moment) -> None:
        found = self._pipelines.get(event.name)
        if found is None or found.run != event.run or found.phase not in (Phase.RUNNING, Phase.STOPPING):
            return
        was_told = found.phase is Phase.STOPPING
        found.phase = Phase.HELD if found.lease else Phase.FREE
        declaration, found.runs = found.runs, None
        if not found.lease:
            return
        self._take(found, event.facts)
        status, outcome = found.status, event.outcome
        if was_told and outcome is not RunOutcome.NOT_GOOD:
            outcome = RunOutcome.STOPPED
        status = replace(status, outcome=outcome, ended_us=moment.time_us, state=PipelineState.WAITING)
        assert declaration is not None, "a run has been started with one"
        if outcome in FAILURES:
            status = replace(status, failures=status.failures + 1, error=event.error[:ERROR_MAX])
            if declaration.follows or outcome is not RunOutcome.NOT_GOOD:  # else at its next time
                found.not_before = moment.elapsed + pause_seconds(status.failures, outcome)
        elif outcome is RunOutcome.GOOD:
            fresh = [each for each in (status.fresh_us, status.started_us) if each is not None]
            status = replace(status, failures=0, error="", good_us=moment.time_us)
            if declaration.follows:  # it was to go on
                found.not_before = moment.elapsed + PAUSE_FIRST_SECONDS
            else:
                status = replace(status, fresh_us=max(fresh, default=None), behind_messages=0)
        found.status = replace(status, since_us=moment.time_us)

    # --- what follows -----------------------------------------------------------------------------------------

    def _advance(self, moment: Moment, effects: list[Effect]) -> None:
        due: list[tuple[int, str]] = []
        for each in list(self._pipelines.values()):
            match each.phase:
                case Phase.FREE:
                    self._advance_free(each, moment, effects)
                case Phase.HELD:
                    self._advance_held(each, moment, effects, due)
                case Phase.STOPPING if moment.elapsed >= each.kill_at:
                    effects.append(Kill(each.name, each.run))
                    each.kill_at = float("inf")
                case _:
                    pass
        for _, name in sorted(due)[: max(self._runs_max - self.running, 0)]:
            self._start(self._pipelines[name], moment, effects)
        for each in self._pipelines.values():
            self._tell(each, moment, effects)

    def _advance_free(self, each: _Pipeline, moment: Moment, effects: list[Effect]) -> None:
        if each.declared is None:
            del self._pipelines[each.name]
        elif self._lease and not self._is_over and moment.elapsed >= each.claim_at:
            each.phase = Phase.CLAIMING
            effects.append(Claim(each.name, self._lease))

    def _advance_held(self, each: _Pipeline, moment: Moment, effects: list[Effect], due: list[tuple[int, str]]) -> None:
        if each.declared is None or self._is_over:
            if each.declared is not None:
                self._become(each, PipelineState.RELEASED, moment, next_us=None)
                self._tell(each, moment, effects)
            effects.append(Release(each.name, each.lease))
            each.phase, each.lease, each.told = Phase.FREE, 0, None
            if each.declared is None:
                del self._pipelines[each.name]
            return
        declaration = each.declared.declaration
        if declaration.paused:
            self._become(each, PipelineState.PAUSED, moment, next_us=None)
            return
        next_us = self._next_us(each, declaration, moment)
        self._become(each, PipelineState.WAITING, moment, next_us=next_us)
        if next_us <= moment.time_us and moment.elapsed >= each.not_before:
            due.append((next_us, each.name))

    def _next_us(self, each: _Pipeline, declaration: Declaration, moment: Moment) -> int:
        status = each.status
        is_again = status.outcome in (RunOutcome.FAILED, RunOutcome.REFUSED, RunOutcome.LOST, RunOutcome.STOPPED)
        if declaration.follows or is_again:
            wait = max(each.not_before - moment.elapsed, 0.0)
            last_us = status.next_us
            if wait == 0.0:
                return min(moment.time_us, last_us) if last_us is not None else moment.time_us
            found = moment.time_us + int(wait * 1e6)
            # The clocks run apart a little; what was said is not said anew for that.
            return last_us if last_us is not None and abs(last_us - found) < 2_000_000 else found
        return next_start_us(declaration, status.started_us, moment.time_us)

    def _become(self, each: _Pipeline, state: PipelineState, moment: Moment, *, next_us: int | None) -> None:
        since_us = each.status.since_us if each.status.state is state else moment.time_us
        each.status = replace(each.status, state=state, since_us=since_us, next_us=next_us)

    def _start(self, each: _Pipeline, moment: Moment, effects: list[Effect]) -> None:
        assert each.declared is not None and each.lease == self._lease, "only what is ours is started"
        self._last_run += 1
        each.run, each.phase, each.started_at = self._last_run, Phase.RUNNING, moment.elapsed
        each.runs = each.declared.declaration
        status = each.status
        is_again = status.outcome in (RunOutcome.FAILED, RunOutcome.REFUSED, RunOutcome.LOST) or (
            each.runs.follows and status.outcome is RunOutcome.GOOD
        )
        each.quarantined_before = status.quarantined_total
        each.status = replace(
            status,
            state=PipelineState.RUNNING,
            since_us=moment.time_us,
            started_us=moment.time_us,
            next_us=None,
            runs=status.runs + 1,
            restarts=status.restarts + (1 if is_again else 0),
            messages=None,
            quarantined=None,
        )
        effects.append(Start(each.name, each.run, each.runs))

    def _stop(self, each: _Pipeline, moment: Moment, effects: list[Effect]) -> None:
        each.phase, each.kill_at = Phase.STOPPING, moment.elapsed + STOP_SECONDS
        self._become(each, PipelineState.STOPPING, moment, next_us=None)
        effects.append(StopRun(each.name, each.run))

    def _tell(self, each: _Pipeline, moment: Moment, effects: list[Effect]) -> None:
        if self._is_over and each.phase is Phase.RUNNING:
            self._stop(each, moment, effects)
        if not each.lease or each.phase is Phase.FREE or each.status == each.told:
            return
        is_news = each.told is None or _news(each.status) != _news(each.told)
        if is_news or moment.elapsed - each.told_at >= TELL_SECONDS:
            each.told, each.told_at = each.status, moment.elapsed
            effects.append(Report(each.name, each.lease, each.status))


def pause_seconds(failures: int, outcome: RunOutcome) -> float:
    """Until the next try. What was refused, or is wrong in what was looked at, is so in a moment as well."""
    if outcome in (RunOutcome.REFUSED, RunOutcome.NOT_GOOD):
        return PAUSE_MAX_SECONDS
    return float(min(PAUSE_FIRST_SECONDS * 2 ** min(failures - 1, 30), PAUSE_MAX_SECONDS))


def _news(status: PipelineStatus) -> PipelineStatus:
    """What is to be told at once: all but how far a run has come, once it is known at all."""
    numbers = (status.fresh_us, status.behind_messages, status.messages, status.quarantined)
    fresh, behind, messages, quarantined = (None if each is None else 0 for each in numbers)
    return replace(
        status,
        fresh_us=fresh,
        behind_messages=behind,
        messages=messages,
        quarantined=quarantined,
        quarantined_total=0,
    )
