from __future__ import annotations

from fnmatch import fnmatchcase
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.hash_ring import HashRing, accepts, ring_hash
from pydanube.core.names import ConsumerId

CONSUMERS = [ConsumerId(number) for number in (11, 22, 33, 44)]


def ring(*consumers: ConsumerId, filters: tuple[str, ...] = ()) -> HashRing:
    made = HashRing()
    for consumer in consumers:
        made.put(consumer, filters)
    return made


PAIR, MIXED = ring(*CONSUMERS[:2]), ring(*CONSUMERS[:2])
MIXED.put(CONSUMERS[2], ("no such key*",))


def test_the_hash_is_fnv1a_folded_and_finalised_by_murmur3() -> None:
    # By hand: fnv1a_64("") = cbf29ce484222325, folded = 4fd0bfc1; and the finaliser of 0 is 0.
    number = 0xCBF29CE4 ^ 0x84222325
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    number ^= number >> 16
    assert ring_hash("") == number


def test_a_joining_consumer_takes_keys_and_moves_none_between_the_others() -> None:
    before, after = ring(*CONSUMERS[:3]), ring(*CONSUMERS)
    keys = [f"key-{number}" for number in range(2000)]
    moved = [key for key in keys if before.owner(key) != after.owner(key)]
    assert all(after.owner(key) == CONSUMERS[3] for key in moved)
    assert 200 < len(moved) < 900


def test_keys_are_spread_over_all_consumers() -> None:
    full = ring(*CONSUMERS)
    owners = [full.owner(f"key-{number}") for number in range(2000)]
    assert all(owners.count(consumer) > 200 for consumer in CONSUMERS)


@given(st.text(max_size=8))
def test_the_ring_of_the_willing_is_the_same_as_a_ring_without_the_others(key: str) -> None:
    if not key.startswith("no such key"):
        assert MIXED.owner(key) == PAIR.owner(key)


def test_a_key_nobody_accepts_has_no_owner() -> None:
    assert ring(*CONSUMERS, filters=("orders-*",)).owner("payments-1") is None
    assert HashRing().owner("any") is None


@pytest.mark.parametrize(
    ("glob", "key", "fits"),
    [
        ("orders-*", "orders-1", True),
        ("orders-*", "orders-", True),
        ("orders-*", "order-1", False),
        ("user-?", "user-1", True),
        ("user-?", "user-12", False),
        ("*", "", True),
        ("a*b*c", "a-bb-c", True),
        ("a*b*c", "a-c-b", False),
        ("a.b", "axb", False),
        ("[ab]", "a", False),
        ("**x", "yx", True),
        ("?", "\n", True),
    ],
)
def test_star_is_any_text_and_question_mark_any_one_character(glob: str, key: str, fits: bool) -> None:
    assert accepts((glob,), key) is fits


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=8))
def test_globs_match_as_the_standard_library_does(glob: str, key: str) -> None:
    assert accepts((glob,), key) == fnmatchcase(key, glob)


def test_a_filter_full_of_stars_costs_no_exponential_time() -> None:
    started = process_time()
    assert not accepts(("*a" * 30 + "b",), "a" * 200)
    assert process_time() - started < 0.5
