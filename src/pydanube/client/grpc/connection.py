"""A gRPC connection to one port of one broker, and the errors that its calls end with.

    async with GrpcConnection("http://127.0.0.1:50051", "--endpoint") as broker:
        found = await broker.ask(GrpcCall("danube_admin.BrokerAdmin/ListBrokers", pb.Empty(), pb.BrokerListResponse))

A call is a value: what is asked, of which service, and what answers it. `pydanube.admin.calls` makes those of the admin
services. A refusal by the broker is `BrokerRefused` with the broker's sentence; a broker that cannot be reached is
`Unreachable`; an address where another server listens is `WrongPort`. TLS does not exist yet: an https address is
refused, not silently downgraded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message

from pydanube.client.grpc import listening
from pydanube.errors import ConfigError, DanubeError, Unreachable

T = TypeVar("T")
M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Message, covariant=True)

CALL_SECONDS: Final = 10.0
NO_METHOD: Final = "Method not found!"  # gRPC's own words
CLIENT_FLAG: Final = "--service-addr"
PORTS: Final = {"admin": 50051, "client": 6650}  # by default
PORT_FLAGS: Final = {"admin": "--admin-addr", "client": "--broker-addr"}
RETRIES_MAX: Final = 8
BACKOFF_BASE_SECONDS: Final = 0.2
BACKOFF_MAX_SECONDS: Final = 2.0
RETRIED: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
)
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    # A broker that comes back is found within this time, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class GrpcCall(Generic[A]):
    """One call of a service: unary, or a stream of answers. `changes` marks those that change something."""

    method: str
    request: Message
    answer: type[A]
    changes: bool = False


class BrokerRefused(DanubeError):
    """The broker's answer is no: `code` is gRPC's, `sentence` its own."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(code, sentence)
        self.code = code
        self.sentence = sentence

    def __str__(self) -> str:
        if self.code == grpc.StatusCode.UNIMPLEMENTED.name and self.sentence != NO_METHOD:
            return self.sentence  # which says why it is not to be had
        return f"{self.sentence} ({self.code})"


class WrongPort(ConfigError):
    """Another server listens at the address than the wanted one: `sentence` says which, and where that one is."""

    def __init__(self, key: str, value: object, sentence: str) -> None:
        super().__init__(key, value, sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


class GrpcConnection:
    """To one port of one broker. Nothing is dialled before the first call. For an `async with` block."""

    def __init__(self, url: str, flag: str = "--service-addr") -> None:
        self.address = target(url, flag)
        self._flag = flag
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, call: GrpcCall[M], *, seconds: float = CALL_SECONDS) -> M:
        """Raises BrokerRefused, Unreachable or WrongPort."""
        return await self.call(call.method, call.request, call.answer, seconds=seconds)

    def follow(self, call: GrpcCall[M]) -> AsyncIterator[M]:
        """The answers of a call that has several. Raises as `ask`."""
        return self.stream(call.method, call.request, call.answer)

    async def call(
        self,
        method: str,
        request: Message,
        answer: type[M],
        *,
        seconds: float = CALL_SECONDS,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> M:
        """Raises BrokerRefused, Unreachable or WrongPort."""
        call = self._methods.get(method)
        if call is None:
            call = self._methods[method] = self._channel.unary_unary(
                f"/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
        try:
            response: M = await call(request, timeout=seconds, metadata=headers)
        except grpc.aio.AioRpcError as error:
            raise await self.explained(error) from error
        return response

    async def stream(self, method: str, request: Message, answer: type[M]) -> AsyncIterator[M]:
        call = self._channel.unary_stream(
            f"/{method}", request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )(request)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise await self.explained(error) from error
        finally:
            call.cancel()

    def failure(self, error: grpc.aio.AioRpcError) -> DanubeError:
        """gRPC says UNAVAILABLE both for a broker that is not there and for one that says so itself."""
        code, sentence = error.code(), " ".join((error.details() or "no reason given").split())
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable(f"the broker at {self.address}", "it did not answer in time")
        if code is grpc.StatusCode.UNAVAILABLE and _is_transport(sentence):
            why = f"nobody answers there; `danube broker` starts one, {self._flag} names another"
            return Unreachable(f"the broker at {self.address}", why)
        return BrokerRefused(code.name, sentence)

    async def explained(self, error: grpc.aio.AioRpcError) -> DanubeError:
        """The failure. If another server may be listening there, it is found out which."""
        failure = self.failure(error)
        wanted = "client" if self._flag == CLIENT_FLAG else "admin"
        if isinstance(failure, BrokerRefused) and failure.sentence == NO_METHOD:
            found = await listening.services_at(self._channel)
            if wanted not in found:
                what = f"the {found.pop()} port" if found else "a gRPC port, but no broker's"
                return self._wrong(what, wanted)
        elif (
            isinstance(failure, Unreachable)
            and error.code() is grpc.StatusCode.UNAVAILABLE
            and "timed out" not in (error.details() or "")  # then a look would only take as long again
        ):
            host = urlsplit(f"//{self.address}").hostname or ""
            if not await asyncio.to_thread(listening.is_known, host):
                why = f"no host of the name {host} is known; check {self._flag}"
                return Unreachable(f"the broker at {self.address}", why)
            listener = await listening.listener_at(self.address)
            if listener in _OTHERS:
                return self._wrong(_OTHERS[listener], wanted)
        return failure

    def _wrong(self, what: str, wanted: str) -> WrongPort:
        """`what` it is, and where the `wanted` one is."""
        default = f"{PORTS[wanted]} unless `danube broker {PORT_FLAGS[wanted]}` says otherwise"
        sentence = f"{self.address} is {what}; the {wanted} port is {default} ({self._flag})"
        return WrongPort(self._flag, self.address, sentence)


def target(url: str, flag: str) -> str:
    """host:port of http://host:port, or of host:port itself."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme == "https":
        raise ConfigError(flag, url, "TLS does not exist yet; use http://")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path.strip("/"):
        usual = PORTS["client" if flag == "--service-addr" else "admin"]
        raise ConfigError(flag, url, f"http://host:port, for example http://127.0.0.1:{usual}")
    return parts.netloc


def is_passing(error: DanubeError) -> bool:
    """Whether the same call may succeed soon: what official clients retry."""
    return isinstance(error, Unreachable) or (
        isinstance(error, BrokerRefused) and grpc.StatusCode[error.code] in RETRIED
    )


async def with_retries(call: Callable[[], Awaitable[T]], *, retries_max: int = RETRIES_MAX) -> T:
    """Tries again what may pass, with growing pauses: about ten seconds in all, time for a broker to restart."""
    for attempt in range(retries_max):
        try:
            return await call()
        except DanubeError as error:
            if not is_passing(error):
                raise
        pause = min(BACKOFF_BASE_SECONDS * (attempt + 1), BACKOFF_MAX_SECONDS)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
    return await call()


_OTHERS: Final = {
    listening.Listener.NATIVE: "the native port",
    listening.Listener.HTTP: "an HTTP port, of metrics or of the web admin perhaps",
    listening.Listener.TLS: "a port that speaks TLS",
}

# What gRPC itself says of a connection; our broker's sentences have none of these words.
_TRANSPORT: Final = (
    "failed to connect",
    "connection refused",
    "connections to all backends",
    "socket closed",
    "connection reset",
    "goaway",
    "broken pipe",
    "dns resolution",
    "stream removed",
    "recvmsg",
    "connection attempt timed out",
    "name resolution",
    "errors resolving",
    "address lookup failed",
)


def _is_transport(sentence: str) -> bool:
    lowered = sentence.lower()
    return any(words in lowered for words in _TRANSPORT)
