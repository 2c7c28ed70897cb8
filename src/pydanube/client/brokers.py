"""The brokers an application knows: connections to them, routes of topics, and retries.

    Brokers.any()          a connection to some broker: one that is open, else the first that answers
    Brokers.owner(topic)   a connection to the broker that serves the topic, by lookup
    retry_until(...)       retries a call that time may help, until the deadline

Addresses are those the application gave and those that lookups named since; all of them are tried, in random order, so
one broker that is away never stops a client that knows another. Neither does one that answers and cannot help, such as
a broker that is cut off from the others: the one that failed most recently is asked last.

A client that was given a broker with TLS never leaves TLS because a broker says so: otherwise one broker that is set up
wrongly, or broken into, would have tokens and messages sent in clear.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydanube.client.connection import BrokerConnection, tls_refusal
from pydanube.client.connector import SYSTEM, Connector
from pydanube.client.messages import Statistics
from pydanube.errors import (
    ClientClosed,
    ConfigError,
    DanubeError,
    DeadlineExceeded,
    TopicUnknown,
    Unavailable,
    Unreachable,
)
from pydanube.wire import strangers
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

PORT: Final = 6651
PLAIN: Final = "danube"
TLS: Final = "danube+tls"
DIAL_SECONDS: Final = 5.0  # to one broker; the next one is tried then
BACKOFF_FIRST_SECONDS: Final = 0.05
BACKOFF_MAX_SECONDS: Final = 0.5  # each topic that waits asks two or three times a second where it is


class Address(NamedTuple):
    """danube://host:port, or danube+tls://host:port."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError."""
        allowed = f"{PLAIN}://host:port or {TLS}://host:port"
        try:
            parts = urlsplit(url if "://" in url else f"{PLAIN}://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError("url", url, allowed) from error
        if parts.scheme not in (PLAIN, TLS) or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigError("url", url, allowed)
        return cls(parts.hostname, port or PORT, parts.scheme == TLS)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TLS if self.tls else PLAIN}://{host}:{self.port}"


def addresses_of(urls: str | Iterable[str]) -> list[Address]:
    """Several are given as a list, or in one text with commas between them."""
    texts = urls.split(",") if isinstance(urls, str) else list(urls)
    found = list(dict.fromkeys(Address.parse(text.strip()) for text in texts if text.strip()))
    if not found:
        raise ConfigError("url", urls, "at least one broker")
    return found


# Called with a broker's URL when a connection to it is open, and with the reason too when it is lost.
OnConnection: TypeAlias = Callable[[str, DanubeError | None], None]


# A token, or a function that is asked for one whenever a connection is made, in the thread of the client's loop.
Token: TypeAlias = str | Callable[[], str]


