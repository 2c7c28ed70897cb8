from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.limits import TokenBucket


def test_a_bucket_starts_full_and_refills_with_time() -> None:
    bucket = TokenBucket(10)
    assert bucket.take(10, now=0.0)
    assert not bucket.take(1, now=0.0)
    assert bucket.ready_at(1, now=0.0) == 0.1
    assert bucket.take(1, now=0.1)
    assert bucket.available(now=100.0) == 10


def test_more_than_the_bucket_holds_is_taken_and_paid_back() -> None:
    bucket = TokenBucket(10)
    assert bucket.take(25, now=0.0)
    assert not bucket.take(1, now=1.5)
    assert bucket.ready_at(1, now=1.5) == bucket.ready_at(25, now=1.5) == 1.6
    assert bucket.take(25, now=1.6)
    assert bucket.ready_at(1, now=1.6) == 4.1


def test_who_takes_each_token_as_it_comes_does_not_starve_who_wants_many() -> None:
    bucket = TokenBucket(10)
    assert bucket.take(10, now=0.0)
    chance, taken = Random(1), {1: 0, 30: 0}
    for tick in range(2_000):
        for count in chance.sample((1, 30), 2):  # both try again every tenth of a second
            taken[count] += bucket.take(count, now=tick / 10)
    assert taken[1] > 20 and taken[30] > 20
    assert 30 * taken[30] + taken[1] <= 10 * 200 + 30


def test_a_clock_that_goes_back_adds_nothing() -> None:
    bucket = TokenBucket(10, now=5.0)
    assert bucket.take(10, now=5.0)
    assert bucket.available(now=1.0) == 0
    assert bucket.available(now=5.0) == 0


@given(st.floats(0.1, 1000), st.lists(st.tuples(st.floats(0, 2), st.integers(1, 50)), min_size=1, max_size=50))
def test_beyond_burst_plus_rate_times_time_only_the_last_goes_and_ready_at_keeps_its_word(
    rate: float, takes: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(rate, burst=50)
    now, taken = 0.0, 0
    for pause, count in takes:
        now += pause
        if not bucket.take(count, now):
            now = bucket.ready_at(count, now)
            assert bucket.take(count, now)
        assert taken + 1 <= 50 + rate * now + 0.01, "everything before it is paid back, and one token was there"
        taken += count
