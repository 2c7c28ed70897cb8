"""A few thousand damaged batches in every test run, and proof that the fuzzer would notice."""

from random import Random

import pytest

from pydanube.errors import InvalidBatch
from pydanube.formats import batch as batches
from tests.fuzz import batch as fuzz


def test_a_damaged_batch_is_refused_or_can_be_read_in_full() -> None:
    result = fuzz.FUZZER.run(seed=1, first=0, count=5_000, jobs=2)
    assert result.failures == []
    assert result.tried == 5_000
    # Damage must get past the checksums, or the fuzzer tests crc32c and nothing else.
    assert result.outcomes["batch"] > 100
    assert sum(n for kind, n in result.outcomes.items() if "not a record batch" in kind) > 500


def test_every_seedling_is_a_valid_batch() -> None:
    for seedling in fuzz.seedlings():
        assert fuzz.judge(seedling.data) == "batch"


def test_an_input_is_the_same_whenever_it_is_made() -> None:
    inputs = [fuzz.generate(7, index) for index in range(200)]
    assert [fuzz.generate(7, index) for index in reversed(range(200))] == inputs[::-1]
    assert [fuzz.generate(8, index) for index in range(200)] != inputs


def test_odd_inputs_have_right_checksums_unless_their_header_claims_another_length() -> None:
    for index in range(1, 400, 2):
        data = fuzz.generate(3, index)
        if len(data) < batches.HEADER_SIZE:
            continue
        with_right_crc = fuzz.with_header_crc(data)
        assert data == with_right_crc


def test_every_kind_of_damage_changes_something_and_never_fails() -> None:
    random = Random(5)
    for damage in set(fuzz.DAMAGES):
        changed = 0
        for seedling in fuzz.seedlings():
            data = bytearray(seedling.data)
            damage(random, data)
            changed += data != seedling.data
        assert changed > 5, damage.__name__


def test_an_error_that_is_not_invalid_batch_counts_as_a_failure() -> None:
    def careless(data: bytes) -> batches.Batch:
        raise TypeError("memoryview")

    with pytest.raises(TypeError):
        fuzz.attempt(1, 0, careless)


def test_an_attempt_to_allocate_by_an_unchecked_length_counts_as_a_failure() -> None:
    def greedy(data: bytes) -> batches.Batch:
        raise InvalidBatch("its body does not decompress: malloc of size 1099511627776 failed")

    with pytest.raises(fuzz.Wrong, match="had not checked"):
        fuzz.attempt(1, 0, greedy)


def test_a_batch_that_cannot_be_read_later_counts_as_a_failure() -> None:
    seedling = next(s for s in fuzz.seedlings() if s.header.codec == 0)
    wrong = seedling.header._replace(rows=seedling.header.rows + 1)

    def trusting(data: bytes) -> batches.Batch:
        return batches.load(fuzz.sealed(wrong, seedling.plain))

    with pytest.raises(fuzz.Wrong, match="rows"):
        fuzz.attempt(1, 0, trusting)
