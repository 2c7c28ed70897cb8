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
    call_bytes: int = 1024  # what a call counts besides its data


class Held:
    """Bytes of requests in all connections. Large messages ask before they come, in turn; small ones are counted."""

    __slots__ = ("_waiting", "limits", "size_bytes")

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.size_bytes = 0
        self._waiting: OrderedDict[ServerCall, tuple[int, Callable[[ServerCall, int], bool]]] = OrderedDict()

    @property
    def is_full(self) -> bool:
        return self.size_bytes > self.limits.held_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def hold(self, call: ServerCall, size: int) -> None:
        call.held_bytes += size
        self.size_bytes += size

    def release(self, call: ServerCall) -> None:
        self.size_bytes -= call.held_bytes
        call.held_bytes = 0
        if self._waiting:
            self._waiting.pop(call, None)
            self._grant_some()

    def ask(self, call: ServerCall, size: int, grant: Callable[[ServerCall, int], bool]) -> None:
        """Calls `grant` when there is room, now or later; not after the call was released. It says whether it holds."""
        self._waiting[call] = size, grant
        self._grant_some()

    def _grant_some(self) -> None:
        waiting = self._waiting
        while waiting:
            call, (size, grant) = next(iter(waiting.items()))
            if self.size_bytes > call.held_bytes and self.size_bytes + size > self.limits.granted_bytes:
                return
            del waiting[call]
            if grant(call, size):
                self.hold(call, size)
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
        "request",
        "shell",
        "started",
        "stream",
        "taken_bytes",
    )

    def __init__(self, stream: Http2Stream, headers: CallHeaders, method: ServerMethod) -> None:
        self.stream = stream
        self.headers = headers
        self.method = method
        self.incoming: Incoming | None = None  # until the request has ended
        self.request: bytes | None = None  # the message of a unary request, when it has come
        self.is_open = True
        self.started = False  # headers have been sent
        self.asked = False
        self.held_bytes = self.granted_bytes = self.taken_bytes = 0
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
