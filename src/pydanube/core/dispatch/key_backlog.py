"""A queue per key, lowest offset first: what Key-Shared keeps of messages whose key is known.

While a key's first message is in flight, waits for a retry, blocks or is being dead-lettered, the rest of that key
waits behind it and every other key goes on. A queue belongs to one consumer, its owner on the ring; when consumers
come and go only the owner of what is not in flight changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from pydanube.core.dispatch.backlog import BacklogCounts
from pydanube.core.dispatch.deliveries import StepContext
from pydanube.core.dispatch.delivery import UNTRIED, PoisonPolicy, RetryAt, Tries, copy_delay_seconds, judge
from pydanube.core.dispatch.events import Blocked, DeadLetter, PoisonDropped
from pydanube.core.dispatch.hash_ring import ring_hash
from pydanube.core.dispatch.key_owners import KeyOwners
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, work
from pydanube.core.dispatch.window import InFlight, SubscriptionProgress
from pydanube.core.names import ConsumerId


class Turn(enum.StrEnum):
    """What a key's first message does."""

    IDLE = "can be sent"
    SENT = "is in flight"
    WAITING = "failed, and waits until it is due"
    BLOCKED = "is poison, and blocks the key"
    DEAD_LETTERING = "is poison, and is being copied"


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


class KeyBacklog:
    """The queues of all keys, and what is known of each message in them."""

    __slots__ = (
        "_blocked",
        "_context",
        "_due",
        "_idle",
        "_in_flight",
        "_keys",
        "_owners",
        "_progress",
        "_tries",
        "_turns",
        "_unowned",
        "gone",
        "key_of",
        "look_for_unaccepted",
        "unread",
    )

    def __init__(
        self, context: StepContext, progress: SubscriptionProgress, in_flight: InFlight, owners: KeyOwners
    ) -> None:
        self._context = context
        self._progress = progress
        self._in_flight = in_flight
        self._owners = owners
        self.unread = OffsetRanges()  # below `next_fresh`, and their keys are not known
        self.gone = OffsetRanges()  # in flight and settled: retention took them
        self.key_of: dict[int, str] = {}  # every offset with a known key that is not settled, or in flight still
        self.look_for_unaccepted = False
        self._keys: dict[str, KeyQueue] = {}
        self._turns = dict.fromkeys(Turn, 0)  # how many queues do what
        self._unowned: dict[str, KeyQueue] = {}  # queues of keys that no connected consumer accepts
        self._tries: dict[int, Tries] = {}  # of offsets that were delivered before and are not in flight
        # Heaps of (first offset, key) by owner. Entries that are no longer true are passed over.
        self._idle: dict[ConsumerId | None, list[tuple[int, str]]] = {None: []}
        self._due: list[tuple[float, str]] = []
        self._blocked: list[tuple[int, str]] = []  # a heap of (current offset, key)

    def counts(self, committed_head: int) -> BacklogCounts:
        unowned = [len(queue.offsets) for queue in self._unowned.values() if queue.turn is Turn.IDLE]
        blocks: KeyQueue | None = None
        while self._blocked and blocks is None:
            offset, key = self._blocked[0]
            queue = self._keys.get(key)
            if queue is not None and queue.turn is Turn.BLOCKED and queue.current == offset:
                blocks = queue
            else:
                heappop(self._blocked)
        return BacklogCounts(
            undispatched=self._turns[Turn.IDLE]
            - len(unowned)
            + self.unread.count
            + self._progress.fresh_count(committed_head),
            waiting=self._turns[Turn.WAITING],
            dead_lettering=self._turns[Turn.DEAD_LETTERING],
            blocked_offset=blocks.current if blocks else None,
            blocked_key=blocks.key if blocks else None,
            blocked_keys=self._turns[Turn.BLOCKED],
            unaccepted=sum(unowned),
        )

    def owner_of(self, offset: int) -> ConsumerId | None:
        """The consumer that the key of an offset belongs to now."""
        return self._keys[self.key_of[offset]].owner

    # --- queues -----------------------------------------------------------------------------------------

    def enqueue(self, offset: int, key: str) -> None:
        queue = self._keys.get(key)
        if queue is None:
            place = ring_hash(key)
            queue = self._keys[key] = KeyQueue(key, place, self._owners.owner(key, place))
            self._turns[Turn.IDLE] += 1
            if queue.owner is None:
                self._unowned[key] = queue
        self.key_of[offset] = queue.key  # one string per key, however many offsets
        heappush(queue.offsets, offset)
        self._offer(queue)

    def first_idle(self, owner: ConsumerId | None) -> KeyQueue | None:
        """The queue of this owner's keys whose next message is the lowest."""
        heap = self._idle[owner]
        while heap:
            offset, key = heap[0]
            queue = self._keys.get(key)
            if queue and queue.turn is Turn.IDLE and queue.owner == owner and queue.offsets[0] == offset:
                return queue
            heappop(heap)
        return None

    def take(self, queue: KeyQueue) -> tuple[int, Tries]:
        """The first message of a queue, which goes into flight."""
        offset = heappop(queue.offsets)
        self._set_turn(queue, Turn.SENT)
        queue.current = offset
        return offset, self._tries.pop(offset, UNTRIED)

    def reassign(self, consumers: Iterable[ConsumerId]) -> None:
        """Messages in flight stay where they are; the next of their key goes to the new owner."""
        self._idle = {None: []} | {consumer: [] for consumer in consumers}
        self.look_for_unaccepted = True
        self._unowned = {}
        for queue in self._keys.values():
            queue.owner = self._owners.owner(queue.key, queue.place)
            if queue.owner is None:
                self._unowned[queue.key] = queue
            if queue.turn is Turn.IDLE:
                self._idle[queue.owner].append((queue.offsets[0], queue.key))
        for heap in self._idle.values():
            heapify(heap)

    def skip_unaccepted(self) -> None:
        """Settles the messages of keys that no registered consumer accepts."""
        self.look_for_unaccepted = False
        kept: list[tuple[int, str]] = []
        while (queue := self.first_idle(None)) is not None:
            heappop(self._idle[None])
            if self._owners.is_kept(queue.key):
                kept.append((queue.offsets[0], queue.key))
                continue
            for offset in sorted(queue.offsets):
                self._progress.settle(offset, offset + 1)
                self.key_of.pop(offset, None)
                self._tries.pop(offset, None)
            self._drop(queue)
        self._idle[None] += kept
        heapify(self._idle[None])

    def _offer(self, queue: KeyQueue) -> None:
        """After every change of a queue: lets its next message be found, or forgets a queue that is empty."""
        if queue.turn is not Turn.IDLE:
            return
        if queue.offsets:
            heappush(self._idle[queue.owner], (queue.offsets[0], queue.key))
            self.look_for_unaccepted |= queue.owner is None
        else:
            self._drop(queue)

    def _set_turn(self, queue: KeyQueue, turn: Turn) -> None:
        self._turns[queue.turn] -= 1
        self._turns[turn] += 1
        queue.turn = turn

    def _turn_idle(self, queue: KeyQueue) -> None:
        self._set_turn(queue, Turn.IDLE)
        queue.current, queue.dead_letter = -1, False

    def _drop(self, queue: KeyQueue) -> None:
        """A queue that is not needed any more."""
        if self._keys.pop(queue.key, None) is not None:
            self._turns[queue.turn] -= 1
            self._unowned.pop(queue.key, None)

    # --- the life of a message ----------------------------------------------------------------------------

    def land(self, first: int, end: int) -> None:
        """Deliveries of messages that are settled already have ended: their keys go on."""
        for offset in range(first, end):
            queue = self._keys[self.key_of.pop(offset)]
            self._turn_idle(queue)
            self._offer(queue)

    def _was_gone(self, offset: int) -> bool:
        """Whether a delivery that has ended was of a message that is gone: then only its key goes on."""
        if not self.gone or not self.gone.remove(offset, offset + 1):
            return False
        self.land(offset, offset + 1)
        return True

    def take_back(self, first: int, end: int, tries: Tries) -> None:
        for offset in range(first, end):
            if self._was_gone(offset):
                continue
            queue = self._put_back(offset, tries)
            self._turn_idle(queue)
            self._offer(queue)

    def _put_back(self, offset: int, tries: Tries) -> KeyQueue:
        queue = self._keys[self.key_of[offset]]
        assert queue.turn is Turn.SENT and queue.current == offset, "one message in flight per key"
        heappush(queue.offsets, offset)
        if tries.deliveries:
            self._tries[offset] = tries
        return queue

    def failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        for offset in range(first, end):
            if not self._was_gone(offset):
                self._decide(self._put_back(offset, tries), offset, tries, asked_seconds)

    def _decide(self, queue: KeyQueue, offset: int, tries: Tries, asked_seconds: float = 0.0) -> None:
        queue.current = offset
        policy, effects = self._context.policy, self._context.effects
        match judge(policy, tries, self._context.now, asked_seconds):
            case RetryAt(due):
                self._wait(queue, due)
            case PoisonPolicy.DROP:
                effects.append(PoisonDropped(OffsetRange(offset, offset + 1), tries))
                self._progress.settle(offset, offset + 1)
                self._free((offset,))
            case PoisonPolicy.DEAD_LETTER:
                assert policy.dead_letter_topic is not None, "the policy was checked when it was made"
                self._set_turn(queue, Turn.DEAD_LETTERING)
                effects.append(DeadLetter(OffsetRange(offset, offset + 1), tries, policy.dead_letter_topic))
            case PoisonPolicy.BLOCK:
                self._set_turn(queue, Turn.BLOCKED)
                heappush(self._blocked, (offset, queue.key))
                effects.append(Blocked(offset, tries, queue.key))

    def _wait(self, queue: KeyQueue, due: float) -> None:
        self._set_turn(queue, Turn.WAITING)
        queue.due = due
        heappush(self._due, (due, queue.key))

    def reveal(self, first: int, end: int) -> None:
        self.unread.add(first, end)

    def undelivered(self, first: int, end: int) -> list[OffsetRange]:
        """What of these was never sent."""
        queued = [OffsetRange(each, each + 1) for each in self._kept(first, end) if each not in self._tries]
        return queued + self.unread.overlap(first, end)

    def _kept(self, first: int, end: int) -> list[int]:
        """Offsets of [first, end) with a known key that are not in flight. What is settled is skipped as ranges."""
        progress = self._progress
        first, end = max(first, progress.next_unacked), min(end, progress.next_fresh)
        return [
            offset
            for gap in progress.settled.gaps(first, end)
            for part in (progress.missing.gaps(*gap) if progress.missing else (gap,))
            for offset in range(*part)
            if offset in self.key_of and self._in_flight.holder(offset) is None
        ]

    def forget(self, ranges: Sequence[OffsetRange]) -> None:
        if self.unread:
            for first, end in ranges:
                self.unread.remove(first, end)
        self._free(offset for first, end in ranges for offset in self._kept(first, end))

    def _free(self, offsets: Iterable[int]) -> None:
        """Forgets offsets that are not in flight (any more); the next messages of their keys may go.

        A queue is looked through once, however many of its offsets go.
        """
        leaving_of: dict[str, set[int]] = {}
        for offset in offsets:
            key = self.key_of.pop(offset, None)
            if key is None:
                continue
            queue = self._keys[key]
            if queue.turn is Turn.SENT and queue.current == offset:  # it was in flight, so it is not in the queue
                self._turn_idle(queue)
                self._offer(queue)
                continue
            self._tries.pop(offset, None)
            leaving_of.setdefault(key, set()).add(offset)
        for key, leaving in leaving_of.items():
            queue = self._keys[key]
            if queue.current in leaving and queue.turn is not Turn.IDLE:
                self._turn_idle(queue)
            if len(leaving) == 1 and queue.offsets and queue.offsets[0] in leaving:
                heappop(queue.offsets)
            else:
                work.ranges += len(queue.offsets) // 64
                queue.offsets = [offset for offset in queue.offsets if offset not in leaving]
                heapify(queue.offsets)
            self._offer(queue)

    def forget_all(self) -> None:
        """As after a seek. The consumers and their keys' owners stay."""
        self._keys.clear()
        self._turns = dict.fromkeys(Turn, 0)
        self._blocked.clear()
        self.key_of.clear()
        self._tries.clear()
        self._due.clear()
        self.unread.clear()
        self.gone.clear()
        self.reassign([consumer for consumer in self._idle if consumer is not None])

    # --- time and policy ----------------------------------------------------------------------------------

    def retry_due(self) -> None:
        retried, now = 0, self._context.now
        while retried < self._context.pieces_max and self._due and self._due[0][0] <= now:
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

    def next_due(self) -> float | None:
        while self._due:
            due, key = self._due[0]
            queue = self._keys.get(key)
            if queue is not None and queue.turn is Turn.WAITING and queue.due == due:
                return due
            heappop(self._due)
        return None

    def judge_again(self) -> None:
        for queue in [queue for queue in self._keys.values() if queue.turn is Turn.BLOCKED]:
            tries = self._tries[queue.current]
            verdict = judge(self._context.policy, tries, self._context.now)
            if verdict is PoisonPolicy.BLOCK:
                continue
            offset = queue.current
            self._turn_idle(queue)
            if isinstance(verdict, RetryAt):
                self._offer(queue)
            else:
                self._decide(queue, offset, tries)

    def dead_lettered(self, first: int, end: int) -> None:
        for offset in self._kept(first, end):
            queue = self._keys[self.key_of[offset]]
            if queue.turn is Turn.DEAD_LETTERING and queue.current == offset:
                self._progress.settle(offset, offset + 1)
                self._free((offset,))

    def dead_letter_failed(self, first: int, end: int) -> None:
        for offset in self._kept(first, end):
            queue = self._keys[self.key_of[offset]]
            if queue.turn is Turn.DEAD_LETTERING and queue.current == offset:
                queue.dead_letter = True
                delay = copy_delay_seconds(self._context.policy, self._tries[offset].failures)
                self._wait(queue, self._context.now + delay)
