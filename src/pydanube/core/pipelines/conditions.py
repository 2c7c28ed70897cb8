"""What is wrong with pipelines, in words: conditions as of brokers, under the names of the alerts.

declarations, statuses, claims ─► PipelineWatch.look ─► conditions, and rows for metrics      at the leader
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.core.cluster.conditions import Condition, Severity, count, order
from pydanube.core.pipelines.declaration import Declaration
from pydanube.core.pipelines.status import Health, PipelineState, PipelineStatus, PipelineVerdict, verdict

FAILING_SECONDS: Final = 60.0
UNSUPERVISED_SECONDS: Final = 60.0
QUARANTINE_SECONDS: Final = 900.0  # rows put aside within this time


class KnownPipeline(NamedTuple):
    """One of them, as stored. `holder`: the supervisor that has claimed it; empty: none."""

    declaration: Declaration
    status: PipelineStatus | None
    holder: str
    revision: int = 0

    @property
    def name(self) -> str:
        return self.declaration.name

    def verdict(self, now_us: int) -> PipelineVerdict:
        return verdict(self.declaration, self.status, self.holder, now_us)


class PipelineRow(NamedTuple):
    """What metrics say of one. None: not known."""

    name: str
    health: str
    fresh_seconds: float | None
    goal_seconds: int | None
    behind_messages: int | None
    failures: int
    restarts: int
    runs: int
    quarantined: int
    is_running: bool

    @classmethod
    def of(cls, known: KnownPipeline, now_us: int) -> PipelineRow:
        status, found = known.status or PipelineStatus(), known.verdict(now_us)
        return cls(
            known.name,
            found.health.value,
            found.fresh_seconds,
            known.declaration.freshness_seconds,
            status.behind_messages,
            status.failures,
            status.restarts,
            status.runs,
            status.quarantined_total,
            status.state is PipelineState.RUNNING and bool(known.holder),
        )


class PipelineWatch:
    """The memory that rules over time need."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []
        self.rows: list[PipelineRow] = []
        self._since: dict[tuple[str, str], tuple[float, int]] = {}
        self._quarantined: dict[str, deque[tuple[float, int]]] = {}

    def forget(self) -> None:
        """Another broker looks from now on."""
        self.conditions, self.rows = [], []
        self._since.clear()
        self._quarantined.clear()

    def look(self, now: float, now_us: int, pipelines: Sequence[KnownPipeline]) -> None:
        holding: dict[tuple[str, str], tuple[float, int]] = {}
        found: list[Condition] = []

        def judge(name: str, severity: Severity, sentence: str, todo: str, subject: str, seconds: float) -> None:
            since = holding[name, subject] = self._since.get((name, subject), (now, now_us // 1000))
            if now - since[0] >= seconds:
                found.append(Condition(name, severity, sentence, todo, subject, since[1]))

        self._quarantined = {each.name: self._quarantined.get(each.name, deque()) for each in pipelines}
        for each in pipelines:
            health, sentence, _ = each.verdict(now_us)
            called = f"pipeline {each.name}"
            todo = f"danube pipeline status {each.name}"
            if health is Health.FAILING:
                judge(
                    "DanubePipelineFailing",
                    Severity.CRITICAL,
                    f"{called}: {sentence}",
                    todo,
                    each.name,
                    FAILING_SECONDS,
                )
            elif health is Health.STALE:
                judge("DanubePipelineStale", Severity.WARNING, f"{called}: {sentence}", todo, each.name, 0.0)
            elif health is Health.UNSUPERVISED:
                judge(
                    "DanubePipelineUnsupervised",
                    Severity.CRITICAL,
                    f"{called}: {sentence}",
                    "start `danube pipeline supervise`, or look why it ended",
                    each.name,
                    UNSUPERVISED_SECONDS,
                )
            if lately := self._aside(now, each):
                judge(
                    "DanubePipelineQuarantining",
                    Severity.WARNING,
                    f"{called}: {count(lately, 'message')} did not fit its schema lately and went to quarantine",
                    "the quarantine table says why, message by message",
                    each.name,
                    0.0,
                )
        self._since = holding
        self.conditions = order(found)
        self.rows = [PipelineRow.of(each, now_us) for each in pipelines]

    def _aside(self, now: float, each: KnownPipeline) -> int:
        """How many were put aside within QUARANTINE_SECONDS, as far as was looked."""
        total = each.status.quarantined_total if each.status is not None else 0
        seen = self._quarantined[each.name]
        if seen and total < seen[-1][1]:
            seen.clear()  # declared anew
        seen.append((now, total))
        while now - seen[0][0] > QUARANTINE_SECONDS:
            seen.popleft()
        return total - seen[0][1]
