"""Data directories that earlier versions wrote are read by this one. Each is kept as a file in tests/fixtures.

data-directory-1   two topics of 40 messages that were uploaded, a tail of 10 that only the journal and the segments
                   have, a subscription with scattered acks; the broker was killed
data-directory-2   the same messages in /default/orders and /default/dotted.name, with keys, attributes and two epochs:
                   the first was closed, the second killed; a shared subscription with scattered acks, a key-shared one,
                   a partitioned topic to which nothing was ever sent
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import pydanube
from pydanube.testing.brokers import TestBroker
from tests.support import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPECTED = [b"%d" % number for number in range(40)] + [b"tail %d" % number for number in range(10)]

pytestmark = pytest.mark.timeout(60)


def unpacked(name: str, directory: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "data"


@pytest.mark.slow
def test_a_directory_of_an_earlier_version_has_its_messages_cursors_and_sessions(tmp_path: Path) -> None:
    async def inside() -> None:
        data = unpacked("data-directory-1", tmp_path)
        for start in range(2):  # what this version makes of it is read again, too
            async with TestBroker(data) as broker, pydanube.connect(broker.url) as client:
                for topic in ("/default/orders", "/default/clicks"):
                    table = await client.fetch(topic, 0, 50).table()
                    assert table.column("payload").to_pylist() == EXPECTED
                    assert table.column("offset").to_pylist() == list(range(50))
                    assert (await client.describe_storage(topic)).objects[0].end == 40
                    # The name goes on with a new session, behind what is there.
                    async with client.producer(topic, name="old-producer") as producer:
                        assert (await producer.send(b"new")).offset == 50 + start
        async with TestBroker(data) as broker, pydanube.connect(broker.url) as client:
            async with client.consumer("/default/orders", subscription="workers", type="shared") as consumer:
                got = [(await consumer.receive(timeout=20)).offset for _ in range(39)]
            # 0 to 4 and every second one up to 18 were acknowledged.
            assert sorted(got) == [*range(5, 20, 2), *range(20, 51)][:39]

    run(inside())


@pytest.mark.slow
def test_a_directory_of_the_version_before_the_layers_has_its_epochs_keys_and_cursors(tmp_path: Path) -> None:
    async def inside() -> None:
        data = unpacked("data-directory-2", tmp_path)
        for start in range(2):
            async with TestBroker(data) as broker, pydanube.connect(broker.url) as client:
                for topic in ("/default/orders", "/default/dotted.name"):
                    table = await client.fetch(topic, 0, 50).table()
                    assert table.column("payload").to_pylist() == EXPECTED
                    assert table.column("offset").to_pylist() == list(range(50))
                    assert table.column("routing_key").to_pylist()[:40] == [f"k{n % 4}" for n in range(40)]
                    assert (await client.describe_storage(topic)).objects[0].end == 40
                    async with client.producer(topic, name="old-producer") as producer:
                        assert (await producer.send(b"new")).offset == 50 + start
        async with TestBroker(data) as broker, pydanube.connect(broker.url) as client:
            async with client.consumer("/default/orders", subscription="workers", type="shared") as consumer:
                got = {(await consumer.receive(timeout=20)).offset for _ in range(40)}
            assert got == {5, *range(7, 20, 2), *range(20, 52)}
            async with client.consumer("/default/dotted.name", subscription="keys", type="key-shared") as consumer:
                got = set()
                while len(got) < 42:
                    message = await consumer.receive(timeout=20)
                    got.add(message.offset)
                    await message.ack()
            assert got == set(range(10, 52))
            async with client.producer("/default/parted", reliable=True) as producer:
                assert (await producer.send(b"first")).offset == 0

    run(inside())
