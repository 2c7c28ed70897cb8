"""`pydanube.admin.v1.Status`: how the cluster is doing, who is connected, what happened.

operator ─► any broker ──► every other one, at the same time, for a moment ──► one answer
                           one that says nothing is in the answer too: silent since then, and what it has unknown
"""

from __future__ import annotations

import asyncio
import platform
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from time import process_time
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.forward import is_forwarded
from pydanube.api.grpc.peers import Peers
from pydanube.api.orders import check_noted
from pydanube.broker.observing import ORPHANS_MAX, Observer, is_wanted
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.cluster.cluster import ClusterNode
from pydanube.core import keys
from pydanube.core.cluster.cluster_conditions import BrokerFacts, ClusterFacts, Life, of_cluster
from pydanube.core.cluster.conditions import Condition, OrphanedRanges, Percentiles, Severity, count
from pydanube.core.cluster.presence import Presence
from pydanube.core.names import BrokerId, NamespaceName, TopicName
from pydanube.core.policies import type_name
from pydanube.errors import DanubeError, TopicUnknown
from pydanube.ports import Delete
from pydanube.wire._pb.pydanube import status_pb2 as pb
from pydanube.wire.status import Code

M = TypeVar("M", bound=Message)

SERVICE: Final = "pydanube.admin.v1.Status"
ASK_SECONDS: Final = 2.0  # a broker that does not answer for so long is silent
LOOKS_APART_US: Final = 60_000_000  # further apart, two unanswered questions may be two different outages
ROWS_DEFAULT: Final = 1_000
ROWS_MAX: Final = 10_000
EVENTS_DEFAULT: Final = 100
CONDITIONS_MAX: Final = 200  # of one broker: a thousand lagging subscriptions are no longer read one by one


class Absent(NamedTuple):
    """Topics that are in no answer: their brokers are silent, or no broker serves them."""

    topics: Sequence[str] = ()
    unserved: int = 0


class PeerAnswer(NamedTuple):
    """Of another broker: what it said, or why it did not."""

    said: Any
    why: str = ""


