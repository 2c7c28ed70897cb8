"""One member of an etcd as seen from here: a channel, the methods we call on it, and when it was last heard of."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from pydanube.errors import ConfigError
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)

# --- what we call -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Answer]):
    """`streams`: both sides may send many messages."""

    path: str
    request: type[Request]
    answer: type[Answer]
    streams: bool = False


RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
DELETE_RANGE: Final = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse, streams=True)
LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse, streams=True
)
LEASE_TIME_TO_LIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse
)
MEMBER_LIST: Final = Method("/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse)
MEMBER_ADD: Final = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
MEMBER_REMOVE: Final = Method("/etcdserverpb.Cluster/MemberRemove", pb.MemberRemoveRequest, pb.MemberRemoveResponse)
MEMBER_PROMOTE: Final = Method("/etcdserverpb.Cluster/MemberPromote", pb.MemberPromoteRequest, pb.MemberPromoteResponse)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
MOVE_LEADER: Final = Method("/etcdserverpb.Maintenance/MoveLeader", pb.MoveLeaderRequest, pb.MoveLeaderResponse)

# --- how we connect ---------------------------------------------------------------------------------

# etcd drops clients that ping more often than every 5 s. A peer that is gone without a goodbye, or that was stopped,
# is noticed after the sum of the two.
KEEPALIVE_SECONDS: Final = 6.0
KEEPALIVE_TIMEOUT_SECONDS: Final = 3.0
OPTIONS: Final = (
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    # Without this a stopped process, whose kernel still confirms what arrives, is waited for a minute.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.http2.max_pings_without_data", 0),  # as many as it takes: a watch may be quiet for hours
    ("grpc.max_receive_message_length", -1),  # etcd bounds what is stored; lists are read in pages
    ("grpc.max_send_message_length", -1),
    # A member that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels with one address share a connection, and with it the pauses between attempts.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
# A member that knows no leader refuses immediately what it could not do, and ends its watches.
REQUIRE_LEADER: Final = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. Without `ca` the system's authorities are trusted; `cert` and `key` are given together."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> Any:
        """For a channel. Raises ConfigError for a file that cannot be read."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("etcd tls", str(self.cert or self.key), "a certificate and its key are given together")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError("etcd tls", str(path), f"it cannot be read: {error.strerror}") from None


def target(url: str) -> str:
    """host:port of an endpoint as it is written by people (host:port) and by etcd (http://host:port)."""
    address = url.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("etcd endpoint", url, "host:port")
    return address


class CallFailed(Exception):
    """What gRPC says of a call that has no answer, or of etcd's answer if that was an error."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = details


class Closed(Exception):
    """The channel was closed from here."""


class Endpoint:
    """Belongs to the event loop that first uses it. Times are the loop's."""

    def __init__(self, address: str, credentials: Any | None) -> None:
        self.address = address
        self.heard_at = float("-inf")
        self.raft_term = 0
        self.shunned_until = float("-inf")
        self._credentials = credentials
        self._channel: Any | None = None
        self._stubs: dict[str, Any] = {}

    def connected(self) -> bool:
        """Whether a call would be sent immediately. Begins to connect if not."""
        ready: bool = self._open().get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY
        return ready

    async def ask(
        self, method: Method[Request, Answer], request: Request, seconds: float, *, require_leader: bool = True
    ) -> Answer:
        """One request, one answer. Raises CallFailed, or Closed."""
        if method.streams:
            stream = self.stream(method, seconds, require_leader=require_leader)
            try:
                await stream.write(request)
                return await stream.read()
            finally:
                stream.cancel()
        metadata = REQUIRE_LEADER if require_leader else None
        try:
            answer: Answer = await self._stub(method)(request, timeout=seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Closed from None
        return answer

    def stream(
        self, method: Method[Request, Answer], seconds: float | None, *, require_leader: bool = True
    ) -> Stream[Request, Answer]:
        """A call of many messages, for `seconds` or without a limit. It ends when it is cancelled or dropped."""
        return Stream(self._stub(method)(timeout=seconds, metadata=REQUIRE_LEADER if require_leader else None))

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._stubs.clear()
            await channel.close()

    def _open(self) -> Any:
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, options=OPTIONS)
        return self._channel

    def _stub(self, method: Method[Request, Answer]) -> Any:
        stub = self._stubs.get(method.path)
        if stub is None:
            channel = self._open()
            make = channel.stream_stream if method.streams else channel.unary_unary
            stub = self._stubs[method.path] = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        return stub


class Stream(Generic[Request, Answer]):
    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, request: Request) -> None:
        """Returns when it is on its way. If the stream has ended, `read` says why."""
        try:
            with suppress(asyncio.InvalidStateError):
                await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Closed from None

    async def read(self) -> Answer:
        """The next answer. Raises CallFailed when there is none. A cancelled read ends the stream: gRPC wants it so."""
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Closed from None
        if answer is grpc.aio.EOF:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the stream was ended")
        found: Answer = answer
        return found

    def cancel(self) -> None:
        self._call.cancel()

    def __del__(self) -> None:
        # gRPC keeps a call until it ends, so it is ended here. After the loop nothing is left to end.
        with suppress(RuntimeError):
            self._call.cancel()


def being_cancelled() -> bool:
    """Whether this task is to end. If not, the call was cancelled: gRPC raises the same for both."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(error: grpc.aio.AioRpcError) -> CallFailed:
    return CallFailed(error.code(), error.details() or "")
