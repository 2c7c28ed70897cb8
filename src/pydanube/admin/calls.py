"""The admin services, a function per call: arguments in, a `GrpcCall` out, which a connection or gateway carries out.

    found = await broker.ask(calls.describe_topic("/default/orders"))
    async for answer in broker.follow(calls.move_topic("/default/orders", wait=True)):
        ...

Nothing is sent here. Errors are those of whatever carries the call out: `BrokerRefused` with the broker's sentence,
`Unreachable`, `WrongPort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from pydanube.admin import values
from pydanube.client.grpc.connection import GrpcCall
from pydanube.core.units import UNIX_EPOCH
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from pydanube.wire._pb.pydanube import pipelines_pb2 as pipelines
from pydanube.wire._pb.pydanube import status_pb2 as status

BROKERS: Final = "danube_admin.BrokerAdmin"
METADATA: Final = "danube_admin.ClusterAdmin"
NAMESPACES: Final = "danube_admin.NamespaceAdmin"
TOPICS: Final = "danube_admin.TopicAdmin"
OURS: Final = "pydanube.admin.v1.Admin"
STATUS: Final = "pydanube.admin.v1.Status"
PIPELINES: Final = "pydanube.admin.v1.Pipelines"
RELIABLE: Final = "Reliable"  # as a broker says it

# --- brokers --------------------------------------------------------------------------------------------


def list_brokers() -> GrpcCall[pb.BrokerListResponse]:
    return GrpcCall(f"{BROKERS}/ListBrokers", pb.Empty(), pb.BrokerListResponse)


def leader() -> GrpcCall[pb.BrokerResponse]:
    return GrpcCall(f"{BROKERS}/GetLeaderBroker", pb.Empty(), pb.BrokerResponse)


def drain_broker(request: values.UnloadBrokerRequest) -> GrpcCall[values.DrainResult]:
    return GrpcCall(f"{BROKERS}/UnloadBroker", request, pb.UnloadBrokerResponse, changes=True)


def activate_broker(broker_id: str, reason: str) -> GrpcCall[pb.ActivateBrokerResponse]:
    request = pb.ActivateBrokerRequest(broker_id=broker_id, reason=reason)
    return GrpcCall(f"{BROKERS}/ActivateBroker", request, pb.ActivateBrokerResponse, changes=True)


def balance() -> GrpcCall[values.ClusterBalance]:
    return GrpcCall(f"{BROKERS}/GetClusterBalance", pb.ClusterBalanceRequest(), pb.ClusterBalanceResponse)


def rebalance(request: values.RebalanceRequest) -> GrpcCall[pb.RebalanceResponse]:
    return GrpcCall(f"{BROKERS}/TriggerRebalance", request, pb.RebalanceResponse, changes=True)


def rebalancing_history(count_max: int) -> GrpcCall[ours.RebalancingHistoryResponse]:
    request = ours.RebalancingHistoryRequest(count_max=count_max)
    return GrpcCall(f"{OURS}/RebalancingHistory", request, ours.RebalancingHistoryResponse)


def forget_broker(broker_id: int) -> GrpcCall[status.ForgetBrokerResponse]:
    request = status.ForgetBrokerRequest(broker_id=broker_id)
    return GrpcCall(f"{STATUS}/ForgetBroker", request, status.ForgetBrokerResponse, changes=True)


# --- the cluster ----------------------------------------------------------------------------------------


def cluster_status() -> GrpcCall[values.ClusterStatus]:
    return GrpcCall(f"{STATUS}/ClusterStatus", status.ClusterStatusRequest(), status.ClusterStatusResponse)


def list_connections(topic: str, count_max: int) -> GrpcCall[values.ConnectionList]:
    """Of one topic, or of all if `topic` is empty."""
    request = status.ListConnectionsRequest(topic=topic, count_max=count_max)
    return GrpcCall(f"{STATUS}/ListConnections", request, status.ListConnectionsResponse)


def list_events(count_max: int) -> GrpcCall[status.ListEventsResponse]:
    return GrpcCall(f"{STATUS}/ListEvents", status.ListEventsRequest(count_max=count_max), status.ListEventsResponse)


def note_order(
    order: str, topic: str, *, to: str = "", offset: int | None = None, sent: int | None = None
) -> GrpcCall[status.NoteOrderResponse]:
    """Writes down, among the events, what was done through the native protocol."""
    request = status.NoteOrderRequest(order=order, topic=topic, to_topic=to, offset=offset, count=sent)
    return GrpcCall(f"{STATUS}/NoteOrder", request, status.NoteOrderResponse, changes=True)


def metadata_status() -> GrpcCall[values.MetadataStatus]:
    """Of the members of the metadata store."""
    return GrpcCall(f"{METADATA}/ClusterStatus", pb.Empty(), pb.ClusterStatusResponse)


def add_member(address: str, node_id: int) -> GrpcCall[pb.AddNodeResponse]:
    request = pb.AddNodeRequest(addr=address, node_id=node_id)
    return GrpcCall(f"{METADATA}/AddNode", request, pb.AddNodeResponse, changes=True)


def promote_member(node_id: int) -> GrpcCall[pb.PromoteNodeResponse]:
    return GrpcCall(
        f"{METADATA}/PromoteNode", pb.PromoteNodeRequest(node_id=node_id), pb.PromoteNodeResponse, changes=True
    )


def remove_member(node_id: int) -> GrpcCall[pb.RemoveNodeResponse]:
    return GrpcCall(
        f"{METADATA}/RemoveNode", pb.RemoveNodeRequest(node_id=node_id), pb.RemoveNodeResponse, changes=True
    )


# --- namespaces -----------------------------------------------------------------------------------------


def list_namespaces() -> GrpcCall[pb.NamespaceListResponse]:
    return GrpcCall(f"{BROKERS}/ListNamespaces", pb.Empty(), pb.NamespaceListResponse)


def topic_names(namespace: str) -> GrpcCall[pb.TopicListResponse]:
    return GrpcCall(f"{NAMESPACES}/GetNamespaceTopics", pb.NamespaceRequest(name=namespace), pb.TopicListResponse)


def namespace_policies(namespace: str) -> GrpcCall[pb.PolicyResponse]:
    return GrpcCall(f"{NAMESPACES}/GetNamespacePolicies", pb.NamespaceRequest(name=namespace), pb.PolicyResponse)


def create_namespace(namespace: str) -> GrpcCall[pb.NamespaceResponse]:
    request = pb.NamespaceRequest(name=namespace)
    return GrpcCall(f"{NAMESPACES}/CreateNamespace", request, pb.NamespaceResponse, changes=True)


def delete_namespace(namespace: str) -> GrpcCall[pb.NamespaceResponse]:
    request = pb.NamespaceRequest(name=namespace)
    return GrpcCall(f"{NAMESPACES}/DeleteNamespace", request, pb.NamespaceResponse, changes=True)


def set_namespace_limits(request: values.SetNamespaceLimitsRequest) -> GrpcCall[ours.NamespaceLimitsResponse]:
    return GrpcCall(f"{OURS}/SetNamespaceLimits", request, ours.NamespaceLimitsResponse, changes=True)


# --- topics ---------------------------------------------------------------------------------------------


def list_topics(namespace: str) -> GrpcCall[pb.TopicInfoListResponse]:
    return GrpcCall(f"{TOPICS}/ListNamespaceTopics", pb.NamespaceRequest(name=namespace), pb.TopicInfoListResponse)


def topics_of_broker(broker_id: str) -> GrpcCall[pb.TopicInfoListResponse]:
    return GrpcCall(f"{TOPICS}/ListBrokerTopics", pb.BrokerRequest(broker_id=broker_id), pb.TopicInfoListResponse)


def create_topic(
    name: str, *, reliable: bool, partitions: int = 0, schema_subject: str | None = None
) -> GrpcCall[pb.TopicResponse]:
    """Partitioned, unless `partitions` is 0."""
    strategy = pb.Reliable if reliable else pb.NonReliable
    if not partitions:
        request = pb.NewTopicRequest(name=name, schema_subject=schema_subject, dispatch_strategy=strategy)
        return GrpcCall(f"{TOPICS}/CreateTopic", request, pb.TopicResponse, changes=True)
    partitioned = pb.PartitionedTopicRequest(
        base_name=name, partitions=partitions, schema_subject=schema_subject, dispatch_strategy=strategy
    )
    return GrpcCall(f"{TOPICS}/CreatePartitionedTopic", partitioned, pb.TopicResponse, changes=True)


def delete_topic(name: str) -> GrpcCall[pb.TopicResponse]:
    return GrpcCall(f"{TOPICS}/DeleteTopic", pb.TopicRequest(name=name), pb.TopicResponse, changes=True)


def unload_topic(name: str) -> GrpcCall[pb.TopicResponse]:
    """The reference's: one answer, when the owner has released the topic. `move_topic` tells how far it is."""
    return GrpcCall(f"{TOPICS}/UnloadTopic", pb.TopicRequest(name=name), pb.TopicResponse, changes=True)


