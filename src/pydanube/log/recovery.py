"""What a log says after a restart: which bytes are the log, which were never finished, which are damaged.

Two steps. `redo_journals`, once per data directory, copies what the commit journals hold into the segments.
`recover_topic` then reads one topic's epochs, oldest first. An epoch that was closed or recovered before is
*finished*: its checkpoint says how it ended and nothing is scanned again. The others are judged as
docs/adr/0001-the-log.md says, and are finished here, so that no later recovery can judge differently.

    bad bytes with a later group that was written when they were already safe    → damage: quarantined, reported
    bad bytes at the end                                                         → torn: kept aside, not part of the log
    an end that nothing vouches for                                              → unproven: said so

The last group of an unfinished epoch may be whole without ever having been synced. It is copied into a new file and
synced before anybody reads it: syncing the old file again would trust pages that a failed sync has already dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Final

from pydanube.core.commit.sessions import Producer, Sessions
from pydanube.errors import DiskFailed, DiskFull, InvalidBatch, LogDamaged
from pydanube.formats.batch import SESSION_RECORD, topic_hash
from pydanube.formats.journal import JournalEntry, decode_journal_header, read_journal
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
    UNSYNCED,
    GroupHeader,
    SegmentHeader,
    batch_headers_of,
    batches_of,
    body_is_whole,
    decode_group_header,
    decode_segment_header,
    encode_group,
    encode_segment_header,
    file_name,
    segment_header_length,
)
from pydanube.log.catalog import PositionIndex, SegmentFile
from pydanube.log.layout import (
    BALLAST,
    CHECKPOINT,
    DAMAGE_SUFFIX,
    JOURNALS,
    SEGMENT_SUFFIX,
    TEMPORARY_SUFFIX,
    TORN_SUFFIX,
    Checkpoint,
    copy_part,
    epoch_directory,
    read_file,
    replace_file,
    topic_directory,
    write_and_sync,
)
from pydanube.log.searching import GroupSearch, content_end
from pydanube.ports import Clock, Disk, Work, Write

log = logging.getLogger(__name__)

READ_BYTES: Final = 1024 * 1024
_REDO_BYTES: Final = 8 * 1024 * 1024


class Tail(Enum):
    """How sure the end of a log is."""

    CLEAN = "clean"  # nothing behind the last group
    TORN = "torn"  # an unfinished write behind the last group; nobody was told about it
    UNPROVEN = "unproven"  # acknowledged messages may be missing at the end


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that recovery cut off and kept in `kept_as`."""

    path: str
    position: int
    length: int
    kept_as: str


@dataclass(frozen=True, slots=True)
class Damage:
    """Offsets [first, end) cannot be read; `end` is None when nobody knows how far it goes."""

    path: str
    position: int
    first: int
    end: int | None
    why: str

    def __str__(self) -> str:
        until = "an unknown offset" if self.end is None else str(self.end)
        return f"{self.path} at position {self.position}: {self.why}; offsets {self.first} up to {until} are lost"


@dataclass(slots=True)
class RecoveredEpoch:
    """One epoch's log, read-only from now on."""

    epoch: int
    directory: str
    segments: list[SegmentFile] = field(default_factory=list)
    first_offset: int = 0
    end_offset: int = 0
    sessions: Sessions = field(default_factory=Sessions)
    append_time: int = 0
    max_publish_time: int = -(2**63)
    torn: list[Torn] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    tail: Tail = Tail.CLEAN
    why: str = ""

    def unproven(self, why: str) -> None:
        self.tail, self.why = Tail.UNPROVEN, why


@dataclass(frozen=True, slots=True)
class Recovered:
    """A topic's log over all epochs that this disk has, oldest first."""

    topic: str
    epochs: list[RecoveredEpoch]

    @property
    def segments(self) -> list[SegmentFile]:
        return [segment for epoch in self.epochs for segment in epoch.segments]

    @property
    def head(self) -> int:
        return self.epochs[-1].end_offset if self.epochs else 0

    @property
    def tail(self) -> Tail:
        return self.epochs[-1].tail if self.epochs else Tail.CLEAN

    @property
    def torn(self) -> list[Torn]:
        return [torn for epoch in self.epochs for torn in epoch.torn]

    @property
    def damage(self) -> list[Damage]:
        return [damage for epoch in self.epochs for damage in epoch.damage]


