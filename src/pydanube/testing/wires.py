"""The network between real clients and the native servers of real brokers: bytes on a virtual loop, from a seed.

    wires = Wires(Random(7), WireFaults(drop=0.02, cut=0.3, delay_max_seconds=0.2))
    server = NativeServer(broker)                                       # in the broker's process, and:
    server.start()
    wires.listen("broker", 6651, server.accept)
    client = Client("danube://broker:6651", connector=wires.connector())

A wire is a pair of transports that do what TCP does: bytes arrive in order or not at all, in pieces of any length,
after some time; a write that the peer does not take stops the writer; a connection that breaks loses what is under way,
and its two ends learn of that at different times. So a client may be back on a new connection while the broker still
serves the old one. Callbacks of each end run in the context of the process that it belongs to: one that is paused hears
nothing, and one that was killed never will (`break_all` then tells its peers).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import ssl
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from pydanube.testing.loop import EPOCH_US

P = TypeVar("P", bound=asyncio.Protocol)
T = TypeVar("T")

WRITE_BUFFER_BYTES: Final = 64 * 1024  # as asyncio's: more than that is not taken without `pause_writing`


@dataclass(frozen=True, slots=True)
class WireFaults:
    """What may happen to every write and to every attempt to connect. Parts are from 0 to 1."""

    delay_seconds: float = 0.0005
    delay_max_seconds: float = 0.0005
    cut: float = 0.0  # of the writes arrive in pieces, each after a time of its own
    drop: float = 0.0  # of the writes are the connection's last: it breaks somewhere inside of them
    linger_max_seconds: float = 0.0  # later does one end learn that the connection broke
    refuse: float = 0.0  # of the attempts to connect are refused
    lose: float = 0.0  # of the attempts reach the server, and the client hears nothing


QUIET: Final = WireFaults()


class _Listener(NamedTuple):
    accept: Callable[[], asyncio.Protocol]
    context: Context


class Wires:
    """`faults` may be changed at any time; connections that exist go on with the new ones."""

    def __init__(self, dice: Random, faults: WireFaults = QUIET) -> None:
        self.dice = dice
        self.faults = faults
        self.connections = self.broken = 0
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._ends: dict[End, tuple[str, int]] = {}  # the clients', by age, and where they lead
        self._digest = hashlib.sha256()

    def listen(self, host: str, port: int, accept: Callable[[], asyncio.Protocol]) -> None:
        """Connections to that address are served by the protocol that `accept` makes, in the process of the caller."""
        self._listeners[host, port] = _Listener(accept, copy_context())

    def close(self, host: str, port: int) -> None:
        """Takes no more connections there. Those that exist go on."""
        self._listeners.pop((host, port), None)

    def connector(self) -> WireConnector:
        """For one client."""
        return WireConnector(self, Random(self.dice.getrandbits(62)))

    def break_all(self, host: str = "", port: int = 0) -> None:
        """All connections break, or those to one address."""
        for end, place in list(self._ends.items()):
            if not host or place == (host, port):
                end.break_()

    @property
    def digest(self) -> str:
        """Of what arrived so far, when and where: equal runs have equal ones."""
        return self._digest.hexdigest()

    def note(self, *facts: object) -> None:
        self._digest.update(repr((round(asyncio.get_running_loop().time(), 9), *facts)).encode())

    def chance(self, part: float) -> bool:
        return part > 0 and self.dice.random() < part

    def delay(self) -> float:
        return self.dice.uniform(self.faults.delay_seconds, self.faults.delay_max_seconds)

    async def dial(self, make: Callable[[], P], host: str, port: int) -> P:
        """As a loop's `create_connection`. Raises OSError."""
        await asyncio.sleep(self.delay())
        listener = self._listeners.get((host, port))
        if listener is None or self.chance(self.faults.refuse):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self.connections += 1
        number = self.connections
        ours, theirs = End(self, f"client {number}", copy_context()), End(self, f"server {number}", listener.context)
        ours.other, theirs.other = theirs, ours
        self.note("connected", number)
        asyncio.get_running_loop().call_soon(theirs.open, listener.accept, context=listener.context.copy())
        if self.chance(self.faults.lose):
            await asyncio.Event().wait()  # until the client gives up
        self._ends[ours] = (host, port)
        protocol = make()
        ours.open(lambda: protocol)
        return protocol

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)


