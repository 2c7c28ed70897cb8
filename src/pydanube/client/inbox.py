"""What a consumer received and its application has not taken: queued deliveries, and the one in hand.

    lane ─► put ─► line ─► next ─► in hand ─► the application, message by message, perhaps in another thread
                     └───────────────┴── take_back, drop: what a lane does not want to be handed over

Messages are not counted as they are taken: a lane asks when it needs the count (`account`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from pydanube.client.messages import Delivered, ReceivedBatch
from pydanube.core.consuming.values import Dropped, Emptied, TakingBegan, Took
from pydanube.core.dispatch.ranges import OffsetRanges

if TYPE_CHECKING:
    from pydanube.client.partition_consumer import PartitionConsumer


class Inbox:
    """Of all lanes of one consumer."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()  # or there is another reason to look
        self.all_answered = (
            asyncio.Event()
        )  # nothing that the application has from one of the lanes is without an answer
        self.is_telling = False  # the lane knows that messages are being taken
        self._line: deque[ReceivedBatch] = deque()
        self._in_hand: ReceivedBatch | None = None
        self._taking: deque[Any] = deque()  # its messages, until they are taken

    def __bool__(self) -> bool:
        return bool(self._line)

    # --- for the consumer ---------------------------------------------------------------------------

    def next(self, taking: deque[Any] | None) -> ReceivedBatch:
        """The next in line. It counts as handed over; with `taking` its messages do, as they leave that queue."""
        delivery = self._line.popleft()
        if taking is None:
            delivery.lane.feed(Took(delivery, delivery.count))
            delivery.lane.feed(TakingBegan())
        else:
            self._in_hand, self._taking, self.is_telling = delivery, taking, False
        return delivery

    def tell(self) -> None:
        """The application takes messages: the broker learns of those that are not answered soon."""
        self.is_telling = True  # until the lane asks how many
        if self._in_hand is not None:
            self._in_hand.lane.feed(TakingBegan())

    def hand_over(self) -> None:
        """If the delivery in hand has been handed over entirely, the next may be taken."""
        if self._in_hand is not None and not self._taking:
            self._in_hand.lane.feed(Took(self._in_hand, self._in_hand.count))
            self._in_hand = None

    def clear(self) -> None:
        self._line.clear()

    # --- for the lanes ------------------------------------------------------------------------------

    def put(self, delivery: ReceivedBatch) -> None:
        self._line.append(delivery)
        self.arrived.set()

    def account(self, lane: PartitionConsumer) -> None:
        """Reports to the lane how much the application has by now."""
        delivery = self._in_hand
        if delivery is not None and delivery.lane is lane:
            self.is_telling = False
            lane.feed(Took(delivery, delivery.count - len(self._taking)))

    def take_back(self, lane: PartitionConsumer, wanted: OffsetRanges, *, copies: bool) -> OffsetRanges:
        """Does not hand over these (`copies`: if they came before); returns which had not been."""
        self.account(lane)
        found = OffsetRanges()
        for delivery in [each for each in self._line if each.lane is lane and (each.is_copy or not copies)]:
            mine = [part for first, end in delivery.ranges for part in wanted.overlap(first, end)]
            if not mine:
                continue
            rest = [gap for first, end in delivery.ranges for gap in wanted.gaps(first, end)]
            for first, end in mine:
                found.add(first, end)
            delivery.keep(rest)
            if not rest:
                self._line.remove(delivery)
                lane.feed(Emptied(delivery))
        if self._in_hand is not None and self._in_hand.lane is lane and (self._in_hand.is_copy or not copies):
            for first, end in self._take_from_hand(self._in_hand, wanted):
                found.add(first, end)
        return found

    def _take_from_hand(self, delivery: ReceivedBatch, wanted: OffsetRanges) -> OffsetRanges:
        found = OffsetRanges()
        kept: list[Delivered] = []
        while self._taking:  # from behind, as another thread may take from the front
            try:
                message = self._taking.pop()
            except IndexError:
                break
            if wanted.overlap(message.offset, message.offset + 1):
                found.add(message.offset, message.offset + 1)
            else:
                kept.append(message)
        self._taking.extend(reversed(kept))
        delivery.keep([gap for first, end in delivery.ranges for gap in found.gaps(first, end)])
        if found and delivery.taken == delivery.count:
            delivery.lane.feed(Emptied(delivery))
        return found

    def drop(self, lane: PartitionConsumer) -> None:
        """Drops what the lane has queued: it is delivered again, or not wanted any more."""
        for delivery in [each for each in self._line if each.lane is lane]:
            self._line.remove(delivery)
            lane.feed(Dropped(delivery))
        if self._in_hand is not None and self._in_hand.lane is lane:
            self._taking.clear()
            if self._in_hand.taken < self._in_hand.count:  # else its bytes were counted then
                lane.feed(Dropped(self._in_hand))
            self._in_hand = None