# --- journals ---------------------------------------------------------------------------------------


async def redo_journals(disk: Disk) -> dict[str, str]:
    """Copies what the journals hold into the segments and syncs those.

    Returns a sentence for every journal that is damaged, by path. Doing it again after a crash is the same as doing it
    once, so the journals stay until `clear_journals`: till then a restart finds the same damage.
    """
    names = [entry.name for entry in await disk.list(JOURNALS)]
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            await disk.remove(f"{JOURNALS}/{name}")
    paths = [f"{JOURNALS}/{name}" for name in names if name.endswith(".journal")]
    links: dict[int, int] = {}
    for path in paths:
        header = decode_journal_header(await disk.read(path, 0, 64))
        if header is not None:
            links[header.previous_id] = header.previous_end
    problems: dict[str, str] = {}
    touched: set[str] = set()
    known: dict[str, int | None] = {}
    for path in paths:
        content = await read_file(disk, path)
        assert content is not None
        header = decode_journal_header(content)
        redo = read_journal(content, end=links.get(header.journal_id) if header else None)
        if redo is None:
            problems[path] = f"{path} has a damaged header"
            continue
        touched |= await _apply(disk, redo.entries, known)
        if redo.torn_at is not None and (rest := content[redo.torn_at :].rstrip(b"\0")):
            # Nobody was told about it, unless the disk has rotted since: kept for a person to look at.
            await replace_file(disk, path + TORN_SUFFIX, rest)
            log.warning("unfinished journal record cut off", extra={"path": path, "position": redo.torn_at})
        if redo.damaged_at:
            problems[path] = f"{path} is damaged at position {redo.damaged_at[0]}"
    for failure in await disk.sync(sorted(touched)):
        if failure is not None:
            raise failure
    return problems


async def clear_journals(disk: Disk, damaged: Collection[str]) -> None:
    """Removes the journals that were redone; damaged ones are kept under another name."""
    names = [entry.name for entry in await disk.list(JOURNALS)]
    for path in damaged:
        await disk.rename(path, path + DAMAGE_SUFFIX)
    for path in [f"{JOURNALS}/{name}" for name in names if name.endswith(".journal")]:
        await disk.remove(path)
    if names:
        await disk.sync_directory(JOURNALS)


async def _apply(disk: Disk, entries: Sequence[JournalEntry], known: dict[str, int | None]) -> set[str]:
    """Writes the entries whose segment exists with that id; returns the paths written to."""
    touched: set[str] = set()
    writes: list[Write] = []
    size = 0
    for entry in entries:
        if entry.path not in known:
            header = await read_segment_header(disk, entry.path)
            known[entry.path] = header[0].segment_id if header else None
        if known[entry.path] != entry.segment_id:
            continue  # removed by retention, or with its topic
        writes.append(Write(entry.path, entry.position, entry.data))
        touched.add(entry.path)
        size += entry.length
        if size >= _REDO_BYTES:
            await _write_redo(disk, writes)
            writes, size = [], 0
    await _write_redo(disk, writes)
    return touched


async def _write_redo(disk: Disk, writes: Sequence[Write]) -> None:
    failures = [failure for failure in await disk.write(writes, sync=False) if failure is not None]
    if failures and all(isinstance(failure, DiskFull) for failure in failures):
        # The ballast is there for this: what is acknowledged must come back even when there is no room.
        await disk.remove(BALLAST)
        failures = [failure for failure in await disk.write(writes, sync=False) if failure is not None]
    if failures:
        raise failures[0]


# --- topics -----------------------------------------------------------------------------------------


async def recover_topic(
    disk: Disk, clock: Clock, work: Work, topic: str, *, journal_damaged: bool = False, last: int | None = None
) -> Recovered:
    """Every epoch of the topic on this disk, up to `last` if that is given, judged and finished."""
    root = topic_directory(topic)
    epochs = []
    for entry in await disk.list(root):
        if entry.is_directory and entry.name.isdigit() and (last is None or int(entry.name) <= last):
            recovery = _EpochRecovery(disk, clock, work, topic, int(entry.name), journal_damaged)
            epoch = await recovery.run()
            if epoch is not None:
                epochs.append(epoch)
    return Recovered(topic, epochs)


