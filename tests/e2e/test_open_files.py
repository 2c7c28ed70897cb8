"""A broker that may open few files, and may not raise that: every topic is served, and what is too much is told so."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

import pydanube
from pydanube.config import open_files
from pydanube.errors import Unavailable
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire
from pydanube.wire.frames import FrameDecoder
from tests.e2e.processes import BrokerProcess
from tests.stubs.danube import DanubeApi_pb2_grpc as api

TOPICS = [f"/default/t{number}" for number in range(1100)]
AT_ONCE = 100
TOO_MANY = 20  # connections beyond the share of the native server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class LimitedBroker(BrokerProcess):
    """Under a limit that it cannot raise."""

    def __init__(self, directory: Path, limit: int) -> None:
        super().__init__(directory)
        self.share = open_files.shares(limit)

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.share.limit}; exec "$@"', "sh", *super().command]

    @property
    def stream_url(self) -> str:
        return f"danube://127.0.0.1:{self.stream_port}"

    @property
    def open_files(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def complaints(self) -> list[str]:
        return [line for line in self.errors() if "resources short" not in line]


async def publish_everywhere(url: str, text: str, topics: Sequence[str] = TOPICS) -> list[int]:
    async with pydanube.connect(url, timeout=30) as client:

        async def one(topic: str) -> int:
            async with client.producer(topic) as producer:
                return (await producer.send(text.encode())).offset

        offsets: list[int] = []
        for first in range(0, len(topics), AT_ONCE):
            offsets += await asyncio.gather(*map(one, topics[first : first + AT_ONCE]))
        return offsets


async def read_everywhere(url: str, topics: Sequence[str] = TOPICS) -> list[list[bytes]]:
    async with pydanube.connect(url, timeout=30) as client:

        async def one(topic: str) -> list[bytes]:
            found: list[bytes] = (await client.fetch(topic).table()).column("payload").to_pylist()
            return found

        found: list[list[bytes]] = []
        for first in range(0, len(topics), AT_ONCE):
            found += await asyncio.gather(*map(one, topics[first : first + AT_ONCE]))
        return found


@asynccontextmanager
async def flooded(broker: LimitedBroker) -> AsyncIterator[tuple[list[str], list[grpc.aio.AioRpcError | None], bytes]]:
    """More connections than the broker takes, at every server: what those heard that were too many."""
    with ExitStack() as opened:
        raw = [
            opened.enter_context(socket.create_connection(("127.0.0.1", broker.stream_port)))
            for _ in range(broker.share.native + TOO_MANY)
        ]
        sentences = []
        for place, one in enumerate(reversed(raw)):  # those that came last
            one.settimeout(20.0 if place < TOO_MANY else 0.5)
            try:
                [frame] = FrameDecoder().feed(one.recv(4096))
            except TimeoutError:
                break  # it is waited for: this one was let in
            sentences.append(str(from_wire(frame.command.error)))
        async with AsyncExitStack() as channels:
            answers: list[grpc.aio.AioRpcError | None] = []
            for _ in range(broker.share.grpc + 40):
                channel = await channels.enter_async_context(
                    grpc.aio.insecure_channel(
                        f"127.0.0.1:{broker.client_port}", options=[("grpc.use_local_subchannel_pool", 1)]
                    )
                )
                try:
                    await api.DiscoveryStub(channel).TopicLookup(
                        pb.TopicLookupRequest(request_id=1, topic=TOPICS[0]), timeout=10
                    )
                    answers.append(None)
                except grpc.aio.AioRpcError as error:
                    answers.append(error)
            for _ in range(broker.share.http):  # that say nothing
                opened.enter_context(socket.create_connection(("127.0.0.1", broker.metrics_port)))
            with socket.create_connection(("127.0.0.1", broker.metrics_port), timeout=10) as one:
                one.sendall(b"GET /health/ready HTTP/1.1\r\n\r\n")
                refused = b""
                while piece := one.recv(4096):
                    refused += piece
            yield sentences, answers, refused


@pytest.mark.parametrize("limit", [256, pytest.param(1024, marks=pytest.mark.long)])
def test_eleven_hundred_topics_and_a_flood_of_connections_under_a_low_limit(tmp_path: Path, limit: int) -> None:
    with LimitedBroker(tmp_path, limit) as broker:

        async def first_life() -> None:
            assert await publish_everywhere(broker.stream_url, "first") == [0] * len(TOPICS)
            assert broker.open_files < limit
            async with (
                pydanube.connect(broker.stream_url) as early,
                early.producer(TOPICS[0]) as producer,
                flooded(broker) as (sentences, answers, refused),
            ):
                assert broker.open_files < limit
                assert len(sentences) >= TOO_MANY
                assert all(f"its limit of open files is {limit}" in sentence for sentence in sentences)
                with pytest.raises(Unavailable, match="limit of open files"):
                    await pydanube.connect(broker.stream_url, timeout=1).open()
                served = answers.count(None)
                assert served == broker.share.grpc
                errors = [error for error in answers if error is not None]
                assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
                told = [error for error in errors if f"its limit of open files is {limit}" in error.details()]
                assert len(told) >= 8 and errors[: len(told)] == told, "then gRPC cuts off, without a word"
                assert refused.startswith(b"HTTP/1.1 503") and b"limit of open files" in refused
                for number in range(20):
                    assert (await producer.send(b"meanwhile")).offset == 1 + number
            assert await publish_everywhere(broker.stream_url, "second", TOPICS[1:200]) == [1] * 199

        asyncio.run(first_life())
        broker.kill()
        broker.start()

        async def second_life() -> None:
            found = await read_everywhere(broker.stream_url)
            assert found[0] == [b"first", *[b"meanwhile"] * 20]
            assert found[1:200] == [[b"first", b"second"]] * 199
            assert found[200:] == [[b"first"]] * 900
            assert broker.open_files < limit

        asyncio.run(second_life())
        assert broker.stop() == 0
        assert broker.complaints() == []


def test_a_soft_limit_is_raised_to_what_is_allowed(tmp_path: Path) -> None:
    class Soft(LimitedBroker):
        @property
        def command(self) -> list[str]:
            return ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *BrokerProcess.command.fget(self)]  # type: ignore[attr-defined]

    with Soft(tmp_path, 64) as broker:
        assert broker.process is not None
        limits = Path(f"/proc/{broker.process.pid}/limits").read_text()
        [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard != "64"
