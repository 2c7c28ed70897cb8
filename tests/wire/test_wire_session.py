"""The native protocol's session: two of them back to back, and nothing between them but bytes. Time is a number."""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.api.native.handle_table import HandleTable
from pydanube.api.native.requests import NativeRequests
from pydanube.config.stream import StreamLimits
from pydanube.errors import ConsumerUnknown, DanubeError, LimitReached, ProtocolViolation, Unreachable
from pydanube.wire import frames, session
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from pydanube.wire.frames import Frame
from pydanube.wire.session import PUSHED, REQUESTS, TOLD, How, Reply, Session, SessionState, Side

URL = "danube://there:6651"
AnySession: TypeAlias = Session[Any]
LOOKUP = pb.Lookup(topic="/default/orders")


def client(now: float = 0.0, url: str = URL) -> AnySession:
    return Session(Side.CLIENT, pb.Hello(client="test", token="secret"), now, peer=url)


def server(now: float = 0.0, **limits: Any) -> AnySession:
    return Session(Side.SERVER, pb.Welcome(broker_id=7, broker="test"), now, limits=StreamLimits(**limits))


def packed(*body: Any, **command: Any) -> bytes:
    return b"".join(bytes(part) for part in frames.encode(pb.Command(**command), *body))


def said(session: AnySession, now: float = 0.0) -> bytes:
    return b"".join(bytes(part) for part in session.to_send(now))


def pass_on(source: AnySession, target: AnySession, now: float = 0.0) -> list[Any]:
    """What the one has to say, heard by the other."""
    return list(target.receive(said(source, now), now))


def greeted(now: float = 0.0, **limits: Any) -> tuple[AnySession, AnySession]:
    ours, theirs = client(now), server(now, **limits)
    assert pass_on(ours, theirs, now) == []
    [welcome] = pass_on(theirs, ours, now)
    assert welcome.kind == "welcome" and (ours.state, theirs.state) == (SessionState.OPEN, SessionState.OPEN)
    return ours, theirs


def greeted_server(**limits: Any) -> AnySession:
    return greeted(**limits)[1]


def test_it_imports_nothing_that_waits_or_tells_the_time() -> None:
    tree = ast.parse(Path(session.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not {name.partition(".")[0] for name in names} & {"asyncio", "socket", "ssl", "time", "threading", "random"}


# --- greeting -----------------------------------------------------------------------------------------


def test_two_sessions_greet_and_know_each_others_limits() -> None:
    ours, theirs = client(), server(frame_bytes=1 << 20, keepalive_seconds=9)
    assert (ours.state, theirs.state) == (SessionState.GREETING, SessionState.GREETING)
    assert pass_on(ours, theirs) == []
    assert (theirs.state, theirs.client) == (SessionState.OPEN, "test")
    [frame] = pass_on(theirs, ours)
    welcome = frame.command.welcome
    assert (welcome.version, welcome.broker_id, welcome.broker) == (1, 7, "test")
    assert (welcome.frame_size_max, welcome.in_flight_max, welcome.keepalive_seconds) == (1 << 20, 8, 9)
    assert ours.frame_size_max == 1 << 20 and ours.state is SessionState.OPEN


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        ({"version_min": 2, "version_max": 9}, "the client speaks versions 2 to 9, the broker 1 to 1"),
        ({"version_min": 3, "version_max": 1}, "versions 3 to 1 are none at all"),
        ({"magic": 7}, "magic 0x00000007"),
        ({"frame_size_max": 9}, "the client takes frames up to a length of 9"),
    ],
)
def test_a_server_refuses_a_greeting_that_it_cannot_take(hello: dict[str, Any], sentence: str) -> None:
    session = server()
    fields = {"magic": frames.MAGIC, "version_min": 1, "version_max": 1, **hello}
    assert list(session.receive(packed(request_id=1, hello=pb.Hello(**fields)), 0.0)) == []
    assert session.end is not None and session.end.how is How.FAILED and sentence in str(session.end.error)
    [frame] = frames.FrameDecoder().feed(said(session))
    assert sentence in frame.command.error.sentence and session.to_send(0.0) == []


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (packed(request_id=1, welcome=pb.Welcome(version=2)), "the broker chose version 2"),
        (packed(request_id=1, done=pb.Done()), "the greeting was answered with done"),
        (packed(b"x", deliver=pb.Deliver(consumer=1, ranges=[0, 1])), "the greeting was answered with deliver"),
        (packed(request_id=1, error=pb.Error(code=pb.LIMIT_REACHED, sentence="too many")), "too many"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "that is an HTTP port"),
        (b"\x15\x03\x03\x00\x02", "that port speaks TLS"),
    ],
)
def test_a_client_says_what_is_wrong_with_an_answer_to_its_greeting(answer: bytes, sentence: str) -> None:
    session = client()
    session.ask(pb.Command(lookup=LOOKUP), "first")
    assert list(session.receive(answer, 0.0)) == []
    assert session.end is not None and sentence in str(session.end.error) and isinstance(session.end.error, DanubeError)
    assert session.take_waiting() == ["first"]


