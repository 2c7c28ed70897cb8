"""What the subscriptions of both kinds of topics share: consumers that join, open streams, leave and are forgotten.

    join ─► outbox, kept for ATTACH_SECONDS ─► attach: a stream reads it ─► detach ─► registered, without an outbox
      ▲                        └── no stream came: given up ────────────────────────────────┤
      └──────────────────────────── the same name again ◄──────────────────────────────────┘

What each step means to the dispatch is said by the kind: `_joined`, `_ending`, `_left`, `_detached`, `_forgotten`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from pydanube.broker.client_index import ClientIndex
from pydanube.broker.cursors import Cursors
from pydanube.broker.kept import KeptBytes
from pydanube.broker.outbox import AnyOutbox, Budget, ConsumerRegistration, DeliveredMessage, MessageOutbox, Outbox
from pydanube.broker.schemas import SchemaRegistry
from pydanube.broker.timer import Timer
from pydanube.core.names import ConsumerId, SubscriptionName, TopicName, consumer_id
from pydanube.core.policies import SubscriptionKind
from pydanube.errors import ConsumerUnknown, DanubeError, SubscriptionBusy
from pydanube.formats.batch import Envelope
from pydanube.ports import Clock
from pydanube.telemetry import SubscriptionMetrics

ATTACH_SECONDS: Final = 10.0  # a consumer that subscribed and never opens its stream gives its messages back


class Services(NamedTuple):
    """What every subscription of a broker shares."""

    clock: Clock
    timer: Timer
    cursors: Cursors
    dead_letter: Callable[[TopicName, Envelope], Awaitable[None]]
    broker_url: Callable[[], str]  # as bound, known once the servers are open
    kept: KeptBytes
    outboxes: Budget
    schemas: SchemaRegistry
    clients: ClientIndex
    may_serve: Callable[[], bool] = lambda: True  # False while the broker's lease may have run out


class BaseSubscription:
    """One subscription and its consumers."""

    reliable: bool  # whether messages are kept until they are acknowledged

    def __init__(
        self,
        topic: TopicName,
        name: SubscriptionName,
        kind: SubscriptionKind,
        services: Services,
        metrics: SubscriptionMetrics,
        consumers: Iterable[ConsumerRegistration],
    ) -> None:
        self.name = name
        self.kind = kind
        self.metrics = metrics
        self._topic = topic
        self._services = services
        self._consumers = {each.consumer_id: each for each in consumers}
        for each in self._consumers.values():
            each.silent_since = services.clock.elapsed()  # those of an earlier process have their time again
            services.clients.consumers.add(each.consumer_id, self)
        self._closed = False

    def _joined(self, registration: ConsumerRegistration) -> None:
        """A consumer has a new outbox. Raises SubscriptionBusy if another consumer has the subscription."""

    def _left(self, registration: ConsumerRegistration, outbox: AnyOutbox) -> None:
        """A consumer's outbox has ended, and it has no other."""

    def _ending(self, outbox: AnyOutbox) -> None:
        """A consumer's outbox is about to end; the consumer may have another already."""

    def _detached(self) -> None:
        """A stream has ended by itself."""

    def _forgotten(self, consumer: ConsumerId) -> None:
        """A consumer's registration is removed."""

    async def close(self, error: DanubeError, *, save: bool = True) -> None:
        """Streams end with `error`. Not `save`: nothing is written to the metadata store."""
        self._closed = True
        for each in self._consumers.values():
            self._disconnect(each, error)

    # --- who is registered --------------------------------------------------------------------------

    @property
    def topic_name(self) -> TopicName:
        return self._topic

    @property
    def consumers(self) -> list[ConsumerRegistration]:
        return list(self._consumers.values())

    @property
    def connected(self) -> int:
        return sum(each.connected for each in self._consumers.values())

    def knows(self, consumer: ConsumerId) -> bool:
        return consumer in self._consumers

    def registration(self, consumer: ConsumerId) -> ConsumerRegistration | None:
        return self._consumers.get(consumer)

    def is_connected(self, consumer: ConsumerId) -> bool:
        registration = self._consumers.get(consumer)
        return registration is not None and registration.connected

    def is_healthy(self, consumer: ConsumerId) -> bool:
        """Whether the consumer has a stream or has just subscribed. Asking counts as a sign of life."""
        registration = self._consumers.get(consumer)
        if registration is None:
            return False
        registration.silent_since = self._services.clock.elapsed()
        return registration.connected

    # --- coming and going ---------------------------------------------------------------------------

    def join(
        self, name: str, key_filters: tuple[str, ...], *, native: bool = False, hands_over: bool = False
    ) -> ConsumerId:
        """A consumer subscribes: messages are kept for it from now on, its stream follows.

        The same name again is a takeover: the old stream ends, what it held is delivered again, the id is the same.
        A `native` one gets stored batches, as many as it grants permits for. One that `hands_over` says what its
        application takes, and deadlines begin then.
        """
        identity = consumer_id(self._topic, self.name, name)
        registration = self._consumers.get(identity)
        if registration is None:
            registration = ConsumerRegistration(identity, name, key_filters)
        elif key_filters:
            registration.key_filters = key_filters
        registration.native = native
        registration.hands_over = native and hands_over
        known = identity in self._consumers
        self._consumers[identity] = registration  # first: the join itself may send to it
        try:
            self._connect(registration)
        except SubscriptionBusy:
            if not known:
                del self._consumers[identity]
            raise
        self._services.clients.consumers.add(identity, self)
        return identity

    def is_wanted(self, consumer: ConsumerId, delivered: DeliveredMessage) -> bool:
        """Whether a message on its way to the wire is still to be shown to this consumer."""
        return True

    def attach(self, consumer: ConsumerId) -> MessageOutbox:
        """The consumer's stream opens. A stream it already had ends cleanly."""
        registration = self._consumers.get(consumer)
        if registration is None or self._closed:
            raise ConsumerUnknown(consumer)
        if registration.outbox is None or registration.attached or registration.native:
            registration.native = registration.hands_over = False
            self._connect(registration)
        registration.attached = True
        assert isinstance(registration.outbox, MessageOutbox)
        return registration.outbox

    def detach(self, consumer: ConsumerId, outbox: AnyOutbox) -> None:
        """The stream has ended: what it held goes to others, or to the consumer when it comes back."""
        registration = self._consumers.get(consumer)
        if registration is not None and registration.outbox is outbox:
            self._disconnect(registration, None)
            self._detached()

    def forget(self, consumer: ConsumerId) -> None:
        """The registration itself is removed."""
        registration = self._consumers.pop(consumer, None)
        if registration is not None:
            self._services.clients.consumers.remove(consumer, self)
            self._disconnect(registration, None)
            self._forgotten(consumer)

    def _connect(self, registration: ConsumerRegistration) -> None:
        fresh: AnyOutbox = Outbox() if registration.native else MessageOutbox(self._services.outboxes)
        previous, registration.outbox = registration.outbox, fresh
        try:
            self._joined(registration)
        except SubscriptionBusy:
            registration.outbox = previous
            raise
        if previous is not None:
            self._ending(previous)
            previous.end()
        registration.attached = False
        now = self._services.clock.elapsed()
        registration.silent_since = now
        self._services.timer.call_at(now + ATTACH_SECONDS, lambda _: self._give_up_on(registration, fresh))

    def _give_up_on(self, registration: ConsumerRegistration, outbox: AnyOutbox) -> None:
        if registration.outbox is outbox and not registration.attached:
            self._disconnect(registration, None)

    def _disconnect(self, registration: ConsumerRegistration, error: DanubeError | None) -> None:
        outbox, registration.outbox = registration.outbox, None
        registration.attached = False
        registration.silent_since = self._services.clock.elapsed()
        if outbox is not None:
            self._ending(outbox)
            outbox.end(error)
            self._left(registration, outbox)
