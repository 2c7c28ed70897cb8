"""Defects that are put into the log, or between the log and its disk, to see whether anything notices.

Each is what somebody might write, or what somebody did write: those whose text says so were in the program. They are
planted by exchanging one function, or a line of it, in the program as it is: `exchange` fails if the line is not there
any more, so that a defect is never planted in vain.
"""

from __future__ import annotations

import asyncio
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from pydanube.core.commit import sessions
from pydanube.core.commit.machine import CommitMachine
from pydanube.core.commit.values import GroupPart
from pydanube.errors import DiskFailed, DiskFull
from pydanube.log import cache, journal_redo, layout, recovery, trimmer, wal
from pydanube.log.commit_context import Broadcast
from pydanube.log.journal_writer import JournalWriter
from pydanube.log.segment_maker import SegmentMaker
from pydanube.log.space import WalSpace
from pydanube.log.trimmer import Trimmer
from pydanube.ports import Disk, Write, WriteResult
from pydanube.stores.disk import file_errors

Plant = Callable[[pytest.MonkeyPatch], None]


def exchange(patch: pytest.MonkeyPatch, owner: type | ModuleType, name: str, *lines: tuple[str, str]) -> None:
    """Exchanges texts in a function's source. Each must occur."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in lines:
        assert old in source, f"{name} does not have {old!r} any more: plant the defect in another way"
        source = source.replace(old, new)
    names: dict[str, Any] = {}
    flags = "from __future__ import annotations\n"
    exec(compile(flags + source, inspect.getsourcefile(function) or "", "exec"), function.__globals__, names)
    patch.setattr(owner, name, names[function.__name__])


# --- between the log and its disk ---------------------------------------------------------------------


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


# --- order of writes and syncs ------------------------------------------------------------------------


def segment_names_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    original = WalSpace.sync_name

    async def careless(self: WalSpace, directory: str) -> None:
        if not directory.startswith("wal/"):
            await original(self, directory)

    patch.setattr(WalSpace, "sync_name", careless)


def journals_go_before_the_segments_are_synced(patch: pytest.MonkeyPatch) -> None:
    retire = JournalWriter._retire

    async def careless(self: JournalWriter, journal: Any, *arguments: Any) -> None:
        for segment, end in journal.dirty.items():
            segment.synced = max(segment.synced, end)
        await retire(self, journal, *arguments)

    patch.setattr(JournalWriter, "_retire", careless)


def the_last_group_is_trusted(patch: pytest.MonkeyPatch) -> None:
    async def careless(*_: Any) -> None:
        pass

    patch.setattr(recovery._EpochRecovery, "_copy_last_group", careless)


def a_new_file_knows_what_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, CommitMachine, "set_aside", ("part.take_back()", "pass"))


def redo_does_not_sync(patch: pytest.MonkeyPatch) -> None:
    async def redo(disk: Disk) -> dict[str, str]:
        return await original(NoSync(disk))  # type: ignore[arg-type]

    class NoSync(Careless):
        async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
            return [None for _ in paths]

        async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
            redone = all(write.path.endswith(".wal") for write in writes)
            return await self._disk.write(writes, sync=sync and not redone)

    original = journal_redo.redo_journals
    patch.setattr(wal, "redo_journals", redo)


def retention_removes_before_it_says_so(patch: pytest.MonkeyPatch) -> None:
    move = Trimmer._move_first_offset
    said: dict[str, int] = {}

    async def later(self: Trimmer, directory: str, first_offset: int) -> None:
        said[directory] = first_offset

    truncate = Trimmer.truncate

    async def careless(self: Trimmer, before: int) -> None:
        await truncate(self, before)
        for directory, first_offset in list(said.items()):
            del said[directory]
            await move(self, directory, first_offset)

    patch.setattr(Trimmer, "_move_first_offset", later)
    patch.setattr(Trimmer, "truncate", careless)


def replaced_files_have_unsynced_names(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, layout, "replace_file", ('await disk.sync_directory(path.rpartition("/")[0])', "pass"))
    for module in (wal, recovery, journal_redo, trimmer):
        patch.setattr(module, "replace_file", layout.replace_file)


def the_cache_drops_what_only_the_journal_has(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, cache.TailCache, "add", ("if cached.end > cached.segment.copied:", "if False:"))


# --- sessions and receipts ----------------------------------------------------------------------------


def sessions_are_kept_when_a_group_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupPart, "take_back", lambda part: None)


def a_repetition_is_acknowledged_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, CommitMachine, "_form_part", ("if stored.base_offset >= of.head:", "if False:"))


def a_snapshot_forgets_the_oldest_batch(patch: pytest.MonkeyPatch) -> None:
    original = sessions.Sessions.to_bytes

    def careless(self: sessions.Sessions, **how: bool) -> bytes:
        copy = self.copy()
        for producer_id, producer in list(copy):
            if len(producer.recent) == sessions.RECENT_MAX:
                copy.put(producer_id, producer._replace(packed=producer.packed[sessions._STORED.size :]))
        return original(copy, **how)

    patch.setattr(sessions.Sessions, "to_bytes", careless)


STOPS_UNLESS_PREPARED = """\
        failure = error
        if why != PREPARED:
            context.stop(error)
    del"""


def a_batch_goes_beyond_the_reservation(patch: pytest.MonkeyPatch) -> None:
    """Where it begins is looked at, and not where it ends."""
    exchange(
        patch,
        CommitMachine,
        "_form_part",
        ("part.end_offset + header.rows > of.reserved_end", "part.end_offset >= of.reserved_end"),
    )


# --- failures -----------------------------------------------------------------------------------------


def a_segment_in_doubt_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Was in the program: `prepare` took any failure for "nothing was made", and recovery sorted by random names."""

    async def order(self: Any, starts: list[Any], *_: Any) -> list[Any]:
        return sorted(starts, key=lambda start: int(start.first_offset))

    exchange(
        patch,
        SegmentMaker,
        "_make",
        ("        failure = error\n        context.stop(error)\n    del", STOPS_UNLESS_PREPARED),
    )
    patch.setattr(recovery._EpochRecovery, "_order_starts", order)