async def read_segment_header(disk: Disk, path: str) -> tuple[SegmentHeader, int] | None:
    """The header and its length, or None if the file is not there or its header does not check."""
    try:
        start = await disk.read(path, 0, SEGMENT_HEADER_SIZE)
        length = segment_header_length(start)
        if length is None:
            return None
        header = decode_segment_header(await disk.read(path, 0, length))
    except FileNotFoundError:
        return None
    return None if header is None else (header, length)


async def write_segment(disk: Disk, directory: str, header: SegmentHeader, *content: bytes) -> SegmentFile:
    """Makes a new segment that survives from the moment its name appears. For recovery, which begins anew."""
    segment = await place_segment(disk, directory, header, *content)
    await disk.sync_directory(directory)
    return segment


async def place_segment(disk: Disk, directory: str, header: SegmentHeader, *content: bytes) -> SegmentFile:
    """A new segment under its name, which the caller syncs.

    Before the rename nothing mentions the file: one that cannot be written or synced is given up for another, once.
    From the rename on nobody can say whether the name is there after a crash, so the caller must not go on in any
    other segment. Raises DiskFull if nothing was made, else DiskFailed.
    """
    path = f"{directory}/{file_name(header.first_offset, header.segment_id)}"
    encoded = encode_segment_header(header)
    temporary = path + TEMPORARY_SUFFIX
    try:
        await _write_temporary(disk, temporary, encoded, *content)
    except DiskFailed as failure:
        log.error("segment not written, trying another file", extra={"path": temporary, "why": failure.why})
        temporary = f"{path}.again{TEMPORARY_SUFFIX}"
        await _write_temporary(disk, temporary, encoded, *content)
    try:
        await disk.rename(temporary, path)
    except DiskFull:
        await disk.remove(temporary)
        raise
    start = len(encoded)
    return SegmentFile(path, header, start, start, header.first_offset, 0, start, start, start)


async def _write_temporary(disk: Disk, path: str, *content: bytes) -> None:
    await disk.create(path)
    try:
        await write_and_sync(disk, path, 0, *content)
    except (DiskFull, DiskFailed):
        with contextlib.suppress(DiskFailed):  # then the next recovery removes it
            await disk.remove(path)
        raise