def test_a_client_that_loses_the_connection_before_it_is_greeted_says_what_may_be_the_matter() -> None:
    for url, hint in ((URL, "if it speaks TLS"), ("danube+tls://there:6651", "perhaps it wants a certificate")):
        session = client(url=url)
        session.lost("reset")
        assert session.end is not None and hint in str(session.end.error)
    ours, _ = greeted()
    ours.lost("reset")
    assert ours.end is not None and str(ours.end.error) == f"{URL} cannot be reached: reset"


# --- commands -----------------------------------------------------------------------------------------


def test_every_command_has_one_place() -> None:
    kinds = {field.name for field in pb.Command.DESCRIPTOR.oneofs_by_name["kind"].fields}
    both = {"ping", "pong", "goodbye"}
    replies = kinds - REQUESTS - TOLD - PUSHED - both - {"hello", "flow"}
    assert replies >= {"welcome", "error", "done", "receipt", "located", "fetched"}
    assert kinds > REQUESTS | TOLD | PUSHED | both
    connection = type("Connection", (), {"broker": None})()
    assert (
        set(NativeRequests(connection, HandleTable(connection), connection)._kinds)
        | {"produce", "fetch", "describe_storages"}
        == REQUESTS
    )


def test_replies_find_their_requests_in_any_order() -> None:
    ours, theirs = greeted()
    numbers = [ours.ask(pb.Command(lookup=LOOKUP), waiter) for waiter in "abc"]
    assert [frame.command.request_id for frame in pass_on(ours, theirs)] == numbers
    theirs.reply(pb.Command(request_id=numbers[2], located=pb.Located()))
    theirs.reply(pb.Command(request_id=numbers[0], error=to_wire(ConsumerUnknown(9))))
    theirs.reply(pb.Command(request_id=numbers[1], done=pb.Done()))
    replies = pass_on(theirs, ours)
    assert [reply.waiter for reply in replies] == ["c", "a", "b"]
    assert isinstance(replies[1].answer, ConsumerUnknown) and replies[2].answer.kind == "done"
    assert ours.take_waiting() == []


def test_a_reply_that_nobody_waits_for_is_dropped_and_what_it_opened_is_closed() -> None:
    ours, theirs = greeted()
    number = ours.ask(pb.Command(subscribe=pb.Subscribe()), "gives up")
    pass_on(ours, theirs)
    ours.forget(number)
    theirs.reply(pb.Command(request_id=number, subscribed=pb.Subscribed(consumer=4)))
    assert pass_on(theirs, ours) == []
    [close] = pass_on(ours, theirs)
    assert close.kind == "close_consumer" and close.command.close_consumer.consumer == 4
    theirs.reply(pb.Command(request_id=close.command.request_id, done=pb.Done()))
    assert pass_on(theirs, ours) == [] and ours.take_waiting() == []


def test_a_ping_is_answered_behind_what_came_before_it() -> None:
    theirs = greeted_server()
    said(theirs)
    data = packed(request_id=9, lookup=LOOKUP) + packed(request_id=2, ping=pb.Ping())
    for frame in theirs.receive(data, 0.0):
        theirs.reply(pb.Command(request_id=frame.command.request_id, done=pb.Done()))
    assert [frame.kind for frame in frames.FrameDecoder().feed(said(theirs))] == ["done", "pong"]


def test_a_caller_may_stop_in_the_middle_and_go_on_later() -> None:
    theirs = greeted_server()
    acks = b"".join(packed(ack=pb.Ack(consumer=1, ranges=[n, n + 1])) for n in range(3))
    first = next(theirs.receive(acks, 0.0))
    assert first.command.ack.ranges == [0, 1] and theirs.has_events
    theirs.receive(packed(flow=pb.Flow(consumer=1)), 1.0)
    rest = [frame.kind for frame in theirs.events()]
    assert rest == ["ack", "ack", "flow"] and not theirs.has_events


