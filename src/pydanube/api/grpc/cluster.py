"""Brokers and the members of the metadata store, over gRPC: the reference's BrokerAdmin and ClusterAdmin.

Any broker answers for the whole cluster. A standalone broker answers for itself, and refuses what needs others with a
sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.forward import MARGIN_SECONDS
from pydanube.broker.quorum import Members, MetadataMember, MetadataMemberStatus
from pydanube.broker.service import Broker
from pydanube.cluster.cluster import ClusterNode
from pydanube.cluster.operations import SINGLE_DRAIN, DrainProgress
from pydanube.core.cluster.lifecycle import BrokerMode
from pydanube.core.names import parse_broker_id
from pydanube.errors import BrokerUnknown, Refused
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire.status import Code

LEADER: Final = "Cluster_Leader"
FOLLOWER: Final = "Cluster_Follower"
NO_ROLE: Final = "None"
NOT_FOUND: Final = "not_found"
STRATEGIES: Final = {"fair": "Fair", "balanced": "Balanced", "weighted_load": "WeightedLoad"}
DRAIN_SECONDS: Final = 60.0
NO_CLUSTER: Final = "a standalone broker has nobody to share its load with"
ALONE: Final = "this broker is standalone, not part of a cluster: it keeps its metadata itself, and has no members"
NOT_OURS: Final = "this cluster's etcd is run by somebody else: its members are managed there, with etcdctl"


class BrokerAdmin:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _cluster(self) -> ClusterNode:
        if self._broker.cluster is None:
            raise RpcRefusal(Code.UNIMPLEMENTED, NO_CLUSTER)
        return self._broker.cluster

    # --- who is there ---------------------------------------------------------------------------------

    async def ListBrokers(self, request: pb.Empty) -> pb.BrokerListResponse:
        cluster = self._broker.cluster
        if cluster is None:
            return pb.BrokerListResponse(brokers=[self._alone()])
        leader = cluster.leader
        found = []
        for broker, registration in sorted(cluster.peers.items()):
            state = cluster.state_of(broker)
            role = NO_ROLE if leader is None else LEADER if broker == leader else FOLLOWER
            found.append(
                pb.BrokerInfo(
                    broker_id=str(broker),
                    broker_addr=registration.broker_url,
                    broker_role=role,
                    admin_addr=registration.admin_addr,
                    metrics_addr=registration.prom_exporter,
                    broker_status=(state.mode if state else BrokerMode.DRAINED).value,
                )
            )
        return pb.BrokerListResponse(brokers=found)

    def _alone(self) -> pb.BrokerInfo:
        addresses = self._broker.config.broker
        return pb.BrokerInfo(
            broker_id=str(self._broker.broker_id),
            broker_addr=self._broker.broker_url,
            broker_role=LEADER,
            admin_addr=f"http://{addresses.admin_addr}",
            metrics_addr=addresses.metrics_addr,
            broker_status=BrokerMode.ACTIVE.value,
        )

    async def GetLeaderBroker(self, request: pb.Empty) -> pb.BrokerResponse:
        cluster = self._broker.cluster
        leader = self._broker.broker_id if cluster is None else cluster.leader
        return pb.BrokerResponse(leader=NOT_FOUND if leader is None else str(leader))

    async def ListNamespaces(self, request: pb.Empty) -> pb.NamespaceListResponse:
        return pb.NamespaceListResponse(namespaces=sorted(set(await self._broker.topics.namespaces())))

    # --- drained and active -----------------------------------------------------------------------------

    async def UnloadBroker(self, request: pb.UnloadBrokerRequest, context: Any) -> pb.UnloadBrokerResponse:
        """Answers when no topic is pending, or with what is still pending when the time is over; the drain goes on."""
        broker = parse_broker_id(request.broker_id)
        cluster = self._broker.cluster
        if cluster is None:
            if broker != self._broker.broker_id:
                raise BrokerUnknown(str(broker))
            raise RpcRefusal(Code.FAILED_PRECONDITION, SINGLE_DRAIN)
        progress = await cluster.requests.drain(
            broker,
            parallel_max=request.max_parallel,
            include=request.namespaces_include,
            exclude=request.namespaces_exclude,
            dry_run=request.dry_run,
        )
        if progress.started and progress.topics:
            seconds = min(float(request.timeout_seconds or DRAIN_SECONDS), _left(context))
            progress = await cluster.requests.drained(broker, progress.topics, seconds)
        return _drain_message(progress)

    async def ActivateBroker(self, request: pb.ActivateBrokerRequest) -> pb.ActivateBrokerResponse:
        """A standalone broker is always active."""
        broker = parse_broker_id(request.broker_id)
        cluster = self._broker.cluster
        if cluster is not None:
            await cluster.requests.activate(broker, request.reason)
        elif broker != self._broker.broker_id:
            raise BrokerUnknown(str(broker))
        return pb.ActivateBrokerResponse(success=True)

    # --- balance ----------------------------------------------------------------------------------------

    async def GetClusterBalance(self, request: pb.ClusterBalanceRequest) -> pb.ClusterBalanceResponse:
        cluster = self._cluster
        balance = cluster.requests.balance()
        loads = balance.loads
        assigned = cluster.view.assigned
        over, under = set(balance.overloaded), set(balance.underloaded)
        return pb.ClusterBalanceResponse(
            coefficient_of_variation=balance.variation,
            mean_load=balance.mean,
            max_load=max(loads.values(), default=0.0),
            min_load=min(loads.values(), default=0.0),
            std_deviation=balance.deviation,
            broker_count=len(loads),
            brokers=[
                pb.BrokerLoadInfo(
                    broker_id=broker,
                    load=load,
                    topic_count=len(assigned.get(broker, ())),
                    is_overloaded=broker in over,
                    is_underloaded=broker in under,
                )
                for broker, load in sorted(loads.items())
            ],
            assignment_strategy=STRATEGIES[self._broker.config.load_manager.assignment_strategy],
        )

    async def TriggerRebalance(self, request: pb.RebalanceRequest) -> pb.RebalanceResponse:
        """Begins a few moves; the others follow in the background. Whether rebalancing is enabled does not matter.

        `success` is whether the order was obeyed: also when there is nothing to do, but not when a rule stopped it.
        """
        cluster = self._cluster
        moves_max = request.max_moves if request.HasField("max_moves") else None
        if moves_max == 0:
            raise RpcRefusal(Code.INVALID_ARGUMENT, "max_moves = 0 is not allowed: 1 or more, or leave it out")
        result = await cluster.requests.rebalance(dry_run=request.dry_run, moves_max=moves_max)
        if result.rest:
            cluster.rebalance_in_background(result)
        return pb.RebalanceResponse(
            success=not result.rule,
            moves_executed=len(result.moves) if result.started else 0,
            proposed_moves=[
                pb.ProposedMove(
                    topic_name=move.topic,
                    from_broker=move.from_broker,
                    to_broker=move.to_broker,
                    estimated_load=move.estimated_load,
                    reason=move.reason,
                )
                for move in result.moves
            ],
            error_message=f"{result.why} [rule: {result.rule}]" if result.rule else result.why,
        )


def _left(context: Any) -> float:
    """Of the caller's patience."""
    left = context.time_remaining()
    return float("inf") if left is None else max(float(left) - MARGIN_SECONDS, 0.0)


