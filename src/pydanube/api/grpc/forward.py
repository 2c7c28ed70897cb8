"""Any broker takes any call about a topic: what only its owner can answer is passed on to the owner.

    operator ─► broker B ── not here: passed on, with what is left of the deadline ──► broker A, the owner
             ◄──────────── answer, or refusal, word for word ◄────────────────────────

Requests go by their field `topic`, or `topic_name`. A topic that no broker serves now is answered here: with the
reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.peers import CALL_SECONDS, FORWARDED, Peers
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import InvalidName
from pydanube.wire.status import Code

# What the owner's process must do, or alone knows. What is only in the metadata store any broker answers.
OWNERS: Final = frozenset(
    {
        "danube_admin.TopicAdmin.Unsubscribe",
        "danube_admin.TopicAdmin.SetSubscriptionFailurePolicy",
        "danube_admin.TopicAdmin.SetSubscriptionDispatchConfig",
        "danube_schema.SchemaRegistry.ConfigureTopicSchema",
        "danube_schema.SchemaRegistry.UpdateTopicValidationPolicy",
        "pydanube.admin.v1.Admin.ChangeFailurePolicy",
        "pydanube.admin.v1.Admin.ExplainSubscription",
        "pydanube.admin.v1.Admin.SeekSubscription",
        "pydanube.admin.v1.Admin.PeekTopic",
        "pydanube.admin.v1.Admin.SetHeartbeat",
        "pydanube.admin.v1.Admin.GetSubscriptionLag",
        "pydanube.admin.v1.Admin.StorageList",
        "pydanube.admin.v1.Admin.StorageVerify",
        "pydanube.admin.v1.Admin.GetRetention",
        "pydanube.admin.v1.Admin.SetRetention",
        "pydanube.admin.v1.Admin.ApplyRetention",
        "pydanube.admin.v1.Admin.DiscardOrphan",
    }
)
TRIES: Final = 3  # the topic may move while the call is on its way
MARGIN_SECONDS: Final = 0.2  # of the caller's deadline, so that it still hears our answer

Forward: TypeAlias = Callable[[Any, Any], Awaitable[Message | None]]
ForwardStream: TypeAlias = Callable[[Any, Any], Awaitable[bool]]


class Forwarder:
    def __init__(self, peers: Peers, refresh: Callable[[], Awaitable[object]]) -> None:
        self._peers = peers
        self._refresh = refresh  # makes what is known of the cluster fresh

    def unary(self, method: MethodDescriptor) -> Forward | None:
        """Answers a call for the owner, or returns None: it is ours to answer. None for calls that are always ours."""
        if method.full_name not in OWNERS:
            return None
        answer = GetMessageClass(method.output_type)
        path = _path(method)

        async def forward(request: Any, context: Any) -> Message | None:
            for _ in range(TRIES):
                owner = self._owner(request, context)
                if owner is None:
                    break
                try:
                    return await self._peers.call(owner, path, request, answer, seconds=_seconds(context))
                except grpc.aio.AioRpcError as error:
                    await self._judge(error, owner, request)
            return None

        return forward

    def stream(self, method: MethodDescriptor) -> ForwardStream | None:
        """The same for a stream of answers: True if it was answered."""
        if method.full_name not in OWNERS:
            return None
        answer = GetMessageClass(method.output_type)
        path = _path(method)

        async def forward(request: Any, context: Any) -> bool:
            owner = self._owner(request, context)
            if owner is None:
                return False
            try:
                async for message in self._peers.stream(owner, path, request, answer, seconds=context.time_remaining()):
                    await context.write(message)
            except grpc.aio.AioRpcError as error:
                raise passed(error.code(), self._peers.said(error, owner), owner) from error
            return True

        return forward

    def _owner(self, request: Any, context: Any) -> BrokerId | None:
        if is_forwarded(context):
            return None
        try:
            return self._peers.owner_of(_topic(request))
        except InvalidName:
            return None

    async def _judge(self, error: grpc.aio.AioRpcError, owner: BrokerId, request: Any) -> None:
        """Raises what the owner said, unless it said so because it is not the owner any more."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await self._refresh()
            if self._peers.owner_of(_topic(request)) != owner:
                return
        raise passed(error.code(), self._peers.said(error, owner), owner) from error


def _topic(request: Any) -> TopicName:
    return TopicName(request.topic_name if hasattr(request, "topic_name") else request.topic)


def is_forwarded(context: Any) -> bool:
    """Whether another broker forwarded the call."""
    return any(key == FORWARDED for key, _ in context.invocation_metadata() or ())


def passed(status: grpc.StatusCode, sentence: str, owner: BrokerId) -> RpcRefusal:
    """The owner's refusal, as the caller gets it."""
    code = Code[status.name]
    if code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNKNOWN):
        return RpcRefusal(Code.UNAVAILABLE, f"broker {owner} has the topic: {sentence}")
    return RpcRefusal(code, sentence)


def _seconds(context: Any) -> float:
    left = context.time_remaining()
    return CALL_SECONDS if left is None else max(left - MARGIN_SECONDS, left / 2)


def _path(method: MethodDescriptor) -> str:
    service = method.containing_service
    assert service is not None
    return f"{service.full_name}/{method.name}"
