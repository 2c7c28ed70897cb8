"""What the native servers of simulated brokers do for real clients, written down where it happens.

A client knows the answers it got; only the server's side knows which owner delivered a message, which acknowledgement
was taken, and when an offset was given out. So the brokers of a run have servers that note it, and `RealClients` asks
here what belongs to a message that an application has got.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.api.native.connection import NativeConnection
from pydanube.api.native.handles import ConsumerHandle, ProducerHandle
from pydanube.api.native.intake import BatchIntake
from pydanube.api.native.pump import Pump
from pydanube.api.native.server import NativeServer
from pydanube.broker.outbox import DeliveredBatch
from pydanube.broker.service import Broker
from pydanube.client.partition_consumer import PartitionConsumer
from pydanube.testing.checkers import ANSWER_SECONDS
from pydanube.testing.cluster import Cluster, Node
from pydanube.testing.history import Done, History, Nacked, Subscribed, life
from pydanube.wire import frames
from tools.sim.cluster_clients import gives_up, in_flight
from tools.sim.cluster_recorder import Recorder

JUDGED: Final = "sub-"  # subscriptions that are named so
VOLATILE: Final = -1  # instead of an offset, where there are none


class Sight(NamedTuple):
    """Of a message that was sent to a consumer: by which owner, and what is to become of it."""

    topic: str  # with its life
    epoch: int
    late: bool  # it may come late: its owner cannot know that it is none any more
    gives_up: bool  # what fails too often becomes a dead letter


class NativeWatch:
    """Makes the servers of `cluster`, and keeps what they tell."""

    def __init__(self, cluster: Cluster, history: History, recorder: Recorder) -> None:
        self.cluster = cluster
        self.history = history
        self.life_of = recorder.life_of
        self.is_replaced = recorder.is_replaced
        self.subscribed: set[tuple[str, str]] = set()
        self._given = recorder.given
        self._sights: dict[tuple[str, int, int], Sight] = {}  # by connection, handle and offset
        self._answers: dict[tuple[str, int], tuple[int, float]] = {}  # by topic and offset: whose, and when
        cluster.make_server = self._server

    def _server(self, broker: Broker) -> NativeServer:
        return _Server(broker, self)

    def now(self) -> float:
        return self.cluster.clock.elapsed()

    def node_of(self, broker: Broker) -> Node | None:
        return next((node for node in self.cluster.nodes if node.broker is broker), None)

    # --- what clients ask -----------------------------------------------------------------------------------

    def sight(self, lane: PartitionConsumer, offset: int) -> Sight:
        """What is known of a message that the application has just got from this lane."""
        assert lane.connection is not None, "what comes from a connection that is gone is not handed over"
        place = str(lane.connection._transport.get_extra_info("name")), lane.handle  # type: ignore[union-attr]
        found = self._sights.get((*place, offset))
        return found or self._sights[*place, VOLATILE]

    def answered_by(self, topic: str, offset: int) -> int:
        """The broker whose answer this is, if it was quick: who has replaced it since is then no news."""
        broker, at = self._answers.get((topic, offset), (0, 0.0))
        return broker if self.now() - at <= ANSWER_SECONDS else 0

    # --- what servers tell ----------------------------------------------------------------------------------

    def opened(self, consuming: ConsumerHandle) -> None:
        subscription = consuming.subscription
        label = life(consuming.topic.name, consuming.topic.ownership.created)
        if subscription.name.startswith(JUDGED) and (label, subscription.name) not in self.subscribed:
            self.subscribed.add((label, subscription.name))
            self.history.add(Subscribed(label, subscription.name, subscription.kind.value, 0, self.now()))

    def sent(self, broker: Broker, wire: str, consuming: ConsumerHandle, item: DeliveredBatch) -> None:
        topic, subscription = consuming.topic, consuming.subscription
        if not subscription.name.startswith(JUDGED):
            return
        node = self.node_of(broker)
        is_late = node is not None and node.cannot_know
        label = life(topic.name, topic.ownership.created)
        sight = Sight(label, topic.ownership.epoch, is_late, gives_up(subscription))
        if subscription.reliable:
            for first, end in item.ranges:
                for offset in range(first, end):
                    self._sights[wire, consuming.handle, offset] = sight
        else:
            self._sights[wire, consuming.handle, VOLATILE] = sight

    def settled(self, consuming: ConsumerHandle, ranges: Sequence[tuple[int, int]], *, is_ack: bool) -> None:
        topic, subscription = consuming.topic, consuming.subscription
        if not subscription.reliable or not subscription.name.startswith(JUDGED):
            return
        label, epoch = life(topic.name, topic.ownership.created), topic.ownership.epoch
        registration = subscription.registration(consuming.consumer_id)
        consumer = registration.name if registration is not None else ""
        for first, end in ranges:
            for offset in range(first, end):
                if is_ack:
                    self.history.add(Done(label, subscription.name, offset, epoch, self.now(), consumer))
                else:
                    self.history.add(Nacked(label, subscription.name, offset, epoch, self.now()))

    def answered(self, broker: Broker, producing: ProducerHandle, offset: int, rows: int, epoch: int) -> None:
        topic = producing.topic
        assert topic.reliable
        self._given(topic, offset + rows - 1, epoch)
        node = self.node_of(broker)
        label = life(topic.name, topic.ownership.created)
        if node is not None and epoch == topic.ownership.epoch:
            for at in range(offset, offset + rows):
                self._answers[label, at] = node.number, self.now()


class _Server(NativeServer):
    def __init__(self, broker: Broker, watch: NativeWatch) -> None:
        super().__init__(broker)
        self.watch = watch

    def accept(self) -> NativeConnection:
        return _Connection(self, self.watch)


class _Connection(NativeConnection):
    """A connection that tells what it takes and sends."""

    def __init__(self, server: _Server, watch: NativeWatch) -> None:
        super().__init__(server)
        self.intake = _Intake(self, self._handles, server.connections)
        self.watch = watch
        self._is_refused = False

    def answer_error(self, request_id: int, error: BaseException) -> None:
        self._is_refused = True
        super().answer_error(request_id, error)

    def _settle(self, frame: frames.Frame) -> None:
        is_ack = frame.kind == "ack"
        command = frame.command.ack if is_ack else frame.command.nack
        consuming = self._handles.consumer(command.consumer)
        ranges: Sequence[tuple[int, int]] = frames.ranges_of(command.ranges)
        if not is_ack and consuming is not None and consuming.subscription.reliable:
            ranges = [
                part for each in ranges for part in in_flight(consuming.subscription, *each, consuming.consumer_id)
            ]
        self._is_refused = False
        super()._settle(frame)
        if consuming is not None and not self._is_refused:
            self.watch.settled(consuming, ranges, is_ack=is_ack)

    def pump(self, consuming: ConsumerHandle) -> Pump:
        self.watch.opened(consuming)
        return _Pump(self, self._handles, consuming)

    @property
    def wire(self) -> str:
        return str(self._transport.get_extra_info("name"))


class _Intake(BatchIntake):
    _connection: _Connection

    def answer_decided(self, producing: ProducerHandle) -> None:
        connection = self._connection
        for decided in producing.in_flight:
            if not decided.outcome.done():
                break
            if not decided.outcome.cancelled() and decided.outcome.exception() is None and producing.topic.reliable:
                receipt = decided.outcome.result()
                connection.watch.answered(connection.broker, producing, receipt.offset, decided.rows, receipt.epoch)
        super().answer_decided(producing)


class _Pump(Pump):
    _connection: _Connection

    async def _deliver(self, item: DeliveredBatch) -> None:
        connection = self._connection
        connection.watch.sent(connection.broker, connection.wire, self._consuming, item)
        await super()._deliver(item)
