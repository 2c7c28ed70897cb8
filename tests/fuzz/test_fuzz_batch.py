"""A few thousand damaged batches in every test run, and proof that the fuzzer would notice."""

import sys
from functools import partial
from random import Random

import pytest

from pydanube.errors import InvalidBatch
from pydanube.log import batch as batches
from tests.fuzz import batch as fuzz


def test_a_damaged_batch_is_refused_or_can_be_read_in_full() -> None:
    result = fuzz.run(seed=1, first=0, count=5_000, jobs=2)
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


# Stands in for the fuzzer's child: input 3 kills it or holds it, all others are refused.
CHILD = """
import json, os, pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
first, count = int(options["--first"]), int(options["--count"])
for index in range(first, first + count):
    pathlib.Path(options["--child"]).write_bytes(index.to_bytes(8, "little"))
    if index == 3:
        {at_three}
print(json.dumps({{"outcomes": {{"refused": count}}, "failures": []}}))
"""


@pytest.mark.parametrize(
    ("at_three", "sentence"),
    [("os.abort()", "the child ended with -6"), ("time.sleep(60)", "it hangs for 0.8 s")],
)
def test_a_child_that_dies_or_hangs_is_reported_with_its_input_and_the_rest_still_runs(
    at_three: str, sentence: str
) -> None:
    child = (sys.executable, "-c", CHILD.format(at_three=at_three))
    result = fuzz.run_chunk(1, 0, 8, hang_seconds=0.8, child=child)
    [failure] = result.failures
    assert failure.index == 3
    assert failure.what.startswith(sentence)
    assert result.outcomes == {"refused": 7}
    assert result.tried == 8


def test_the_last_line_has_the_totals_and_the_exit_code_is_0_without_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fuzz.main(["--seed", "3", "--count", "50", "--jobs", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("seed 3: 50 inputs in ") and last.endswith(" 0 failures")


def test_the_exit_code_is_1_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = (sys.executable, "-c", CHILD.format(at_three="os.abort()"))
    monkeypatch.setattr(fuzz, "run_chunk", partial(fuzz.run_chunk, child=child))
    assert fuzz.main(["--seed", "3", "--count", "8", "--jobs", "1"]) == 1
    output = capsys.readouterr().out
    assert "seed 3 input 3: the child ended with -6" in output
    assert "--seed 3 --first 3 --count 1" in output
