"""A broker survives whatever is sent to it, and stays consistent. `make fuzz-rpc` is the long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import BrokerProcess
from tests.e2e.rpc_random import Report, fuzz
from tests.e2e.rpc_requests import Requests, services

COUNT = 3_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_requests_are_answered_with_ok_or_a_sentence_and_harm_nothing(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        report = fuzz(broker, seed=3, count=COUNT, in_flight=32)
    assert report.count == COUNT
    assert set(report.by_call) == {
        f"/{service.full_name}/{method.name}" for _, service in services() for method in service.methods
    }, "every call was made"
    assert report.codes["OK"] > COUNT / 10 and report.codes["INVALID_ARGUMENT"] > COUNT / 10, report.codes


def test_a_seed_repeats_the_requests() -> None:
    once, again = (Requests(7) for _ in range(2))
    assert [once.draw()[2] for _ in range(200)] == [again.draw()[2] for _ in range(200)]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("INTERNAL", "the broker failed"),
        ("UNKNOWN", "Unexpected <class 'KeyError'>"),
        ("NOT_FOUND", "Traceback (most recent call last)"),
        ("INVALID_ARGUMENT", ""),
        ("UNAVAILABLE", "Socket closed"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded"),
    ],
)
def test_a_wrong_answer_is_noticed(code: str, sentence: str) -> None:
    report = Report()
    report.note("/danube.Discovery/TopicLookup", code, sentence)
    assert len(report.violations) == 1
