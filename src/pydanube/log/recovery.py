"""What a log says after a restart: which bytes are the log, which were never finished, which are damaged.

Two steps. `redo_journals`, once per data directory, copies what the commit journals hold into the segments.
`recover_topic` then reads one topic's epochs, oldest first. An epoch that was closed or recovered before is
*finished*: its checkpoint says how it ended and nothing is scanned again. The others are judged as
docs/adr/0001-the-log.md says, and are finished here, so that no later recovery can judge differently.

    bad bytes with a later group that was written when they were already safe    → damage: quarantined, reported
    bad bytes at the end                                                         → torn: kept aside, not part of the log
    an end that nothing proves                                                   → unproven: reported as such

The last group of an unfinished epoch may be whole without ever having been synced. It is copied into a new file and
synced before it is read: syncing the old file again would trust pages that a failed sync has already dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from pydanube.core.commit.sessions import Sessions
from pydanube.errors import LogDamaged
from pydanube.formats.batch import topic_hash
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    UNSYNCED,
    batches_of,
    body_is_whole,
    encode_group,
    encode_segment_header,
)
from pydanube.log.catalog import PositionIndex, SegmentFile
from pydanube.log.group_scan import GroupScan
from pydanube.log.layout import (
    CHECKPOINT,
    DAMAGE_SUFFIX,
    SEGMENT_SUFFIX,
    TEMPORARY_SUFFIX,
    TORN_SUFFIX,
    Checkpoint,
    copy_part,
    epoch_directory,
    read_file,
    replace_file,
    topic_directory,
)
from pydanube.log.recovered import Damage, Recovered, RecoveredEpoch, TailState, Torn
from pydanube.log.segment_files import read_segment_header, write_segment
from pydanube.ports import Clock, Disk, Work

log = logging.getLogger(__name__)


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
        and went on in another: then it goes. If both hold something, it cannot be decided which is the log.
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
            why = f"it and {other.path} both begin here, and nothing says which of them is the log"
            self._result.damage.append(Damage(start.path, 0, start.first_offset, None, why))

    async def _holds(self, start: SegmentFile, after: Mapping[int, SegmentFile]) -> bool:
        """Whether anything was ever written to the segment, as far as its bytes show: also what is torn or damaged."""
        if start.segment_id in after:
            return True
        seen = await self._looked_through(start)
        return seen.end > seen.start or seen.damaged

    async def _looked_through(self, segment: SegmentFile) -> SegmentFile:
        """A copy of what is known of it, with its end; `damaged` also if only its last bytes are no group."""
        seen = replace(segment, index=PositionIndex())
        scan = GroupScan(self._disk, seen, RecoveredEpoch(self._result.epoch, self._directory))
        await scan.run()
        seen.damaged |= bool(scan.rest_length)
        return seen

    async def _bound_last(self) -> None:
        """The successor of the last segment so far is missing: only its groups say how far it goes."""
        if self._result.segments:
            aside = RecoveredEpoch(self._result.epoch, self._directory)
            await GroupScan(self._disk, self._result.segments[-1], aside).run()

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
        scan = GroupScan(self._disk, last, result)
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
            result.tail = TailState.TORN if result.tail is TailState.CLEAN else result.tail
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

    async def _copy_last_group(self, last: SegmentFile, scan: GroupScan) -> None:
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
        """Records where the epoch ends, so that no later recovery judges differently."""
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
            proven=result.tail is not TailState.UNPROVEN,
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
