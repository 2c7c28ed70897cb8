"""Key-Shared: one consumer per key, one message in flight per key, order per key kept whatever happens.

Each key has a queue of its own, lowest offset first. While one of its messages is in flight, waits for a
retry, blocks or is being dead-lettered, the rest of *that key* waits behind it and every other key goes on. A
consumer that joins gets a key only after the message in flight at the old one is answered; one that leaves
gives its messages back to the front of their queues. So no churn reorders a key, and nothing queued is ever
thrown away. A message that retention takes while a consumer has it stays in flight, although it is settled: its
key waits until the consumer answers, leaves or times out, as the application may look at it yet.

The machine does not know keys: it asks for them (`ReadKeys`) while somebody has room and nothing to do, and
is told (`Keyed`). Offsets below `progress.next_fresh` have known keys, except those in `_unread`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from pydanube.core.dispatch.consumer_windows import DispatchLimits, Member
from pydanube.core.dispatch.delivery import UNTRIED, FailurePolicy, Poison, RetryAt, Tries, copy_delay_seconds, judge
from pydanube.core.dispatch.events import Blocked, DeadLetter, Dropped, Joined, Ranges, ReadKeys
from pydanube.core.dispatch.hash_ring import Ring, accepts, ring_hash
from pydanube.core.dispatch.lag import Standing
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import Machine
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, work
from pydanube.core.dispatch.window import Progress
from pydanube.core.names import ConsumerId

KEYS_READ_MAX: Final = 1_000  # offsets whose keys are asked for at a time
QUEUED_MAX: Final = 100_000  # offsets in queues: bounds memory, some 15 MB, when a hot key is stuck
LIMITS: Final = DispatchLimits(consumer_unacked_max=1_000)


class Turn(enum.Enum):
    """What a key's first message does."""

    IDLE = "can be sent"
    SENT = "is in flight"
    WAITING = "failed, and waits until it is due"
    BLOCKED = "is poison, and blocks the key"
    DEAD_LETTERING = "is poison, and is being copied"


class Unaccepted(enum.Enum):
    """What happens to a key that no registered consumer accepts."""

    SKIP = "skip"  # counts as acknowledged, as in the reference
    KEEP = "keep"  # waits for a consumer that accepts it


@dataclass(slots=True, eq=False)
class KeyQueue:
    """Invariant: `offsets` (a heap) are all of the key's offsets that are neither settled nor in flight. The
    message that `turn` speaks of is `current`: in flight if SENT, else still in `offsets`.
    """

    key: str
    place: int  # on the ring
    owner: ConsumerId | None
    offsets: list[int] = field(default_factory=list)
    turn: Turn = Turn.IDLE
    current: int = -1
    due: float = 0.0
    dead_letter: bool = False  # WAITING for another try of the copy, not of the delivery


