"""A fuzzer that stays inside connections of our gRPC server.

    python -m tests.fuzz.http2 --count 1000000 --seed 7
    python -m tests.fuzz.http2 --seed 7 --first 1234 --count 1     repeats one input

Goal: whatever a client sends, the server raises nothing, every account is the sum of its parts after every step, and
nothing is left when the connection is gone.

Method: random frames end a connection at the first one, so it begins with some that are right, on streams that exist;
then one frame is damaged (a bit, its length, its flags, its stream), repeated, or put where it may not be; then it goes
on with right ones. What is sent is cut by chance. The layer above answers, writes and forgets by chance too.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Final

from pydanube.wire.grpc.messages import PREFIX
from pydanube.wire.http2 import frames
from pydanube.wire.status import Code
from tests.fuzz.runner import Fuzzer
from tests.harness.grpc_wires import ANSWERS, CLIENT_STREAM, SMALL, UNARY, Raw, Server

PATHS: Final = (UNARY, UNARY, SMALL, CLIENT_STREAM, ANSWERS, "/t.T/Nothing")


class Fuzzed:
    """One connection, its client and what the layer above does."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.server = Server()
        self.raw = Raw(self.server)
        self.open: list[int] = []  # streams whose request goes on

    def run(self) -> str:
        random = self.random
        steps = random.randint(2, 10)
        damaged_at = random.randrange(1, steps)
        for step in range(steps):
            data = self.right()
            if step == damaged_at:
                data = self.damaged(data)
            self.send(data)
            self.layer_above()
            self.server.check_accounts()
            if self.raw.ended:
                break
        ended = self.raw.ended
        self.server._note(self.server.grpc.lose())
        self.server.calls.clear()
        self.server.check_idle()
        return ended or "goes on"

    def send(self, data: bytes) -> None:
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((0, 0, 1, 3))))
        for first, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            self.server.receive(data[first:end])

    def right(self) -> bytes:
        """A frame or two that a client may send now."""
        random, raw = self.random, self.raw
        kind = random.randrange(9)
        if kind < 2:
            more = (("grpc-timeout", f"{random.randrange(99)}S"),) if random.random() < 0.2 else ()
            return raw.call(random.randbytes(random.choice((0, 5, 300))), random.choice(PATHS), *more)
        if kind < 4:
            begun = raw.request(random.choice(PATHS))
            self.open.append(raw.stream)
            return begun + raw.data(PREFIX.pack(0, random.choice((0, 50, 70_000, 2**31))))
        if kind == 4 and self.open:
            stream = random.choice(self.open)
            return raw.data(
                random.randbytes(random.choice((0, 1, 60, 1_000))), stream=stream, end=random.random() < 0.4
            )
        if kind == 5:
            stream = random.choice([0, *range(1, raw.stream + 1, 2)])
            return frames.window_update(stream, random.choice((1, 70_000)))
        if kind == 6 and raw.stream > 0:
            return frames.rst_stream(random.randrange(1, raw.stream + 1, 2), random.randrange(14))
        if kind == 7:
            return frames.settings([(random.randrange(1, 8), random.choice((0, 1, 16_384, 65_535)))])
        return frames.frame(
            frames.PING, random.choice((0, 1)), 0, random.choice((b"12345678", b"pydanube", b"goodbye."))
        )

    def damaged(self, data: bytes) -> bytes:
        random = self.random
        kind = random.randrange(8)
        changed = bytearray(data)
        if kind == 0:
            place = random.randrange(len(changed))
            changed[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[random.randrange(3)] = random.randrange(256)  # the first frame's length
        elif kind == 2:
            changed[4] ^= random.choice((1, 4, 8, 32))
        elif kind == 3:
            changed[5:9] = random.randrange(self.raw.stream + 5 if self.raw.stream > 0 else 5).to_bytes(4, "big")
        elif kind == 4:
            changed[3] = random.randrange(12)
        elif kind == 5:
            return data + data
        elif kind == 6:
            payload = random.randbytes(random.choice((0, 4, 5, 6, 8, 40)))
            stream = random.choice((0, 1, max(self.raw.stream, 1), self.raw.stream + 2))
            return frames.frame(random.randrange(12), random.randrange(256), stream, payload) + data
        else:
            start = random.randrange(len(changed))
            del changed[start : start + random.choice((1, 9, 30))]
        return bytes(changed)

    def layer_above(self) -> None:
        random, server = self.random, self.server
        if random.random() < 0.5:
            server.answer_all()
        for call in list(server.calls):
            if call.method.handler == "answers" and random.random() < 0.7 and server.grpc.has_room(call):
                server.grpc.begin_answers(call)
                server.grpc.write(call, bytes(random.choice((0, 10, 30_000))))
            if random.random() < 0.1:
                server.calls.pop(call)
                server.grpc.finish(call, Code.OK)
        if random.random() < 0.1:
            server.grpc.leave(server.now)
        if random.random() < 0.2:
            server.tick(random.choice((0.1, 2, 35)))
        if random.random() < 0.8:
            server.output()
            server.grpc.take_roomy()


def attempt(seed: int, index: int) -> str:
    return Fuzzed(Random(f"http2 {seed} {index}")).run()


FUZZER: Final = Fuzzer(
    module="tests.fuzz.http2",
    description="Damages a frame inside connections of the gRPC server.",
    attempt=attempt,
    accepted="goes on",
    accepted_plural="connections that went on",
    count=1_000_000,
    chunk=20_000,
)

if __name__ == "__main__":
    sys.exit(FUZZER.main())
