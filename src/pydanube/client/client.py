"""The client: one object per application and cluster."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

from pydanube.client.admin import Fetch, NativeAdmin
from pydanube.client.brokers import Brokers, OnConnection, Token, addresses_of
from pydanube.client.connector import SYSTEM, Connector
from pydanube.client.consumer import Consumer
from pydanube.client.failures import FailurePolicy, policy_change
from pydanube.client.messages import (
    TYPES,
    Lag,
    Located,
    LogFlushed,
    Place,
    Statistics,
    StorageInfo,
    SubscriptionType,
    TopicInfo,
    place_of,
)
from pydanube.client.open_batch import ProducerSettings
from pydanube.client.partition_consumer import ConsumerSettings
from pydanube.client.producer import Producer
from pydanube.client.publisher import Publisher
from pydanube.client.requests import Requests
from pydanube.client.tail import Tail
from pydanube.client.topics import TopicSelection
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import type_name
from pydanube.core.units import MIB
from pydanube.errors import ConfigError, DanubeError, TopicUnknown
from pydanube.wire._pb.pydanube import stream_pb2 as pb

Compression: TypeAlias = Literal["none", "lz4", "zstd"]

TIMEOUT_SECONDS: Final = 60.0  # a broker that dies is replaced when its lease is over: 32 s, and the time to notice
BUFFER_BYTES: Final = 32 * MIB
BATCH_BYTES: Final = 1 * MIB
BATCH_BYTES_MAX: Final = 32 * MIB
BATCH_MESSAGES: Final = 1_000
WINDOW_MESSAGES: Final = 10_000
WINDOW_BYTES: Final = 16 * MIB
DISCOVER_SECONDS: Final = 5.0
NAME_SIZE_MAX_BYTES: Final = 200


def connect(
    url: str | Iterable[str] = "danube://127.0.0.1:6651",
    *,
    token: Token = "",
    tls: ssl.SSLContext | None = None,
    timeout: float = TIMEOUT_SECONDS,
    on_connection: OnConnection | None = None,
) -> Client:
    """A client for the brokers at `url`: one URL, a list of them, or several with commas between them.

    Use it as an async context manager; entering it waits until one broker answers. `danube+tls://` encrypts, with the
    system's certificates or with `tls`. `timeout` is the deadline, in seconds, of every call that gets none of its own.
    `token` may be a function: it is asked for a token whenever a connection is made, so that one can be renewed.
    `on_connection(url, error)` is called when a connection is open (`error` is None) and when it is lost.

    >>> async with pydanube.connect(url) as client:
    ...     async with client.producer("/default/orders") as orders:
    ...         receipt = await orders.send(b"2 coffees")
    ...     print(receipt.topic, receipt.offset)
    /default/orders 0
    """
    return Client(url, token=token, tls=tls, timeout=timeout, on_connection=on_connection)


class Client:
    """Producers, consumers and questions; all share one connection per broker. See `connect`."""

    def __init__(
        self,
        url: str | Iterable[str],
        *,
        token: Token = "",
        tls: ssl.SSLContext | None = None,
        timeout: float = TIMEOUT_SECONDS,
        on_connection: OnConnection | None = None,
        connector: Connector = SYSTEM,
    ) -> None:
        """`connector`: where connections, the date and random numbers come from; another one is for simulations."""
        if timeout <= 0:
            raise ConfigError("timeout", timeout, "seconds, more than 0")
        self._brokers = Brokers(
            addresses_of(url), token=token, tls=tls, connector=connector, on_connection=on_connection
        )
        self._admin = NativeAdmin(self._brokers, timeout)
        self.timeout = timeout

    def _unique(self) -> str:
        return f"{self._brokers.connector.rng.getrandbits(32):08x}"

    async def open(self) -> Self:
        """As entering the `async with` block: returns when a broker has answered."""
        silent = f"no answer from {', '.join(self._brokers.known)}"
        await self._brokers.retry_until("connecting", self.timeout, self._brokers.any, silent)
        return self

    async def close(self) -> None:
        """Closes all connections. Close producers and consumers first: what they have not sent is lost."""
        await self._brokers.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def brokers(self) -> list[str]:
        """The URLs of all brokers known so far."""
        return self._brokers.known

    @property
    def is_connected(self) -> bool:
        """Whether a connection to some broker is open now. Sends nothing, and opens none."""
        return self._brokers.is_connected

    async def ping(self, *, timeout: float | None = None) -> float:
        """Asks some broker for a sign of life, and connects again if need be; returns the seconds that it took.

        Raises DeadlineExceeded, which says why no broker answered: for a `/readyz`, with a short timeout.
        """
        seconds = self.timeout if timeout is None else timeout
        loop = asyncio.get_running_loop()
        begun_at = loop.time()

        async def asked() -> None:
            await (await self._brokers.any()).request(pb.Command(ping=pb.Ping()), "pong")

        await self._brokers.retry_until("a ping", seconds, asked)
        return loop.time() - begun_at

    def statistics(self) -> Statistics:
        """Which connections there are, how often one was opened and lost, and why the last one was."""
        return self._brokers.statistics()

    # --- messages -----------------------------------------------------------------------------------

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        reliable: bool = True,
        create: bool = True,
        partitions: int = 0,
        idempotent: bool = True,
        exclusive: bool = False,
        schema_subject: str | None = None,
        compression: Compression = "none",
        linger: float = 0.0,
        batch_bytes: int = BATCH_BYTES,
        batch_messages: int = BATCH_MESSAGES,
        buffer_bytes: int = BUFFER_BYTES,
        timeout: float | None = None,
    ) -> Producer:
        """A producer for an `async with` block.

        A missing topic is created (`create`): reliable, or not, and with `partitions` if that is not 0. `name` is
        unique among running producers of the topic: a second one of the same name takes the first one's place.
        `idempotent` producers store every message once, whatever happens to their connection.

        A batch is sent when the broker is ready for one, `linger` seconds after its first message at the earliest, and
        before it has more than `batch_messages` or `batch_bytes`. `buffer_bytes` bound what has no receipt yet.
        """
        checked = _check_topic(topic)
        name = f"{checked.name}-{self._unique()}" if name is None else name
        _check_name("name", name)
        if not 1 <= batch_bytes <= BATCH_BYTES_MAX:
            raise ConfigError("batch_bytes", batch_bytes, f"from 1 to {BATCH_BYTES_MAX}")
        for key, number in (("batch_messages", batch_messages), ("buffer_bytes", buffer_bytes)):
            if number < 1:
                raise ConfigError(key, number, "at least 1")
        if compression not in ("none", "lz4", "zstd"):
            raise ConfigError("compression", compression, "none, lz4 or zstd")
        settings = ProducerSettings(
            name=name,
            reliable=reliable,
            create=create,
            idempotent=idempotent,
            exclusive=exclusive,
            schema_subject=schema_subject or "",
            compression=compression,
            linger_seconds=linger,
            batch_bytes=batch_bytes,
            batch_messages=batch_messages,
            timeout=self.timeout if timeout is None else timeout,
        )

        async def parts() -> list[str]:
            try:
                return [*await self._admin.parts(topic, settings.timeout)]
            except TopicUnknown:
                if not create:
                    raise
                if not partitions:
                    return [topic]  # the broker makes it
            await self.create_topic(
                topic, reliable=reliable, partitions=partitions, schema_subject=schema_subject, exist_ok=True
            )
            return [*await self._admin.parts(topic, settings.timeout)]

        return Producer(self._brokers, topic, settings, partitions=parts, buffer_bytes=buffer_bytes)

    def consumer(
        self,
        topic: str | Iterable[str],
        *,
        subscription: str,
        name: str | None = None,
        type: SubscriptionType = "shared",
        start: Place = "latest",
        key_filters: Iterable[str] = (),
        window_messages: int | None = None,
        window_bytes: int = WINDOW_BYTES,
        failure_policy: FailurePolicy | None = None,
        discover_seconds: float = DISCOVER_SECONDS,
        timeout: float | None = None,
    ) -> Consumer:
        """A consumer for an `async with` block, of one topic or several, which must exist, and of patterns.

        In a pattern (`"/default/orders.*"`) `*` is any text and `?` one character. Its topics may come and go: new ones
        are found within `discover_seconds` and read from their beginning, those that are deleted are left.

        A new subscription is of `type` and begins at `start`: "earliest", "latest", an offset, or a datetime. An
        existing one keeps its type and goes on where it was. `name` is unique among the subscription's consumers: the
        same name again takes the older one's place. `key_filters` are globs, for "key_shared".

        `window_messages` and `window_bytes` bound what was delivered and not handed to the application yet. Without a
        number, consumers of shared and key_shared subscriptions have as many messages as they work off in a moment, so
        that all get some, and others 10,000. The ack timeout begins when a message is handed over.

        `failure_policy` has what is to be changed of the subscription's, for all of its consumers:
        `{"max_redelivery_count": 3, "dead_letter_topic": "/default/dead"}`.
        """
        selection = TopicSelection.of(topic)
        name = f"{subscription}-{self._unique()}" if name is None else name
        _check_name("name", name)
        kind = type_name(type)
        if kind is None:
            raise ConfigError("type", type, f"one of {', '.join(TYPES)}")
        most = WINDOW_MESSAGES if window_messages is None else window_messages
        if not discover_seconds > 0:
            raise ConfigError("discover_seconds", discover_seconds, "seconds, more than 0")
        for key, number in (("window_messages", most), ("window_bytes", window_bytes)):
            if not 1 <= number <= 1 << 40:
                raise ConfigError(key, number, "from 1 to 2**40")
        settings = ConsumerSettings(
            subscription=SubscriptionName(subscription),
            name=name,
            type=TYPES[kind],
            start=place_of(start),
            key_filters=tuple(key_filters),
            window_messages=most,
            window_bytes=window_bytes,
            adapts=window_messages is None,
        )
        seconds = self.timeout if timeout is None else timeout
        change = None if failure_policy is None else policy_change(failure_policy)

        async def prepare(part: str) -> None:
            if change is not None:
                await self._admin.change_failure_policy(part, settings.subscription, change, seconds)

        return Consumer(
            self._brokers,
            str(selection),
            settings,
            partitions=lambda: self._admin.selected(selection, seconds),
            timeout=seconds,
            discover_seconds=discover_seconds if selection.patterns else None,
            comes_and_goes=selection.matches,
            prepare=prepare,
        )

    def fetch(self, topic: str, start: int = 0, end: int | None = None, *, timeout: float | None = None) -> Fetch:
        """Reads offsets [start, end) of a topic, or of a partition, without a subscription. `end` None: up to its head.

        >>> async for batch in client.fetch("/default/numbers", 1, 3):
        ...     print(batch.column("payload").to_pylist())
        [b'2', b'3']
        >>> table = await client.fetch("/default/numbers").table()
        >>> table.num_rows
        3
        """
        if start < 0 or (end is not None and end < start):
            raise ConfigError("start", start, "0 <= start <= end")
        return Fetch(self._admin, _check_topic(topic), start, end, self.timeout if timeout is None else timeout)

    def tail(self, topic: str, start: Place = "latest", *, timeout: float | None = None) -> Tail:
        """Reads what is published to a topic from `start` on, as it comes, without a subscription.

        For an `async with` block. Leaves no trace at the broker, and takes no messages from subscriptions.
        """
        name, seconds = _check_topic(topic), self.timeout if timeout is None else timeout

        async def parts() -> list[str]:
            return [*await self._admin.parts(name, seconds)]

        return Tail(self._admin, name, start, partitions=parts, timeout=seconds)

    def requests(self, topic: str, *, timeout: float | None = None) -> Requests:
        """Questions and replies over non-reliable topics, which are made if they are missing. See `Requests`."""
        return Requests(self, _check_topic(topic), self._unique(), self.timeout if timeout is None else timeout)

    def publisher(self, topic: str, name: str) -> Publisher:
        """Stores batches that are encoded already, for those who can tell afterwards which of them arrived."""
        _check_name("name", name)
        return Publisher(self._brokers, TopicName(topic), name, self.timeout)

    # --- topics -------------------------------------------------------------------------------------

    async def create_topic(
        self,
        topic: str,
        *,
        reliable: bool = True,
        partitions: int = 0,
        schema_subject: str | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Raises TopicExists, unless `exist_ok`.

        >>> await client.create_topic("/default/clicks", partitions=3)
        >>> (await client.describe_topic("/default/clicks")).partitions
        3
        >>> await client.delete_topic("/default/clicks")
        """
        await self._admin.create_topic(
            topic,
            reliable=reliable,
            partitions=partitions,
            schema_subject=schema_subject,
            exist_ok=exist_ok,
            timeout=timeout,
        )

    async def delete_topic(self, topic: str, *, timeout: float | None = None) -> None:
        """With all its messages and subscriptions; of a partitioned topic, all partitions."""
        await self._admin.delete_topic(topic, timeout)

    async def describe_topic(self, topic: str, *, timeout: float | None = None) -> TopicInfo:
        return await self._admin.describe_topic(topic, timeout)

    async def describe_storage(self, topic: str, *, timeout: float | None = None) -> StorageInfo:
        """Which objects hold a topic's history, and which offsets are gaps. Of a partition, not of its base."""
        return await self._admin.describe_storage(topic, timeout)

    async def describe_storages(
        self, topics: Iterable[str], *, timeout: float | None = None
    ) -> dict[TopicName, StorageInfo | DanubeError]:
        """As `describe_storage`, of many topics, with one request to each broker; a base stands for its partitions.

        A topic that cannot be described has the error as its value. What has not changed since the last call is not
        sent again.
        """
        return await self._admin.describe_storages(topics, timeout)

    async def swap_objects(self, topic: str, old: Sequence[str], new: Descriptor) -> None:
        """Asks the owner to describe an object that was made of several neighbours, or of one by erasing rows, instead.

        Sent once: a caller that gets no answer finds out with `describe_storage`. Raises Conflict if the owner has
        others now.
        """
        await self._admin.swap_objects(topic, old, new)

    async def flush_log(self, topic: str, *, timeout: float | None = None) -> LogFlushed:
        """Has the owner upload all that is committed, and drop it from its disk. Of a partition, not of its base."""
        return await self._admin.flush_log(topic, timeout)

    async def note_order(
        self, order: str, topic: str, *, to: str = "", count: int | None = None, timeout: float | None = None
    ) -> bool:
        """Has a broker write into the log of events what an operator had this client do: `RedriveLetters`.

        False if the broker is older than this call.
        """
        return await self._admin.note_order(pb.NoteOrder(order=order, topic=topic, to_topic=to, count=count), timeout)

    async def list_topics(self, namespace: str | None = None, *, timeout: float | None = None) -> list[str]:
        """All topics, or those of one namespace, by name."""
        return await self._admin.list_topics(namespace, timeout)

    async def lookup(self, topic: str, *, timeout: float | None = None) -> Located:
        """Which broker serves the topic, and of how many partitions it is the base."""
        return await self._admin.lookup(topic, timeout)

    async def find_offset(self, topic: str, at: Place, *, timeout: float | None = None) -> int:
        """The offset that "earliest", "latest" or a time means now."""
        return await self._admin.find_offset(topic, at, timeout)

    # --- subscriptions ------------------------------------------------------------------------------

    async def lag(self, topic: str, subscription: str, *, timeout: float | None = None) -> Lag:
        """How far the subscription is behind, and in words why.

        >>> async with client.consumer("/default/numbers", subscription="behind", start="earliest"):
        ...     pass
        >>> (await client.lag("/default/numbers", "behind")).messages
        3
        """
        return await self._admin.lag(topic, subscription, timeout)

    async def seek(self, topic: str, subscription: str, to: Place, *, timeout: float | None = None) -> list[int]:
        """Moves a subscription; returns its new place in every partition. Consumers of it use `Consumer.seek`."""
        return await self._admin.seek(topic, subscription, to, timeout)

    async def unsubscribe(self, topic: str, subscription: str, *, timeout: float | None = None) -> None:
        """Removes the subscription and its cursor. Raises SubscriptionBusy while a consumer is connected."""
        await self._admin.unsubscribe(topic, subscription, timeout)


def _check_topic(topic: object) -> TopicName:
    """Raises ConfigError, or InvalidName."""
    if not isinstance(topic, str):
        raise ConfigError("topic", topic, "one topic, as text: /namespace/name. For several, make one for each")
    return TopicName(topic)


def _check_name(key: str, name: str) -> None:
    if not name or len(name.encode()) > NAME_SIZE_MAX_BYTES:
        raise ConfigError(key, name, f"1 to {NAME_SIZE_MAX_BYTES} bytes of UTF-8")
