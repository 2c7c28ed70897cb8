"""Real clients and a real broker, with nothing between them but bytes that are cut, delayed and lost, from a seed."""

from __future__ import annotations

import asyncio
import errno
from random import Random
from typing import Any, NamedTuple

import pytest

import pydanube
from pydanube.api.native.server import NativeServer
from pydanube.broker.service import Broker
from pydanube.errors import Unavailable
from pydanube.testing.loop import Process, run
from pydanube.testing.wires import QUIET, Path, WireFaults, Wires
from tests.harness.brokers import BrokerFixture, small_wal

TOPIC = "/default/orders"
URL = "danube://broker:6651"
ROUGH = WireFaults(delay_max_seconds=0.05, cut=0.3, drop=0.06, linger_max_seconds=20.0, refuse=0.1, lose=0.05)
MESSAGES = 150


class Outcome(NamedTuple):
    stored: list[bytes]  # in the log, in order
    receipts: dict[int, int]  # offsets by number
    consumed: list[tuple[int, bytes]]  # in order, repetitions too
    connections: int
    broken: int
    seconds: float
    digest: str


class Site:
    """One broker and its address; processes come and go."""

    def __init__(self, wires: Wires) -> None:
        self.is_up = False
        self._host = BrokerFixture()
        self._wires = wires

    async def boot(self) -> None:
        broker = await self._host.boot()
        await self._host._process.call(self._serve(broker))
        self.is_up = True

    async def _serve(self, broker: Broker) -> None:
        server = NativeServer(broker)
        server.start()
        self._wires.listen("broker", 6651, server.accept)

    def kill(self) -> None:
        self.is_up = False
        self._host.kill()
        self._wires.close("broker", 6651)
        self._wires.break_all("broker", 6651)

    async def restart_now_and_then(self, rng: Random) -> None:
        while True:
            await asyncio.sleep(rng.uniform(1, 6))
            self.kill()
            await asyncio.sleep(rng.uniform(0, 2))
            await self.boot()


async def exchange(seed: int, faults: WireFaults, *, kills: bool = False, idempotent: bool = True) -> Outcome:
    """A producer and a consumer, until everything is stored, consumed and acknowledged."""
    wires, loop = Wires(Random(seed), faults), asyncio.get_running_loop()
    site = Site(wires)
    await site.boot()
    receipts: dict[int, int] = {}
    consumed: list[tuple[int, bytes]] = []

    async def produce() -> None:
        async with pydanube.Client(URL, connector=wires.connector()) as client:
            rng = Random(seed)
            async with client.producer(TOPIC, name="p", idempotent=idempotent) as producer:

                async def send(number: int) -> None:
                    receipts[number] = (await producer.send(b"%d" % number, timeout=600)).offset

                for first in range(0, MESSAGES, 10):
                    async with asyncio.TaskGroup() as group:
                        for number in range(first, first + 10):
                            group.create_task(send(number))
                    await asyncio.sleep(rng.uniform(0, 0.5))

    async def consume() -> None:
        missing = {b"%d" % number for number in range(MESSAGES)}
        async with (
            pydanube.Client(URL, connector=wires.connector()) as client,
            client.consumer(TOPIC, subscription="s", type="exclusive", start="earliest", name="c") as consumer,
        ):
            async for message in consumer:
                consumed.append((message.offset, message.payload))
                await message.ack()
                missing.discard(message.payload)
                if not missing:
                    break
            await consumer.flush()

    async with pydanube.Client(URL, connector=wires.connector()) as client:
        await client.create_topic(TOPIC, exist_ok=True)
    restarting = asyncio.create_task(site.restart_now_and_then(Random(seed)) if kills else asyncio.sleep(0))
    async with asyncio.timeout(3600), asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
    wires.faults = QUIET
    restarting.cancel()
    await asyncio.gather(restarting, return_exceptions=True)
    if not site.is_up:
        await site.boot()
    async with pydanube.Client(URL, connector=wires.connector()) as client:
        lag = (await client.lag(TOPIC, "s")).messages
        # Cursors are saved within seconds: a kill may come before. What is stored twice may come after the consumer.
        assert kills or not idempotent or lag == 0
        table = await client.fetch(TOPIC).table()
        stored = table.column("payload").to_pylist()
    site.kill()
    return Outcome(stored, receipts, consumed, wires.connections, wires.broken, loop.time(), wires.digest)


