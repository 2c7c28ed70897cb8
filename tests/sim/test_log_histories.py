"""A thousand random lives of the log, and the proof that they would notice.

Every defect in PLANTED is put into the log or between the log and its disk, one at a time; each must be found
within two thousand such histories. A check that has never found anything proves nothing.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pydanube.log import committer, recovery
from pydanube.ports import Disk, Write, WriteResult
from pydanube.testing.log_history import run_history
from pydanube.testing.sim import Totals, outcomes

HISTORIES = 2000
CHUNKS = 8
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
def test_the_log_keeps_its_promises_in_a_thousand_histories(chunk: int) -> None:
    totals = live(range(chunk, HISTORIES // 2, CHUNKS))
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
        "from pydanube.testing.log_history import run_history\n"
        "for seed in range(20): print(run_history(seed).digest)\n"
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
    here = [run_history(seed).digest for seed in range(20)]
    assert runs[0] == runs[1] == here
    assert len(set(here)) == 20


# --- planted defects --------------------------------------------------------------------------------


class Careless:
    """Passes everything on to the disk; each defect changes one method."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


class AcknowledgesBeforeTheSync(Careless):
    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        return await self._disk.write(writes, sync=sync and not writes[0].path.endswith((".wal", ".journal")))


class ForgetsToSyncDirectories(Careless):
    async def sync_directory(self, path: str) -> None:
        pass


class SyncsTheOldFileAfterARoll(Careless):
    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self._before: dict[str, str] = {}  # segment -> the one that was made before it
        self._newest: dict[str, str] = {}  # directory -> segment

    async def rename(self, source: str, target: str) -> None:
        await self._disk.rename(source, target)
        if target.endswith(".wal"):
            directory = target.rpartition("/")[0]
            if directory in self._newest:
                self._before[target] = self._newest[directory]
            self._newest[directory] = target

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        results = await self._disk.write(writes, sync=False)
        if sync:
            await self._disk.sync([self._before.get(write.path, write.path) for write in writes])
        return results


def removes_journals_before_the_segments_are_synced(patch: pytest.MonkeyPatch) -> None:
    retire = committer.Committer._retire

    async def careless(self: committer.Committer, journal: Any, *arguments: Any) -> None:
        for segment, end in journal.dirty.items():
            segment.synced = max(segment.synced, end)
        await retire(self, journal, *arguments)

    patch.setattr(committer.Committer, "_retire", careless)


def keeps_sessions_of_a_group_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committer.Forming, "take_back", lambda part: None)


def trusts_the_last_group(patch: pytest.MonkeyPatch) -> None:
    async def careless(*_: Any) -> None:
        pass

    patch.setattr(recovery._EpochRecovery, "_copy_last_group", careless)


PLANTED: dict[str, type[Careless] | Callable[[pytest.MonkeyPatch], None]] = {
    "ack before sync": AcknowledgesBeforeTheSync,
    "missing directory sync": ForgetsToSyncDirectories,
    "sync of the old file after a roll": SyncsTheOldFileAfterARoll,
    "journal removed before the segments are synced": removes_journals_before_the_segments_are_synced,
    "sessions kept when a group fails": keeps_sessions_of_a_group_that_failed,
    "last group trusted without a copy": trusts_the_last_group,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = PLANTED[name]
    wrap: type[Careless] | None = None
    if isinstance(defect, type):
        wrap = defect
    else:
        defect(monkeypatch)
    for seed in range(HISTORIES):
        outcome = run_history(seed, wrap_disk=wrap)  # type: ignore[arg-type]
        if outcome.failure is not None:
            print(f"{name}: found after {seed + 1} histories: {outcome.failure.splitlines()[-1]}")
            return
    raise AssertionError(f"{name} was not found in {HISTORIES} histories")
