"""Sends what the outbox of a native consumer holds, as fast as its peer takes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydanube.api.native.handle_table import HandleTable
from pydanube.api.native.handles import ConsumerHandle, fits, groups_of, parts_of
from pydanube.api.native.intake import PARSE_ON_LOOP_BYTES
from pydanube.broker.outbox import DeliveredBatch, RecalledRanges
from pydanube.errors import MessageTooLarge, NotServed, SubscriptionBusy
from pydanube.formats.batch import in_version_1
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire

if TYPE_CHECKING:
    from pydanube.api.native.connection import NativeConnection


class Pump:
    """One consumer's way from its outbox to the peer."""

    __slots__ = ("_connection", "_consuming", "_handles")

    def __init__(self, connection: NativeConnection, handles: HandleTable, consuming: ConsumerHandle) -> None:
        self._connection = connection
        self._handles = handles
        self._consuming = consuming

    async def run(self) -> None:
        consuming, session = self._consuming, self._connection.session
        while session.end is None:
            items = await consuming.outbox.get()
            if not items:
                self._ended()
                return
            for item in items if consuming.is_reliable else consuming.packed(items):
                if isinstance(item, RecalledRanges):
                    ranges = frames.flat(item.ranges)
                    recall = pb.Recall(consumer=consuming.handle, ranges=ranges, seeks=item.seeks, taken=item.taken)
                    self._connection.send(pb.Command(recall=recall))
                    continue
                groups, cost_bytes = groups_of(item)
                if not groups and fits(item.batch, session.frame_size_max):
                    await self._deliver(item)
                    continue
                cutting = partial(parts_of, item, groups, session.frame_size_max)
                is_quick = 0 < cost_bytes <= PARSE_ON_LOOP_BYTES and item.batch.header.codec == 0
                try:
                    parts = cutting() if is_quick else await self._connection.broker.run(cutting)
                except MessageTooLarge as error:
                    self._handles.forget(consuming)
                    consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
                    self._connection.send(pb.Command(error=to_wire(error, consumer=consuming.handle)))
                    return
                consuming.account(item, parts)
                for part in parts:
                    await self._deliver(part)

    async def _deliver(self, item: DeliveredBatch) -> None:
        await self._connection.writable.wait()
        consuming = self._consuming
        wanted = consuming.wanted(item)
        if wanted is None:
            return
        deliver = pb.Deliver(
            consumer=consuming.handle, ranges=frames.flat(wanted.ranges), attempt=item.attempt, seeks=item.seeks
        )
        batch = item.batch
        if batch.header.envelope > self._connection.session.envelope_version:
            batch = in_version_1(batch)
        self._connection.send(pb.Command(deliver=deliver), *batch.buffers)
        consuming.sent(wanted)

    def _ended(self) -> None:
        consuming = self._consuming
        ended = consuming.outbox.ended
        if isinstance(ended, NotServed):
            return  # the topic closes: the handle table tells the peer when all its handles have ended
        if self._handles.consumer(consuming.handle) is not None:  # else it was the peer who closed it
            self._handles.forget(consuming)
            taken = SubscriptionBusy(consuming.topic.name, consuming.subscription.name, "a newer one of this name")
            self._connection.send(pb.Command(error=to_wire(ended or taken, consumer=consuming.handle)))