class StatusService:
    """`observer` looks at this broker; `version` is what it runs."""

    def __init__(self, broker: Broker, peers: Peers, observer: Observer, version: str) -> None:
        self._broker = broker
        self._peers = peers
        self._observer = observer
        self._version = version
        self._started_us = broker.clock.time_us()
        self._cpu = (broker.clock.elapsed(), process_time())
        self._cpu_share: float | None = None
        # Of brokers that do not answer: the first unanswered question, and the last. They are asked only on request, so
        # the last answer may be hours older than the outage.
        self._in_vain_us: dict[BrokerId, tuple[int, int]] = {}
        self._not_uploaded: dict[BrokerId, float] = {}  # seconds, as others said last

    # --- the cluster ------------------------------------------------------------------------------------

    async def ClusterStatus(self, request: pb.ClusterStatusRequest) -> pb.ClusterStatusResponse:
        mine = self._status()
        cluster = self._broker.cluster
        if cluster is None:
            return self._alone(mine)
        answers = await self._ask_all("BrokerStatus", pb.BrokerStatusRequest(), pb.BrokerStatusResponse)
        now_us = self._broker.clock.time_us()
        for broker, answer in answers.items():
            if answer.said is not None:
                self._in_vain_us.pop(broker, None)
                self._not_uploaded.pop(broker, None)
                if answer.said.HasField("upload_lag_seconds"):
                    self._not_uploaded[broker] = answer.said.upload_lag_seconds
            else:
                first_us, last_us = self._in_vain_us.get(broker, (now_us, now_us))
                is_one_silence = now_us - last_us <= LOOKS_APART_US
                self._in_vain_us[broker] = first_us if is_one_silence else now_us, now_us
        said: dict[BrokerId, pb.BrokerStatusResponse] = {
            broker: answer.said for broker, answer in answers.items() if answer.said is not None
        }
        said[self._broker.broker_id] = mine
        states = self._states(cluster, said, answers)
        free = [topic for topic, seen in cluster.view.markers.items() if seen.value.is_free]
        waiting = [topic for topic in free if cluster.view.markers[topic].value.wait]
        facts = ClusterFacts(
            now_us // 1000,
            [
                replace(
                    _facts(state, cluster.view.seen.get(BrokerId(state.broker_id)), cluster),
                    not_uploaded_seconds=self._not_uploaded.get(BrokerId(state.broker_id)),
                )
                for state in states
            ],
            cluster.leader is not None,
            sorted(map(str, free)),
            sorted(map(str, waiting)),
        )
        unserved = len(free) + sum(state.topics for state in states if state.life != Life.ANSWERS)
        return pb.ClusterStatusResponse(
            conditions=[_condition_message(each) for each in of_cluster(facts)],
            brokers=states,
            brokers_alive=sum(state.life == Life.ANSWERS for state in states),
            brokers_known=len(states),
            topics=len(cluster.view.hosts) + sum(topic not in cluster.view.hosts for topic in free),
            topics_unserved=unserved,
            lag_messages=pb.Total(
                known=sum(each.lag_messages for each in said.values()),
                # One of an earlier version answers, and says nothing of itself.
                is_complete=not unserved and all(each.broker_id for each in said.values()),
            ),
            orphan_messages_max=sum(each.offsets for one in said.values() for each in one.orphans),
        )

    def _alone(self, mine: pb.BrokerStatusResponse) -> pb.ClusterStatusResponse:
        unopened = len(self._broker.topics.unopened)
        state = pb.BrokerState(
            broker_id=self._broker.broker_id,
            address=self._broker.broker_url,
            life=Life.ANSWERS,
            since_us=self._started_us,
            mode="active",
            is_leader=True,
            topics=mine.topics,
            status=mine,
        )
        facts = ClusterFacts(
            self._broker.clock.time_us() // 1000,
            [
                BrokerFacts(
                    broker=state.broker_id,
                    address=state.address,
                    life=Life.ANSWERS,
                    mode="active",
                    starts_ms=self._broker.starts.unexpected_ms if self._broker.starts is not None else (),
                    own=self._observer.conditions,
                    orphans=self._observer.orphans,
                )
            ],
            has_leader=True,
        )
        return pb.ClusterStatusResponse(
            conditions=[_condition_message(each) for each in of_cluster(facts)],
            brokers=[state],
            brokers_alive=1,
            brokers_known=1,
            topics=mine.topics + unopened,
            topics_unserved=unopened,
            lag_messages=pb.Total(known=mine.lag_messages, is_complete=not unopened),
            is_standalone=True,
        )

    def _states(
        self,
        cluster: ClusterNode,
        said: Mapping[BrokerId, pb.BrokerStatusResponse],
        answers: Mapping[BrokerId, PeerAnswer],
    ) -> list[pb.BrokerState]:
        view = cluster.view
        found = []
        for broker in sorted({*view.registrations, *view.seen, *view.assigned}):
            record = view.seen[broker].value if broker in view.seen else None
            registration = view.registrations[broker].value if broker in view.registrations else None
            state = view.states[broker].value if broker in view.states else None
            has_left = state is not None and state.has_left
            gone_for = view.gone_for(broker)
            if gone_for is not None and not has_left:
                gone_for += view.silent_before_end  # before its lease ran out, as the leader writes it down
            life, since_us = self._life(broker, registration is not None, broker in said, record, gone_for)
            if life is Life.GONE and has_left:
                life = Life.STOPPED  # it said so itself, before the leader wrote it down
            found.append(
                pb.BrokerState(
                    broker_id=broker,
                    address=registration.broker_url if registration else record.address if record else "",
                    life=life,
                    since_us=since_us,
                    why=answers[broker].why if broker in answers else "",
                    mode=state.mode.value if state is not None else "",
                    reason=state.reason if state is not None else "",
                    is_leader=cluster.leader == broker,
                    topics=len(view.assigned.get(broker, ())),
                    status=said.get(broker),
                    admin_addr=registration.admin_addr if registration else "",
                    metrics_addr=registration.prom_exporter if registration else "",
                    stream_url=registration.stream_url if registration else "",
                )
            )
        return found

    def _life(
        self, broker: BrokerId, is_registered: bool, answers: bool, record: Presence | None, gone_for: float | None
    ) -> tuple[Life, int | None]:
        if answers:
            return Life.ANSWERS, record.since_ms * 1000 if record is not None and record.gone_ms is None else None
        first_us, last_us = self._in_vain_us.get(broker, (None, 0))
        if is_registered:
            return Life.SILENT, first_us
        # It fell silent before its lease ran out, before the leader noticed: the earliest of what is known.
        known = []
        if record is not None and record.gone_ms is not None:
            known.append(record.gone_ms * 1000)
        if gone_for is not None:
            known.append(self._broker.clock.time_us() - int(gone_for * 1e6))
        if first_us is not None and min(known, default=last_us) - last_us <= LOOKS_APART_US:
            known.append(first_us)
        life = Life.STOPPED if record is not None and record.in_order else Life.GONE
        return life, min(known, default=None)

    async def NoteOrder(self, request: pb.NoteOrderRequest) -> pb.NoteOrderResponse:
        """Like every order it is recorded once it has succeeded (`api/orders.py`): this only checks its words."""
        check_noted(request)
        return pb.NoteOrderResponse()

    async def ForgetBroker(self, request: pb.ForgetBrokerRequest) -> pb.ForgetBrokerResponse:
        cluster = self._broker.cluster
        broker = BrokerId(request.broker_id)
        if cluster is None:
            raise RpcRefusal(Code.FAILED_PRECONDITION, "a standalone broker has no others that it could forget")
        if broker in cluster.view.registrations:
            raise RpcRefusal(Code.FAILED_PRECONDITION, f"broker {broker} is here: stop it first")
        if cluster.view.assigned.get(broker):
            raise RpcRefusal(
                Code.FAILED_PRECONDITION,
                f"broker {broker} still has {count(len(cluster.view.assigned[broker]), 'topic')}, "
                "which others take in a moment",
            )
        if broker not in cluster.view.seen:
            raise RpcRefusal(
                Code.NOT_FOUND, f"there is no broker {broker} that is gone: `danube admin status` shows those that are"
            )
        key = keys.seen(broker)
        if await cluster.view.transact([cluster.view.compare(key)], [Delete(key)]) is None:
            raise RpcRefusal(Code.ABORTED, f"broker {broker} changed meanwhile: look again")
        return pb.ForgetBrokerResponse()

    # --- this broker --------------------------------------------------------------------------------------

    async def BrokerStatus(self, request: pb.BrokerStatusRequest) -> pb.BrokerStatusResponse:
        return self._status()

    def _status(self) -> pb.BrokerStatusResponse:
        broker, numbers, watch = self._broker, self._observer.numbers, self._observer.watch
        orphans = sorted(self._observer.orphans, key=lambda each: (-each.offsets, each.topic))
        return pb.BrokerStatusResponse(
            broker_id=broker.broker_id,
            address=broker.broker_url,
            stream_url=broker.stream_url,
            version=self._version,
            python=platform.python_version(),
            started_us=self._started_us,
            cpu_share=self._cpu_now(),
            memory_bytes=_memory_bytes(),
            disk_used_bytes=numbers.disk_used_bytes,
            disk_free_bytes=numbers.disk_free_bytes,
            log_size_bytes=numbers.log_size_bytes,
            log_limit_bytes=numbers.log_limit_bytes or None,
            upload_lag_seconds=numbers.upload_lag_seconds,
            lease_age_seconds=numbers.lease_age_seconds,
            publish=_latency(watch.publishes),
            commit=_latency(watch.commits),
            conditions=[_condition_message(each) for each in self._observer.conditions[:CONDITIONS_MAX]],
            orphans=[
                pb.Orphans(topic=each.topic, ranges=each.ranges, offsets=each.offsets, broker_ids=each.brokers)
                for each in orphans[:ORPHANS_MAX]
            ],
            orphans_left_out=max(len(orphans) - ORPHANS_MAX, 0),
            lag_messages=self._observer.lag_messages,
            connections=self._observer.connections,
            topics=len(broker.topics.loaded),
        )

    def _cpu_now(self) -> float | None:
        """Of one core, since the last look that was at least a second ago."""
        now, used = self._broker.clock.elapsed(), process_time()
        if now - self._cpu[0] >= 1.0:
            self._cpu_share = (used - self._cpu[1]) / (now - self._cpu[0])
            self._cpu = (now, used)
        return self._cpu_share

    async def _check_names(self, topic: str, namespace: str = "") -> None:
        """An empty list is the answer for a name that is there. Raises InvalidName, TopicUnknown, NamespaceUnknown."""
        if topic and not await self._broker.topics.partitions(name := TopicName(topic)):
            raise TopicUnknown(name)
        if namespace:
            await self._broker.topics.namespace_policy(NamespaceName(namespace))

    # --- subscriptions --------------------------------------------------------------------------------------

    async def ListSubscriptions(
        self, request: pb.ListSubscriptionsRequest, context: Any
    ) -> pb.ListSubscriptionsResponse:
        if not is_forwarded(context):
            await self._check_names(request.topic, request.namespace)
        rows_max = min(request.count_max or ROWS_DEFAULT, ROWS_MAX)
        found = [row async for row in self._subscriptions(request)]
        left_out, unknown, absent = 0, [], Absent()
        if not is_forwarded(context):
            answers = await self._ask_all("ListSubscriptions", request, pb.ListSubscriptionsResponse)
            for answer in answers.values():
                if answer.said is not None:
                    found += answer.said.subscriptions
                    left_out += answer.said.left_out
            unknown = self._unknown(answers)
            absent = self._absent(unknown, request.topic, request.namespace)
        # Those of non-reliable topics have no lag, and come last.
        found.sort(key=lambda row: (-row.lag_messages if row.HasField("lag_messages") else 1, row.topic, row.name))
        return pb.ListSubscriptionsResponse(
            subscriptions=found[:rows_max],
            left_out=left_out + max(len(found) - rows_max, 0),
            unknown=unknown,
            unanswered=absent.topics,
            unserved=absent.unserved,
        )

    async def _subscriptions(self, request: pb.ListSubscriptionsRequest) -> Any:
        for topic in list(self._broker.topics.loaded):
            if not is_wanted(topic.name, request.topic) or (
                request.namespace and topic.name.namespace != request.namespace
            ):
                continue
            await asyncio.sleep(0)
            if not topic.reliable:
                for fanned in list(topic.subscriptions.values()):
                    yield pb.SubscriptionState(
                        topic=topic.name,
                        name=fanned.name,
                        type=type_name(fanned.kind.value),
                        broker_id=self._broker.broker_id,
                        consumers=fanned.connected,
                    )
            else:
                for subscription in list(topic.subscriptions.values()):
                    yield self._subscription(topic, subscription)

    def _subscription(self, topic: Topic, subscription: Subscription) -> pb.SubscriptionState:
        standing = subscription.standing()
        late = self._observer.late(topic, subscription)
        return pb.SubscriptionState(
            topic=topic.name,
            name=subscription.name,
            type=type_name(subscription.kind.value),
            broker_id=self._broker.broker_id,
            lag_messages=standing.lag,
            lag_seconds=late.seconds,
            catch_up_seconds=late.catch_up.seconds,
            course=late.catch_up.course,
            consumers=standing.consumers,
            unacked=standing.unacked,
            waiting=standing.waiting,
            is_blocked=standing.blocked_offset is not None,
            missing=standing.missing,
        )

    # --- connections ----------------------------------------------------------------------------------------

    async def ListConnections(self, request: pb.ListConnectionsRequest, context: Any) -> pb.ListConnectionsResponse:
        if not is_forwarded(context):
            await self._check_names(request.topic)
        rows_max = min(request.count_max or ROWS_DEFAULT, ROWS_MAX)
        found = [
            pb.ConnectionState(
                kind=each.kind,
                name=each.name,
                topic=each.topic,
                subscription=each.subscription,
                address=each.caller.address if each.caller else "",
                client=each.caller.client if each.caller else "",
                protocol=each.caller.protocol if each.caller else "",
                since_us=each.caller.since_us if each.caller else None,
                unacked=each.unacked,
                rate=each.rate,
                broker_id=self._broker.broker_id,
            )
            for each in self._observer.connected(request.topic)
        ]
        left_out, unknown, absent = 0, [], Absent()
        if not is_forwarded(context):
            answers = await self._ask_all("ListConnections", request, pb.ListConnectionsResponse)
            for answer in answers.values():
                if answer.said is not None:
                    found += answer.said.connections
                    left_out += answer.said.left_out
            unknown = self._unknown(answers)
            absent = self._absent(unknown, request.topic)
        found.sort(key=lambda row: (row.topic, row.kind, row.subscription, row.name))
        return pb.ListConnectionsResponse(
            connections=found[:rows_max],
            left_out=left_out + max(len(found) - rows_max, 0),
            unknown=unknown,
            unanswered=absent.topics,
            unserved=absent.unserved,
        )

    # --- what happened --------------------------------------------------------------------------------------

    async def ListEvents(self, request: pb.ListEventsRequest) -> pb.ListEventsResponse:
        count = min(request.count_max or EVENTS_DEFAULT, ROWS_MAX)
        found = [
            pb.Happening(time_us=each.time_ms * 1000, kind=each.kind, sentence=each.sentence, by=each.by)
            for each in await self._broker.events.newest(count)
        ]
        if self._broker.cluster is not None:
            found += [
                pb.Happening(
                    time_us=move.timestamp * 1000,
                    kind="moved",
                    sentence=f"rebalancing moved {move.topic} from broker {move.from_broker} to {move.to_broker}: "
                    f"{move.reason}",
                    by="the leader",
                )
                for move in self._broker.cluster.view.history.values()
            ]
        found.sort(key=lambda each: -each.time_us)
        return pb.ListEventsResponse(events=found[:count])

    # --- asking the others ------------------------------------------------------------------------------------

    async def _ask_all(self, method: str, request: Message, answer: type[M]) -> dict[BrokerId, PeerAnswer]:
        others = self._peers.others()
        answers = await asyncio.gather(*(self._ask(broker, method, request, answer) for broker in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, broker: BrokerId, method: str, request: Message, answer: type[M]) -> PeerAnswer:
        try:
            said = await self._peers.call(broker, f"{SERVICE}/{method}", request, answer, seconds=ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return PeerAnswer(answer())  # of an earlier version: it is there, and says nothing of itself
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return PeerAnswer(None, f"it did not answer within {ASK_SECONDS:.0f} s")
            return PeerAnswer(None, "nobody answers there")
        except DanubeError as error:
            return PeerAnswer(None, str(error))
        return PeerAnswer(said)

    def _unknown(self, answers: Mapping[BrokerId, PeerAnswer]) -> list[pb.Unknown]:
        """Whose topics are not in an answer: brokers that say nothing, and those that are gone and had some."""
        cluster = self._broker.cluster
        if cluster is None:
            return []
        view = cluster.view
        silent = {broker: answer.why for broker, answer in answers.items() if answer.said is None}
        silent |= {broker: "it is gone" for broker in view.assigned if broker not in view.registrations}
        return [
            pb.Unknown(
                broker_id=broker,
                address=view.registrations[broker].value.broker_url if broker in view.registrations else "",
                why=why,
                topics=len(view.assigned.get(broker, ())),
            )
            for broker, why in sorted(silent.items())
        ]

    def _absent(self, unknown: Sequence[pb.Unknown], topic: str, namespace: str = "") -> Absent:
        """Of the topics that were asked for."""
        cluster = self._broker.cluster
        if cluster is None:
            return Absent()
        view = cluster.view
        silent = {name for each in unknown for name in view.assigned.get(BrokerId(each.broker_id), ())}
        free = {name for name, seen in view.markers.items() if seen.value.is_free and name not in view.hosts}
        every = [name for name in silent | free if is_wanted(name, topic) and namespace in ("", name.namespace)]
        return Absent(sorted(every)[:ROWS_MAX], sum(name in free for name in every))


# --- messages -----------------------------------------------------------------------------------------------


def _facts(state: pb.BrokerState, seen: Any, cluster: ClusterNode) -> BrokerFacts:
    status = state.status if state.HasField("status") else None
    return BrokerFacts(
        broker=state.broker_id,
        address=state.address.rpartition("://")[2],
        life=Life(state.life),
        since_ms=state.since_us // 1000 if state.HasField("since_us") else None,
        why=state.why,
        mode=state.mode,
        reason=state.reason,
        topics=state.topics,
        own=[_condition(each) for each in status.conditions] if status is not None else (),
        orphans=_orphans(status.orphans) if status is not None else (),
        starts_ms=seen.value.starts_ms if seen is not None else (),
        lease_seconds=cluster.membership.lease.ttl_seconds,
    )


def _orphans(messages: Iterable[pb.Orphans]) -> Sequence[OrphanedRanges]:
    return [OrphanedRanges(each.topic, each.ranges, each.offsets, tuple(each.broker_ids)) for each in messages]


def _condition(message: pb.Condition) -> Condition:
    return Condition(
        message.name,
        Severity.CRITICAL if message.severity == Severity.CRITICAL else Severity.WARNING,
        message.sentence,
        message.todo,
        message.subject,
        message.since_us // 1000 if message.HasField("since_us") else None,
    )


def _condition_message(condition: Condition) -> pb.Condition:
    return pb.Condition(
        name=condition.name,
        severity=condition.severity,
        sentence=condition.sentence,
        todo=condition.todo,
        subject=condition.subject,
        since_us=None if condition.since_ms is None else condition.since_ms * 1000,
        runbook=condition.runbook,
    )


def _latency(percentiles: Percentiles) -> pb.Latency:
    return pb.Latency(p50_ms=percentiles.p50, p95_ms=percentiles.p95, p99_ms=percentiles.p99)


def _memory_bytes() -> int | None:
    """In use now; None where the system does not say so."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