def move_topic(
    topic: str, *, to_broker: int = 0, wait: bool = False, timeout_seconds: int = 0
) -> GrpcCall[values.MoveAnswer]:
    """To be followed: progress, then a result for the topic or each partition. `to_broker` 0: the leader chooses."""
    request = ours.UnloadTopicRequest(topic=topic, to_broker=to_broker, wait=wait, timeout_seconds=timeout_seconds)
    return GrpcCall(f"{OURS}/UnloadTopic", request, ours.UnloadTopicResponse, changes=True)


def describe_topic(name: str) -> GrpcCall[values.TopicDescription]:
    return GrpcCall(f"{TOPICS}/DescribeTopic", pb.DescribeTopicRequest(name=name), pb.DescribeTopicResponse)


def topic_state(topic: str) -> GrpcCall[values.TopicState]:
    return GrpcCall(f"{OURS}/TopicState", ours.TopicStateRequest(topic=topic), ours.TopicStateResponse)


def topic_moves(topic: str) -> GrpcCall[ours.MovePhasesResponse]:
    return GrpcCall(f"{OURS}/MovePhases", ours.MovePhasesRequest(topic=topic), ours.MovePhasesResponse)


def set_on_crash(topic: str, *, wait: bool) -> GrpcCall[ours.SetOnCrashResponse]:
    request = ours.SetOnCrashRequest(topic=topic, wait=wait)
    return GrpcCall(f"{OURS}/SetOnCrash", request, ours.SetOnCrashResponse, changes=True)