class _EpochRecovery:
    """Judges one epoch directory."""

    def __init__(self, disk: Disk, clock: Clock, work: Work, topic: str, epoch: int, journal_damaged: bool) -> None:
        self._disk = disk
        self._clock = clock
        self._work = work
        self._topic = topic
        self._directory = epoch_directory(topic, epoch)
        self._journal_damaged = journal_damaged
        self._result = RecoveredEpoch(epoch, self._directory)
        self._damage_reported = False  # by a recovery that was cut short

    async def run(self) -> RecoveredEpoch | None:
        """None if nothing of the epoch is left."""
        result = self._result
        names = await self._tidy()
        self._damage_reported = any(name.endswith(DAMAGE_SUFFIX) for name in names)
        checkpoint = await self._read_checkpoint(CHECKPOINT in names)
        segments = await self._read_headers(names, checkpoint)
        over = checkpoint is not None and checkpoint.finished and checkpoint.proven and not result.damage
        if checkpoint and over and not segments and checkpoint.first_offset >= checkpoint.end_offset:
            await self._remove_directory()
            return None
        if not segments and not result.damage and not (checkpoint and checkpoint.finished):
            return None  # opened, and nothing was ever appended
        await self._chain(segments, checkpoint)
        if checkpoint and checkpoint.finished:
            await self._take_ending(checkpoint)
        else:
            await self._judge_ending()
            await self._finish(checkpoint)
        return result

    # --- reading what is there ----------------------------------------------------------------------

    async def _tidy(self) -> list[str]:
        names = [entry.name for entry in await self._disk.list(self._directory)]
        for name in names:
            if name.endswith(TEMPORARY_SUFFIX):
                await self._disk.remove(f"{self._directory}/{name}")
        return names

    async def _read_checkpoint(self, exists: bool) -> Checkpoint | None:
        if not exists:
            return None
        path = f"{self._directory}/{CHECKPOINT}"
        data = await read_file(self._disk, path)
        checkpoint = Checkpoint.from_bytes(data or b"")
        if checkpoint is None:
            # Replaced whole, so this is no torn write.
            self._result.damage.append(Damage(path, 0, 0, None, "its checksum does not hold"))
            self._result.unproven("wal.ckpt is damaged")
        return checkpoint

    async def _read_headers(self, names: list[str], checkpoint: Checkpoint | None) -> list[SegmentFile]:
        segments = []
        synced = False
        for name in sorted(names):
            if not name.endswith(SEGMENT_SUFFIX) or not name.partition("-")[0].isdecimal():
                continue
            path = f"{self._directory}/{name}"
            first_offset = int(name.partition("-")[0])
            if checkpoint and first_offset < checkpoint.first_offset:
                # Retention had decided so, and a crash brought it back. The decision is made safe, then acted on.
                if not synced:
                    await self._disk.sync_directory(self._directory)
                    synced = True
                await self._disk.remove(path)
                continue
            read = await read_segment_header(self._disk, path)
            if read is None or read[0].topic_hash != topic_hash(self._topic):
                why = "its header does not check" if read is None else "it belongs to another topic"
                self._result.damage.append(Damage(path, 0, first_offset, None, why))
                continue
            header, start = read
            size = await self._disk.size(path)
            segments.append(SegmentFile(path, header, start, start, header.first_offset, 0, start, size, size))
        return segments

    async def _chain(self, segments: list[SegmentFile], checkpoint: Checkpoint | None) -> None:
        """Puts the segments in the order of their links and bounds each by its successor."""
        by_id = {segment.segment_id: segment for segment in segments}
        after: dict[int, SegmentFile] = {}
        for segment in segments:
            previous = segment.header.previous_id
            if previous in by_id:
                if previous in after:
                    raise LogDamaged(
                        self._topic, segment.path, 0, segment.first_offset, None,
                        f"it and {after[previous].path} both follow {by_id[previous].path}",
                    )  # fmt: skip
                after[previous] = segment
        result = self._result
        kept = checkpoint.first_offset if checkpoint else 0
        starts = [segment for segment in segments if segment.header.previous_id not in by_id]
        for start in await self._order_starts(starts, after, checkpoint):
            await self._bound_last()
            ordered = _chain_of(start, after)
            for bounded, following in pairwise(ordered):
                bounded.end = bounded.synced = following.header.previous_end
                bounded.end_offset = following.first_offset
            if start.header.previous_id and start.first_offset != kept:
                first = result.segments[-1].end_offset if result.segments else kept
                result.damage.append(
                    Damage(start.path, 0, first, start.first_offset, "the segment before it is missing")
                )
            result.segments += ordered
        result.first_offset = result.segments[0].first_offset if result.segments else kept

    async def _order_starts(
        self, starts: list[SegmentFile], after: Mapping[int, SegmentFile], checkpoint: Checkpoint | None
    ) -> list[SegmentFile]:
        """The segments whose predecessor is not here, in order of offsets. Their names are random and decide nothing.

        An epoch begins once. A second segment without any predecessor is empty if a process could not sync its name
        and went on in another: then it goes. If both hold something, nobody can say which is the log.
        """
        firsts = [start for start in starts if start.header.previous_id == 0]
        if len(firsts) > 1:
            kept = await self._sole_first(firsts, after, checkpoint)
            starts = [start for start in starts if start in kept or start not in firsts]
        by_offset: dict[int, list[SegmentFile]] = {}
        for start in starts:
            by_offset.setdefault(start.first_offset, []).append(start)
        ordered: list[SegmentFile] = []
        for _, same in sorted(by_offset.items()):
            if len(same) > 1:
                empty = [start for start in same if not await self._holds(start, after)]
                holding = [start for start in same if start not in empty]
                if len(holding) > 1:
                    self._contradict(holding)
                    holding = []
                same = empty + holding  # an empty one stands before what begins at its offset
            ordered += same
        return ordered

    async def _sole_first(
        self, firsts: list[SegmentFile], after: Mapping[int, SegmentFile], checkpoint: Checkpoint | None
    ) -> list[SegmentFile]:
        """The one with which the epoch begins; none if that cannot be said."""
        named = checkpoint.segment_id if checkpoint and checkpoint.finished else None
        chosen = [first for first in firsts if named in [each.segment_id for each in _chain_of(first, after)]]
        holding = chosen + [first for first in firsts if first not in chosen and await self._holds(first, after)]
        # If none holds anything it does not matter which one stays.
        staying = holding or [max(firsts, key=lambda first: first.header.created_us)]
        for first in firsts:
            if first not in staying:
                log.warning("empty second start of an epoch removed", extra={"topic": self._topic, "path": first.path})
                await self._disk.remove(first.path)
        if len(staying) == 1:
            return staying
        if not chosen:
            self._contradict(staying)
        for first in staying:
            if chosen and first not in chosen:  # how the epoch ended is known, and this has no part in it
                last = await self._looked_through(_chain_of(first, after)[-1])
                why = f"it and {chosen[0].path} both begin the epoch, which ends without it"
                self._result.damage.append(Damage(first.path, 0, first.first_offset, last.end_offset, why))
        return chosen

    def _contradict(self, starts: Sequence[SegmentFile]) -> None:
        """Two or more that hold something and cannot both be the log: none of them is read, and each is named."""
        for start, other in zip(starts, [*starts[1:], starts[0]], strict=True):
            why = f"it and {other.path} both begin here, and nobody can say which of them is the log"
            self._result.damage.append(Damage(start.path, 0, start.first_offset, None, why))

    async def _holds(self, start: SegmentFile, after: Mapping[int, SegmentFile]) -> bool:
        """Whether anything was ever written to the segment, as far as one can see: also what is torn or damaged."""
        if start.segment_id in after:
            return True
        seen = await self._looked_through(start)
        return seen.end > seen.start or seen.damaged

    async def _looked_through(self, segment: SegmentFile) -> SegmentFile:
        """A copy of what is known of it, with its end; `damaged` also if only its last bytes are no group."""
        seen = replace(segment, index=PositionIndex())
        scan = _Scan(self._disk, seen, RecoveredEpoch(self._result.epoch, self._directory))
        await scan.run()
        seen.damaged |= bool(scan.rest_length)
        return seen

    async def _bound_last(self) -> None:
        """The successor of the last segment so far is missing: only its groups say how far it goes."""
        if self._result.segments:
            aside = RecoveredEpoch(self._result.epoch, self._directory)
            await _Scan(self._disk, self._result.segments[-1], aside).run()

    # --- how it ended -------------------------------------------------------------------------------

    async def _take_ending(self, checkpoint: Checkpoint) -> None:
        result = self._result
        result.end_offset = checkpoint.end_offset
        result.append_time = checkpoint.append_time
        result.max_publish_time = checkpoint.max_publish_time
        result.sessions = Sessions.from_bytes(checkpoint.sessions)
        if not checkpoint.proven:
            result.unproven(checkpoint.why)
        last = result.segments[-1] if result.segments else None
        if last is not None and last.segment_id == checkpoint.segment_id:
            last.end = last.synced = checkpoint.end_position
            last.end_offset = checkpoint.end_offset
        elif checkpoint.end_offset > checkpoint.first_offset:
            await self._bound_last()
            first = last.end_offset if last else checkpoint.first_offset
            if first < checkpoint.end_offset:  # else it was empty: nothing is missed
                result.damage.append(
                    Damage(self._directory, 0, first, checkpoint.end_offset, "its newest segment is missing")
                )

    async def _judge_ending(self) -> None:
        result = self._result
        broken = [damage for damage in result.damage if damage.end is None and damage.position == 0]
        if not result.segments:
            result.end_offset = min((damage.first for damage in broken), default=0)
            result.unproven("no segment of it can be read")
            return
        last = result.segments[-1]
        header = last.header
        result.sessions = Sessions.from_bytes(header.snapshot)
        result.append_time = header.append_time
        result.max_publish_time = header.max_publish_time
        scan = _Scan(self._disk, last, result)
        await scan.run()
        if result.damage:
            # Before the copy: with that in place, a restart does not look for damage in this segment any more.
            await self._report_damage()
        if result.damage or self._damage_reported:
            result.sessions.loosen()
        if scan.rest_length:
            kept_as = last.path + TORN_SUFFIX
            await copy_part(self._disk, last.path, last.end, scan.rest_end, kept_as)
            result.torn.append(Torn(last.path, last.end, scan.rest_length, kept_as))
            result.tail = Tail.TORN if result.tail is Tail.CLEAN else result.tail
        result.end_offset = last.end_offset
        if header.flags & UNSYNCED:
            # What is finished must not change any more, so it is made safe now, if it still can be.
            await self._disk.sync([last.path])
            result.unproven("its durability is os and it was not closed")
        elif scan.last_group is not None:
            await self._copy_last_group(last, scan)
        if self._journal_damaged:
            result.unproven("a commit journal is damaged")
        behind = [damage for damage in broken if damage.first >= last.first_offset]
        if behind:
            result.unproven(f"{behind[-1].path} cannot be read")

    async def _copy_last_group(self, last: SegmentFile, scan: _Scan) -> None:
        group = scan.last_group
        assert group is not None and scan.sessions_before is not None
        body = await self._disk.read(last.path, group.position + GROUP_HEADER_SIZE, group.length)
        if not body_is_whole(group, body):
            raise LogDamaged(
                self._topic, last.path, group.position, group.first_offset, group.end_offset,
                "it changed while it was read",
            )  # fmt: skip
        header = last.header._replace(
            segment_id=self._work.random_u64(),
            first_offset=group.first_offset,
            created_us=self._clock.time_us(),
            previous_id=last.segment_id,
            previous_end=group.position,
            append_time=scan.append_time_before,
            max_publish_time=scan.max_publish_time_before,
            snapshot=scan.sessions_before,
        )
        start = len(encode_segment_header(header))
        copy = encode_group(
            list(batches_of(body)),
            segment_id=header.segment_id,
            number=0,
            position=start,
            durable_before=start,
            first_offset=group.first_offset,
        )
        # A recovery whose sync of the names failed may have made `last`. Its name must not vanish behind a link.
        await self._disk.sync_directory(self._directory)
        kept = await write_segment(self._disk, self._directory, header, *map(bytes, copy.buffers))
        kept.grow(copy.header, copy.length)
        kept.synced = kept.copied = kept.filled = kept.end
        last.end = last.synced = group.position
        last.end_offset = group.first_offset
        self._result.segments.append(kept)

    async def _finish(self, checkpoint: Checkpoint | None) -> None:
        """From now on the epoch ends where this recovery says, whatever a later one might think."""
        result = self._result
        last = result.segments[-1] if result.segments else None
        await self._report_damage()
        # Not above what is damaged: that would be taken for removed by retention, and forgotten, before it is recorded.
        first_kept = min([result.first_offset, *(damage.first for damage in result.damage)])
        finished = Checkpoint(
            first_offset=checkpoint.first_offset if checkpoint else first_kept,
            finished=True,
            end_offset=result.end_offset,
            segment_id=last.segment_id if last else 0,
            end_position=last.end if last else 0,
            append_time=result.append_time,
            max_publish_time=result.max_publish_time,
            proven=result.tail is not Tail.UNPROVEN,
            why=result.why,
            sessions=result.sessions.to_bytes(),
        )
        await replace_file(self._disk, f"{self._directory}/{CHECKPOINT}", finished.to_bytes())

    async def _report_damage(self) -> None:
        texts: dict[str, str] = {}
        for damage in self._result.damage:
            texts[damage.path] = texts.get(damage.path, "") + f"{self._topic}: {damage}\n"
        for path, text in texts.items():
            await replace_file(self._disk, path + DAMAGE_SUFFIX, text.encode())

    async def _remove_directory(self) -> None:
        """Retention had removed every segment; the rest goes too, unless something is kept for a person."""
        await self._disk.sync_directory(self._directory)
        if [entry.name for entry in await self._disk.list(self._directory)] == [CHECKPOINT]:
            await self._disk.remove(f"{self._directory}/{CHECKPOINT}")
            await self._disk.remove(self._directory)
            await self._disk.sync_directory(topic_directory(self._topic))