def a_journal_whose_sync_failed_is_used_again(patch: pytest.MonkeyPatch) -> None:
    """Was in the program."""
    exchange(
        patch,
        JournalWriter,
        "_next_journal",
        ("keep=not after_failure", "keep=True"),
        ("if after_failure:", "if True:"),
    )


def a_removed_file_stops_the_log(patch: pytest.MonkeyPatch) -> None:
    """Was in the program: opening a topic again copied what the journal had, and did not sync it."""

    async def copy_directory(self: JournalWriter, directory: str) -> None:
        def away() -> list[Any]:
            return [segment for segment in self.uncopied if segment.path.startswith(f"{directory}/")]

        stopped = self._context.machine.stopped
        if away() and stopped is not None:
            raise stopped
        if away():
            await self.copy()
        for segment in away():
            raise DiskFull(segment.path)

    async def never(self: Any, segment: Any) -> bool:
        return False

    patch.setattr(JournalWriter, "copy_directory", copy_directory)
    patch.setattr(JournalWriter, "_is_gone", never)


def a_lack_of_descriptors_is_a_broken_disk(patch: pytest.MonkeyPatch) -> None:
    """Was in the program."""
    original = file_errors.failure_of

    def careless(error: OSError, path: str, operation: str) -> DiskFull | DiskFailed:
        known = original(OSError(error.errno, error.strerror), path, operation)
        short = isinstance(known, DiskFull) and type(known) is not DiskFull
        return DiskFailed(path, operation, error.strerror or str(error)) if short else known

    patch.setattr(file_errors, "failure_of", careless)


def readers_that_gave_up_are_remembered(patch: pytest.MonkeyPatch) -> None:
    """Was in the program."""

    async def wait(self: Any) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        await waiter

    patch.setattr(Broadcast, "wait", wait)


def dropped_segments_are_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal.TopicLog, "_uncount", lambda self, segments: None)


def a_second_close_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Was in the program."""
    exchange(patch, wal.TopicLog, "close", ("await self._ended.wait()", "pass"))


PLANTED: dict[str, type[Careless] | Plant] = {
    "ack before sync": AcknowledgesBeforeTheSync,
    "missing directory sync": ForgetsToSyncDirectories,
    "sync of the old file after a roll": SyncsTheOldFileAfterARoll,
    "name of a new segment not synced": segment_names_are_not_synced,
    "journal removed before the segments are synced": journals_go_before_the_segments_are_synced,
    "last group trusted without a copy": the_last_group_is_trusted,
    "snapshot of a new file knows what is not stored": a_new_file_knows_what_is_not_stored,
    "redo without a sync": redo_does_not_sync,
    "retention removes before it says so": retention_removes_before_it_says_so,
    "name of a replaced file not synced": replaced_files_have_unsynced_names,
    "cache drops what only the journal has": the_cache_drops_what_only_the_journal_has,
    "sessions kept when a group fails": sessions_are_kept_when_a_group_fails,
    "repetition acknowledged before the sync": a_repetition_is_acknowledged_before_the_sync,
    "snapshot forgets the oldest batch": a_snapshot_forgets_the_oldest_batch,
    "batch beyond the reservation": a_batch_goes_beyond_the_reservation,
    "segment in doubt forgotten": a_segment_in_doubt_is_forgotten,
    "journal used again after a failed sync": a_journal_whose_sync_failed_is_used_again,
    "removed file of a reopened topic stops the log": a_removed_file_stops_the_log,
    "lack of descriptors taken for a broken disk": a_lack_of_descriptors_is_a_broken_disk,
    "readers that gave up are remembered": readers_that_gave_up_are_remembered,
    "bytes of dropped segments counted for ever": dropped_segments_are_counted,
    "second close does not wait": a_second_close_does_not_wait,
}
