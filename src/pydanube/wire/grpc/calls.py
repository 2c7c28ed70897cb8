"""One call, and what all calls of all connections may hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pydanube.wire.grpc.headers import CallHeaders
from pydanube.wire.grpc.messages import Incoming
from pydanube.wire.http2.values import Http2Stream
from pydanube.wire.status import Code


class ServerMethod(NamedTuple):
    """`handler` is the upper layer's. A message beyond the bound is refused from its prefix, with `too_large`."""

    path: str
    handler: Any
    streams_requests: bool
    size_max_bytes: int
    too_large: Callable[[int, int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    request_seconds: float = 60.0  # a request that has begun is complete by then
    held_bytes: int = 64 * 1024 * 1024  # requests of all connections: received, or granted, and not answered
    granted_bytes: int = 48 * 1024 * 1024  # of it, for messages larger than a stream's window
    connection_granted_bytes: int = 12 * 1024 * 1024  # of that, to one connection, unless a message alone is larger
    call_bytes: int = 1024  # what a call counts besides its data


class Share:
    """One connection's part of what is granted."""

    __slots__ = ("granted_bytes", "waiting")

    def __init__(self) -> None:
        self.granted_bytes = 0  # to calls that are not released
        self.waiting: OrderedDict[ServerCall, tuple[int, Callable[[ServerCall, int], bool]]] = OrderedDict()


class Held:
    """Bytes of requests in all connections. Small messages are counted; large ones ask before they come.

    Invariant: a connection is in `_waiting` if and only if its share has calls that wait. Connections take turns, and
    one that has its share waits for itself only: else a few requests that never come would stop all others.
    """

    __slots__ = ("_waiting", "limits", "size_bytes")

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.size_bytes = 0
        self._waiting: OrderedDict[Share, None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        return self.size_bytes > self.limits.held_bytes

    @property
    def waiting(self) -> int:
        return sum(len(share.waiting) for share in self._waiting)

    def hold(self, call: ServerCall, size: int) -> None:
        call.held_bytes += size
        self.size_bytes += size

    def promise(self, call: ServerCall, size: int) -> None:
        call.promised_bytes += size
        call.share.granted_bytes += size
        self.hold(call, size)

    def release(self, call: ServerCall) -> None:
        self.size_bytes -= call.held_bytes
        call.share.granted_bytes -= call.promised_bytes
        call.held_bytes = call.promised_bytes = 0
        if self._waiting:
            share = call.share
            if share.waiting.pop(call, None) is not None and not share.waiting:
                del self._waiting[share]
            self._grant_some()

    def ask(self, call: ServerCall, size: int, grant: Callable[[ServerCall, int], bool]) -> None:
        """Calls `grant` when there is room, now or later; not after the call was released. It says whether it holds."""
        call.share.waiting[call] = size, grant
        self._waiting.setdefault(call.share)
        self._grant_some()

    def _grant_some(self) -> None:
        waiting, limits = self._waiting, self.limits
        passed = 0  # one after the other, because they have their share
        while passed < len(waiting):
            share = next(iter(waiting))
            call, (size, grant) = next(iter(share.waiting.items()))
            if share.granted_bytes and share.granted_bytes + size > limits.connection_granted_bytes:
                waiting.move_to_end(share)
                passed += 1
                continue
            if self.size_bytes > call.held_bytes and self.size_bytes + size > limits.granted_bytes:
                return
            passed = 0
            del share.waiting[call]
            if share.waiting:
                waiting.move_to_end(share)
            else:
                del waiting[share]
            if grant(call, size):
                self.promise(call, size)
                call.granted_bytes += size


class ServerCall:
    """`shell` is the upper layer's: what it keeps for the call."""

    __slots__ = (
        "asked",
        "granted_bytes",
        "headers",
        "held_bytes",
        "incoming",
        "is_open",
        "method",
        "promised_bytes",
        "request",
        "share",
        "shell",
        "started",
        "stream",
        "taken_bytes",
    )

    def __init__(self, stream: Http2Stream, headers: CallHeaders, method: ServerMethod, share: Share) -> None:
        self.stream = stream
        self.share = share
        self.headers = headers
        self.method = method
        self.incoming: Incoming | None = None  # until the request has ended
        self.request: bytes | None = None  # the message of a unary request, when it has come
        self.is_open = True
        self.started = False  # headers have been sent
        self.asked = False
        self.held_bytes = self.promised_bytes = self.granted_bytes = self.taken_bytes = 0
        self.shell: Any = None

    def attach(self, shell: Any) -> None:
        """None when the upper layer has done with the call: no reference leads from here to it."""
        self.shell = shell


class Called(NamedTuple):
    """A unary request has come as a whole, or a stream of requests begins: `message` is None."""

    call: ServerCall
    message: bytes | None


class MessageReceived(NamedTuple):
    """Of a stream of requests; None: there are no more."""

    call: ServerCall
    message: bytes | None


class CallRefused(NamedTuple):
    """Wrong as such. The upper layer answers, so that it is counted as any other refusal."""

    call: ServerCall
    code: Code
    sentence: str


class Cancelled(NamedTuple):
    """The client has left, or broke a rule. Nothing more can be said to it."""

    call: ServerCall


CallEvent: TypeAlias = Called | MessageReceived | CallRefused | Cancelled
