"""The other brokers of the cluster, as this one calls them: on the admin address that each has registered.

A call that one broker forwards carries `x-danube-forwarded` with its id: the receiver answers it itself or refuses it,
so that no call is forwarded in circles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from pydanube.broker.catalog import Live
from pydanube.broker.dead_letters import append_to
from pydanube.broker.overview import Overview
from pydanube.broker.service import Broker
from pydanube.broker.table_flushes import Flushes
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError, NotServed, Refused, TopicUnknown, Unreachable
from pydanube.formats.batch import Envelope, encode, messages, parse, rows_of
from pydanube.wire._pb.pydanube import peers_pb2 as pb

M = TypeVar("M", bound=Message)

FORWARDED: Final = "x-danube-forwarded"
SERVICE: Final = "pydanube.peers.v1.Peers"
CALL_SECONDS: Final = 30.0
FLUSH_SECONDS: Final = 1.0
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # A broker that comes back is found soon, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Peers:
    """One channel to each broker that was ever called. Implements `catalog.Remote`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._channels: dict[str, Any] = {}

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    # --- whom to call -------------------------------------------------------------------------------------

    def owner_of(self, topic: TopicName) -> BrokerId | None:
        """The other living broker that has the topic; None if it is here, or has no owner."""
        cluster = self._broker.cluster
        if cluster is None or self._broker.topics.get(topic) is not None:
            return None
        host = cluster.host_of(topic)
        return host if host != self._broker.broker_id and host in cluster.peers else None

    def others(self) -> list[BrokerId]:
        cluster = self._broker.cluster
        return [] if cluster is None else sorted(each for each in cluster.peers if each != self._broker.broker_id)

    # --- calling ------------------------------------------------------------------------------------------

    async def call(
        self, peer: BrokerId, method: str, request: Message, answer: type[M], *, seconds: float = CALL_SECONDS
    ) -> M:
        """Raises AioRpcError, or Unreachable for a broker that has just gone."""
        channel = self._channel(peer)
        call = channel.unary_unary(
            f"/{method}", request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        response: M = await call(request, timeout=seconds, metadata=self._metadata())
        return response

    async def stream(
        self, peer: BrokerId, method: str, request: Message, answer: type[M], *, seconds: float | None = None
    ) -> AsyncIterator[M]:
        """As `call`, of as many answers as there are."""
        channel = self._channel(peer)
        call = channel.unary_stream(
            f"/{method}", request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )(request, timeout=seconds, metadata=self._metadata())
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((FORWARDED, str(self._broker.broker_id)),)

    def _channel(self, peer: BrokerId) -> Any:
        cluster = self._broker.cluster
        registration = cluster.peers.get(peer) if cluster is not None else None
        if registration is None:
            raise Unreachable(f"broker {peer}", "it is not registered any more")
        address = registration.admin_addr.partition("://")[2] or registration.admin_addr
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return channel

    def said(self, error: grpc.aio.AioRpcError, peer: BrokerId) -> str:
        """The peer's own sentence, or that it says nothing: gRPC's words are of a connection that is ours alone."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it did not answer in time"
        cluster = self._broker.cluster
        registration = cluster.peers.get(peer) if cluster is not None else None
        if registration is None:
            return "it is not registered any more"
        if error.code() is grpc.StatusCode.UNAVAILABLE and not self._hears(peer):
            return f"nobody answers at {registration.broker_url.rpartition('://')[2]}"
        return error.details() or "no reason given"

    def _hears(self, peer: BrokerId) -> bool:
        return self._channel(peer).get_state() is grpc.ChannelConnectivity.READY

    # --- what topics ask ----------------------------------------------------------------------------------

    async def delete(self, topic: TopicName) -> None:
        await self._ask_owner(topic, "DeleteTopic", pb.DeleteTopicRequest(topic=topic), pb.DeleteTopicResponse)

    async def append(self, topic: TopicName, message: Envelope) -> None:
        batch = encode(rows_of([message]), topic=topic).to_bytes()
        await self._ask_owner(topic, "Append", pb.AppendRequest(topic=topic, batch=batch), pb.AppendResponse)

    async def live(self, topic: TopicName) -> Live:
        answer = await self._ask_owner(topic, "Live", pb.LiveRequest(topic=topic), pb.LiveResponse)
        return Live(answer.first_offset, answer.head, answer.producers, answer.consumers)

    async def flush(self, topics: Sequence[TopicName]) -> None:
        of_owner: dict[BrokerId, list[str]] = {}
        for topic in topics:
            if (owner := self.owner_of(topic)) is not None:
                of_owner.setdefault(owner, []).append(topic)

        async def ask(owner: BrokerId, topics: Sequence[str]) -> None:
            request = pb.FlushRequest(topics=topics)
            try:
                await self.call(owner, f"{SERVICE}/Flush", request, pb.FlushResponse, seconds=FLUSH_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise Unreachable(f"broker {owner}", self.said(error, owner)) from error

        asked = [ask(owner, topics) for owner, topics in of_owner.items()]
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _ask_owner(self, topic: TopicName, method: str, request: Message, answer: type[M]) -> M:
        owner = self.owner_of(topic)
        if owner is None:
            directory = self._broker.topics.directory
            raise NotServed(topic, *(directory.where(topic) if directory is not None else ("nobody has it",)))
        try:
            return await self.call(owner, f"{SERVICE}/{method}", request, answer)
        except grpc.aio.AioRpcError as error:
            raise error_of(error.code(), self.said(error, owner), owner, topic) from error


def error_of(code: grpc.StatusCode, sentence: str, peer: BrokerId, topic: TopicName) -> DanubeError:
    """What another broker said, in the words of this one."""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return Unreachable(f"broker {peer}, which has {topic},", sentence)
    if code is grpc.StatusCode.NOT_FOUND:
        return TopicUnknown(topic)
    if code is grpc.StatusCode.INTERNAL:
        return DanubeError(f"broker {peer}: {sentence}")
    return Refused(f"broker {peer}: {sentence}")


class PeerService:
    """The same calls on the owner's side."""

    def __init__(self, broker: Broker, flushes: Flushes) -> None:
        self._topics = broker.topics
        self._overview = Overview(broker)
        self._flushes = flushes

    async def Live(self, request: pb.LiveRequest) -> pb.LiveResponse:
        name = TopicName(request.topic)
        await self._topics.require(name)
        return pb.LiveResponse(**(await self._overview.live(name))._asdict())

    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> pb.DeleteTopicResponse:
        await self._topics.delete_here(await self._topics.require(TopicName(request.topic)))
        return pb.DeleteTopicResponse()

    async def Append(self, request: pb.AppendRequest) -> pb.AppendResponse:
        topic = await self._topics.require(TopicName(request.topic))
        for message in messages(parse(request.batch)):
            await append_to(topic, message)
        return pb.AppendResponse()

    async def Flush(self, request: pb.FlushRequest) -> pb.FlushResponse:
        """Begun when this returns, not done."""
        self._flushes.begin(map(TopicName, request.topics), only_here=True)
        return pb.FlushResponse()
