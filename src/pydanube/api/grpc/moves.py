"""Topics on their way between brokers, over gRPC: the part of `pydanube.admin.v1` that is about the cluster."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.forward import is_forwarded
from pydanube.api.grpc.peers import Peers
from pydanube.api.moves import UNLOAD_SECONDS, Moves
from pydanube.broker.service import Broker
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import TopicUnknown
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from pydanube.wire.status import Code

HISTORY_DEFAULT: Final = 100


class MoveCalls:
    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._moves = Moves(broker, peers)

    async def TopicState(self, request: pb.TopicStateRequest, context: Any) -> pb.TopicStateResponse:
        name = TopicName(request.topic)
        return await (self._moves.state_here(name) if is_forwarded(context) else self._moves.state(name))

    async def MovePhases(self, request: pb.MovePhasesRequest, context: Any) -> pb.MovePhasesResponse:
        """A standalone broker's topics never moved."""
        name = TopicName(request.topic)
        if is_forwarded(context):
            return pb.MovePhasesResponse(moves=self._moves.past_here(name))
        if not await self._topics.exists(name):
            raise TopicUnknown(name)
        return pb.MovePhasesResponse(moves=await self._moves.past(name))

    async def UnloadTopic(self, request: pb.UnloadTopicRequest, context: Any) -> None:
        writing = asyncio.Lock()  # partitions move side by side, and gRPC takes one message at a time

        async def write(message: pb.UnloadTopicResponse) -> None:
            async with writing:
                await context.write(message)

        async def send(message: pb.UnloadTopicResponse) -> None:
            # The reporting task is cancelled when the move is done; a message in the middle of a write goes out first.
            task = asyncio.create_task(write(message))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(task)

        async def on_progress(progress: pb.UnloadProgress) -> None:
            await send(pb.UnloadTopicResponse(progress=progress))

        results = await self._moves.unload(
            TopicName(request.topic),
            BrokerId(request.to_broker) if request.to_broker else None,
            wait=request.wait,
            seconds=float(request.timeout_seconds or UNLOAD_SECONDS),
            on_progress=on_progress,
        )
        for result in results:
            await send(pb.UnloadTopicResponse(result=result))

    async def SetOnCrash(self, request: pb.SetOnCrashRequest) -> pb.SetOnCrashResponse:
        topics = await self._topics.set_on_crash(TopicName(request.topic), wait=request.wait)
        return pb.SetOnCrashResponse(topics=topics)

    async def DiscardOrphan(self, request: pb.DiscardOrphanRequest) -> pb.DiscardOrphanResponse:
        name = TopicName(request.topic)
        topic = await self._topics.require(name)
        orphan = await topic.discard_orphan(request.first) if topic.reliable else None
        if orphan is None:
            raise RpcRefusal(
                Code.NOT_FOUND,
                f"topic {name} has no orphan that begins at {request.first}: `topics orphan list` shows those that are",
            )
        return pb.DiscardOrphanResponse(first=orphan.start, end=orphan.end)

    async def RebalancingHistory(self, request: pb.RebalancingHistoryRequest) -> pb.RebalancingHistoryResponse:
        """A standalone broker has none."""
        cluster = self._broker.cluster
        moves = cluster.requests.history() if cluster is not None else []
        return pb.RebalancingHistoryResponse(
            moves=[
                pb.RebalancingMove(
                    topic=move.topic,
                    from_broker=move.from_broker,
                    to_broker=move.to_broker,
                    estimated_load=move.estimated_load,
                    reason=move.reason,
                    time_ms=move.timestamp,
                )
                for move in moves[: request.count_max or HISTORY_DEFAULT]
            ]
        )