def peek(topic: str, offset: int | None, count: int, payload_max_bytes: int = 0) -> GrpcCall[ours.PeekTopicResponse]:
    """`offset` None: the newest messages. `payload_max_bytes` 0: whole payloads."""
    request = ours.PeekTopicRequest(topic=topic, offset=offset, count=count, payload_max_bytes=payload_max_bytes)
    return GrpcCall(f"{OURS}/PeekTopic", request, ours.PeekTopicResponse)


def discard_orphan(topic: str, first: int) -> GrpcCall[ours.DiscardOrphanResponse]:
    request = ours.DiscardOrphanRequest(topic=topic, first=first)
    return GrpcCall(f"{OURS}/DiscardOrphan", request, ours.DiscardOrphanResponse, changes=True)


# --- storage --------------------------------------------------------------------------------------------


def list_storage(topic: str, *, summary: bool = False) -> GrpcCall[values.StorageListing]:
    """`summary`: only `tiers`, from what the broker has in memory."""
    request = ours.StorageListRequest(topic=topic, summary=summary)
    return GrpcCall(f"{OURS}/StorageList", request, ours.StorageListResponse)


def verify_storage(topic: str, *, repair: bool) -> GrpcCall[ours.StorageVerifyResponse]:
    """To be followed: progress, then one report."""
    request = ours.StorageVerifyRequest(topic=topic, repair=repair)
    return GrpcCall(f"{OURS}/StorageVerify", request, ours.StorageVerifyResponse, changes=repair)


def retention(*, topic: str | None = None, namespace: str | None = None) -> GrpcCall[values.RetentionRule]:
    request = ours.GetRetentionRequest(topic=topic, namespace=namespace)
    return GrpcCall(f"{OURS}/GetRetention", request, ours.RetentionResponse)


def set_retention(request: values.SetRetentionRequest) -> GrpcCall[values.RetentionRule]:
    return GrpcCall(f"{OURS}/SetRetention", request, ours.RetentionResponse, changes=True)


def apply_retention(topic: str) -> GrpcCall[ours.ApplyRetentionResponse]:
    request = ours.ApplyRetentionRequest(topic=topic)
    return GrpcCall(f"{OURS}/ApplyRetention", request, ours.ApplyRetentionResponse, changes=True)


