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

A `Path` is the network to one address. While it loses what goes one way, or both, bytes wait, as TCP sends them again;
an end that has no more patience gives up, and its peer learns of that when the network is back. A machine whose power
is cut sends no reset (`break_all(silent=True)`): what its peers still write is answered with a reset once it is back.
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


class Path:
    """The network between clients and one address."""

    def __init__(self) -> None:
        self.delay_max_seconds = 0.0  # in addition to that of the wires
        self._requests_lost = self._answers_lost = False
        self._waiting: dict[End, None] = {}  # something is on its way to them

    @property
    def requests_lost(self) -> bool:
        """One way: nothing reaches the address."""
        return self._requests_lost

    @requests_lost.setter
    def requests_lost(self, lost: bool) -> None:
        self._requests_lost = lost
        self._go_on()

    @property
    def answers_lost(self) -> bool:
        """The other way: nothing comes back."""
        return self._answers_lost

    @answers_lost.setter
    def answers_lost(self, lost: bool) -> None:
        self._answers_lost = lost
        self._go_on()

    def heal(self) -> None:
        self.requests_lost = self.answers_lost = False
        self.delay_max_seconds = 0.0

    def holds(self, end: End) -> bool:
        """Whether nothing reaches this end now; it is called when something may."""
        lost = self._answers_lost if end.is_client else self._requests_lost
        if lost:
            self._waiting[end] = None
        return lost

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for end in waiting:
            end.arrive_soon()


class _Listener(NamedTuple):
    accept: Callable[[], asyncio.Protocol]
    context: Context
    path: Path


class Wires:
    """`faults` may be changed at any time; connections that exist go on with the new ones."""

    def __init__(self, rng: Random, faults: WireFaults = QUIET) -> None:
        self.rng = rng
        self.faults = faults
        self.connections = self.broken = 0
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._ends: dict[End, WireConnector] = {}  # the clients', by age, and whose they are
        self._digest = hashlib.sha256()

    def listen(self, host: str, port: int, accept: Callable[[], asyncio.Protocol], path: Path | None = None) -> None:
        """Connections to that address are served by the protocol that `accept` makes, in the process of the caller."""
        self._listeners[host, port] = _Listener(accept, copy_context(), path or Path())

    def listens(self, place: tuple[str, int]) -> bool:
        return place in self._listeners

    def close(self, host: str, port: int) -> None:
        """Takes no more connections there. Those that exist go on."""
        self._listeners.pop((host, port), None)

    def connector(self) -> WireConnector:
        """For one client."""
        return WireConnector(self, Random(self.rng.getrandbits(62)))

    def break_all(self, host: str = "", port: int = 0, *, silent: bool = False) -> None:
        """All connections break, or those to one address. `silent`: without a reset."""
        for end in list(self._ends):
            if not host or end.place == (host, port):
                if silent:
                    end.go_dark()
                else:
                    end.break_()

    def break_of(self, connector: WireConnector) -> None:
        for end, dialed_by in list(self._ends.items()):
            if dialed_by is connector:
                end.break_()

    @property
    def digest(self) -> str:
        """Of what arrived so far, when and where: equal runs have equal ones."""
        return self._digest.hexdigest()

    def note(self, *facts: object) -> None:
        self._digest.update(repr((round(asyncio.get_running_loop().time(), 9), *facts)).encode())

    def chance(self, part: float) -> bool:
        return part > 0 and self.rng.random() < part

    def delay(self, path: Path) -> float:
        seconds = self.rng.uniform(self.faults.delay_seconds, self.faults.delay_max_seconds)
        return seconds + self.rng.random() * path.delay_max_seconds if path.delay_max_seconds else seconds

    async def dial(self, make: Callable[[], P], host: str, port: int, connector: WireConnector) -> P:
        """As a loop's `create_connection`. Raises OSError."""
        listener = self._listeners.get((host, port))
        if listener is not None and (listener.path.requests_lost or listener.path.answers_lost):
            await asyncio.Event().wait()  # until the client gives up
        await asyncio.sleep(self.delay(listener.path if listener is not None else Path()))
        listener = self._listeners.get((host, port))
        if listener is None or self.chance(self.faults.refuse):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self.connections += 1
        number = self.connections
        place, path = (host, port), listener.path
        ours = End(self, f"client {number}", copy_context(), place, path, is_client=True)
        theirs = End(self, f"server {number}", listener.context, place, path, is_client=False)
        ours.other, theirs.other = theirs, ours
        self.note("connected", number)
        asyncio.get_running_loop().call_soon(theirs.open, listener.accept, context=listener.context.copy())
        if self.chance(self.faults.lose):
            await asyncio.Event().wait()  # until the client gives up
        self._ends[ours] = connector
        protocol = make()
        ours.open(lambda: protocol)
        return protocol

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)


