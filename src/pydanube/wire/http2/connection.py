"""The server's side of one HTTP/2 connection, sans-I/O.

    connection = Http2Connection(limits, unsent, now)
    events = connection.receive(data, now)        Opened, DataReceived, StreamReset: in order, to be handled at once
    connection.respond(stream, ...)               or start, write, finish, reset
    transport.write(connection.data_to_send())
    connection.tick(now)                          about once a second: limits of time

A peer that breaks a rule of the connection gets a GOAWAY, and `end` says why; then nothing more is read, all streams
are reset, and the layer that does I/O closes once it has written what there is. A rule of a stream costs only the
stream. After `end` there are no streams.

Windows: the peer may send as long as both its stream's and the connection's window are open. They are opened again by
the layer above, which alone knows when it has done with the bytes (`give_back`, `grant`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pydanube.wire.http2 import frames
from pydanube.wire.http2.abuse import CREDIT_OF_DATA, Abuse
from pydanube.wire.http2.frames import DATA, END_STREAM, HEADERS, PADDED, WINDOW_DEFAULT, WINDOW_MAX, ErrorCode
from pydanube.wire.http2.headers import HeaderBlock, HeaderDecoder
from pydanube.wire.http2.leaving import GracefulShutdown
from pydanube.wire.http2.receiving import FrameReceiver, check_priority, check_size, settings_of, unpadded
from pydanube.wire.http2.sending import FrameSender, Unsent
from pydanube.wire.http2.values import (
    DataReceived,
    Event,
    Http2Error,
    Http2Limits,
    Http2Stream,
    StreamOpened,
    StreamReset,
)

RESET_REMEMBERED: Final = 4096  # streams that we ended before their peer: what is on its way is not its fault
SMALL_DATA_BYTES: Final = 64  # a frame of less that does not end its stream carries too little


class Http2Connection:
    """One peer. `end` is None as long as it goes on, then why it ended; `streams` are those that are open."""

    def __init__(self, limits: Http2Limits, unsent: Unsent, now: float) -> None:
        self._limits = limits
        self._abuse = Abuse(limits, now)
        self._decoder = HeaderDecoder(limits.block_bytes, limits.remembered_blocks)
        self._receiving = FrameReceiver(limits, now)
        self._sending = FrameSender(limits, unsent)
        self._leaving = GracefulShutdown(limits, now)
        self.streams: dict[int, Http2Stream] = {}
        self.end: Http2Error | None = None
        self._events: list[Event] = []
        self._last_stream = 0
        self._our_resets: OrderedDict[int, None] = OrderedDict()
        self._peer_stream_window = WINDOW_DEFAULT
        self._receive_window = limits.connection_window_bytes
        self._returned_bytes = 0
        self._now = now
        self.take_roomy = self._sending.take_roomy  # streams that waited for room, and have it
        self._out = self._sending.out
        self._out.append(
            frames.settings(
                (
                    (frames.MAX_CONCURRENT_STREAMS, limits.streams),
                    (frames.INITIAL_WINDOW_SIZE, limits.stream_window_bytes),
                    (frames.MAX_HEADER_LIST_SIZE, limits.block_bytes),
                )
            )
        )
        if limits.connection_window_bytes > WINDOW_DEFAULT:
            self._out.append(frames.window_update(0, limits.connection_window_bytes - WINDOW_DEFAULT))

    # --- receiving --------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What the bytes mean. Never raises: a peer that breaks the rules ends the connection."""
        events = self._events = []
        if self.end is not None:
            return events
        self._now = now
        self._leaving.heard(now)
        try:
            for kind, flags, identity, payload in self._receiving.frames(data, now):
                if kind == DATA:
                    self._take_data(flags, identity, payload)
                elif kind == HEADERS:
                    self._take_block(identity, payload, bool(flags & END_STREAM))
                else:
                    self._take_control(kind, flags, identity, payload)
        except Http2Error as error:
            self._fail(error)
        self._events = []
        return events

    def _take_data(self, flags: int, identity: int, data: bytes) -> None:
        size = len(data)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "data beyond the connection's window")
        stream = self.streams.get(identity)
        if stream is None or stream.remote_ended:
            self._take_stray_data(stream, identity, size)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "data beyond the stream's window")
        ended = bool(flags & END_STREAM)
        if size < SMALL_DATA_BYTES and not ended:
            self._abuse.idle(self._now)
        if flags & PADDED:
            data = unpadded(data)
            self.give_back(size - len(data), stream)
        if stream.length_left is not None:
            stream.length_left -= len(data)
            if stream.length_left < 0 or (ended and stream.length_left):
                self.reset(stream, ErrorCode.PROTOCOL_ERROR, is_their_fault=True)
                self.give_back(len(data))
                return
        stream.remote_ended = ended
        self._events.append(DataReceived(stream, data, ended))

    def _take_stray_data(self, stream: Http2Stream | None, identity: int, size: int) -> None:
        if stream is None and identity in self._our_resets:
            self._abuse.idle(self._now)
            self.give_back(size)
        elif identity > self._last_stream or not identity & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "data of a stream that does not exist")
        else:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "data of a stream that has ended")

    def _take_block(self, identity: int, block: bytes, ended: bool) -> None:
        try:
            headers = self._decoder.decode(block)
        except ValueError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {error}") from error
        stream = self.streams.get(identity)
        if identity > self._last_stream:
            self._open(identity, headers, ended)
        elif stream is not None and not stream.remote_ended:
            self._take_trailers(stream, headers, ended)
        elif stream is None and identity in self._our_resets:
            self._abuse.idle(self._now)
        else:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "headers of a stream that has ended")

    def _take_trailers(self, stream: Http2Stream, headers: HeaderBlock, ended: bool) -> None:
        if not ended or headers.malformed or headers.pseudo or stream.length_left:
            self.reset(stream, ErrorCode.PROTOCOL_ERROR, is_their_fault=True)
            return
        stream.remote_ended = True
        self._events.append(DataReceived(stream, b"", True))

    def _open(self, identity: int, headers: HeaderBlock, ended: bool) -> None:
        self._last_stream = identity
        if identity > self._leaving.accepts_up_to:
            self._remember_reset(identity)  # our GOAWAY told that it will not be looked at
            self._abuse.idle(self._now)
            return
        length = headers.content_length
        is_malformed = headers.malformed or not headers.pseudo or (ended and length)
        if is_malformed or len(self.streams) >= self._limits.streams:
            code = ErrorCode.PROTOCOL_ERROR if is_malformed else ErrorCode.REFUSED_STREAM
            self._out.append(frames.rst_stream(identity, code))
            self._remember_reset(identity)
            self._abuse.reset(self._now, self._now)
            return
        stream = Http2Stream(identity, self._limits.stream_window_bytes, self._peer_stream_window, self._now)
        stream.remote_ended = ended
        stream.length_left = length
        self.streams[identity] = stream
        self._events.append(StreamOpened(stream, headers, ended))

    # --- control frames ---------------------------------------------------------------------------------

    def _take_control(self, kind: int, flags: int, identity: int, payload: bytes) -> None:
        if kind in (frames.PING, frames.SETTINGS, frames.GOAWAY) and identity:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame of the connection on a stream")
        if kind == frames.WINDOW_UPDATE:
            self._abuse.idle(self._now)
            self._take_window(identity, payload)
        elif kind == frames.PING:
            self._take_ping(flags, payload)
        elif kind == frames.RST_STREAM:
            check_size(payload, 4)
            self._take_reset(identity, frames.U32.unpack(payload)[0])
        elif kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PRIORITY:
            self._abuse.idle(self._now)
            check_priority(payload, identity)
        elif kind == frames.GOAWAY:
            if len(payload) < 8:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY that is too short")
            self._abuse.idle(self._now)
            self._leaving.peer_leaves = True
        elif kind == frames.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client may not push")
        else:
            self._abuse.idle(self._now)  # unknown frames are ignored

    def _take_ping(self, flags: int, payload: bytes) -> None:
        check_size(payload, 8)
        if not flags & frames.ACK:
            self._abuse.idle(self._now)
            self._out.append(frames.frame(frames.PING, frames.ACK, 0, payload))
            return
        answer = self._leaving.pong(payload, self._last_stream)
        if answer is None:
            self._abuse.idle(self._now)
        elif answer:
            self._out.append(answer)

    def _take_window(self, identity: int, payload: bytes) -> None:
        check_size(payload, 4)
        more = frames.U32.unpack(payload)[0] & WINDOW_MAX
        sending = self._sending
        if identity == 0:
            if not more or sending.window + more > WINDOW_MAX:
                code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
                raise Http2Error(code, "a window that cannot be")
            sending.window += more
            return
        stream = self.streams.get(identity)
        if stream is None:
            if identity > self._last_stream or not identity & 1:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a window of a stream that does not exist")
            return
        if not more or stream.send_window + more > WINDOW_MAX:
            code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
            self.reset(stream, code, is_their_fault=True)
            return
        stream.send_window += more
        sending.wake(stream)

    def _take_reset(self, identity: int, code: int) -> None:
        if identity == 0 or identity > self._last_stream or not identity & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a reset of a stream that does not exist")
        stream = self.streams.get(identity)
        if stream is None:
            self._abuse.idle(self._now)
            return
        self._events.append(StreamReset(stream, code))
        self._forget(stream)
        self._abuse.reset(self._now, stream.opened_at)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        self._abuse.idle(self._now)
        if flags & frames.ACK:
            check_size(payload, 0)
            return
        for key, value in settings_of(payload, self._limits):
            if key != frames.INITIAL_WINDOW_SIZE or value == self._peer_stream_window:
                continue
            more, self._peer_stream_window = value - self._peer_stream_window, value
            self._abuse.idle(self._now, len(self.streams) // 16)
            for stream in self.streams.values():
                stream.send_window += more
                if stream.send_window > WINDOW_MAX:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "a window that cannot be")
                self._sending.wake(stream)
        self._out.append(frames.SETTINGS_ACK)

    # --- sending ----------------------------------------------------------------------------------------

    def respond(self, stream: Http2Stream, first: bytes, data: bytes, last: bytes) -> None:
        """Headers, data and trailers: a whole answer."""
        if stream.local_ended:
            return
        if self._sending.whole(stream, first, data, last):
            self._ended(stream)
        else:
            self.start(stream, first)
            self._sending.add(stream, data)
            self.finish(stream, last)

    def start(self, stream: Http2Stream, block: bytes) -> None:
        if not stream.local_ended:
            self._out.append(frames.headers(stream.id, block, end=False))

    def write(self, stream: Http2Stream, data: bytes) -> None:
        if not stream.local_ended:
            self._sending.add(stream, data)

    def has_room(self, stream: Http2Stream) -> bool:
        """Whether more may be written now. If not, `take_roomy` names it when it may."""
        return stream.local_ended or self._sending.has_room(stream)

    def finish(self, stream: Http2Stream, block: bytes) -> None:
        """Trailers (or none), behind what is queued; or headers that are all there is."""
        if stream.local_ended or stream.trailers is not None:
            return
        if stream.queued_bytes:
            stream.trailers = block
            return
        self._out.append(frames.last(stream.id, block))
        self._ended(stream)

    def reset(self, stream: Http2Stream, code: int, *, is_their_fault: bool = False) -> None:
        """Ends a stream on both sides. The layer above hears of it if it is the peer's fault."""
        if self.streams.get(stream.id) is not stream:
            return
        self._out.append(frames.rst_stream(stream.id, code))
        self._remember_reset(stream.id)
        self._forget(stream)
        if is_their_fault:
            self._events.append(StreamReset(stream, code))
            self._abuse.reset(self._now, stream.opened_at)

    def _ended(self, stream: Http2Stream) -> None:
        """We have sent all of it."""
        stream.local_ended = True
        if stream.remote_ended:
            self._abuse.completed()
            self._forget(stream)
        else:
            self.reset(stream, ErrorCode.NO_ERROR)  # the rest of the request is not wanted

    def _forget(self, stream: Http2Stream) -> None:
        stream.local_ended = stream.remote_ended = True
        self._sending.drop(stream)
        self.streams.pop(stream.id, None)

    def _remember_reset(self, identity: int) -> None:
        self._our_resets[identity] = None
        if len(self._our_resets) > RESET_REMEMBERED:
            self._our_resets.popitem(last=False)

    def give_back(self, size: int, stream: Http2Stream | None = None) -> None:
        """Opens the connection's window, and the stream's if it goes on, by bytes that are done with.

        Less than 0 takes back what was granted and never came: as much is done with before the window opens again.
        """
        self._returned_bytes += size
        if stream is not None and size > 0 and not stream.remote_ended:
            stream.receive_window += size
            self._out.append(frames.window_update(stream.id, size))

    def grant(self, stream: Http2Stream, size: int) -> None:
        """Lets the peer send so much more, on this stream, than the windows would."""
        stream.receive_window += size
        self._out.append(frames.window_update(stream.id, size))
        self.give_back(size)

    def reopen(self, stream: Http2Stream, window: int) -> None:
        """Opens the stream's window to `window` again, when that is worth a frame."""
        more = window - stream.receive_window
        if more > window // 4 and not stream.remote_ended:
            stream.receive_window += more
            self._out.append(frames.window_update(stream.id, more))

    def data_to_send(self) -> bytes:
        """What the transport is to write now. Call it only while the transport takes more."""
        if self._returned_bytes > 0 and (
            self._returned_bytes >= self._limits.connection_window_bytes // 4
            or self._receive_window < self._limits.connection_window_bytes // 2
        ):
            self._out.append(frames.window_update(0, self._returned_bytes))
            self._receive_window += self._returned_bytes
            self._returned_bytes = 0
        sending = self._sending
        if sending.queued_bytes:
            for stream in sending.pump():
                self._ended(stream)
            if sending.whole_frames:
                self._abuse.worked(CREDIT_OF_DATA * sending.whole_frames)
                sending.whole_frames = 0
        if self._leaving.ends_with_its_streams and not self.streams and self.end is None:
            self.end = Http2Error(ErrorCode.NO_ERROR, "all calls have ended")
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        return data

    # --- time and the end -------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """Ends the connection of a peer that broke a limit of time, and asks one that is silent."""
        events = self._events = []
        if self.end is None:
            try:
                self._receiving.check_time(now)
                if said := self._leaving.tick(now, self._last_stream):
                    self._out.append(said)
            except Http2Error as error:
                self._fail(error)
        self._events = []
        return events

    def leave(self, now: float) -> None:
        """Asks the peer to go; calls that are on their way are still taken. Ends with the last stream."""
        if self.end is None and (said := self._leaving.leave(now)):
            self._out.append(said)

    def lose(self) -> list[Event]:
        """The transport is gone: all streams are reset, nothing is sent."""
        events = self._events = []
        self._close(Http2Error(ErrorCode.NO_ERROR, "the connection is lost"), ErrorCode.CANCEL)
        self._events = []
        self._out.clear()
        return events

    def _fail(self, error: Http2Error) -> None:
        self._out.append(frames.goaway(self._last_stream, error.code, error.reason))
        self._close(error, error.code)

    def _close(self, error: Http2Error, code: int) -> None:
        if self.end is None:
            self.end = error
        for stream in list(self.streams.values()):
            self._events.append(StreamReset(stream, code))
            self._forget(stream)
        self._receiving.close()
        self._our_resets.clear()