# --- subscriptions --------------------------------------------------------------------------------------


def subscriptions_of(topic: str) -> GrpcCall[pb.SubscriptionListResponse]:
    return GrpcCall(f"{TOPICS}/ListSubscriptions", pb.TopicRequest(name=topic), pb.SubscriptionListResponse)


def list_subscriptions(count_max: int, *, namespace: str = "", topic: str = "") -> GrpcCall[values.SubscriptionList]:
    """Of a namespace, of a topic, or of the cluster; furthest behind first."""
    request = status.ListSubscriptionsRequest(namespace=namespace, topic=topic, count_max=count_max)
    return GrpcCall(f"{STATUS}/ListSubscriptions", request, status.ListSubscriptionsResponse)


def unsubscribe(topic: str, subscription: str) -> GrpcCall[pb.SubscriptionResponse]:
    request = pb.SubscriptionRequest(topic=topic, subscription=subscription)
    return GrpcCall(f"{TOPICS}/Unsubscribe", request, pb.SubscriptionResponse, changes=True)


def explain(topic: str, subscription: str) -> GrpcCall[values.SubscriptionExplanation]:
    request = ours.ExplainSubscriptionRequest(topic=topic, subscription=subscription)
    return GrpcCall(f"{OURS}/ExplainSubscription", request, ours.ExplainSubscriptionResponse)


def lag(topic: str, subscription: str) -> GrpcCall[ours.GetSubscriptionLagResponse]:
    request = ours.GetSubscriptionLagRequest(topic=topic, subscription=subscription)
    return GrpcCall(f"{OURS}/GetSubscriptionLag", request, ours.GetSubscriptionLagResponse)


def seek(topic: str, subscription: str, to: str | int | datetime) -> GrpcCall[ours.SeekSubscriptionResponse]:
    """`to` is earliest, latest, an offset or a time."""
    request = ours.SeekSubscriptionRequest(topic=topic, subscription=subscription)
    if to == "earliest":
        request.earliest.SetInParent()
    elif to == "latest":
        request.latest.SetInParent()
    elif isinstance(to, datetime):
        request.time_us = (to - UNIX_EPOCH) // timedelta(microseconds=1)
    else:
        request.offset = int(to)
    return GrpcCall(f"{OURS}/SeekSubscription", request, ours.SeekSubscriptionResponse, changes=True)


def set_heartbeat(topic: str, heartbeat: str, subscription: str = "") -> GrpcCall[ours.SetHeartbeatResponse]:
    """Of one subscription, or of a topic's that have none of their own."""
    request = ours.SetHeartbeatRequest(topic=topic, subscription=subscription, heartbeat=heartbeat)
    return GrpcCall(f"{OURS}/SetHeartbeat", request, ours.SetHeartbeatResponse, changes=True)


def dispatch_config(topic: str, subscription: str) -> GrpcCall[pb.GetSubscriptionDispatchConfigResponse]:
    request = pb.GetSubscriptionDispatchConfigRequest(topic=topic, subscription=subscription)
    return GrpcCall(f"{TOPICS}/GetSubscriptionDispatchConfig", request, pb.GetSubscriptionDispatchConfigResponse)


def set_dispatch_config(topic: str, subscription: str, max_unacked_messages: int) -> GrpcCall[pb.SubscriptionResponse]:
    config = pb.SubscriptionDispatchConfig(max_unacked_messages=max_unacked_messages)
    request = pb.SetSubscriptionDispatchConfigRequest(topic=topic, subscription=subscription, dispatch_config=config)
    return GrpcCall(f"{TOPICS}/SetSubscriptionDispatchConfig", request, pb.SubscriptionResponse, changes=True)


def failure_policy(topic: str, subscription: str) -> GrpcCall[values.SubscriptionSettings]:
    request = pb.GetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription)
    return GrpcCall(f"{TOPICS}/GetSubscriptionFailurePolicy", request, pb.GetSubscriptionFailurePolicyResponse)


def set_failure_policy(
    topic: str, subscription: str, policy: values.SubscriptionFailurePolicy
) -> GrpcCall[pb.SubscriptionResponse]:
    request = pb.SetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription, failure_policy=policy)
    return GrpcCall(f"{TOPICS}/SetSubscriptionFailurePolicy", request, pb.SubscriptionResponse, changes=True)


