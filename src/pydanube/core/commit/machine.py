"""The commit decision: which batches become the next group, and what follows from how its write went.

    submit ─► pending ─► form ─► (the shell writes and syncs) ─┬─► committed ──► Commit: head, receipts
                  ▲       ▲                                    └─► not_written, not_recorded
                  │       │                                         │
                  │       └── RefusePart: undo, DiskFull ◄──────────┤
                  │                                                 ├─► WriteAgain: to a new file, once
                  └─ making a segment: in no line until then        └─► Stop: nothing is acknowledged any more

`CommitMachine` is values in, values out: it knows no file, clock or event loop. The shell (log/committer.py) asks for
a group, writes that, reports the result of every write and carries out the effect that comes back.

Invariants:

- A group is formed only when the one before is decided. Tentative offsets and sessions never outlive one group, and a
  batch that was queued behind a refused one is judged against the state without that one.
- `head`, `append_time` and `max_publish_time` of a target are those of decided parts. `sessions` includes the parts
  that are being written; `GroupPart.undo` has what they replaced.
- A part is refused only if nothing of it can reappear after a restart. If it may, the log stops: its batches are
  neither acknowledged nor refused for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic

from pydanube.core.commit.sessions import ProducerState, Stored
from pydanube.core.commit.values import (
    FAILURE,
    FIRST,
    PREPARED,
    SIZE,
    SPACE,
    TIME,
    Answers,
    B,
    BatchHeader,
    Commit,
    CommitLimits,
    CommitReceipt,
    CommitTarget,
    GroupPart,
    JournalState,
    Pending,
    RefusePart,
    Route,
    SegmentState,
    Stop,
    T,
    W,
    WriteAgain,
)
from pydanube.errors import (
    DanubeError,
    DiskFailed,
    DiskFull,
    LimitReached,
    LogClosed,
    LogStopped,
    NotServed,
    Refused,
    ResourcesShort,
    SessionUnknown,
)

# What one sync costs, in bytes written: about 0.2 ms. Decides between many syncs and writing twice.
SYNC_COST_BYTES: Final = 192 * 1024
# Topics that were opened together do not all roll together: each does so a little earlier than it must.
ROLL_EARLY: Final = 0.2
SESSIONS: Final = "sessions of producers in the topic (storage.wal.sessions_max)"


class CommitMachine(Generic[T, B, W]):
    """Decides for every target of one data directory. No call waits; the order of calls is the shell's."""

    def __init__(self, limits: CommitLimits) -> None:
        self._limits = limits
        self.ready: dict[T, None] = {}  # targets with pending batches, in order of arrival
        self.waiting: dict[T, None] = {}  # targets whose next batch waits for a larger reservation
        self.making: dict[T, None] = {}  # targets whose next segment is being made: nothing of them is formed
        self.pending_bytes = 0
        self.stopped: LogStopped | None = None

    # --- the queue ---

    def submit(self, to: T, batch: B, waiter: W, on_decided: Callable[[], None] | None = None) -> DanubeError | None:
        """Queues the batch, or returns why not."""
        if self.stopped is not None:
            return self.stopped
        if to.closed:
            return LogClosed(to.topic)
        to.pending.append(Pending(batch, waiter, on_decided))
        self.pending_bytes += batch.header.size_bytes
        if to not in self.making:
            self.ready[to] = None
        return None

    def reservation_grew(self, to: T) -> bool:
        """Whether batches that waited for it can be formed now."""
        if to not in self.waiting:
            return False
        del self.waiting[to]
        self.ready[to] = None
        return True

    def awaits_turn(self, of: T) -> bool:
        """Whether its batches wait for nothing but their turn, or a segment that is being made."""
        return of in self.ready or of in self.making

    def withdraw(self, of: T, error: DanubeError) -> Answers[W]:
        """Nothing that is queued will be formed."""
        self.ready.pop(of, None)
        self.waiting.pop(of, None)
        answers: Answers[W] = []
        while of.pending:
            batch, waiter, _ = of.pending.popleft()
            self.pending_bytes -= batch.header.size_bytes
            answers.append((waiter, error))
        return answers

    def stop(self, why: str) -> LogStopped:
        """From now on nothing is queued; `withdraw_all` has the answers for what was."""
        assert self.stopped is None
        self.stopped = LogStopped(why)
        return self.stopped

    def withdraw_all(self) -> Answers[W]:
        assert self.stopped is not None
        answers: Answers[W] = []
        for each in [*self.ready, *self.waiting, *self.making]:
            answers += self.withdraw(each, self.stopped)
        return answers

    # --- segments ---

    def why_new_segment(self, of: T, segment: SegmentState | None, now_us: int) -> str | None:
        """Why the target's next group needs another segment; None: this one has room, and is young."""
        if segment is None:
            return FIRST
        if segment.failed:
            return FAILURE
        if segment.end == segment.start:
            return None
        if segment.end >= self._limits.segment_bytes:
            return SIZE
        early = ROLL_EARLY * (of.topic_hash % 1024) / 1024
        age_us = now_us - segment.created_us
        return TIME if age_us >= self._limits.segment_seconds * (1 - early) * 1_000_000 else None

    def segment_begun(self, of: T) -> None:
        """A segment is being made. What its header says of the target must hold until it is adopted, so nothing is
        formed until then.
        """
        assert of not in self.making
        self.ready.pop(of, None)
        self.waiting.pop(of, None)
        self.making[of] = None

    def segment_not_made(self, of: T, why: str, error: DiskFull) -> Answers[W]:
        """The disk is full, and nothing was made. The target goes on in the one it has, if that is not full."""
        return [] if why in (SPACE, PREPARED) else self.withdraw(of, error)

    def segment_ended(self, of: T) -> None:
        """No segment is being made any more."""
        del self.making[of]
        if of.pending:
            self.ready[of] = None

    # --- forming ---

    def form(self, line: Sequence[T], now_us: int, *, may_answer: bool) -> tuple[list[GroupPart[T, B, W]], Answers[W]]:
        """Takes batches from these targets in turn, up to the group's size: checks them against their sessions, gives
        them offsets and an append time. Also returns what is answered without a write: repetitions and refusals.
        """
        share = max(1, self._limits.group_bytes // max(1, len(line)))
        left = self._limits.group_bytes
        parts: list[GroupPart[T, B, W]] = []
        answers: Answers[W] = []
        for each in line:
            if left <= 0:
                break
            del self.ready[each]
            part = self._form_part(each, min(share, left), now_us, may_answer, answers)
            assert part.batches or not part.waiters, "a repetition of what is in this group needs the original in it"
            if part.batches:
                left -= part.size_bytes
                parts.append(part)
            if each.pending:  # to the end of the line
                (self.waiting if _awaits_reservation(each) else self.ready)[each] = None
        return parts, answers

    def _form_part(
        self, of: T, size_max_bytes: int, now_us: int, may_answer: bool, answers: Answers[W]
    ) -> GroupPart[T, B, W]:
        part: GroupPart[T, B, W] = GroupPart(
            of,
            end_offset=of.head,
            append_time=max(now_us, of.append_time),  # a clock that went back does not order batches
            max_publish_time=of.max_publish_time,
        )
        sessions = of.sessions
        pending = of.pending
        while pending:
            batch, waiter, on_decided = pending[0]
            header = batch.header
            size = header.size_bytes
            if part.batches and part.size_bytes + size > size_max_bytes:
                break  # the first always fits, however large
            if of.reserved_end is not None and part.end_offset + header.rows > of.reserved_end:
                break
            pending.popleft()
            self.pending_bytes -= size
            if waiter.done():
                continue  # the caller left before anything was decided
            producer_id = header.producer_id
            if header.flags:
                if header.ends_session and not sessions.ends(producer_id, header.session, header.first_sequence):
                    # It was used since, or replaced.
                    answers.append((waiter, SessionUnknown(producer_id, header.session)))
                    continue
                part.undo.setdefault(producer_id, sessions.get(producer_id))
                if header.ends_session:
                    sessions.ended(producer_id, header.session)
                else:
                    sessions.opened(producer_id, header.session, part.append_time)
            elif producer_id:
                try:
                    stored = self._check_sequence(of, header)
                except Refused as refusal:
                    answers.append((waiter, refusal))
                    continue
                if stored is not None:
                    if stored.base_offset >= of.head:  # still in this group: its fate is shared
                        part.waiters.append((waiter, stored.base_offset, True))
                    elif may_answer:
                        receipt = CommitReceipt(stored.base_offset, stored.epoch, of.durability, True)
                        answers.append((waiter, receipt))
                    else:
                        answers.append((waiter, _fenced(of)))
                    continue
                part.undo.setdefault(producer_id, sessions.get(producer_id))
                sessions.accepted(
                    producer_id, header.session, header.first_sequence, header.rows,
                    header.body_crc, part.end_offset, of.epoch, part.append_time,
                )  # fmt: skip
            part.batches.append((batch, part.end_offset))
            part.waiters.append((waiter, part.end_offset, False))
            if on_decided is not None:
                part.on_decided[on_decided] = None
            if header.rows:
                part.end_offset += header.rows
                if header.max_publish_time > part.max_publish_time:
                    part.max_publish_time = header.max_publish_time
            part.size_bytes += size
        return part

    def _check_sequence(self, of: T, header: BatchHeader) -> Stored | None:
        """What is stored if the batch is a repetition, None if it is new and next; raises Refused if neither."""
        producer_id, sessions = header.producer_id, of.sessions
        if header.session >> 32 > of.epoch:  # no owner up to now can have issued it
            raise SessionUnknown(producer_id, header.session)
        stored = sessions.check(producer_id, header.session, header.first_sequence, header.rows, header.body_crc)
        limit = self._limits.sessions_max
        if len(sessions) >= limit and stored is None and sessions.get(producer_id) is None:
            raise LimitReached(SESSIONS, limit)  # else it would be adopted
        return stored

    # --- where a group is written ---

    def may_use_journal(self, parts: int, journal: JournalState) -> bool:
        """Whether the journal is a choice at all, before the record is measured."""
        if parts == 1:
            return False  # one sync either way
        return journal.end is not None or not journal.is_being_made  # no group waits for one that is made ahead

    def route(self, parts: int, record_bytes: int, journal: JournalState) -> Route:
        """Where a group of synced parts goes: one record that is written twice, or a sync for each part."""
        if not self.may_use_journal(parts, journal):
            return Route.DIRECT
        if (parts - 1) * SYNC_COST_BYTES <= record_bytes or journal.start + record_bytes > self._limits.journal_bytes:
            return Route.DIRECT
        if journal.end is None:
            return Route.NEW_JOURNAL
        if journal.end + record_bytes <= self._limits.journal_bytes:
            return Route.JOURNAL
        # The journal before waits for the syncs of all its files; these few parts do not wait for that.
        return Route.DIRECT if journal.is_retiring else Route.NEW_JOURNAL

    def copies_are_due(self, uncopied_bytes: int) -> bool:
        """Whether what only the journal and memory have is written to the segments now, not in the next pause."""
        return uncopied_bytes >= self._limits.copy_bytes

    # --- how the write went ---

    def committed(self, part: GroupPart[T, B, W], *, may_answer: bool) -> Commit[W]:
        """The part is safe, in its segment or in the journal."""
        part.decided = True
        target = part.target
        target.head = part.end_offset
        target.append_time = part.append_time
        target.max_publish_time = part.max_publish_time
        if not may_answer:
            # It is stored, and may turn up later as rescued. No producer may rely on it, so none gets a receipt.
            return Commit(_refusals(part, _fenced(target)), ())
        epoch, durability = target.epoch, target.durability
        answers: Answers[W] = [
            (waiter, CommitReceipt(offset, epoch, durability, duplicate)) for waiter, offset, duplicate in part.waiters
        ]
        # While others wait for the disk, it is given work first.
        return Commit(answers, () if self.ready else tuple(part.on_decided))

    def not_written(
        self, part: GroupPart[T, B, W], failure: DiskFull | DiskFailed, *, was_synced: bool = True
    ) -> RefusePart[W] | WriteAgain | Stop:
        """The part's write to its segment failed, or the sync behind it. `was_synced`: everything before it in that
        file was.
        """
        if part.again:
            # Whether the group will be there after a restart is unknown, so it cannot be refused.
            return Stop(failure)
        if isinstance(failure, DiskFull):
            return self._refuse([part], failure)
        if not part.target.is_synced or not was_synced:
            # Groups that only the journal has: a new file would have to hold them too. A restart redoes them.
            return Stop(failure)
        part.again = True
        return WriteAgain(failure)

    def not_recorded(
        self, parts: Sequence[GroupPart[T, B, W]], failure: DiskFull | DiskFailed
    ) -> RefusePart[W] | WriteAgain | Stop:
        """The parts' record could not be written to the journal, or not be synced."""
        if parts[0].again:
            return Stop(failure)
        if isinstance(failure, ResourcesShort):
            return self._refuse(parts, failure)  # nothing was written that the next record does not overwrite
        for part in parts:
            part.again = True
        return WriteAgain(failure)

    def journal_not_made(self, parts: Sequence[GroupPart[T, B, W]], failure: DiskFull) -> RefusePart[W]:
        """The disk is too full for the journal that the parts' record needs: nothing of it was written."""
        return self._refuse(parts, failure)

    def given_up(self, parts: Iterable[GroupPart[T, B, W]], why: str) -> Answers[W]:
        """The log stops in the middle of this group. Some parts may be on disk, so none is refused for good."""
        answers: Answers[W] = []
        for part in parts:
            if not part.decided:
                part.take_back()
                answers += _refusals(part, LogStopped(why))
        return answers

    def set_aside(self, part: GroupPart[T, B, W]) -> dict[int, ProducerState | None]:
        """Takes the part back while a new file is made, whose header must not know what is not stored.

        Returns what `put_back` needs.
        """
        sessions = part.target.sessions
        tentative = {producer_id: sessions.get(producer_id) for producer_id in part.undo}
        part.take_back()
        return tentative

    def put_back(self, part: GroupPart[T, B, W], tentative: dict[int, ProducerState | None]) -> None:
        for producer_id, producer in tentative.items():
            part.target.sessions.put(producer_id, producer)

    @staticmethod
    def _refuse(parts: Sequence[GroupPart[T, B, W]], error: DiskFull) -> RefusePart[W]:
        answers: Answers[W] = []
        for part in parts:
            part.decided = True
            part.take_back()
            answers += _refusals(part, error)
        return RefusePart(answers, error)


def by_severity(results: Sequence[DanubeError | None]) -> Sequence[int]:
    """Places of results in the order in which they are dealt with: what is safe first, so that it is answered; then
    what found the disk full; failures last, because they may stop the log.
    """
    places = range(len(results))
    return sorted(places, key=lambda place: _severity(results[place])) if any(results) else places


def _severity(result: DanubeError | None) -> int:
    return 0 if result is None else 1 if isinstance(result, DiskFull) else 2


def _refusals(part: GroupPart[T, B, W], error: DanubeError) -> Answers[W]:
    return [(waiter, error) for waiter, _, _ in part.waiters]


def _awaits_reservation(of: CommitTarget[Any, Any]) -> bool:
    return of.reserved_end is not None and of.head + of.pending[0].batch.header.rows > of.reserved_end


def _fenced(of: CommitTarget[Any, Any]) -> NotServed:
    return NotServed(of.topic, "this broker's lease was not renewed in time, so another may have it")
