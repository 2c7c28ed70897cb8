"""One subscription of a reliable topic: what clients and administrators say to it.

Acks, seeks and settings become events of its dispatch machine (`dispatcher.py`), which decides what is sent to whom.
While the topic is about to leave (`pause`) no ack is taken, so that the cursor that is saved is the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydanube.broker.dispatcher import Dispatcher
from pydanube.broker.outbox import BatchOutbox, DeliveredBatch, DeliveredMessage
from pydanube.broker.registrations import LEASE_OVER
from pydanube.core import keys
from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    AckRefused,
    Available,
    ConsumerFinished,
    CursorReset,
    Granted,
    Handed,
    HistoryAvailable,
    NackReceived,
    NotHeld,
    PolicyChanged,
    Ranges,
    Returned,
    Ticked,
    Voided,
)
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.names import ConsumerId
from pydanube.errors import (
    AckOutdated,
    DanubeError,
    NotServed,
    OffsetOutOfRange,
    Refused,
)
from pydanube.ports import Put


class Subscription(Dispatcher):
    """One subscription of a reliable topic."""

    reliable: Literal[True] = True

    @property
    def seeks(self) -> int:
        """How often it was moved, by all its owners."""
        return self._shipper.seeks

    # --- life ---------------------------------------------------------------------------------------

    def pause(self, error: DanubeError) -> None:
        """The topic is about to leave: nothing is sent and no ack is taken, so that the cursor is final."""
        self._paused_for = error
        self._shipper.pause()

    def resume(self) -> None:
        """It stays after all."""
        self._paused_for = None
        self._shipper.resume()
        self._step(Available(self._source.log.head))

    def reveal(self, rescued: Ranges, voided: Ranges) -> None:
        """Offsets that could not be read: these can now, those never will."""
        if voided:
            self._step(Voided(voided))
        self._step(HistoryAvailable(rescued))
        self._step(Ticked())

    # --- consumers ----------------------------------------------------------------------------------

    def held_by(self, consumer: ConsumerId) -> int:
        """Messages that it was sent, or is about to be, and has not acknowledged."""
        member = self._machine.windows.get(consumer)
        return member.held if member is not None else 0

    def attach_native(self, consumer: ConsumerId) -> BatchOutbox:
        """The outbox of a consumer that has just joined natively."""
        registration = self._consumers[consumer]
        assert registration.native and registration.outbox is not None
        registration.attached = True
        return registration.outbox

    def grant(self, consumer: ConsumerId, permits: Permits) -> None:
        """A native consumer granted these permits, on top of those it has."""
        self._step(Granted(consumer, permits))

    # --- what clients and administrators say --------------------------------------------------------

    def ack_ranges(self, ranges: Ranges, seeks: int | None = None, consumer: ConsumerId | None = None) -> None:
        """Acknowledges what is committed, whether or not this owner has sent it; twice is as good as once.

        Raises OffsetOutOfRange if some are not committed, and AckOutdated if some were delivered before a seek and not
        since; the others count all the same. With `seeks`, the number that the deliveries had, all of them are judged.
        """
        self._settle(AckReceived(ranges, consumer), seeks)

    def nack_ranges(
        self,
        ranges: Ranges,
        delay_seconds: float = 0.0,
        reason: str = "",
        seeks: int | None = None,
        consumer: ConsumerId | None = None,
    ) -> None:
        """What is not in flight is delivered (again) anyhow. Raises as `ack_ranges` does."""
        self.metrics.nacks.inc(sum(each.size for each in ranges))
        self._settle(NackReceived(ranges, delay_seconds, reason, consumer), seeks)

    def handed(self, consumer: ConsumerId, ranges: Ranges, seeks: int) -> None:
        """A consumer's application has these now. What was delivered before a seek is not its business any more."""
        if seeks == self.seeks and not self._closed:
            self._step(Handed(consumer, ranges))

    def extend(self, consumer: ConsumerId, ranges: Ranges, seeks: int, seconds: float) -> None:
        """A consumer's application needs these for so long, from now. Raises if one of them is not its own any more."""
        self._check_serving()
        if seeks != self.seeks:
            raise AckOutdated(self._source.name, self.name, ranges[0].first)
        refused = self._step(Handed(consumer, ranges, seconds))
        if isinstance(refused, NotHeld):
            raise Refused(
                f"offset {refused.ranges[0].first} of {self._source.name} is not held by this consumer of subscription "
                f"{self.name} any more: its time was over, or it is acknowledged; it cannot be held for longer"
            )

    def give_back(
        self, consumer: ConsumerId, ranges: Ranges, seeks: int, *, stop: bool = False, taken: int = 0
    ) -> None:
        """A consumer's application has not seen these, and will not; with `stop` it wants nothing more at all."""
        if self._closed:
            return  # everything that is not acknowledged is delivered again
        # Also while the topic is about to leave: it may stay after all, and this is said once.
        if stop:
            self._step(ConsumerFinished(consumer))
        if ranges and seeks == self.seeks:
            self._step(Returned(consumer, ranges, taken))

    def still_held(self, consumer: ConsumerId, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of these that are still in flight to the consumer: not acknowledged in the meantime, for example."""
        in_flight = self._machine.in_flight
        return [
            (piece.first, piece.end)
            for first, end in ranges
            for piece in in_flight.overlap(first, end)
            if piece.value.consumer == consumer
        ]

    def is_wanted(self, consumer: ConsumerId, delivered: DeliveredMessage) -> bool:
        """False if it was acknowledged while on its way to the wire, by a consumer that had it from an earlier owner
        too: it must not be sent.
        """
        return bool(self.still_held(consumer, [(delivered.offset, delivered.offset + 1)]))

    def _check_serving(self) -> None:
        if self._paused_for is not None:
            raise self._paused_for
        if not self._services.may_serve():  # an ack that is taken here might be lost
            raise NotServed(self._source.name, LEASE_OVER)

    def _settle(self, event: AckReceived | NackReceived, seeks: int | None) -> None:
        self._check_serving()
        if seeks is not None and seeks != self.seeks:
            raise AckOutdated(self._source.name, self.name, event.ranges[0].first)
        head = self._source.log.head
        if self._machine.progress.head < head and any(end > self._machine.progress.head for _, end in event.ranges):
            self._step(Available(head))  # the notifier has not come round yet
        refused = self._step(event)
        if isinstance(refused, AckRefused):
            offset = refused.ranges[0].first
            if offset < head:
                raise AckOutdated(self._source.name, self.name, offset)
            raise OffsetOutOfRange(self._source.name, offset, self._source.first_offset, head)

    def ack(self, offset: int) -> None:
        self.ack_ranges((OffsetRange(offset, offset + 1),))

    def nack(self, offset: int, delay_seconds: float = 0.0, reason: str = "") -> None:
        self.nack_ranges((OffsetRange(offset, offset + 1),), delay_seconds, reason)

    async def move_to(self, offset: int) -> int:
        """As `seek`, and stored when it returns: how often it was moved now. Raises what keeps it from being stored.

        The number of the seek is stored first: consumers may hold acks of earlier deliveries, and bring them to the
        next owner of the topic. If only the number is stored, such acks are void and their messages come again;
        nothing else happens.
        """
        async with self._moving:
            self._check_serving()
            number = Put(keys.seeks(self._source.name, self.name), str(self.seeks + 1).encode())
            await self._source.ownership.write([number])
            self._check_serving()  # a move of the topic may have stored the last cursor in the meantime
            self.seek(offset)
            moved = self.seeks
            await self.save()
            return moved

    def seek(self, offset: int) -> None:
        """Delivery goes on at `offset`, whatever was acknowledged.

        What was on its way to consumers is dropped; they never see it, so they get back the permits it took.
        """
        sends = self._shipper.seek()
        unsent = {each.consumer_id: each.outbox.clear() for each in self._consumers.values() if each.outbox is not None}
        self._step(CursorReset(offset))
        for send in sends:
            self._shipper.take_back(send)
        for consumer, items in unsent.items():
            if self._consumers[consumer].native and items:
                batches = [item for item in items if isinstance(item, DeliveredBatch)]
                rows = sum(end - first for item in batches for first, end in item.ranges)
                size_bytes = sum(item.batch.header.size_bytes for item in batches)
                self._step(Granted(consumer, Permits(rows, size_bytes)))

    def change(self, *, policy: FailurePolicy | None = None, limits: DispatchLimits | None = None) -> None:
        """Takes effect immediately, also for what is in flight."""
        self._step(PolicyChanged(policy, limits))

    def change_rate(self, rate: TokenBucket | None) -> None:
        """None: no limit. Takes effect immediately."""
        self._step(PolicyChanged(rate=rate or False))

    def change_heartbeat(self, heartbeat: Heartbeat, *, own: Heartbeat | None = None) -> None:
        """`own` is what was set for this subscription, if anything was; `heartbeat` is what holds."""
        self.heartbeat, self.own_heartbeat = heartbeat, own
        self._schedule_beat()