def test_bodies_are_passed_on_without_a_copy() -> None:
    ours, theirs = greeted()
    body = memoryview(bytes(range(256)) * 40)
    ours.ask(pb.Command(produce=pb.Produce(producer=1)), "receipt", body)
    out = ours.to_send(0.0)
    assert out[1] is body
    aligned = b"".join(bytes(part) for part in out)
    [frame] = theirs.receive(aligned, 0.0)
    assert frame.body == body and type(frame) is Frame


VIOLATIONS = {
    "a second greeting": (packed(request_id=1, hello=pb.Hello()), "the greeting is over"),
    "a broker's command": (packed(request_id=9, done=pb.Done()), "done is the broker's to say"),
    "a request without an id": (packed(lookup=LOOKUP), "lookup has no request id, so nobody could tell its answer"),
    "a batch without an id": (
        packed(b"x", produce=pb.Produce()),
        "produce has no request id, so nobody could tell its",
    ),
    "a frame over the limit": (struct.pack("<IH", (1 << 20) + 1, 3), "over the limit of 1048576"),
    "no protobuf": (struct.pack("<IH", 5, 3) + b"\xff\xff\xff", "no protobuf message"),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_is_told_behind_what_came_before_and_nothing_is_read_behind_it(what: str) -> None:
    theirs = greeted_server(frame_bytes=1 << 20)
    said(theirs)
    data, sentence = VIOLATIONS[what]
    ping = packed(request_id=2, ping=pb.Ping())
    events = list(theirs.receive(packed(flow=pb.Flow(consumer=1)) + ping + data + ping, 0.0))
    assert [frame.kind for frame in events] == ["flow"]
    *before, error = frames.FrameDecoder().feed(said(theirs))
    assert [frame.kind for frame in before] == ["pong"] and sentence in error.command.error.sentence
    assert theirs.state is SessionState.CLOSED and theirs.end is not None and theirs.end.how is How.FAILED
    assert isinstance(theirs.end.error, ProtocolViolation)
    assert list(theirs.receive(ping, 1.0)) == []
    theirs.send(pb.Command(ping=pb.Ping()))
    theirs.reply(pb.Command(request_id=9, done=pb.Done()))
    assert said(theirs) == b""


def test_a_refused_request_that_ends_the_connection_is_its_reply() -> None:
    theirs = greeted_server()
    said(theirs)
    theirs.fail(LimitReached("connections", 2), 77)
    theirs.fail(LimitReached("connections", 3), 78)
    [frame] = frames.FrameDecoder().feed(said(theirs))
    assert frame.command.request_id == 77 and frame.command.error.code == pb.LIMIT_REACHED


# --- ends ---------------------------------------------------------------------------------------------


def test_a_server_leaves_when_a_client_that_said_goodbye_has_all_its_answers() -> None:
    ours, theirs = greeted()
    number = ours.ask(pb.Command(fetch=pb.Fetch()), "first")
    ours.goodbye()
    assert [frame.kind for frame in pass_on(ours, theirs)] == ["fetch"]
    assert theirs.state is SessionState.LEAVING and theirs.end is None
    theirs.send(pb.Command(moved=pb.Moved()))
    theirs.reply(pb.Command(request_id=number, fetched=pb.Fetched()))
    assert theirs.end is not None and theirs.end.how is How.LEFT
    kinds = [event.kind if isinstance(event, Frame) else event.waiter for event in pass_on(theirs, ours)]
    assert kinds == ["moved", "first"]


def test_a_client_leaves_when_it_has_all_answers_of_a_broker_that_said_goodbye() -> None:
    ours, theirs = greeted()
    number = ours.ask(pb.Command(lookup=LOOKUP), "first")
    pass_on(ours, theirs)
    theirs.goodbye("shutting down")
    [goodbye] = pass_on(theirs, ours)
    assert goodbye.command.goodbye.reason == "shutting down" and ours.state is SessionState.LEAVING and ours.end is None
    theirs.reply(pb.Command(request_id=number, located=pb.Located()))
    [reply] = pass_on(theirs, ours)
    assert reply.waiter == "first"
    assert ours.end is not None and ours.end.how is How.LEFT and "going away" in str(ours.end.error)
    assert ours.ask(pb.Command(lookup=LOOKUP), "late") == 0


def test_a_client_leaves_a_broker_that_said_goodbye_when_its_last_caller_gives_up() -> None:
    ours, theirs = greeted()
    number = ours.ask(pb.Command(lookup=LOOKUP), "first")
    theirs.goodbye()
    pass_on(theirs, ours)
    ours.forget(number)
    assert ours.end is not None and ours.end.how is How.LEFT


def test_what_was_received_and_not_handled_is_returned_when_the_connection_is_lost() -> None:
    theirs = greeted_server()
    acks = b"".join(packed(ack=pb.Ack(consumer=1, ranges=[n, n + 1])) for n in range(3))
    next(theirs.receive(acks, 0.0))
    assert [frame.command.ack.ranges[0] for frame in theirs.lost("gone")] == [1, 2]
    assert theirs.lost("gone") == [] and theirs.due() is None


# --- time ---------------------------------------------------------------------------------------------


def drive(session: AnySession, until: float) -> Iterator[float]:
    """Ticks the session whenever it is due; nothing else happens."""
    while (due := session.due()) is not None and due <= until:
        session.tick(due)
        yield due


def not_greeted(session: AnySession) -> None: ...


def half_a_frame(session: AnySession) -> None:
    list(session.receive(packed(request_id=2, ping=pb.Ping())[:5], 0.0))


def takes_nothing(session: AnySession) -> None:
    session.pause_writing(1.0)


def is_closing(session: AnySession) -> None:
    session.fail(LimitReached("connections", 2))
    session.to_send(2.0)


@pytest.mark.parametrize(
    ("act", "at", "why"),
    [
        (None, 10.0, "it did not greet in time"),
        (not_greeted, 30.0, "it was silent for too long"),
        (half_a_frame, 20.0, "it did not finish a frame in time"),
        (takes_nothing, 26.0, "it took nothing for too long"),
        (is_closing, 27.0, "it took nothing for too long"),
    ],
)
def test_a_server_drops_a_late_peer_when_it_is_due(act: Callable[..., None] | None, at: float, why: str) -> None:
    limits = {"handshake_seconds": 10, "keepalive_seconds": 15, "frame_seconds": 20, "stuck_seconds": 25}
    session = server(**limits) if act is None else greeted_server(**limits)
    if act is not None:
        act(session)
    assert session.due() == at
    session.tick(at - 0.001)
    assert session.end is None or session.end.how is How.FAILED
    assert list(drive(session, 100.0)) == [at]
    assert session.end is not None and session.end.how is How.DROPPED
    assert isinstance(session.end.error, Unreachable) and session.end.error.why == why
    assert session.due() is None


def test_a_peer_that_is_not_read_from_is_not_blamed_for_its_silence() -> None:
    session = greeted_server(keepalive_seconds=15)
    session.pause_reading()
    assert session.due() is None
    session.resume_reading(100.0)
    assert session.due() == 130.0


def test_a_client_pings_a_quiet_broker_and_ends_with_a_silent_one() -> None:
    ours, theirs = greeted(keepalive_seconds=15)
    pinged: list[float] = []
    for now in drive(ours, 100.0):
        if b := said(ours, now):
            pinged.append(now)
            list(theirs.receive(b, now))
            if now < 50:
                pass_on(theirs, ours, now)
    assert pinged == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert ours.end is not None and "silent for" in str(ours.end.error) and ours.end.how is How.DROPPED
    assert theirs.end is None


def test_a_client_without_a_keepalive_is_never_due() -> None:
    session = client()
    welcome = pb.Welcome(version=1, frame_size_max=1 << 20, in_flight_max=8)
    assert [frame.kind for frame in session.receive(packed(request_id=1, welcome=welcome), 0.0)] == ["welcome"]
    assert session.due() is None


# --- cut anywhere -------------------------------------------------------------------------------------


class Heard(NamedTuple):
    events: list[Any]
    said: bytes
    state: SessionState
    end: str


def hear(session: AnySession, reads: list[bytes]) -> Heard:
    """Everything that the session makes of these reads; every request is replied to."""
    events: list[Any] = []
    out = said(session)
    for data in reads:
        for event in session.receive(data, 0.0):
            if isinstance(event, Reply):
                answer = event.answer
                events.append((event.waiter, answer.kind if isinstance(answer, Frame) else str(answer)))
            else:
                events.append((event.kind, event.command.request_id, bytes(event.body)))
                if session.side is Side.SERVER and event.command.request_id:
                    session.reply(pb.Command(request_id=event.command.request_id, done=pb.Done()))
        out += said(session)
    return Heard(events, out, session.state, "" if session.end is None else f"{session.end.how} {session.end.error}")


TO_SERVER = [
    packed(request_id=1, hello=pb.Hello(magic=frames.MAGIC, version_min=1, version_max=1)),
    packed(request_id=5, lookup=LOOKUP),
    packed(b"a batch" * 30, request_id=6, produce=pb.Produce(producer=1)),
    packed(ack=pb.Ack(consumer=1, ranges=[0, 1])),
    packed(request_id=7, ack=pb.Ack(consumer=1, ranges=[0, 1])),
    packed(request_id=2, ping=pb.Ping()),
    packed(pong=pb.Pong()),
    packed(flow=pb.Flow(consumer=1)),
    packed(request_id=8, done=pb.Done()),
    packed(lookup=LOOKUP),
    packed(goodbye=pb.Goodbye()),
    struct.pack("<IH", 5, 3) + b"\xff\xff\xff",
]
TO_CLIENT = [
    packed(request_id=1, welcome=pb.Welcome(version=1, frame_size_max=1 << 20, in_flight_max=8)),
    packed(request_id=3, located=pb.Located()),
    packed(request_id=4, error=pb.Error(code=pb.NOT_SERVED, sentence="it moves", retryable=True)),
    packed(b"a batch" * 30, deliver=pb.Deliver(consumer=1, ranges=[0, 1])),
    packed(moved=pb.Moved(topic="/default/orders")),
    packed(error=pb.Error(code=pb.SUBSCRIPTION_BUSY, sentence="taken", consumer=2)),
    packed(request_id=9, subscribed=pb.Subscribed(consumer=4)),
    packed(request_id=2, ping=pb.Ping()),
    packed(goodbye=pb.Goodbye()),
    packed(error=pb.Error(code=pb.UNAVAILABLE, sentence="everything ends", retryable=True)),
    struct.pack("<IH", 5, 3) + b"\xff\xff\xff",
]


def asking_client() -> AnySession:
    session = client()
    session.ask(pb.Command(lookup=LOOKUP), "first")
    session.ask(pb.Command(lookup=LOOKUP), "second")
    return session


@pytest.mark.parametrize(("make", "said_to_it"), [(server, TO_SERVER), (asking_client, TO_CLIENT)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_makes_no_difference_where_the_bytes_are_cut(
    make: Callable[[], AnySession], said_to_it: list[bytes], data: st.DataObject
) -> None:
    commands = data.draw(st.lists(st.sampled_from(said_to_it), max_size=8))
    whole = (said_to_it[0] if data.draw(st.booleans()) else b"") + b"".join(commands)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    reads = [whole[first:end] for first, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert hear(make(), reads) == hear(make(), [whole]) == hear(make(), [bytes([byte]) for byte in whole])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_request_gets_one_reply_or_is_told_that_none_will_come(data: st.DataObject) -> None:
    """A client and a server that ask, reply, leave and lose the connection in any order, over wires that cut."""
    ours, theirs = greeted(keepalive_seconds=15)
    wires: dict[AnySession, bytes] = {ours: b"", theirs: b""}  # on their way to these
    told: list[Any] = []
    owed: list[int] = []
    asked, now = 0, 0.0
    actions = ["ask", "ask", "up", "up", "down", "down", "reply", "reply", "leave", "bye", "tick"]
    for action in data.draw(st.lists(st.sampled_from(actions))):
        now += 0.5
        if action == "ask":
            asked += bool(ours.ask(pb.Command(lookup=LOOKUP), asked))
        elif action == "reply" and owed:
            theirs.reply(pb.Command(request_id=owed.pop(data.draw(st.integers(0, len(owed) - 1))), done=pb.Done()))
        elif action == "leave":
            theirs.goodbye()
        elif action == "bye":
            ours.goodbye()
        elif action == "tick":
            ours.tick(now)
            theirs.tick(now)
        elif action in ("up", "down"):
            session = theirs if action == "up" else ours
            cut = data.draw(st.integers(0, len(wires[session])))
            read, wires[session] = wires[session][:cut], wires[session][cut:]
            for event in session.receive(read, now):
                if isinstance(event, Reply):
                    told.append(event.waiter)
                elif event.kind == "lookup":
                    owed.append(event.command.request_id)
        wires[theirs] += said(ours, now)
        wires[ours] += said(theirs, now)
    for session in (ours, theirs):
        assert session.end is None or session.end.how is How.LEFT, session.end
    ours.lost("the end")
    told += ours.take_waiting()
    assert sorted(told) == list(range(asked))