def outcome(seed: int, faults: WireFaults, **how: bool) -> Outcome:
    with small_wal():
        return run(exchange(seed, faults, **how), seed)


def check(found: Outcome) -> None:
    """Every message is stored once, under the offset of its receipt, and was consumed, new ones in order."""
    assert sorted(found.stored) == sorted(b"%d" % number for number in range(MESSAGES))
    assert {found.stored[offset]: number for number, offset in found.receipts.items()} == {
        b"%d" % number: number for number in range(MESSAGES)
    }
    assert all(found.stored[offset] == payload for offset, payload in found.consumed)
    first_seen = list(dict.fromkeys(offset for offset, _ in found.consumed))
    assert first_seen == list(range(MESSAGES))


def test_a_quiet_wire_carries_everything_once() -> None:
    found = outcome(1, QUIET)
    check(found)
    assert len(found.consumed) == MESSAGES and (found.connections, found.broken) == (4, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_decides_what_happens_to_real_clients_on_rough_wires(seed: int) -> None:
    found = outcome(seed, ROUGH)
    check(found)
    assert found.broken > 3 and found.connections > 7, found
    assert outcome(seed, ROUGH) == found


@pytest.mark.parametrize("seed", range(2))
def test_clients_live_through_a_broker_that_is_killed_and_comes_back(seed: int) -> None:
    found = outcome(seed, ROUGH, kills=True)
    check(found)
    assert outcome(seed, ROUGH, kills=True).digest == found.digest


def test_wires_are_rough_enough_to_make_a_plain_producer_store_messages_twice() -> None:
    found = outcome(1, ROUGH, idempotent=False)
    assert len(found.stored) > MESSAGES == len(set(found.stored))


class Echo(asyncio.Protocol):
    """Sends back what it gets, and remembers what happened to it."""

    def __init__(self) -> None:
        self.got = b""
        self.lost: list[Exception | None] = []
        self.paused = 0
        self.transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def data_received(self, data: bytes) -> None:
        self.got += data

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.paused -= 1


async def wire(faults: WireFaults = QUIET, seed: int = 1) -> tuple[Wires, Echo, Echo]:
    wires, served = Wires(Random(seed), faults), Echo()
    wires.listen("broker", 1, lambda: served)
    client = await wires.connector().connect(Echo, "broker", 1, None)
    await asyncio.sleep(0.001)
    return wires, client, served


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_however_they_are_cut_and_delayed(seed: int) -> None:
    async def main() -> None:
        _, client, served = await wire(WireFaults(delay_max_seconds=1.0, cut=0.7), seed)
        for number in range(50):
            client.transport.write(b"%03d " % number)
        client.transport.close()
        await asyncio.sleep(10)
        assert served.got == b"".join(b"%03d " % number for number in range(50))
        assert (client.lost, served.lost) == ([None], [None])

    run(main(), seed)


def test_a_writer_stops_while_its_peer_reads_nothing() -> None:
    async def main() -> None:
        _, client, served = await wire()
        served.transport.pause_reading()
        client.transport.write(bytes(100_000))
        await asyncio.sleep(1)
        assert client.paused == 1 and not served.got
        served.transport.resume_reading()
        await asyncio.sleep(1)
        assert client.paused == 0 and len(served.got) == 100_000

    run(main(), 1)


def test_the_ends_of_a_broken_wire_learn_it_at_different_times_and_what_was_under_way_is_lost() -> None:
    async def main() -> None:
        wires, client, served = await wire(WireFaults(linger_max_seconds=10.0))
        client.transport.write(b"arrives")
        await asyncio.sleep(1)
        client.transport.write(b"is lost")
        wires.break_all()
        await asyncio.sleep(0.001)
        assert len(client.lost) + len(served.lost) == 1 and served.got == b"arrives"
        await asyncio.sleep(10)
        assert len(client.lost) == len(served.lost) == 1
        assert isinstance(client.lost[0], ConnectionResetError)
        with pytest.raises(ConnectionRefusedError) as refused:
            await wires.connector().connect(Echo, "nobody", 1, None)
        assert refused.value.errno == errno.ECONNREFUSED

    run(main(), 1)


def test_a_paused_process_hears_of_its_connections_when_it_goes_on() -> None:
    async def main() -> None:
        process, wires, served = Process("broker"), Wires(Random(1)), Echo()
        process.run(wires.listen, "broker", 1, lambda: served)
        client = await wires.connector().connect(Echo, "broker", 1, None)
        await asyncio.sleep(1)
        process.pause()
        client.transport.write(b"hello")
        await asyncio.sleep(5)
        assert served.got == b""
        process.resume()
        await asyncio.sleep(0.001)
        assert served.got == b"hello"

    run(main(), 1)


@pytest.mark.parametrize("lost", ["requests_lost", "answers_lost"])
def test_what_a_network_loses_one_way_arrives_when_it_is_back(lost: str) -> None:
    async def main() -> None:
        wires, served, path = Wires(Random(1)), Echo(), Path()
        wires.listen("broker", 1, lambda: served, path)
        client = await wires.connector().connect(Echo, "broker", 1, None)
        await asyncio.sleep(0.001)
        setattr(path, lost, True)
        client.transport.write(b"to the broker")
        served.transport.write(b"from the broker")
        with pytest.raises(TimeoutError):  # nobody connects meanwhile
            async with asyncio.timeout(5):
                await wires.connector().connect(Echo, "broker", 1, None)
        assert (served.got == b"") == (lost == "requests_lost")
        assert (client.got == b"") == (lost == "answers_lost")
        path.heal()
        await asyncio.sleep(0.001)
        assert (served.got, client.got) == (b"to the broker", b"from the broker")

    run(main(), 1)


def test_a_peer_that_gave_up_while_the_network_was_away_is_missed_when_it_is_back() -> None:
    async def main() -> None:
        wires, served, path = Wires(Random(1)), Echo(), Path()
        wires.listen("broker", 1, lambda: served, path)
        client = await wires.connector().connect(Echo, "broker", 1, None)
        await asyncio.sleep(0.001)
        path.requests_lost = True
        client.transport.write(b"is lost")
        client.transport.abort()
        await asyncio.sleep(60)
        assert client.lost == [None] and served.lost == []
        path.requests_lost = False
        await asyncio.sleep(0.001)
        assert served.got == b"" and isinstance(served.lost[0], ConnectionResetError)

    run(main(), 1)


def test_a_machine_without_power_tells_nobody_until_it_is_back_and_is_asked() -> None:
    async def main() -> None:
        wires, client, served = await wire()
        wires.close("broker", 1)
        wires.break_all("broker", 1, silent=True)
        client.transport.write(b"is lost")
        await asyncio.sleep(60)
        assert client.lost == [] and served.got == b""
        wires.listen("broker", 1, Echo)
        await asyncio.sleep(60)
        assert client.lost == [], "nobody has asked"
        client.transport.write(b"are you there?")
        await asyncio.sleep(0.01)
        assert isinstance(client.lost[0], ConnectionResetError)

    run(main(), 1)


def test_the_connections_of_one_client_break_without_those_of_others() -> None:
    async def main() -> None:
        wires = Wires(Random(1))
        wires.listen("broker", 1, Echo)
        connector = wires.connector()
        mine = await connector.connect(Echo, "broker", 1, None)
        other = await wires.connector().connect(Echo, "broker", 1, None)
        connector.break_all()
        await asyncio.sleep(0.001)
        assert len(mine.lost) == 1 and other.lost == []

    run(main(), 1)


def test_a_client_that_is_refused_says_so() -> None:
    async def main() -> None:
        wires = Wires(Random(1))
        with pytest.raises(Unavailable, match="Connection refused"):
            await pydanube.Client(URL, connector=wires.connector(), timeout=5).open()

    run(main(), 1)
