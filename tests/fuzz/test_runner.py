"""What every fuzzer rests on: no input is lost, whatever it does to the child that tries it."""

import sys
from dataclasses import replace

import pytest

from tests.fuzz.batch import FUZZER

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
    [("os.abort()", "the child ended with -6"), ("time.sleep(60)", "it hangs for 3.0 s")],
)
def test_a_child_that_dies_or_hangs_is_reported_with_its_input_and_the_rest_still_runs(
    at_three: str, sentence: str
) -> None:
    child = (sys.executable, "-c", CHILD.format(at_three=at_three))
    result = replace(FUZZER, child=child, hang_seconds=3.0).run_chunk(1, 0, 8)
    [failure] = result.failures
    assert failure.index == 3
    assert failure.what.startswith(sentence)
    assert result.outcomes == {"refused": 7}
    assert result.tried == 8


def test_the_last_line_has_the_totals_and_the_exit_code_is_0_without_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert FUZZER.main(["--seed", "3", "--count", "50", "--jobs", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("seed 3: 50 inputs in ") and last.endswith(" 0 failures")


def test_the_exit_code_is_1_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    child = (sys.executable, "-c", CHILD.format(at_three="os.abort()"))
    assert replace(FUZZER, child=child).main(["--seed", "3", "--count", "8", "--jobs", "1"]) == 1
    output = capsys.readouterr().out
    assert "seed 3 input 3: the child ended with -6" in output
    assert "--seed 3 --first 3 --count 1" in output
