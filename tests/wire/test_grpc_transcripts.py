"""What official clients really send, as files (tests/harness/grpc_recorder.py), drives the sans-I/O server.

However it is cut, the same calls come out, every account is right, and the same cut gives the same bytes back.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire.grpc.calls import Called, CallLimits, Held, ServerMethod
from pydanube.wire.grpc.server import GrpcServerConnection
from pydanube.wire.http2.sending import Unsent
from tests.harness.grpc_wires import LIMITS, MIB, Server, too_large

PLACE = Path(__file__).parents[1] / "fixtures" / "transcripts"
FILES = sorted(PLACE.glob("grpc-*.bin"))
STREAMS = "/danube.ConsumerService/ReceiveMessages"


class Heard(Server):
    """Takes every method; answers unary calls at once, and delivers something to streams."""

    def __post_init__(self) -> None:
        def find(path: str) -> ServerMethod:
            return ServerMethod(path, "answers" if path == STREAMS else "unary", False, 4 * MIB, too_large)

        self.grpc = GrpcServerConnection(find, self.held, self.unsent, self.limits, self.now)


def replayed(data: bytes, seed: int) -> tuple[list[tuple[str, bytes]], bytes]:
    """The calls and what was said, with the bytes cut as the seed says."""
    random = Random(seed)
    server = Heard(limits=LIMITS, held=Held(CallLimits()), unsent=Unsent(MIB))
    said = bytearray()
    while data:
        # More at once than a window would be what no client can have sent.
        size = 20_000 if seed == 0 else random.choice((1, 9, 100, 20_000))
        server.receive(data[:size])
        data = data[size:]
        server.now += 0.001
        server.answer_all()
        for call in server.calls:
            server.grpc.write(call, b"delivered")
        said += server.output()
        server.check_accounts()
    assert server.grpc.end is None or server.grpc.end.code.name == "NO_ERROR"
    calls = [(event.call.method.path, event.message) for event in server.log if isinstance(event, Called)]
    server._note(server.grpc.lose())
    server.check_idle()
    return [(path, message) for path, message in calls if message is not None], bytes(said)


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_recorded_connection_gives_the_same_calls_however_it_is_cut(file: Path) -> None:
    whole, _ = replayed(file.read_bytes(), 0)
    assert whole
    for seed in (1, 2):
        calls, said = replayed(file.read_bytes(), seed)
        assert calls == whole
        assert replayed(file.read_bytes(), seed)[1] == said, "nothing but the bytes and the time decides"


def test_the_official_client_sends_what_it_was_told_to() -> None:
    calls = [call for file in FILES for call in replayed(file.read_bytes(), 0)[0]]
    counted = Counter(path.rpartition("/")[2] for path, _ in calls)
    assert counted["SendMessage"] == counted["Ack"] == 6
    assert counted["CreateProducer"] == counted["Subscribe"] == counted["ReceiveMessages"] == 1
    sent = [pb.StreamMessage.FromString(message) for path, message in calls if path.endswith("/SendMessage")]
    assert [each.payload for each in sent[:5]] == [f"message {number}".encode() for number in range(5)]
    assert len(sent[5].payload) == 100_000