def _drain_message(progress: DrainProgress) -> pb.UnloadBrokerResponse:
    return pb.UnloadBrokerResponse(
        started=progress.started,
        total=len(progress.topics),
        succeeded=progress.succeeded,
        failed=len(progress.failed),
        pending=len(progress.pending),
        failed_topics=[f"{topic}: {why}" for topic, why in sorted(progress.failed.items())],
    )


class ClusterAdmin:
    """The members of the metadata store. A node is a member, by the id that the store gave it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def ClusterStatus(self, request: pb.Empty) -> pb.ClusterStatusResponse:
        found = await self._members.status()
        mine = self._mine([each.member for each in found])
        leaders = [each for each in found if each.is_leader]
        self_status = next((each for each in found if mine is not None and each.member.id == mine.id), None)
        return pb.ClusterStatusResponse(
            leader_id=leaders[0].member.id if leaders else 0,
            current_term=max((each.raft_term for each in found), default=0),
            last_applied=self_status.raft_applied if self_status else 0,
            voters=[each.member.id for each in found if not each.member.is_learner],
            learners=[each.member.id for each in found if each.member.is_learner],
            self_node_id=mine.id if mine else 0,
            raft_addr=self._broker.config.cluster.raft_addr,
        )

    async def AddNode(self, request: pb.AddNodeRequest) -> pb.AddNodeResponse:
        """A broker that is started with --join adds itself; for that one this finds that it is there."""
        members = self._members
        if not request.addr or not request.node_id:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT, "addr and node_id are needed: those that the new node's status shows"
            )
        before = {each.member.id for each in await members.status()}
        url = request.addr if "://" in request.addr else f"http://{request.addr}"
        try:
            found = await members.add_learner(url)
        except Refused as refused:
            raise RpcRefusal(Code.FAILED_PRECONDITION, str(refused)) from refused
        added = _at(found, url)
        if added is None:
            raise RpcRefusal(Code.INTERNAL, f"{url} was added, and is not among the members")
        message = (
            "it is a member already" if added.id in before else "added as a learner; promote it when it has caught up"
        )
        return pb.AddNodeResponse(success=True, node_id=added.id, message=message)

    async def PromoteNode(self, request: pb.PromoteNodeRequest) -> pb.PromoteNodeResponse:
        status = await self._find(request.node_id)
        if not status.member.is_learner:
            return pb.PromoteNodeResponse(success=True, message=f"node {request.node_id} is already a voter")
        try:
            await self._members.promote(request.node_id)
        except Refused as refused:
            raise RpcRefusal(Code.FAILED_PRECONDITION, str(refused)) from refused
        return pb.PromoteNodeResponse(success=True, message=f"node {request.node_id} is a voter now")

    async def RemoveNode(self, request: pb.RemoveNodeRequest) -> pb.RemoveNodeResponse:
        status = await self._find(request.node_id)
        voters = [each for each in await self._members.status() if not each.member.is_learner]
        if not status.member.is_learner and len(voters) == 1:
            raise RpcRefusal(
                Code.FAILED_PRECONDITION, f"node {request.node_id} is the last voter: without it there is no cluster"
            )
        try:
            await self._members.remove(request.node_id)
        except Refused as refused:
            raise RpcRefusal(Code.FAILED_PRECONDITION, str(refused)) from refused
        return pb.RemoveNodeResponse(success=True, message=f"node {request.node_id} is removed")

    @property
    def _members(self) -> Members:
        if self._broker.cluster is None:
            raise RpcRefusal(Code.UNIMPLEMENTED, ALONE)
        if self._broker.members is None:
            raise RpcRefusal(Code.FAILED_PRECONDITION, NOT_OURS)
        return self._broker.members

    async def _find(self, node_id: int) -> MetadataMemberStatus:
        members = self._members
        if not node_id:
            raise RpcRefusal(Code.INVALID_ARGUMENT, "node_id = 0 is not allowed: ClusterStatus shows those that are")
        found = next((each for each in await members.status() if each.member.id == node_id), None)
        if found is None:
            raise RpcRefusal(
                Code.NOT_FOUND, f"there is no node {node_id}: `danube admin cluster status` shows those that are"
            )
        return found

    def _mine(self, members: Sequence[MetadataMember]) -> MetadataMember | None:
        return _at(members, self._broker.config.cluster.raft_addr)


def _at(members: Sequence[MetadataMember], address: str) -> MetadataMember | None:
    """The member that others reach at this address, with or without a scheme."""
    bare = address.rpartition("://")[2]
    return next((each for each in members if any(url.rpartition("://")[2] == bare for url in each.peer_urls)), None)