def change_failure_policy(request: values.ChangeFailurePolicyRequest) -> GrpcCall[ours.ChangeFailurePolicyResponse]:
    """Only what the request has; the answer says what changed."""
    return GrpcCall(f"{OURS}/ChangeFailurePolicy", request, ours.ChangeFailurePolicyResponse, changes=True)


# --- tables -----------------------------------------------------------------------------------------------


def read_catalog(method: str, target: str, headers: Mapping[str, str]) -> GrpcCall[ours.ReadCatalogResponse]:
    """One HTTP request to the Iceberg catalog, as a broker answers it: a refusal is an answer, too."""
    request = ours.ReadCatalogRequest(method=method, target=target, headers=headers)
    return GrpcCall(f"{OURS}/ReadCatalog", request, ours.ReadCatalogResponse)


# --- pipelines --------------------------------------------------------------------------------------------


def apply_pipeline(name: str, declaration: str) -> GrpcCall[pipelines.ApplyPipelineResponse]:
    """`declaration` is JSON; one of a pipeline that is there changes it."""
    request = pipelines.ApplyPipelineRequest(name=name, declaration=declaration)
    return GrpcCall(f"{PIPELINES}/ApplyPipeline", request, pipelines.ApplyPipelineResponse, changes=True)


def list_pipelines(name: str = "") -> GrpcCall[values.PipelineList]:
    """All, or one, which is refused if there is none of that name."""
    return GrpcCall(
        f"{PIPELINES}/ListPipelines", pipelines.ListPipelinesRequest(name=name), pipelines.ListPipelinesResponse
    )


def delete_pipeline(name: str) -> GrpcCall[pipelines.DeletePipelineResponse]:
    request = pipelines.DeletePipelineRequest(name=name)
    return GrpcCall(f"{PIPELINES}/DeletePipeline", request, pipelines.DeletePipelineResponse, changes=True)


def pause_pipeline(name: str, paused: bool) -> GrpcCall[pipelines.PausePipelineResponse]:
    request = pipelines.PausePipelineRequest(name=name, paused=paused)
    return GrpcCall(f"{PIPELINES}/PausePipeline", request, pipelines.PausePipelineResponse, changes=True)


def join_supervisor(supervisor: str) -> GrpcCall[pipelines.JoinSupervisorResponse]:
    request = pipelines.JoinSupervisorRequest(supervisor=supervisor)
    return GrpcCall(f"{PIPELINES}/JoinSupervisor", request, pipelines.JoinSupervisorResponse, changes=True)


def renew_supervisor(lease: int) -> GrpcCall[pipelines.RenewSupervisorResponse]:
    request = pipelines.RenewSupervisorRequest(lease=lease)
    return GrpcCall(f"{PIPELINES}/RenewSupervisor", request, pipelines.RenewSupervisorResponse, changes=True)


def leave_supervisor(lease: int) -> GrpcCall[pipelines.LeaveSupervisorResponse]:
    request = pipelines.LeaveSupervisorRequest(lease=lease)
    return GrpcCall(f"{PIPELINES}/LeaveSupervisor", request, pipelines.LeaveSupervisorResponse, changes=True)


def claim_pipeline(lease: int, name: str, supervisor: str) -> GrpcCall[pipelines.ClaimPipelineResponse]:
    request = pipelines.ClaimPipelineRequest(lease=lease, name=name, supervisor=supervisor)
    return GrpcCall(f"{PIPELINES}/ClaimPipeline", request, pipelines.ClaimPipelineResponse, changes=True)


def release_pipeline(lease: int, name: str) -> GrpcCall[pipelines.ReleasePipelineResponse]:
    request = pipelines.ReleasePipelineRequest(lease=lease, name=name)
    return GrpcCall(f"{PIPELINES}/ReleasePipeline", request, pipelines.ReleasePipelineResponse, changes=True)


def report_pipeline(lease: int, name: str, status_json: str) -> GrpcCall[pipelines.ReportPipelineResponse]:
    request = pipelines.ReportPipelineRequest(lease=lease, name=name, status=status_json)
    return GrpcCall(f"{PIPELINES}/ReportPipeline", request, pipelines.ReportPipelineResponse, changes=True)
