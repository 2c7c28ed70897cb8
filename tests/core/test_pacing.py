"""Windows that adapt: a tenth of a second of work, whatever the work is."""

from __future__ import annotations

import pytest

from pydanube.core.consuming.pacing import FIRST_MESSAGES, GROWTH, Pacing


def worked(
    pacing: Pacing, seconds: float, count: int, *, now: float = 0.0, workers: int = 1, idle: float = 0.0
) -> float:
    """`count` messages, each `seconds` long, with `idle` seconds of nothing to do behind each."""
    for _ in range(count):
        pacing.tick(now, is_busy=True)
        now += seconds
        pacing.tick(now, is_busy=False, answered=workers)
        now += idle
    return now


@pytest.mark.parametrize(("seconds", "window"), [(60.0, 1), (0.06, 2), (0.005, 20), (0.001, 100), (1e-6, 10_000)])
def test_the_window_is_a_tenth_of_a_second_of_work(seconds: float, window: int) -> None:
    pacing = Pacing(10_000)
    worked(pacing, seconds, 20_000 if seconds < 0.01 else 100)
    assert pacing.window == pytest.approx(window, rel=0.2, abs=1)


def test_it_begins_with_few_and_grows_step_by_step() -> None:
    pacing = Pacing(10_000)
    assert pacing.window == FIRST_MESSAGES
    before, now = pacing.window, 0.0
    for _ in range(200):
        now = worked(pacing, 1e-6, 1, now=now, workers=10)
        assert pacing.window <= GROWTH * before
        before = pacing.window


def test_having_nothing_to_do_is_not_being_slow() -> None:
    pacing = Pacing(10_000)
    worked(pacing, 0.005, 500, idle=1.0)
    assert pacing.window == pytest.approx(20, abs=3)


def test_a_long_way_to_the_broker_is_made_up_for() -> None:
    near, far = Pacing(10_000), Pacing(10_000)
    far.round_trip(0.1)
    for pacing in (near, far):
        worked(pacing, 0.001, 5_000)
    assert far.window == pytest.approx(3 * near.window, rel=0.1)


def test_several_at_a_time_are_a_faster_worker() -> None:
    pacing = Pacing(10_000)
    worked(pacing, 0.1, 100, workers=8)
    assert pacing.window == pytest.approx(8, abs=1)


def test_a_worker_that_becomes_slow_soon_has_a_small_window() -> None:
    pacing = Pacing(10_000)
    now = worked(pacing, 1e-5, 20_000)
    assert pacing.window > 5_000
    worked(pacing, 1.0, 10, now=now)
    assert pacing.window <= 2


def test_the_change_is_said_so_that_permits_follow() -> None:
    pacing, said = Pacing(100), FIRST_MESSAGES
    now = 0.0
    for _ in range(1_000):
        said += pacing.tick(now, is_busy=True)
        now += 0.0001
        said += pacing.tick(now, is_busy=False, answered=1)
    assert said == pacing.window == 100