class KeySharedDispatch(Machine):
    """`away` are registered consumers that are not connected now, or are sent nothing; their keys are kept for them."""

    shares = True

    def __init__(
        self,
        progress: Progress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
        unaccepted: Unaccepted = Unaccepted.SKIP,
        away: Mapping[ConsumerId, tuple[str, ...]] | None = None,
        queued_max: int = QUEUED_MAX,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits or LIMITS, rate=rate)
        self.unaccepted = unaccepted
        self.queued_max = queued_max
        self._away = dict(away or {})
        self._ring = Ring()
        self._keys: dict[str, KeyQueue] = {}
        self._turns = dict.fromkeys(Turn, 0)  # how many queues do what
        self._unowned: dict[str, KeyQueue] = {}  # queues of keys that no connected consumer accepts
        self._key_of: dict[int, str] = {}  # every offset with a known key that is not settled, or in flight still
        self._tries: dict[int, Tries] = {}  # of offsets that were delivered before and are not in flight
        # Heaps of (first offset, key) by owner. Entries that are no longer true are passed over.
        self._idle: dict[ConsumerId | None, list[tuple[int, str]]] = {None: []}
        self._due: list[tuple[float, str]] = []
        self._blocked: list[tuple[int, str]] = []  # a heap of (current offset, key)
        self._unread = OffsetRanges()
        self._gone = OffsetRanges()  # in flight and settled: retention took them
        self._asked = False  # a ReadKeys is on its way
        self._ask_later = False  # the last answer was empty; wait for the next tick or commit
        self._look_for_unaccepted = False

    def standing(self, committed_head: int = 0) -> Standing:
        first = self._first_blocked()
        members = self.roster.members
        by_window = any(member.messages is None for member in members)
        has_room = [member.consumer for member in members if self.roster.has_room_for(member)]
        unread = self._unread.count + self.progress.fresh_count(committed_head)
        has_work = unread > 0 or any(self._first_idle(consumer) is not None for consumer in has_room)
        unowned = [len(queue.offsets) for queue in self._unowned.values() if queue.turn is Turn.IDLE]
        return Standing(
            head=max(self.progress.head, committed_head),
            next_unacked=self.progress.next_unacked,
            lag=self.progress.lag(committed_head),
            undispatched=self._turns[Turn.IDLE] - len(unowned) + unread,
            consumers=len(members),
            has_room=bool(has_room) and has_work,
            unacked=self.in_flight.count,
            unseen=self.roster.unseen,
            late=self.roster.late,
            window_held=self.roster.window_held,
            unacked_max=self.roster.window if by_window else None,
            waiting=self._turns[Turn.WAITING],
            retry_at=self._next_due(),
            blocked_offset=first.current if first else None,
            blocked_key=first.key if first else None,
            blocked_keys=self._turns[Turn.BLOCKED],
            dead_lettering=self._turns[Turn.DEAD_LETTERING],
            rate_ready_at=self._rate_ready_at,
            first_offset=self.first_offset,
            missing=self.progress.missing_count(),
            timed_out=self.timed_out,
            unaccepted=sum(unowned),
        )

    def _first_blocked(self) -> KeyQueue | None:
        while self._blocked:
            offset, key = self._blocked[0]
            queue = self._keys.get(key)
            if queue is not None and queue.turn is Turn.BLOCKED and queue.current == offset:
                return queue
            heappop(self._blocked)
        return None

    # --- assigning --------------------------------------------------------------------------------------

    def _assign(self) -> None:
        self._skip_unaccepted()
        members = self.roster.members
        # Who has room, by the lowest message that could go there: sending changes only the receiver's own.
        lowest: list[tuple[int, int]] = []
        for at, member in enumerate(members):
            self._offer_to(lowest, at, member)
        pieces = 0
        while lowest:
            if pieces == self.pieces_max:
                self._unfinished = True
                return
            offset, at = heappop(lowest)
            member = members[at]
            if self.roster.room(member) <= 0:
                continue  # the window that all share is full
            allowed = self._allowance()
            if allowed == 0:
                return
            queue = self._first_idle(member.consumer)
            assert queue is not None and queue.offsets[0] == offset, "only this member's keys have changed"
            heappop(queue.offsets)
            self._set_turn(queue, Turn.SENT)
            queue.current = offset
            self._send(member, offset, offset + 1, self._tries.pop(offset, UNTRIED))
            self._offer_to(lowest, at, member)
            pieces += 1
        self._ask_for_keys(members)

    def _offer_to(self, lowest: list[tuple[int, int]], at: int, member: Member) -> None:
        """Among consumers with room, the key whose next message is the lowest goes first."""
        if self.roster.room(member) > 0 and (queue := self._first_idle(member.consumer)) is not None:
            heappush(lowest, (queue.offsets[0], at))

    def _set_turn(self, queue: KeyQueue, turn: Turn) -> None:
        self._turns[queue.turn] -= 1
        self._turns[turn] += 1
        queue.turn = turn

    def _drop(self, queue: KeyQueue) -> None:
        """A queue that is not needed any more."""
        if self._keys.pop(queue.key, None) is not None:
            self._turns[queue.turn] -= 1
            self._unowned.pop(queue.key, None)

    def _first_idle(self, owner: ConsumerId | None) -> KeyQueue | None:
        heap = self._idle[owner]
        while heap:
            offset, key = heap[0]
            queue = self._keys.get(key)
            if queue and queue.turn is Turn.IDLE and queue.owner == owner and queue.offsets[0] == offset:
                return queue
            heappop(heap)
        return None

    def _skip_unaccepted(self) -> None:
        if not self._look_for_unaccepted or not len(self.roster) or self.unaccepted is Unaccepted.KEEP:
            return  # without any consumer nobody has refused anything
        self._look_for_unaccepted = False
        kept: list[tuple[int, str]] = []
        while (queue := self._first_idle(None)) is not None:
            heappop(self._idle[None])
            if any(accepts(filters, queue.key) for filters in self._away.values()):
                kept.append((queue.offsets[0], queue.key))
                continue
            for offset in sorted(queue.offsets):
                self._settle(offset)
            self._drop(queue)
        self._idle[None] += kept
        heapify(self._idle[None])

    def _ask_for_keys(self, members: list[Member]) -> None:
        """Reads ahead only while somebody has room and nothing to do."""
        if self._asked or self._ask_later or len(self._key_of) >= self.queued_max:
            return
        if not any(self.roster.room(member) > 0 for member in members):
            return
        wanted = self._next_unknown()
        if wanted is not None:
            self._asked = True
            self._effects.append(ReadKeys(wanted))

    def _next_unknown(self) -> OffsetRange | None:
        """Where keys are to be read next: over what is settled or known, whose keys are passed over, so that a
        thousand keys are one question however scattered they are; not over what is missing, where reading ends.
        """
        unread = self._unread.lowest()
        if unread is not None:
            return OffsetRange(unread.first, self._unread.overlap(unread.first, unread.first + KEYS_READ_MAX)[-1].end)
        fresh = self.progress.peek_fresh(1)
        if fresh is None:
            return None
        end = min(self.progress.head, fresh.first + KEYS_READ_MAX)
        missing = self.progress.missing.next_first(fresh.first)
        return OffsetRange(fresh.first, end if missing is None else min(end, missing))

    def _resume(self) -> None:
        super()._resume()
        self._ask_later = False

    def _ticked(self) -> None:
        self._asked = False  # in case the question or its answer was lost; a repeated answer does no harm

    def _keyed(self, pairs: tuple[tuple[int, str], ...]) -> None:
        self._asked = False
        known_before = len(self._key_of)
        for offset, key in pairs:
            if self._unread.remove(offset, offset + 1):
                self._enqueue(offset, key)
                continue
            # In order, without a gap: an offset that the answer left out must be asked for again.
            fresh = self.progress.peek_fresh(1)
            if fresh is not None and fresh.first == offset:
                self.progress.take_fresh(1)
                self._enqueue(offset, key)
        self._ask_later = len(self._key_of) == known_before

    def _enqueue(self, offset: int, key: str) -> None:
        queue = self._keys.get(key)
        if queue is None:
            place = ring_hash(key)
            queue = self._keys[key] = KeyQueue(key, place, self._ring.owner(key, place))
            self._turns[Turn.IDLE] += 1
            if queue.owner is None:
                self._unowned[key] = queue
        self._key_of[offset] = queue.key  # one string per key, however many offsets
        heappush(queue.offsets, offset)
        self._offer(queue)

    def _offer(self, queue: KeyQueue) -> None:
        """After every change of a queue: lets its next message be found, or forgets a queue that is empty."""
        if queue.turn is not Turn.IDLE:
            return
        if queue.offsets:
            heappush(self._idle[queue.owner], (queue.offsets[0], queue.key))
            self._look_for_unaccepted |= queue.owner is None
        else:
            self._drop(queue)

    # --- consumers --------------------------------------------------------------------------------------

    def _joined(self, event: Joined) -> None:
        self.roster.join(event.consumer, event.permits, hands_over=event.hands_over)
        self._away.pop(event.consumer, None)
        self._ring.put(event.consumer, event.key_filters)
        self._reassign()

    def _rejoined(self, event: Joined) -> None:
        self._away.pop(event.consumer, None)
        self._ring.put(event.consumer, event.key_filters)
        self._reassign()

    def _left(self, consumer: ConsumerId) -> None:
        self._out_of_turn(consumer)
        super()._left(consumer)
        self._reassign()

    def _out_of_turn(self, consumer: ConsumerId) -> None:
        """Its keys go to others. What it holds of them stays in flight, and the rest of those keys behind it."""
        if consumer not in self._away:
            self._away[consumer] = self._ring.filters(consumer)
            self._ring.remove(consumer)
            self._reassign()

    def _in_turn_again(self, consumer: ConsumerId) -> None:
        self._ring.put(consumer, self._away.pop(consumer))
        self._reassign()

    def _recallable(self, member: Member, idle: Sequence[Member]) -> list[OffsetRange]:
        """What belongs to the idle by now: they joined after it was sent."""
        owners = {each.consumer for each in idle}
        return [
            OffsetRange(offset, offset + 1)
            for piece in self.in_flight.unseen(member.consumer)
            for offset in range(piece.first, piece.end)
            if self._keys[self._key_of[offset]].owner in owners
        ]

    def _forgotten(self, consumer: ConsumerId) -> None:
        self._away.pop(consumer, None)
        self._look_for_unaccepted = True

    def _reassign(self) -> None:
        """Messages in flight stay where they are; the next of their key goes to the new owner."""
        self._idle = {None: []} | {member.consumer: [] for member in self.roster.members}
        self._look_for_unaccepted = True
        self._unowned = {}
        for queue in self._keys.values():
            queue.owner = self._ring.owner(queue.key, queue.place)
            if queue.owner is None:
                self._unowned[queue.key] = queue
            if queue.turn is Turn.IDLE:
                self._idle[queue.owner].append((queue.offsets[0], queue.key))
        for heap in self._idle.values():
            heapify(heap)

    # --- the life of a message ----------------------------------------------------------------------------

    def _settle(self, offset: int) -> None:
        self.progress.settle(offset, offset + 1)
        self._key_of.pop(offset, None)
        self._tries.pop(offset, None)

    def _landed(self, first: int, end: int) -> None:
        for offset in range(first, end):
            queue = self._keys[self._key_of.pop(offset)]
            self._turn_idle(queue)
            self._offer(queue)

    def _free(self, offsets: Iterable[int]) -> None:
        """Forgets offsets that are not in flight; the next messages of their keys may go.

        A queue is looked through once, however many of its offsets go.
        """
        gone: dict[str, set[int]] = {}
        for offset in offsets:
            key = self._key_of.pop(offset, None)
            if key is not None:
                self._tries.pop(offset, None)
                gone.setdefault(key, set()).add(offset)
        for key, leaving in gone.items():
            queue = self._keys[key]
            if len(leaving) == 1 and queue.offsets and queue.offsets[0] in leaving:
                heappop(queue.offsets)
            else:
                work.ranges += len(queue.offsets) // 64
                queue.offsets = [offset for offset in queue.offsets if offset not in leaving]
                heapify(queue.offsets)
            if queue.current in leaving and queue.turn is not Turn.IDLE:
                self._turn_idle(queue)
            self._offer(queue)

    def _turn_idle(self, queue: KeyQueue) -> None:
        self._set_turn(queue, Turn.IDLE)
        queue.current, queue.dead_letter = -1, False

    def _lose(self, first: int, end: int) -> None:
        for piece in self.in_flight.overlap(first, end):
            self._gone.add(piece.first, piece.end)

    def _answered(self, ranges: Ranges) -> None:
        if not self._gone:
            return
        for first, end in ranges:
            for part in self._gone.overlap(first, end):
                pieces = self.in_flight.cut(*part)
                self._release(pieces)
                self._count_answers(pieces, OffsetRanges())
                self._gone.remove(*part)
                self._landed(*part)

    def _let_go(self, offset: int) -> bool:
        """Whether a delivery that has ended was of a message that is gone: then only its key goes on."""
        if not self._gone or not self._gone.remove(offset, offset + 1):
            return False
        self._landed(offset, offset + 1)
        return True

    def _take_back(self, first: int, end: int, tries: Tries) -> None:
        for offset in range(first, end):
            if self._let_go(offset):
                continue
            queue = self._put_back(offset, tries)
            self._turn_idle(queue)
            self._offer(queue)

    def _put_back(self, offset: int, tries: Tries) -> KeyQueue:
        queue = self._keys[self._key_of[offset]]
        assert queue.turn is Turn.SENT and queue.current == offset, "one message in flight per key"
        heappush(queue.offsets, offset)
        if tries.deliveries:
            self._tries[offset] = tries
        return queue

    def _failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        for offset in range(first, end):
            if self._let_go(offset):
                continue
            self._decide(self._put_back(offset, tries), offset, tries, asked_seconds)

    def _decide(self, queue: KeyQueue, offset: int, tries: Tries, asked_seconds: float = 0.0) -> None:
        queue.current = offset
        match judge(self.policy, tries, self._now, asked_seconds):
            case RetryAt(due):
                self._wait(queue, due)
            case Poison.DROP:
                self._effects.append(Dropped(OffsetRange(offset, offset + 1), tries))
                self.progress.settle(offset, offset + 1)
                self._free((offset,))
            case Poison.DEAD_LETTER:
                assert self.policy.dead_letter_topic is not None, "the policy was checked when it was made"
                self._set_turn(queue, Turn.DEAD_LETTERING)
                one = OffsetRange(offset, offset + 1)
                self._effects.append(DeadLetter(one, tries, self.policy.dead_letter_topic))
            case Poison.BLOCK:
                self._set_turn(queue, Turn.BLOCKED)
                heappush(self._blocked, (offset, queue.key))
                self._effects.append(Blocked(offset, tries, queue.key))

    def _wait(self, queue: KeyQueue, due: float) -> None:
        self._set_turn(queue, Turn.WAITING)
        queue.due = due
        heappush(self._due, (due, queue.key))

    def _undelivered(self, first: int, end: int) -> list[OffsetRange]:
        queued = [OffsetRange(each, each + 1) for each in self._kept(first, end) if each not in self._tries]
        return queued + self._unread.overlap(first, end)

    def _kept(self, first: int, end: int) -> list[int]:
        """Offsets of [first, end) in queues, by offset. What is settled is skipped as ranges."""
        progress = self.progress
        first, end = max(first, progress.next_unacked), min(end, progress.next_fresh)
        return [
            offset
            for gap in progress.settled.gaps(first, end)
            for part in (progress.missing.gaps(*gap) if progress.missing else (gap,))
            for offset in range(*part)
            if offset in self._key_of and self.in_flight.holder(offset) is None
        ]

    def _revealed(self, first: int, end: int) -> None:
        self._unread.add(first, end)

    def _forget(self, ranges: Sequence[OffsetRange]) -> None:
        if self._unread:
            for first, end in ranges:
                self._unread.remove(first, end)
        self._free(offset for first, end in ranges for offset in self._kept(first, end))

    def _forget_all(self) -> None:
        self._keys.clear()
        self._turns = dict.fromkeys(Turn, 0)
        self._blocked.clear()
        self._key_of.clear()
        self._tries.clear()
        self._due.clear()
        self._unread.clear()
        self._gone.clear()
        self._asked = False
        self._reassign()

    # --- time and policy ----------------------------------------------------------------------------------

    def _retry_due(self) -> None:
        retried = 0
        while retried < self.pieces_max and self._due and self._due[0][0] <= self._now:
            retried += 1
            due, key = heappop(self._due)
            queue = self._keys.get(key)
            if queue is None or queue.turn is not Turn.WAITING or queue.due != due:
                continue
            if queue.dead_letter:
                queue.dead_letter = False
                self._decide(queue, queue.current, self._tries[queue.current])  # by the policy of today
            else:
                self._turn_idle(queue)
                self._offer(queue)

    def _next_due(self) -> float | None:
        while self._due:
            due, key = self._due[0]
            queue = self._keys.get(key)
            if queue is not None and queue.turn is Turn.WAITING and queue.due == due:
                return due
            heappop(self._due)
        return None

    def _judge_again(self) -> None:
        for queue in [queue for queue in self._keys.values() if queue.turn is Turn.BLOCKED]:
            tries = self._tries[queue.current]
            verdict = judge(self.policy, tries, self._now)
            if verdict is Poison.BLOCK:
                continue
            offset = queue.current
            self._turn_idle(queue)
            if isinstance(verdict, RetryAt):
                self._offer(queue)
            else:
                self._decide(queue, offset, tries)

    def _dead_lettered(self, first: int, end: int) -> None:
        for offset in self._kept(first, end):
            queue = self._keys[self._key_of[offset]]
            if queue.turn is Turn.DEAD_LETTERING and queue.current == offset:
                self.progress.settle(offset, offset + 1)
                self._free((offset,))

    def _dead_letter_failed(self, first: int, end: int) -> None:
        for offset in self._kept(first, end):
            queue = self._keys[self._key_of[offset]]
            if queue.turn is Turn.DEAD_LETTERING and queue.current == offset:
                queue.dead_letter = True
                self._wait(queue, self._now + copy_delay_seconds(self.policy, self._tries[offset].failures))
