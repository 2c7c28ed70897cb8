"""What is wrong with pipelines: under the names of the alerts, once it has lasted, and at the leader alone."""

from __future__ import annotations

from dataclasses import replace

from pydanube.core.cluster.conditions import Severity
from pydanube.core.pipelines.conditions import KnownPipeline, PipelineWatch
from pydanube.core.pipelines.declaration import Declaration
from pydanube.core.pipelines.status import PipelineState, PipelineStatus, RunOutcome

NOW_US = 1_800_000_000_000_000
DECLARATION = Declaration.parse({"name": "orders", "job": "lake", "follow": "30s", "freshness": "5m"})
GOOD = PipelineStatus(state=PipelineState.RUNNING, fresh_us=NOW_US, runs=1)
FAILING = replace(GOOD, failures=2, outcome=RunOutcome.FAILED, error="no bucket")


def looked(watch: PipelineWatch, now: float, status: PipelineStatus | None, holder: str = "a") -> list[str]:
    watch.look(now, NOW_US, [KnownPipeline(DECLARATION, status, holder)])
    return [each.name for each in watch.conditions]


def test_a_pipeline_that_is_well_is_no_condition() -> None:
    assert looked(PipelineWatch(), 0.0, GOOD) == []


def test_a_failing_pipeline_is_said_after_a_minute_with_its_error_and_its_runbook() -> None:
    watch = PipelineWatch()
    assert looked(watch, 0.0, FAILING) == [] and looked(watch, 50.0, FAILING) == []
    assert looked(watch, 60.0, FAILING) == ["DanubePipelineFailing"]
    [found] = watch.conditions
    assert found.severity is Severity.CRITICAL and found.subject == "orders" and "no bucket" in found.sentence
    assert found.runbook == "docs/runbooks/DanubePipelineFailing.md" and found.since_ms == NOW_US // 1000
    assert looked(watch, 70.0, GOOD) == [] and looked(watch, 80.0, FAILING) == []


def test_a_stale_one_is_said_at_once_and_one_without_a_supervisor_after_a_minute() -> None:
    watch = PipelineWatch()
    assert looked(watch, 0.0, replace(GOOD, fresh_us=NOW_US - 301_000_000)) == ["DanubePipelineStale"]
    assert looked(watch, 10.0, GOOD, holder="") == []
    assert looked(watch, 70.0, GOOD, holder="") == ["DanubePipelineUnsupervised"]


def test_messages_that_were_put_aside_are_said_for_a_quarter_of_an_hour() -> None:
    watch = PipelineWatch()
    assert looked(watch, 0.0, replace(GOOD, quarantined_total=7)) == [], "those of before may be a year old"
    assert looked(watch, 10.0, replace(GOOD, quarantined_total=9)) == ["DanubePipelineQuarantining"]
    assert "2 messages" in watch.conditions[0].sentence
    assert looked(watch, 800.0, replace(GOOD, quarantined_total=9)) == ["DanubePipelineQuarantining"]
    assert looked(watch, 1_000.0, replace(GOOD, quarantined_total=9)) == []
    assert looked(watch, 1_010.0, replace(GOOD, quarantined_total=1)) == [], "declared anew, it counts anew"


def test_who_does_not_lead_says_nothing() -> None:
    watch = PipelineWatch()
    looked(watch, 0.0, replace(GOOD, fresh_us=0))
    watch.forget()
    assert watch.conditions == [] and watch.rows == []