def _chain_of(start: SegmentFile, after: Mapping[int, SegmentFile]) -> list[SegmentFile]:
    """The segment and those that follow it."""
    chain = [start]
    while (following := after.get(chain[-1].segment_id)) is not None:
        chain.append(following)
    return chain


class _Scan:
    """Walks the groups of an unfinished epoch's last segment; fills in what they say."""

    def __init__(self, disk: Disk, segment: SegmentFile, result: RecoveredEpoch) -> None:
        self._disk = disk
        self._segment = segment
        self._result = result
        self._buffer = b""
        self._buffer_start = 0
        self._size = segment.filled
        self._undo: dict[int, Producer | None] = {}
        self.last_group: GroupHeader | None = None
        self.sessions_before: bytes | None = None
        self.append_time_before = 0
        self.max_publish_time_before = 0
        self.rest_end = 0  # of what stands behind the last group, without the zeros at its end

    @property
    def rest_length(self) -> int:
        return self.rest_end - self._segment.end

    async def run(self) -> None:
        segment = self._segment
        while True:
            group = await self._whole_group(segment.end)
            if group is None:
                group = await self._behind_damage()
                if group is None:
                    break
            await self._take(group)
        segment.synced = segment.copied = segment.end

    async def _bytes(self, position: int, length: int) -> memoryview:
        """`length` bytes at `position`, fewer only at the end of the file; read ahead in large pieces."""
        start = position - self._buffer_start
        if start < 0 or start + length > len(self._buffer):
            self._buffer = await self._disk.read(self._segment.path, position, max(length, READ_BYTES))
            self._buffer_start = position
            start = 0
        return memoryview(self._buffer)[start : start + length]

    async def _whole_group(self, position: int) -> GroupHeader | None:
        """The group that must stand here, if it does, with every byte right."""
        segment = self._segment
        group = decode_group_header(await self._bytes(position, GROUP_HEADER_SIZE), 0, position, segment.segment_id)
        if group is None or group.number != segment.next_number or group.first_offset != segment.end_offset:
            return None
        return group if await self._is_whole(group) else None

    async def _is_whole(self, group: GroupHeader) -> bool:
        if group.position + GROUP_HEADER_SIZE + group.length > self._size:
            return False
        return body_is_whole(group, await self._bytes(group.position + GROUP_HEADER_SIZE, group.length))

    async def _take(self, group: GroupHeader) -> None:
        result = self._result
        sessions = result.sessions
        self.last_group = group
        self.append_time_before = result.append_time
        self.max_publish_time_before = result.max_publish_time
        body = await self._bytes(group.position + GROUP_HEADER_SIZE, group.length)
        undo: dict[int, Producer | None] = {}
        try:
            for header in batch_headers_of(body):
                if header.producer_id:
                    undo.setdefault(header.producer_id, sessions.get(header.producer_id))
                    if header.ends_session:
                        sessions.ended(header.producer_id, header.session)
                    elif header.flags & SESSION_RECORD:
                        sessions.opened(header.producer_id, header.session, header.append_time)
                    else:
                        sessions.accepted(
                            header.producer_id, header.session, header.first_sequence, header.rows,
                            header.body_crc, header.base_offset, header.epoch, header.append_time,
                        )  # fmt: skip
                result.append_time = max(result.append_time, header.append_time)
                if header.rows:
                    result.max_publish_time = max(result.max_publish_time, header.max_publish_time)
        except InvalidBatch as error:  # the group's checksum holds, so it was written like this
            raise AssertionError(f"{self._segment.path} at {group.position}: {error}") from error
        self._segment.grow(group, GROUP_HEADER_SIZE + group.length)
        self._undo = undo

    async def _behind_damage(self) -> GroupHeader | None:
        """Decides what the bad bytes at the segment's end are; the group to go on with if they are damage."""
        segment = self._segment
        position = segment.end
        self._close_last()
        going_on: GroupHeader | None = None
        search = GroupSearch(self._disk, segment.path, position + 1, self._size, segment.segment_id)
        while (group := await search.next()) is not None:
            if group.number <= segment.next_number or group.first_offset < segment.end_offset:
                continue
            if not await self._is_whole(group):
                continue
            going_on = going_on or group
            if group.durable_before > position:
                # Written when these bytes were already safe: they were good once.
                why = "its checksum does not hold"
                self._result.damage.append(
                    Damage(segment.path, position, segment.end_offset, going_on.first_offset, why)
                )
                segment.damaged = True
                segment.end = going_on.position
                segment.end_offset = going_on.first_offset
                segment.next_number = going_on.number
                return going_on
        self.rest_end = await content_end(self._disk, segment.path, position, self._size)
        return None

    def _close_last(self) -> None:
        """The state before the last group, for a copy of it."""
        if self.last_group is None:
            return
        sessions = Sessions(dict(self._result.sessions))
        for producer_id, producer in self._undo.items():
            sessions.put(producer_id, producer)
        self.sessions_before = sessions.to_bytes()
