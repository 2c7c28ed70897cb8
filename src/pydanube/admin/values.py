"""What the admin services answer with, and the larger things that they take.

The generated messages are the values: typed, compared by content, and complete when the protocol gains a field. Their
modules stay behind this one, so that commands and pages need not know which service an answer came from.
"""

from __future__ import annotations

from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from pydanube.wire._pb.pydanube import pipelines_pb2 as pipelines
from pydanube.wire._pb.pydanube import status_pb2 as status

# brokers and the cluster
ActivateBrokerRequest = pb.ActivateBrokerRequest
ClusterBalance = pb.ClusterBalanceResponse
DrainResult = pb.UnloadBrokerResponse
MetadataStatus = pb.ClusterStatusResponse
RebalanceRequest = pb.RebalanceRequest
RebalancingMove = ours.RebalancingMove
UnloadBrokerRequest = pb.UnloadBrokerRequest
BrokerFigures = status.BrokerStatusResponse
BrokerState = status.BrokerState
ClusterEvent = status.Happening
ClusterStatus = status.ClusterStatusResponse
ConnectionList = status.ListConnectionsResponse
ConnectionState = status.ConnectionState
Latency = status.Latency
ReportedCondition = status.Condition
UnknownBroker = status.Unknown

# topics and namespaces
MoveAnswer = ours.UnloadTopicResponse
MovePhase = ours.Phase
MoveResult = ours.UnloadResult
NamespaceLimits = ours.NamespaceLimits
OffsetSpan = ours.Range
OrphanState = ours.OrphanState
PeekedMessage = ours.PeekedMessage
RetentionRule = ours.RetentionResponse
SetNamespaceLimitsRequest = ours.SetNamespaceLimitsRequest
SetRetentionRequest = ours.SetRetentionRequest
SettingChange = ours.Change
StorageFinding = ours.Finding
StorageListing = ours.StorageListResponse
Tiers = ours.Tiers
TopicDescription = pb.DescribeTopicResponse
TopicEntry = pb.TopicInfo
TopicMove = ours.Move
TopicState = ours.TopicStateResponse
VerifyReport = ours.VerifyReport

# pipelines
PipelineList = pipelines.ListPipelinesResponse
PipelineState = pipelines.PipelineState

# subscriptions
ChangeFailurePolicyRequest = ours.ChangeFailurePolicyRequest
SubscriptionExplanation = ours.ExplainSubscriptionResponse
SubscriptionFailurePolicy = pb.SubscriptionFailurePolicy
SubscriptionLag = ours.Lag
SubscriptionList = status.ListSubscriptionsResponse
SubscriptionSettings = pb.GetSubscriptionFailurePolicyResponse
SubscriptionState = status.SubscriptionState
BACKOFF = {"fixed": pb.Fixed, "exponential": pb.Exponential}
POISON = {"dead_letter": pb.DeadLetter, "block": pb.Block, "drop": pb.Drop}