class WireConnector:
    """A client's way to these wires, with the virtual loop's date and a seed of its own."""

    def __init__(self, wires: Wires, rng: Random) -> None:
        self._wires = wires
        self.rng = rng

    @property
    def time_ns(self) -> Callable[[], int]:
        loop = asyncio.get_running_loop()
        return lambda: EPOCH_US * 1000 + round(loop.time() * 1e9)

    async def connect(self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
        assert tls is None, "wires are plain"
        return await self._wires.dial(make, host, port, self)

    def break_all(self) -> None:
        """All connections of this client break, as when its process is killed."""
        self._wires.break_of(self)

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        async def later() -> T:
            await asyncio.sleep(0)
            return function()

        return asyncio.ensure_future(later())


class End(asyncio.Transport):
    """One end of a wire."""

    def __init__(
        self, wires: Wires, name: str, context: Context, place: tuple[str, int], path: Path, *, is_client: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.is_client = is_client
        self.other: End
        self._wires = wires
        self.place = place
        self._path = path
        self._context = context.copy()
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = None
        self._coming: deque[tuple[float, bytes | Exception | None]] = deque()  # None: the peer has closed
        self._came: deque[bytes | None] = deque()
        self._last_at = 0.0  # when the last of what was written arrives
        self._untaken_bytes = 0  # written here, and not taken by the peer
        self._high_bytes, self._low_bytes = WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES // 4
        self._is_paused = False  # the protocol was asked to stop writing
        self._is_reading = True
        self._is_breaking = False  # what is written from now on does not get far
        self._is_dark = False  # the peer's machine is gone, without a reset
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
        linger = self._wires.rng.uniform(0, self._wires.faults.linger_max_seconds)
        first, second = (self, self.other) if self._wires.rng.random() < 0.5 else (self.other, self)
        for end, seconds in ((first, 0.0), (second, linger)):
            end._is_closing = True
            end._reset_in(seconds)

    def go_dark(self) -> None:
        """The peer's machine has no power."""
        self._wires.broken += 1
        self._is_dark = self.other._is_over = True
        self._coming.clear()

    def _reset_in(self, seconds: float) -> None:
        """What is under way to this end is lost; what has arrived is not."""
        self._coming.clear()
        self._coming.append((self._loop.time() + seconds, _reset()))
        self._loop.call_later(seconds, self._arrive, context=self._context)

    # --- writing ------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`name` is the connection's, at both ends."""
        if name == "name":
            return self.name.partition(" ")[2]
        return (self.other.name.replace(" ", "-"), 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = WRITE_BUFFER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._untaken_bytes

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_breaking or not data:
            return
        if self._is_dark:
            if self._wires.listens(self.place):  # it is back, and knows of no connection
                self._is_breaking = True
                self._reset_in(self._wires.delay(self._path))
            return
        wires, data = self._wires, bytes(data)
        is_last = wires.chance(wires.faults.drop)
        if is_last:
            data = data[: wires.rng.randint(0, len(data))]
        while data:
            size = wires.rng.randint(1, len(data)) if wires.chance(wires.faults.cut) else len(data)
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
        self._last_at = max(self._last_at, self._loop.time() + self._wires.delay(self._path))
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

    def arrive_soon(self) -> None:
        self._soon(self._arrive)

    def _arrive(self) -> None:
        now = self._loop.time()
        while self._coming and self._coming[0][0] <= now:
            if self._path.holds(self):
                return
            came = self._coming.popleft()[1]
            if isinstance(came, Exception):
                self._lost(came)
                return
            self._came.append(came)
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
            self._soon(self._lost, None)
            self.other._reset_in(self._wires.delay(self._path))

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
