"""The part of `pydanube.admin.v1` that changes limits and failure policies: only what is given; says what changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.admin import reliable_topic
from pydanube.broker.service import Broker
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.names import NamespaceName, SubscriptionName, TopicName
from pydanube.core.policies import LIMITS
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from pydanube.wire.status import Code

POLICY_FIELDS: Final = tuple(FailurePolicy().to_json())


class PolicyCalls:
    def __init__(self, broker: Broker) -> None:
        self._limits = broker.namespace_limits
        self._topics = broker.topics

    async def SetNamespaceLimits(self, request: pb.SetNamespaceLimitsRequest) -> pb.NamespaceLimitsResponse:
        given = {name: getattr(request.limits, name) for name in LIMITS if request.limits.HasField(name)}
        if not given and not request.reset:
            raise RpcRefusal(Code.INVALID_ARGUMENT, f"say which limits to set or to reset: {', '.join(LIMITS)}")
        done = await self._limits.set(NamespaceName(request.namespace), given, request.reset)
        return pb.NamespaceLimitsResponse(
            changes=changes(done.before.limits(), done.after.limits()),
            limits=pb.NamespaceLimits(**done.after.limits()),
            set_here=done.set_here,
            topics=done.topics,
        )

    async def ChangeFailurePolicy(self, request: pb.ChangeFailurePolicyRequest) -> pb.ChangeFailurePolicyResponse:
        """In effect immediately, and kept for a subscription that does not exist yet."""
        name, subscription = TopicName(request.topic), SubscriptionName(request.subscription)
        given: dict[str, object] = {each: getattr(request, each) for each in POLICY_FIELDS if request.HasField(each)}
        if not given:
            raise RpcRefusal(Code.INVALID_ARGUMENT, f"say what to change: {', '.join(POLICY_FIELDS)}")
        if "dead_letter_topic" in given:
            given["dead_letter_topic"] = str(given["dead_letter_topic"]).strip() or None
        if given.get("dead_letter_topic") == name:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT, f"dead_letter_topic = {name} is not allowed: its poison would come back for ever"
            )
        reliable_topic(await self._topics.require(name), "a failure policy")
        before, after = await self._topics.change_failure_policy(name, subscription, given)
        return pb.ChangeFailurePolicyResponse(changes=changes(before.to_json(), after.to_json()))


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[pb.Change]:
    return [
        pb.Change(name=name, before=_text(before.get(name)), after=_text(value))
        for name, value in after.items()
        if value != before.get(name)
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)