class RetryDelay:
    """Exponential backoff with jitter, up to a bound."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._next = BACKOFF_FIRST_SECONDS

    def reset(self) -> None:
        self._next = BACKOFF_FIRST_SECONDS

    def seconds(self) -> float:
        seconds, self._next = self._next, min(2 * self._next, BACKOFF_MAX_SECONDS)
        return seconds * self._rng.uniform(0.5, 1.0)

    async def sleep(self) -> None:
        await asyncio.sleep(self.seconds())


async def with_deadline(what: str, seconds: float, waiting: Awaitable[T]) -> T:
    """The result, if it comes in time."""
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError:
        raise DeadlineExceeded(what, seconds) from None


class Brokers:
    """Connections by address, at most one each; opened when needed, opened again when lost."""

    def __init__(
        self,
        addresses: list[Address],
        *,
        token: Token = "",
        tls: ssl.SSLContext | None = None,
        connector: Connector = SYSTEM,
        on_connection: OnConnection | None = None,
    ) -> None:
        self.connector = connector
        self._on_connection = on_connection
        self._known = dict.fromkeys(addresses)  # in order of appearance
        self._given = frozenset(addresses)
        self._has_tls = any(each.tls for each in addresses)
        self._token = token
        self._tls = tls
        self._connections: dict[Address, BrokerConnection] = {}
        self._dialing: dict[Address, asyncio.Task[BrokerConnection]] = {}
        self._routes: dict[str, Address] = {}  # named by `Moved`: where to look first
        self._failed_at: dict[str, float] = {}  # by URL: when a broker last could not help
        self._named_by: dict[str, str] = {}  # URLs: who last said that a topic is there
        self._closed = False
        self._opened = self._lost = 0
        self._last_error: DanubeError | None = None

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open now. May be asked in any thread."""
        return any(connection.usable for connection in list(self._connections.values()))

    def statistics(self) -> Statistics:
        connections = [connection for connection in self._connections.values() if connection.usable]
        return Statistics(
            connected=sorted(connection.url for connection in connections),
            connections_opened=self._opened,
            connections_lost=self._lost,
            producers=sum(len(connection.producers) for connection in connections),
            consumers=sum(len(connection.consumers) for connection in connections),
            last_error=str(self._last_error or ""),
        )

    async def retry_until(self, what: str, seconds: float, attempt: Callable[[], Awaitable[T]], silent: str = "") -> T:
        """Calls `attempt` until it succeeds or fails for good. Raises DeadlineExceeded, which says what went wrong
        last; `silent` is what it says if nothing did, because the first attempt is still waiting.
        """
        backoff = RetryDelay(self.connector.rng)
        last: DanubeError | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await attempt()
                    except DanubeError as error:
                        if not error.retryable:
                            raise
                        last = error
                    await backoff.sleep()
        except TimeoutError:
            raise DeadlineExceeded(what, seconds, str(last or silent)) from last

    @property
    def known(self) -> list[str]:
        return [str(address) for address in self._known]

    async def any(self) -> BrokerConnection:
        """Raises Unreachable if no broker answers, or the last refusal."""
        self._check_open()
        usable = [connection for connection in self._connections.values() if connection.usable]
        if usable:
            best = min(usable, key=lambda connection: self._failed_at.get(connection.url, 0.0))
            self._look_for_better(best)
            return best
        refusal: DanubeError | None = None
        why: dict[Address, DanubeError] = {}
        for address in self.connector.rng.sample(list(self._known), len(self._known)):
            try:
                return await self.connection(address)
            except DanubeError as error:
                refusal = refusal if error.retryable else error
                why[address] = error
        raise refusal or _no_answer(why)

    async def owner(self, topic: str) -> tuple[BrokerConnection, int]:
        """A connection to the topic's broker, and of how many partitions it is the base. Raises TopicUnknown."""
        route = self._routes.pop(topic, None)
        if route is not None:
            return await self.connection(route), 0
        asked = await self.any()
        try:
            frame = await asked.request(pb.Command(lookup=pb.Lookup(topic=topic)), "located")
            located = frame.command.located
            is_here = located.is_local or located.partitions
            owner = asked if is_here else await self.connection(self.named(located.stream_url))
        except (Unavailable, asyncio.CancelledError):  # a caller that gives up had no answer either
            self.deprioritize(asked.url)
            raise
        self._named_by[owner.url] = asked.url
        return owner, located.partitions

    async def owner_or_any(self, topic: str) -> BrokerConnection:
        """As `owner`; a topic that does not exist can be created anywhere."""
        try:
            return (await self.owner(topic))[0]
        except TopicUnknown:
            return await self.any()

    def bad_route(self, connection: BrokerConnection) -> None:
        """The topic is not at `connection`. The broker that named it may have a stale view, so it is asked later."""
        self.deprioritize(self._named_by.get(connection.url, connection.url))

    def deprioritize(self, url: str) -> None:
        """This broker could not help: others are asked first."""
        self._failed_at[url] = asyncio.get_running_loop().time()

    def _look_for_better(self, best: BrokerConnection) -> None:
        """Dials brokers that failed longer ago than this one, or never, in the background: they may be away."""
        since = self._failed_at.get(best.url, 0.0)
        for address in self._known:
            if self._failed_at.get(str(address), 0.0) < since:
                self._dialing_to(address)

    def knows_route(self, topic: str) -> bool:
        """Whether a broker has named the topic's owner, and that was not tried yet."""
        return topic in self._routes

    def moved(self, topic: str, url: str) -> None:
        """The topic's old broker has said where it is now."""
        if url:
            try:
                self._routes[topic] = self.named(url)
            except (ConfigError, Unreachable) as error:
                log.warning("topic moved to where we do not go", extra={"topic": topic, "why": str(error)})

    def named(self, url: str) -> Address:
        """What a broker calls another one. Raises ConfigError, and Unreachable for one to which we do not go."""
        address = Address.parse(url)
        self._check_tls(address)
        return address

    def _check_tls(self, address: Address) -> None:
        if self._has_tls and not address.tls and address not in self._given:
            why = "a broker named it, and it is without TLS, which this client does not leave; set stream.tls there"
            raise Unreachable(str(address), why)

    async def connection(self, address: Address) -> BrokerConnection:
        """An open connection to this broker. Callers at the same time share one attempt."""
        self._check_open()
        self._check_tls(address)
        connection = self._connections.get(address)
        if connection is not None and connection.usable:
            return connection
        dialing = self._dialing_to(address)
        try:
            # A caller that gives up must not take the attempt away from the others.
            return await asyncio.shield(dialing)
        except asyncio.CancelledError:
            if self._closed and dialing.cancelled():  # by `close`, and not because the caller was cancelled
                raise ClientClosed("the client") from None
            raise

    async def close(self) -> None:
        """Says goodbye to all."""
        self._closed = True
        for dialing in list(self._dialing.values()):
            dialing.cancel()
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=1.0)

    def _dialing_to(self, address: Address) -> asyncio.Task[BrokerConnection]:
        dialing = self._dialing.get(address)
        if dialing is None:
            dialing = self._dialing[address] = asyncio.create_task(self._dial(address), name=f"dial {address}")
            dialing.add_done_callback(lambda task: self._dialed(address, task))
        return dialing

    def _dialed(self, address: Address, task: asyncio.Task[BrokerConnection]) -> None:
        self._dialing.pop(address, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps no caller waits for it any more
            self.deprioritize(str(address))
            self._last_error = error if isinstance(error, DanubeError) else self._last_error

    def _gone(self, connection: BrokerConnection) -> None:
        if not self._closed:
            self._lost += 1
            self._last_error = connection.ended
            self._tell(connection.url, connection.ended)

    def _tell(self, url: str, error: DanubeError | None) -> None:
        if self._on_connection is not None:
            try:
                self._on_connection(url, error)
            except Exception:  # the application's mistake: connections live on
                log.exception("on_connection failed", extra={"broker": url})

    async def _dial(self, address: Address) -> BrokerConnection:
        url = str(address)
        context = (self._tls or ssl.create_default_context()) if address.tls else None
        connection: BrokerConnection | None = None
        token = self._token if isinstance(self._token, str) else self._token()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                connection = await self.connector.connect(
                    lambda: BrokerConnection(url, token), address.host, address.port, context
                )
                await asyncio.shield(connection.welcome)
        except TimeoutError:
            error = Unreachable(url, f"no answer within {DIAL_SECONDS:g} s")
            if connection is not None:  # as of HTTP servers, which wait for an empty line
                hint = f"somebody took the connection, and said nothing within {DIAL_SECONDS:g} s"
                error = Unreachable(url, f"{hint}; if that is no broker's native port: {strangers.NATIVE}")
                connection.end(error)
            raise error from None
        except ssl.SSLError as error:
            raise tls_refusal(url, error) from error
        except OSError as error:
            raise Unreachable(url, _in_words(error)) from error
        except asyncio.CancelledError:
            if connection is not None:
                connection.end(Unreachable(url, "given up"))
            raise
        if self._closed:
            connection.close()
            raise ClientClosed("the client")
        self._known.setdefault(address)
        self._connections[address] = connection
        self._opened += 1
        connection.closed.add_done_callback(lambda _: self._gone(connection))
        log.debug("connected", extra={"broker": url})
        self._tell(url, None)
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the client")


def _no_answer(why: dict[Address, DanubeError]) -> DanubeError:
    """Why no broker answered: each named once, and a reason that all share said once."""
    if len(why) == 1:
        return next(iter(why.values()))
    reasons = {str(address): getattr(error, "why", "") or str(error) for address, error in why.items()}
    shared = set(reasons.values())
    if len(shared) == 1:
        return Unreachable(" and ".join(sorted(reasons)), shared.pop())
    return Unreachable("the brokers", "; ".join(f"{url}: {reason}" for url, reason in sorted(reasons.items())))


def _in_words(error: OSError) -> str:
    """asyncio says which address it called, and nothing else; we have named it."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error)
