"""Administration over gRPC: namespaces, topics and subscriptions, on the admin port of any broker.

Codes mean what they say (`status.ADMIN`): the reference answers NOT_FOUND to nearly everything. What is written down is
answered by the broker that is asked; what only a topic's owner can do is passed on to it (`forward.py`). Brokers are in
`cluster.py`; our own service, `pydanube.admin.v1`, is in `extensions.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from typing import Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.peers import Peers
from pydanube.api.moves import Moves, whole
from pydanube.api.operations import TopicOperations
from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.overview import Overview
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_ALLOWED
from pydanube.core.names import NamespaceName, SubscriptionName, TopicName, parse_broker_id
from pydanube.core.policies import SUBSCRIPTION_TYPES, Delivery
from pydanube.errors import InvalidName, TopicUnknown
from pydanube.history.side_by_side import gather_bounded
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire.convert import failure_policy_message, failure_policy_of
from pydanube.wire.status import Code

DELIVERY: Final = {pb.NonReliable: Delivery.NON_RELIABLE, pb.Reliable: Delivery.RELIABLE}


class SecurityAdmin:
    unimplemented = "this broker has no authentication yet"


class NamespaceAdmin:
    def __init__(self, broker: Broker) -> None:
        self._topics = broker.topics

    async def GetNamespaceTopics(self, request: pb.NamespaceRequest) -> pb.TopicListResponse:
        names = await self._topics.names(NamespaceName(request.name))
        return pb.TopicListResponse(topics=[name.removeprefix("/") for name in names])

    async def GetNamespacePolicies(self, request: pb.NamespaceRequest) -> pb.PolicyResponse:
        policy = await self._topics.namespace_policy(NamespaceName(request.name))
        return pb.PolicyResponse(policies=json.dumps(policy.to_json()))

    async def CreateNamespace(self, request: pb.NamespaceRequest) -> pb.NamespaceResponse:
        await self._topics.create_namespace(NamespaceName(request.name))
        return pb.NamespaceResponse(success=True)

    async def DeleteNamespace(self, request: pb.NamespaceRequest) -> pb.NamespaceResponse:
        await self._topics.delete_namespace(NamespaceName(request.name))
        return pb.NamespaceResponse(success=True)


class TopicAdmin:
    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._operations = TopicOperations(broker)
        self._overview = Overview(broker)
        self._schemas = broker.schemas
        self._moves = Moves(broker, peers)

    # --- topics -------------------------------------------------------------------------------------

    async def ListNamespaceTopics(self, request: pb.NamespaceRequest) -> pb.TopicInfoListResponse:
        return await self._infos(await self._topics.names(NamespaceName(request.name)))

    async def ListBrokerTopics(self, request: pb.BrokerRequest) -> pb.TopicInfoListResponse:
        broker, cluster = parse_broker_id(request.broker_id), self._broker.cluster
        names: Collection[TopicName] = ()
        if cluster is not None:
            names = cluster.view.assigned.get(broker, ())
        elif broker == self._broker.broker_id:
            names = [topic.name for topic in self._topics.loaded]
        return await self._infos(sorted(names))

    async def CreateTopic(self, request: pb.NewTopicRequest) -> pb.TopicResponse:
        delivery = delivery_of(request.dispatch_strategy)
        await self._operations.create(TopicName(request.name), delivery, request.schema_subject or None)
        return pb.TopicResponse(success=True)

    async def CreatePartitionedTopic(self, request: pb.PartitionedTopicRequest) -> pb.TopicResponse:
        delivery = delivery_of(request.dispatch_strategy)
        await self._operations.create_partitioned(
            TopicName(request.base_name), request.partitions, delivery, request.schema_subject or None
        )
        return pb.TopicResponse(success=True)

    async def DeleteTopic(self, request: pb.TopicRequest) -> pb.TopicResponse:
        await self._operations.delete(TopicName(request.name))
        return pb.TopicResponse(success=True)

    async def UnloadTopic(self, request: pb.TopicRequest) -> pb.TopicResponse:
        """Answers when the old owner has released the topic; of a base, the owners of all partitions."""
        whole(await self._moves.unload(TopicName(request.name)))
        return pb.TopicResponse(success=True)

    async def DescribeTopic(self, request: pb.DescribeTopicRequest) -> pb.DescribeTopicResponse:
        """As the metadata store has it, whichever broker serves it. `TopicState` says which one does."""
        found = await self._overview.describe(TopicName(request.name))
        subject = await self._schemas.find(found.schema_subject) if found.schema_subject is not None else None
        return pb.DescribeTopicResponse(
            name=found.topic,
            subscriptions=sorted(found.subscriptions),
            broker_id=str(found.broker or ""),
            delivery=found.delivery.value,
            schema_subject=found.schema_subject,
            schema_id=subject.schema_id if subject is not None else None,
            schema_version=subject.latest if subject is not None else None,
            schema_type=subject.type.value if subject is not None else None,
            compatibility_mode=subject.compatibility.mode.value.upper() if subject is not None else None,
        )

    async def _infos(self, names: Sequence[TopicName]) -> pb.TopicInfoListResponse:
        found = await gather_bounded([functools.partial(self._info, name) for name in names])
        infos = []
        for each in found:
            if isinstance(each, TopicUnknown):
                continue  # it was deleted in the meantime
            if isinstance(each, BaseException):
                raise each
            infos.append(each)
        return pb.TopicInfoListResponse(topics=infos)

    async def _info(self, name: TopicName) -> pb.TopicInfo:
        """A topic that is not served belongs to no broker."""
        host = self._overview.host_of(name)
        delivery = await self._overview.delivery(name)
        return pb.TopicInfo(name=name, broker_id=str(host or ""), delivery=delivery.value)

    # --- subscriptions ------------------------------------------------------------------------------

    async def ListSubscriptions(self, request: pb.TopicRequest) -> pb.SubscriptionListResponse:
        """Empty for an unknown topic."""
        try:
            found = await self._overview.describe(TopicName(request.name))
        except TopicUnknown:
            return pb.SubscriptionListResponse()
        return pb.SubscriptionListResponse(subscriptions=sorted(found.subscriptions))

    async def Unsubscribe(self, request: pb.SubscriptionRequest) -> pb.SubscriptionResponse:
        await self._operations.unsubscribe(TopicName(request.topic), SubscriptionName(request.subscription))
        return pb.SubscriptionResponse(success=True)

    async def SetSubscriptionFailurePolicy(
        self, request: pb.SetSubscriptionFailurePolicyRequest
    ) -> pb.SubscriptionResponse:
        """In effect immediately, and kept for a subscription that does not exist yet."""
        name, subscription = TopicName(request.topic), SubscriptionName(request.subscription)
        if not request.HasField("failure_policy"):
            raise RpcRefusal(Code.INVALID_ARGUMENT, "failure_policy is missing")
        policy = failure_policy_of(request.failure_policy)
        if policy.dead_letter_topic == name:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT, f"dead_letter_topic = {name} is not allowed: its poison would come back for ever"
            )
        await self._reliable(name, "a failure policy")
        await self._topics.set_failure_policy(name, subscription, policy)
        return pb.SubscriptionResponse(success=True)

    async def GetSubscriptionFailurePolicy(
        self, request: pb.GetSubscriptionFailurePolicyRequest
    ) -> pb.GetSubscriptionFailurePolicyResponse:
        """Never an error: what is not known has no policy."""
        try:
            name, subscription = TopicName(request.topic), SubscriptionName(request.subscription)
        except InvalidName:
            return pb.GetSubscriptionFailurePolicyResponse()
        policy = await self._topics.get_failure_policy(name, subscription)
        try:
            kind = (await self._overview.describe(name)).subscriptions.get(subscription)
        except TopicUnknown:
            kind = None
        return pb.GetSubscriptionFailurePolicyResponse(
            failure_policy=None if policy is None else failure_policy_message(policy),
            subscription_type=0 if kind is None else SUBSCRIPTION_TYPES.index(kind),
        )

    async def SetSubscriptionDispatchConfig(
        self, request: pb.SetSubscriptionDispatchConfigRequest
    ) -> pb.SubscriptionResponse:
        name, subscription = TopicName(request.topic), SubscriptionName(request.subscription)
        if not request.HasField("dispatch_config"):
            raise RpcRefusal(Code.INVALID_ARGUMENT, "dispatch_config is missing")
        unacked_max = request.dispatch_config.max_unacked_messages
        if not 1 <= unacked_max <= UNACKED_MAX_ALLOWED:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT,
                f"max_unacked_messages = {unacked_max} is not allowed: from 1 to {UNACKED_MAX_ALLOWED}",
            )
        await self._reliable(name, "a dispatch configuration")
        await self._topics.set_dispatch_config(name, subscription, unacked_max=unacked_max)
        return pb.SubscriptionResponse(success=True)

    async def GetSubscriptionDispatchConfig(
        self, request: pb.GetSubscriptionDispatchConfigRequest
    ) -> pb.GetSubscriptionDispatchConfigResponse:
        try:
            name, subscription = TopicName(request.topic), SubscriptionName(request.subscription)
        except InvalidName:
            return pb.GetSubscriptionDispatchConfigResponse()
        config = await self._topics.get_dispatch_config(name, subscription)
        if config.unacked_max is None:
            return pb.GetSubscriptionDispatchConfigResponse()
        return pb.GetSubscriptionDispatchConfigResponse(
            dispatch_config=pb.SubscriptionDispatchConfig(max_unacked_messages=config.unacked_max)
        )

    async def _reliable(self, name: TopicName, what: str) -> None:
        try:
            reliable_topic(await self._topics.require(name), what)
        except TopicUnknown as unknown:
            raise RpcRefusal(Code.FAILED_PRECONDITION, str(unknown)) from unknown


def reliable_topic(topic: AnyTopic, what: str) -> Topic:
    if not topic.reliable:
        raise RpcRefusal(
            Code.FAILED_PRECONDITION,
            f"topic {topic.name} is not reliable: it keeps no messages, so {what} means nothing",
        )
    return topic


def delivery_of(number: pb.DispatchStrategy) -> Delivery:
    if number not in DELIVERY:
        raise RpcRefusal(
            Code.INVALID_ARGUMENT, f"dispatch_strategy {number} is not known: 0 is NonReliable, 1 is Reliable"
        )
    return DELIVERY[number]
