"""What a scrape says of pipelines: at the leader, or a broker that is alone; elsewhere nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pydanube.core.pipelines.conditions import PipelineRow
from pydanube.core.pipelines.status import Health
from pydanube.telemetry.families import Family, Rows, counter_family, gauge_family


def pipeline_families(rows: Sequence[PipelineRow]) -> Iterator[Family]:
    """Every family, also without a pipeline. What is not known of one has no series."""
    labels = ("pipeline",)

    def of(number: Callable[[PipelineRow], float | None]) -> Rows:
        numbers = [((each.name,), number(each)) for each in rows]
        return [(names, value) for names, value in numbers if value is not None]

    text = "1 for how a pipeline is doing, 0 for the other words"
    each_health = [
        ((each.name, health.value), float(each.health == health.value)) for each in rows for health in Health
    ]
    yield gauge_family("danube_pipeline_health", text, (*labels, "health"), each_health)
    text = "How old the newest data of the result may be; pipelines of which it is known"
    yield gauge_family("danube_pipeline_freshness_seconds", text, labels, of(lambda each: each.fresh_seconds))
    text = "How old it is to be at most; pipelines that say so"
    yield gauge_family("danube_pipeline_freshness_goal_seconds", text, labels, of(lambda each: each.goal_seconds))
    text = "Messages that wait to become part of the result; pipelines of which it is known"
    yield gauge_family("danube_pipeline_behind_messages", text, labels, of(lambda each: each.behind_messages))
    text = "1 while a run goes on"
    yield gauge_family("danube_pipeline_running", text, labels, of(lambda each: float(each.is_running)))
    text = "Failed runs, one after the other; 0 since one was good"
    yield gauge_family("danube_pipeline_failures", text, labels, of(lambda each: each.failures))
    yield counter_family("danube_pipeline_runs", "Runs that were started", labels, of(lambda each: each.runs))
    text = "Runs that were started because the one before did not end well"
    yield counter_family("danube_pipeline_restarts", text, labels, of(lambda each: each.restarts))
    text = "Messages that did not fit the schema and went to quarantine"
    yield counter_family("danube_pipeline_quarantined", text, labels, of(lambda each: each.quarantined))
