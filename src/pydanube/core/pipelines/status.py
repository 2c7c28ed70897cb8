"""How a pipeline is doing: what its supervisor wrote down, and what follows from that.

    declaration + status + is it claimed ─► verdict ─► ok | stale | failing | paused | unsupervised | unknown

Only what is known to be well is `ok`: the last run ended well or has shown progress, a supervisor holds the pipeline,
and its data is as fresh as declared. Times are microseconds since 1970.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Self

from pydanube.core.cluster.conditions import count, words
from pydanube.core.pipelines.declaration import Declaration

ERROR_MAX: Final = 500
NUMBER_MAX: Final = 2**63 - 1  # what a status can hold, and every list of pipelines can carry
FAILURES_MAX: Final = 2**32 - 1
LAG_FACTS: Final = ("fresh_us", "behind_messages", "messages", "batches", "quarantined")
TEXTS: Final = ("supervisor", "error")
CLAIM_GRACE_US: Final = 60_000_000  # a supervisor that stopped in order is followed by another within this time


class RunOutcome(enum.StrEnum):
    GOOD = "good"
    NOT_GOOD = "not_good"  # the job ended by itself, and says what is wrong with what it looked at
    FAILED = "failed"  # it crashed, or ended without a word
    REFUSED = "refused"  # its settings, or what they refer to
    STOPPED = "stopped"  # it was told to
    LOST = "lost"  # its supervisor ended first: how it went is not known


FAILURES: Final = frozenset({RunOutcome.NOT_GOOD, RunOutcome.FAILED, RunOutcome.REFUSED})


class PipelineState(enum.StrEnum):
    WAITING = "waiting"  # for its time, or after a failure
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    RELEASED = "released"  # by a supervisor that stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """As its supervisor last wrote it. None: not known, or there was none."""

    state: PipelineState = PipelineState.WAITING
    supervisor: str = ""
    since_us: int = 0  # in this state
    started_us: int | None = None  # the run that goes on, or the last one
    ended_us: int | None = None  # the last run; None also while the first goes on
    outcome: RunOutcome | None = None  # of the last run that ended
    error: str = ""  # of the last run that was not good; stays until one is
    good_us: int | None = None  # when the last good one ended
    fresh_us: int | None = None  # the result has everything that was published before
    failures: int = 0  # one after the other
    restarts: int = 0  # runs that were started because the one before did not end well, ever
    runs: int = 0
    next_us: int | None = None  # when the next one begins, as things stand
    behind_messages: int | None = None
    messages: int | None = None  # of this run, or of the last
    quarantined: int | None = None  # of this run, or of the last
    quarantined_total: int = 0  # of all runs

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self | None:
        """None: it cannot be read, or shown. Fields of newer versions are left out."""
        try:
            values = json.loads(stored)
            known = {each.name for each in fields(cls)}
            kept: dict[str, Any] = {name: value for name, value in values.items() if name in known}
            kept["state"] = PipelineState(kept.get("state", PipelineState.WAITING))
            if kept.get("outcome") is not None:
                kept["outcome"] = RunOutcome(kept["outcome"])
            made = cls(**kept)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        numbers = {each.name: each.default for each in fields(cls) if each.name not in ("state", "outcome", *TEXTS)}
        is_sound = all(_is_number(getattr(made, name), default) for name, default in numbers.items())
        is_sound = is_sound and all(_is_text(getattr(made, name)) for name in TEXTS)
        return made if is_sound and made.failures <= FAILURES_MAX else None

    def to_bytes(self) -> bytes:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def _is_number(value: object, default: object) -> bool:
    return value is default is None or (isinstance(value, int) and 0 <= value <= NUMBER_MAX)


def _is_text(value: object) -> bool:
    """Text, and no half of a character."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def facts_of(said: Mapping[str, object]) -> dict[str, int]:
    """What of a run's words is a number that a status has; anything else is left out."""
    return {
        name: value
        for name in LAG_FACTS
        if isinstance(value := said.get(name), int) and not isinstance(value, bool) and 0 <= value <= NUMBER_MAX
    }


# --- what follows -------------------------------------------------------------------------------------------


class Health(enum.StrEnum):
    OK = "ok"
    STALE = "stale"
    FAILING = "failing"
    PAUSED = "paused"
    UNSUPERVISED = "unsupervised"
    UNKNOWN = "unknown"


class PipelineVerdict(NamedTuple):
    """`fresh_seconds`: how old the newest data of the result may be; None: not known."""

    health: Health
    sentence: str
    fresh_seconds: float | None


def verdict(declaration: Declaration, status: PipelineStatus | None, holder: str, now_us: int) -> PipelineVerdict:
    """`holder` is the supervisor that has it; empty: none."""
    fresh = None if status is None or status.fresh_us is None else max(now_us - status.fresh_us, 0) / 1e6

    def found(health: Health, sentence: str) -> PipelineVerdict:
        return PipelineVerdict(health, sentence, fresh)

    failed = status is not None and status.failures > 0
    last = f"; the last run {_how(status)}" if status is not None and failed else ""
    if declaration.paused:
        return found(Health.PAUSED, f"paused{last}")
    if not holder:
        since_us = declaration.changed_us
        if status is not None and status.state is PipelineState.RELEASED:
            since_us = max(since_us, status.since_us)
        if now_us - since_us < CLAIM_GRACE_US:
            return found(Health.UNKNOWN, f"waits for a supervisor{last}")
        return found(Health.UNSUPERVISED, f"no supervisor runs it{last}: `danube pipeline supervise` does")
    if status is None:
        return found(Health.UNKNOWN, "it has not run yet")
    if failed:
        times = f", {count(status.failures, 'time')} in a row" if status.failures > 1 else ""
        return found(Health.FAILING, f"the last run {_how(status)}{times}")
    goal = declaration.freshness_seconds
    if fresh is None:
        if goal is not None and now_us - max(declaration.changed_us, 0) > goal * 1_000_000:
            return found(Health.STALE, f"nothing is in its result yet; it is to be no older than {words(goal)}")
        how = "runs for the first time" if status.state is PipelineState.RUNNING else "has not ended a run yet"
        return found(Health.UNKNOWN, f"it {how}")
    if goal is not None and fresh > goal:
        return found(Health.STALE, f"its result is {words(fresh)} old, and is to be no older than {words(goal)}")
    if status.outcome is RunOutcome.LOST and status.state is not PipelineState.RUNNING:
        return found(Health.UNKNOWN, f"the last run {_how(status)}")
    return found(Health.OK, f"its result is {words(fresh)} old")


def _how(status: PipelineStatus) -> str:
    verb = {
        RunOutcome.GOOD: "ended well",
        RunOutcome.NOT_GOOD: "found something wrong",
        RunOutcome.FAILED: "failed",
        RunOutcome.REFUSED: "was refused",
        RunOutcome.STOPPED: "was stopped",
        RunOutcome.LOST: "was lost with its supervisor",
    }
    if status.failures and status.outcome not in FAILURES:
        text = "that came to an end failed"  # one that is tried again, or was stopped meanwhile
    else:
        text = verb[status.outcome] if status.outcome is not None else "has not ended"
    return f"{text}: {status.error}" if status.error else text
