"""Hundreds of random lives of the log, and the proof that they would notice.

Every defect in PLANTED (planted_log.py) is put into the log or between the log and its disk, one at a time; each must
be found within a thousand such histories. A check that has never found anything proves nothing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.sim.planted_log import PLANTED, Careless
from tools.sim.command import Totals, outcomes
from tools.sim.coverage import unmet
from tools.sim.log_history import OPERATIONS, run_history

HISTORIES = 240  # `make sim` lives thousands
WITHIN = 1000  # histories, a planted defect must be found
CHUNKS = 3
# Seeds that once found a bug. They stay, whatever the histories of their numbers have become since.
REGRESSIONS = [int(line.split()[0]) for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines() if line]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log reports every fault that is injected; thousands of lines would hide the one that matters."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def live(seeds: Sequence[int]) -> Totals:
    totals = Totals()
    for outcome in outcomes(seeds, processes=1):
        totals.add(outcome)
    return totals


def told(totals: Totals) -> str:
    return "\n".join(f"seed {outcome.seed}: {outcome.failure}" for outcome in totals.failures)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_log_keeps_its_promises_in_hundreds_of_histories(chunk: int) -> None:
    totals = live(range(chunk, HISTORIES, CHUNKS))
    assert not totals.failures, told(totals)
    assert not totals.too_idle, str(totals)
    # Every kind of trouble was there.
    for kind in ("power cuts", "kills", "failed syncs", "no room", "flips", "truncations", "clean closes"):
        assert totals.counts[kind] > 0, kind


def test_what_was_once_wrong_stays_right() -> None:
    totals = live(REGRESSIONS)
    assert not totals.failures, told(totals)


def test_the_same_seed_gives_the_same_history_in_another_process() -> None:
    script = (
        "import logging; logging.disable(50)\n"
        "from tools.sim.log_history import run_history\n"
        "for seed in range(8): print(run_history(seed).digest)\n"
    )
    # Another hash seed: whoever iterates over a set of strings is found out.
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    here = [run_history(seed).digest for seed in range(8)]
    assert runs[0] == runs[1] == here
    assert len(set(here)) == 8


def test_the_fixed_histories_meet_every_public_operation_and_every_limit() -> None:
    totals = live(range(1000, 1080))
    assert not totals.failures, told(totals)
    assert unmet(totals.met, *OPERATIONS) == []
    for limit in ("segments full (size)", "segments full (time)", "segments full (room)", "journals full"):
        assert totals.counts[f"limit: {limit}"] > 0, limit
    for kind in (
        "limit: bytes_max met",
        "aimed faults",
        "no descriptor",
        "files closed for others",
        "closes that failed",
        "epochs given up",
        "closed logs read",
        "receipts told",
        "leases lost",
        "boots that went on",
    ):
        assert totals.counts[kind] > 0, kind


# --- planted defects --------------------------------------------------------------------------------

# Where each was found last: tried first, so that `make test` need not search. If a history of that number is another
# one by now, the search begins at 0.
FOUND_AT = {
    "last group trusted without a copy": 352,
    "journal removed before the segments are synced": 173,
    "snapshot of a new file knows what is not stored": 172,
    "redo without a sync": 19,
    "retention removes before it says so": 18,
    "name of a replaced file not synced": 732,
    "cache drops what only the journal has": 38,
    "snapshot forgets the oldest batch": 110,
    "segment in doubt forgotten": 585,
    "journal used again after a failed sync": 223,
    "removed file of a reopened topic stops the log": 737,
    "second close does not wait": 666,
}


def found_by(name: str, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str] | None:
    """The first of the seeds whose history breaks a promise with the defect, and which."""
    defect = PLANTED[name]
    wrap: type[Careless] | None = None
    if isinstance(defect, type):
        wrap = defect
    else:
        defect(monkeypatch)
    for seed in seeds:
        outcome = run_history(seed, wrap_disk=wrap)  # type: ignore[arg-type]
        if outcome.failure is not None:
            return seed, outcome.failure.splitlines()[-1]
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by(name, [FOUND_AT.get(name, 0), *range(WITHIN)], monkeypatch)
    assert found is not None, f"{name} was not found in {WITHIN} histories"


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by(name, range(WITHIN), monkeypatch)
    assert found is not None, f"{name} was not found in {WITHIN} histories"
    print(f"{name}: found after {found[0] + 1} histories: {found[1]}")