class WireConnector:
    """A client's way to these wires, with the virtual loop's date and a seed of its own."""

    def __init__(self, wires: Wires, dice: Random) -> None:
        self._wires = wires
        self.dice = dice

    @property
    def time_ns(self) -> Callable[[], int]:
        loop = asyncio.get_running_loop()
        return lambda: EPOCH_US * 1000 + round(loop.time() * 1e9)

    async def connect(self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
        assert tls is None, "wires are plain"
        return await self._wires.dial(make, host, port)

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        async def later() -> T:
            await asyncio.sleep(0)
            return function()

        return asyncio.ensure_future(later())


class End(asyncio.Transport):
    """One end of a wire."""

    def __init__(self, wires: Wires, name: str, context: Context) -> None:
        super().__init__()
        self.name = name
        self.other: End
        self._wires = wires
        self._context = context.copy()
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = None
        self._coming: deque[tuple[float, bytes | None]] = deque()  # None: the peer has closed
        self._came: deque[bytes | None] = deque()
        self._last_at = 0.0  # when the last of what was written arrives
        self._untaken_bytes = 0  # written here, and not taken by the peer
        self._high_bytes, self._low_bytes = WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES // 4
        self._is_paused = False  # the protocol was told to stop writing
        self._is_reading = True
        self._is_breaking = False  # what is written from now on does not get far
        self._is_closing = self._is_over = False

    def open(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Here begins what the protocol hears."""
        if not self._is_over:
            self._protocol = make()
            self._protocol.connection_made(self)
            self._soon(self._push)

    def break_(self) -> None:
        """The wire breaks. One of the ends, by chance, learns it later than the other."""
        if self._is_over and self.other._is_over:
            return
        self._wires.broken += 1
        linger = self._wires.dice.uniform(0, self._wires.faults.linger_max_seconds)
        first, second = (self, self.other) if self._wires.dice.random() < 0.5 else (self.other, self)
        for end in (first, second):
            end._coming.clear()  # what is under way is lost; what has arrived is not
            end._is_closing = True
        self._loop.call_soon(first._lost, _reset(), context=first._context)
        self._loop.call_later(linger, second._lost, _reset(), context=second._context)

    # --- writing ------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.other.name.replace(" ", "-"), 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = WRITE_BUFFER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._untaken_bytes

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_breaking or not data:
            return
        wires, data = self._wires, bytes(data)
        is_last = wires.chance(wires.faults.drop)
        if is_last:
            data = data[: wires.dice.randint(0, len(data))]
        while data:
            size = wires.dice.randint(1, len(data)) if wires.chance(wires.faults.cut) else len(data)
            self._transmit(data[:size])
            data = data[size:]
        if is_last:
            self._is_breaking = True
            self._loop.call_at(self._last_at, self.break_)
        if self._untaken_bytes > self._high_bytes and not self._is_paused and self._protocol is not None:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _transmit(self, data: bytes | None) -> None:
        self._untaken_bytes += len(data or b"")
        self._last_at = max(self._last_at, self._loop.time() + self._wires.delay())
        self.other._coming.append((self._last_at, data))
        self._loop.call_at(self._last_at, self.other._arrive, context=self.other._context)

    def _taken(self, size_bytes: int) -> None:
        self._untaken_bytes -= size_bytes
        if self._is_paused and self._untaken_bytes <= self._low_bytes:
            self._is_paused = False
            self._soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_over or self._protocol is None:
            return
        if self._is_closing:
            self._lost(None)
        else:
            self._protocol.resume_writing()

    # --- reading ------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._soon(self._push)

    def is_reading(self) -> bool:
        return self._is_reading

    def _arrive(self) -> None:
        now = self._loop.time()
        while self._coming and self._coming[0][0] <= now:
            self._came.append(self._coming.popleft()[1])
        self._push()

    def _push(self) -> None:
        while self._came and self._is_reading and not self._is_over and self._protocol is not None:
            data = self._came.popleft()
            if data is None:
                self._lost(None)
                return
            self._wires.note(self.name, len(data))
            self.other._taken(len(data))
            self._protocol.data_received(data)

    # --- ending -------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """What was written still arrives, and then the end."""
        if not self._is_closing:
            self._is_closing = True
            self._transmit(None)
            if not self._is_paused:
                self._soon(self._lost, None)

    def abort(self) -> None:
        """What was written and has not arrived is lost."""
        if not self._is_over:
            self._is_closing = True
            self.other._coming.clear()
            self._soon(self._lost, None)
            self._loop.call_later(self._wires.delay(), self.other._lost, _reset(), context=self.other._context)

    def _lost(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_over = self._is_closing = True
        self._wires.forget(self)
        self._wires.note(self.name, "lost", error is None)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(callback, *args, context=self._context)


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
