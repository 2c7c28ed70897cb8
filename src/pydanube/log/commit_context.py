"""What the parts of the committer share: the decision, the ports, the lock, and how answers reach producers.

committer.py ─┬─ segment_maker.py    the next segments of logs, concurrently with groups
              ├─ writer.py           groups to the segments themselves
              ├─ journal_writer.py   groups to the commit journal, and from there to the segments
              ├─ zero_fill.py        zeros ahead of small groups
              └─ space.py            full disk, ballast, bound of bytes, lack of descriptors
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pydanube.core.commit.machine import CommitMachine
from pydanube.core.commit.values import Answers, CommitLimits, CommitReceipt, CommitTarget, GroupPart
from pydanube.errors import DanubeError, LogStopped
from pydanube.formats.batch import Batch, stamp
from pydanube.formats.segment import SegmentGroup, encode_group
from pydanube.log.catalog import SegmentFile
from pydanube.log.pressure import Pressure
from pydanube.ports import Clock, Disk, Work
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)

Answer: TypeAlias = "asyncio.Future[CommitReceipt]"


class CommitConfig(CommitLimits, Protocol):
    """The settings of the committer and its parts; see WalConfig."""

    @property
    def ballast_bytes(self) -> int: ...
    @property
    def bytes_max(self) -> int: ...
    @property
    def pending_bytes(self) -> int: ...


class Broadcast:
    """Wakes every task that waits at this moment."""

    __slots__ = ("_also", "_waiters")

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._also = also  # called, too

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:  # a caller that gives up leaves nothing behind, also if it never fires
            self._waiters.pop(waiter, None)

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._also()


class SegmentedLog(CommitTarget[Batch, Answer]):
    """One topic's log as the committer writes it: the decision's state, and the file that the next group goes to."""

    directory: str
    active: SegmentFile | None

    def adopt(self, segment: SegmentFile) -> None:
        """The next group goes here."""
        raise NotImplementedError

    def committed(self, batches: Sequence[Batch], segment: SegmentFile) -> None:
        """These are safe, so they may be seen; `head` is behind them already."""
        raise NotImplementedError


Part: TypeAlias = GroupPart[SegmentedLog, Batch, Answer]


@dataclass(slots=True, eq=False)
class EncodedPart:
    """A part of a group as bytes, for the segment that its log has now."""

    part: Part
    log: SegmentedLog
    batches: list[Batch]
    segment: SegmentFile
    group: SegmentGroup

    @classmethod
    def of(cls, part: Part) -> EncodedPart:
        target, append_time = part.target, part.append_time
        epoch, segment = target.epoch, target.active
        assert segment is not None
        batches = [
            stamp(batch, base_offset=offset, epoch=epoch, append_time=append_time) for batch, offset in part.batches
        ]
        return cls(part, target, batches, segment, _group_of(target, batches, segment))

    def move_to(self, segment: SegmentFile) -> None:
        """The same batches for another segment."""
        self.segment = segment
        self.group = _group_of(self.log, self.batches, segment)


def _group_of(target: SegmentedLog, batches: Sequence[Batch], segment: SegmentFile) -> SegmentGroup:
    return encode_group(
        batches,
        segment_id=segment.segment_id,
        number=segment.next_number,
        position=segment.end,
        durable_before=segment.end if target.is_synced else segment.synced,
        first_offset=target.head,
    )


class CommitContext:
    """One per data directory."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        work: Work,
        config: CommitConfig,
        *,
        metrics: WalMetrics,
        may_answer: Callable[[], bool],
        on_stopped: Callable[[LogStopped], None],
    ) -> None:
        self.disk = disk
        self.clock = clock
        self.work = work
        self.config = config
        self.metrics = metrics
        self.may_answer = may_answer
        self._on_stopped = on_stopped
        self.machine: CommitMachine[SegmentedLog, Batch, Answer] = CommitMachine(config)
        self.exclusive = asyncio.Lock()  # held while files are touched
        self.wake = asyncio.Event()  # there is something to do for the committer's task
        self.pressure = Pressure(config.pending_bytes, lambda: self.machine.pending_bytes)
        self.decided = Broadcast(self.pressure.relieve)

    @staticmethod
    def answer(answers: Answers[Answer]) -> None:
        for waiter, outcome in answers:
            if waiter.done():
                continue  # the caller left; its batch stays
            if isinstance(outcome, CommitReceipt):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)

    def refuse_pending(self, of: SegmentedLog, error: DanubeError) -> None:
        self.answer(self.machine.withdraw(of, error))

    def stop(self, error: Exception) -> None:
        """The disk has failed for good: nothing is acknowledged any more, reads of what is committed go on."""
        if self.machine.stopped is None:
            stopped = self.machine.stop(str(error) or repr(error))
            log.critical("log stopped", extra={"why": str(error)}, exc_info=not isinstance(error, DanubeError))
            self._on_stopped(stopped)
        self.answer(self.machine.withdraw_all())
        self.wake.set()
        self.decided.fire()
