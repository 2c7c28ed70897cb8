"""A stream whose worker did not start in time goes on; one that fails for another reason ends. No Spark is started."""

from __future__ import annotations

import logging

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from pydanube.pipeline import run as jobs
from pydanube.pipeline.report import JobReport
from pydanube.spark import restarts
from pydanube.spark.restarts import run_again

LATE = "Job aborted due to stage failure: org.apache.spark.SparkException: Python worker failed to connect back."


class Query:
    """Fails so many times, and then ends in order. Each run takes some seconds."""

    def __init__(self, *errors: str, seconds: float = 1.0) -> None:
        self.errors = list(errors)
        self.seconds = seconds
        self.now = 0.0
        self.runs = 0
        self.pauses: list[float] = []

    def __call__(self) -> str:
        self.runs += 1
        self.now += self.seconds
        if self.errors:
            raise StreamingQueryException(self.errors.pop(0))
        return "done"

    def run(self, restarts_max: int = 5) -> str:
        return run_again(self, what="lake", restarts_max=restarts_max, pause=self.pauses.append, now=lambda: self.now)


def test_it_goes_on_after_a_worker_that_did_not_start_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    query = Query(LATE, LATE)
    with caplog.at_level(logging.WARNING):
        assert query.run() == "done"
    assert (query.runs, query.pauses) == (3, [2.0, 4.0])
    assert [record.message for record in caplog.records] == [
        "a Python worker of Spark did not start in time: starting again from the checkpoint"
    ] * 2


def test_it_gives_up_when_no_worker_starts_any_more() -> None:
    query = Query(*[LATE] * 9)
    with pytest.raises(PySparkException, match="connect back"):
        query.run(restarts_max=3)
    assert query.runs == 4
    patient = Query(*[LATE] * 9, seconds=restarts.LONG_SECONDS)
    assert patient.run(restarts_max=3) == "done"


def test_another_failure_is_raised_at_once() -> None:
    query = Query("offsets 3 to 9 of /default/a cannot be read")
    with pytest.raises(PySparkException, match="cannot be read"):
        query.run()
    assert query.runs == 1 and not query.pauses


def test_only_jobs_with_a_checkpoint_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_FIRST_SECONDS", 0.0)
    for job, runs in (("lake", 2), ("replay", 1)):
        tries: list[int] = []

        def once(job: str = job, tries: list[int] = tries) -> JobReport:
            tries.append(1)
            if len(tries) == 1:
                raise PySparkException(LATE)
            return JobReport(job)

        if runs == 1:
            with pytest.raises(PySparkException):
                jobs._run(job, once)
        else:
            assert jobs._run(job, once).is_good
        assert len(tries) == runs
