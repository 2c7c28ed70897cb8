"""A real broker whose object store is a directory is killed again and again while it uploads; then its log is lost."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import pydanube
from pydanube.errors import DanubeError
from tests.e2e.processes import BrokerProcess, danube_here, until
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KILLS = 4
TOPICS = [f"/default/killed-{number}" for number in range(4)]  # some upload is nearly always under way
Told = dict[str, dict[int, bytes]]


async def publish_until_killed(broker: BrokerProcess, moment: float, told: Told, number: int) -> None:
    """Publishes to all topics at once until the process dies, and remembers what was acknowledged."""
    noise = random.Random(number)

    async def publish(client: pydanube.Client, topic: str) -> None:
        async with client.producer(topic, name=f"{topic}-{number}") as producer:
            for count in range(10**6):
                payload = b"%d %d " % (number, count) + noise.randbytes(200)
                receipt = await producer.send(payload, key=f"key-{count % 5}")
                told[topic][receipt.offset] = payload
                await asyncio.sleep(0.005)  # enough messages for many uploads, and not more than can be read back soon

    async def kill() -> None:
        await asyncio.sleep(moment)
        broker.kill()

    client = pydanube.connect(f"danube://127.0.0.1:{broker.stream_port}", timeout=2)
    publishing = [asyncio.ensure_future(publish(client, topic)) for topic in TOPICS]
    await kill()
    for task in publishing:
        task.cancel()
    await asyncio.gather(*publishing, return_exceptions=True)
    with suppress(DanubeError):
        await client.close()


async def read(broker: BrokerProcess, topic: str, head: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    async with (
        pydanube.connect(f"danube://127.0.0.1:{broker.stream_port}", timeout=20) as client,
        client.consumer(topic, subscription="late", start="earliest") as consumer,
    ):
        while len(found) < head:
            message = await consumer.receive(timeout=30)
            assert message.offset not in found, "an offset came twice"
            found[message.offset] = message.payload
            await message.ack()
    return found


def listed(broker: BrokerProcess, topic: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(broker.admin("storage", "list", topic, "--output", "json"))
    return answer


def test_a_broker_killed_while_it_uploads_comes_back_with_everything(tmp_path: Path) -> None:
    config = tmp_path / "broker.yml"
    settings = {
        "upload": {"interval_seconds": 1},
        "local_retention": {"time_minutes": 1, "size_mb": 1, "check_interval_minutes": 1},
    }
    config.write_text(yaml.safe_dump({"storage": settings}))
    flags = ("--config-file", str(config), "--storage-url", f"file://{tmp_path / 'bucket'}")
    moments = random.Random(20)
    told: Told = {topic: {} for topic in TOPICS}
    with BrokerProcess(tmp_path, *flags) as broker:
        for topic in TOPICS:
            broker.admin("topics", "create", topic, "--dispatch-strategy", "reliable")
        for number in range(KILLS):
            run(publish_until_killed(broker, 0.5 + 1.5 * moments.random(), told, number))
            broker.start()
        assert all(len(messages) > KILLS for messages in told.values())
        heads = {}
        for topic in TOPICS:

            def uploaded(topic: str = topic) -> int:
                answer = listed(broker, topic)
                whole = answer["cloud"] == [{"first": 0, "end": answer["head"]}]
                return int(answer["head"]) if whole else 0

            heads[topic] = until(
                uploaded, f"{topic} is uploaded", seconds=60, say=lambda: str(listed(broker, TOPICS[0]))
            )
        assert broker.stop() == 0
        shutil.rmtree(broker.data_dir / "wal")
        shutil.rmtree(broker.data_dir / "journal", ignore_errors=True)
        broker.start()
        for topic in TOPICS:
            found = run(read(broker, topic, heads[topic]))
            assert told[topic].items() <= found.items(), "lost or renumbered"
            assert len(set(found.values())) == len(found), "a message under two offsets"
            checked = danube_here(
                "admin", "--endpoint", broker.endpoint, "storage", "verify", topic, "--output", "json"
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr
            assert json.loads(checked.stdout)["messages"] == heads[topic]
        unexpected = [error for error in broker.errors() if "log continues behind a gap" not in error]
        assert unexpected == []
