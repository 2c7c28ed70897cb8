"""Which broker serves a topic: any broker of a cluster tells, and only the owner takes its messages.

async with Owners(connection) as owners:
    broker = await owners.of("/default/orders")
    ...
    owners.forget("/default/orders")            after a failure: another broker may have it by now
"""

from __future__ import annotations

from typing import Self, TypeVar

from google.protobuf.message import Message

from pydanube.client.grpc.connection import BrokerRefused, GrpcCall, GrpcConnection, with_retries
from pydanube.errors import DanubeError
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb

M = TypeVar("M", bound=Message)

NOT_FOUND = "NOT_FOUND"


class Owners:
    """Connections by topic. `first` is the broker that the user named; the caller closes it."""

    def __init__(self, first: GrpcConnection) -> None:
        self.first = first
        self._found: dict[str, GrpcConnection] = {}
        self._others: dict[str, GrpcConnection] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._others.values():
            await each.__aexit__()

    async def of(self, topic: str) -> GrpcConnection:
        """The first broker, if the topic does not exist yet or has no owner at the moment."""
        if topic not in self._found:
            self._found[topic] = await self._look_up(topic)
        return self._found[topic]

    async def ask(self, topic: str, call: GrpcCall[M]) -> M:
        """A call to the owner, retried for a while. Raises BrokerRefused or Unreachable."""

        async def once() -> M:
            broker = await self.of(topic)
            try:
                return await broker.ask(call)
            except DanubeError:
                self.forget(topic)
                raise

        return await with_retries(once)

    def forget(self, topic: str) -> None:
        self._found.pop(topic, None)

    async def _look_up(self, topic: str) -> GrpcConnection:
        request = pb.TopicLookupRequest(request_id=1, topic=topic)
        try:
            answer = await self.first.call("danube.Discovery/TopicLookup", request, pb.TopicLookupResponse)
        except BrokerRefused as error:
            if error.code != NOT_FOUND:
                raise
            return self.first
        if answer.response_type != pb.TopicLookupResponse.Redirect:
            return self.first
        if answer.connect_url not in self._others:
            self._others[answer.connect_url] = await GrpcConnection(answer.connect_url).__aenter__()
        return self._others[answer.connect_url]
