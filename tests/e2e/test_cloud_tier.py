"""History outlives the disk: everything comes back from a real S3-compatible server, to everybody who can read it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import duckdb_extension_httpfs
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pytest
import yaml

import pydanube
from tests.e2e.objectstores import S3Server
from tests.e2e.processes import BrokerProcess, danube_here, until
from tests.e2e.tcp_proxy import Line
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOPIC = "/default/orders"
ONE_BY_ONE, BATCHED, OFFICIAL = 60, 500, 20
COUNT = ONE_BY_ONE + BATCHED + OFFICIAL


class Stored(NamedTuple):
    offset: int
    payload: bytes
    key: str | None
    attributes: dict[str, str]
    publish_time: datetime
    producer: str | None


def url_of(broker: BrokerProcess) -> str:
    return f"danube://127.0.0.1:{broker.stream_port}"


async def produce(broker: BrokerProcess) -> None:
    """One by one with keys and attributes, then many in compressed batches."""
    async with pydanube.connect(url_of(broker), timeout=20) as client:
        async with client.producer(TOPIC, name="one by one") as producer:
            for number in range(ONE_BY_ONE):
                attributes = {"number": str(number), "ünïcode": "ja"} if number % 2 else {}
                await producer.send(b"native %d" % number, key=f"key-{number % 7}", attributes=attributes)
        async with client.producer(TOPIC, name="batched", compression="zstd") as producer:
            for number in range(BATCHED):
                producer.send_nowait(b"batched %d" % number)
            await producer.flush()


async def consume(broker: BrokerProcess, subscription: str, count: int = COUNT) -> list[Stored]:
    async with (
        pydanube.connect(url_of(broker), timeout=20) as client,
        client.consumer(TOPIC, subscription=subscription, start="earliest") as consumer,
    ):
        found = []
        for _ in range(count):
            message = await consumer.receive(timeout=30)
            found.append(
                Stored(
                    message.offset,
                    message.payload,
                    message.key,
                    message.attributes,
                    message.publish_time,
                    message.producer_name,
                )
            )
            await message.ack()
        return found


def listed(broker: BrokerProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(broker.admin("storage", "list", TOPIC, "--output", "json"))
    return found


def wait_until_uploaded(broker: BrokerProcess, head: int) -> dict[str, Any]:
    def uploaded() -> dict[str, Any] | None:
        found = listed(broker)
        return found if found["head"] == head and found["cloud"] == [{"first": 0, "end": head}] else None

    return until(uploaded, f"{head} messages are uploaded", seconds=60, say=lambda: str(listed(broker))) or {}


def lose_the_log(broker: BrokerProcess) -> None:
    shutil.rmtree(broker.data_dir / "wal")
    shutil.rmtree(broker.data_dir / "journal", ignore_errors=True)  # there is none while topics are few


@contextmanager
def forgetful_broker(directory: Path, *flags: str) -> Iterator[BrokerProcess]:
    """A broker that must not complain of anything but its lost log."""
    with BrokerProcess(directory, *flags) as broker:
        yield broker
        assert [error for error in broker.errors() if "log continues behind a gap" not in error] == []


def verify(broker: BrokerProcess) -> dict[str, Any]:
    done = danube_here("admin", "--endpoint", broker.endpoint, "storage", "verify", TOPIC, "--output", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_message_comes_back_from_the_bucket_to_every_reader(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    config = tmp_path / "broker.yml"
    config.write_text(yaml.safe_dump({"storage": {"durable": s3_server.options, "upload": {"interval_seconds": 1}}}))
    flags = ("--config-file", str(config), "--storage-url", f"s3://{bucket}/some/prefix")
    with forgetful_broker(tmp_path, *flags) as broker:
        broker.admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable")
        run(produce(broker))
        with broker.run(
            *("producer", TOPIC, "--reliable", "--count", OFFICIAL, "--keys", 3, "--attribute", "official")
        ) as official:
            official.until("created")
            official.go()
            official.until("done")
        sent = run(consume(broker, "before"))
        assert [each.offset for each in sent] == list(range(COUNT))
        wait_until_uploaded(broker, COUNT)

        assert broker.stop() == 0
        lose_the_log(broker)
        broker.start()
        description = json.loads(broker.admin("topics", "describe", TOPIC, "--output", "json"))
        assert description["cloud"] == [{"first": 0, "end": COUNT}] and description["log"] == []

        assert run(consume(broker, "after")) == sent
        check_official(broker, sent)
        check_tables(broker, s3_server, bucket, sent)
        assert verify(broker)["messages"] == COUNT

        run(produce(broker))
        assert [each.offset for each in run(consume(broker, "later", COUNT + 10))[COUNT:]] == [
            *range(COUNT, COUNT + 10)
        ]


def check_official(broker: BrokerProcess, sent: list[Stored]) -> None:
    """A subscription of the official client begins at the head; an operator may send it back."""
    with broker.run("consumer", TOPIC, "--subscription", "official") as consumer:
        consumer.until("subscribed")
        broker.admin("subscriptions", "seek", TOPIC, "official", "earliest")
        received = consumer.until("received", len(sent), seconds=90)
    assert [line["offset"] for line in received] == [each.offset for each in sent]
    for line, each in zip(received, sent, strict=True):
        assert line["payload"].encode() == each.payload
        assert line["attributes"] == each.attributes
        assert (line["key"] or None, line["producer"]) == (each.key, each.producer)
        assert line["publish_time"] == milliseconds(each.publish_time)


def milliseconds(time: datetime) -> int:
    """Since 1970, as the official clients count."""
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def check_tables(broker: BrokerProcess, server: S3Server, bucket: str, sent: list[Stored]) -> None:
    paths = broker.admin("storage", "list", TOPIC, "--output", "paths").splitlines()
    assert paths and all(path.startswith(f"s3://{bucket}/some/prefix/default/orders/data-") for path in paths)
    assert stored_of(read_with_pyarrow(server, paths)) == sent
    assert stored_of(read_with_duckdb(server, 'SELECT * FROM read_parquet(?) ORDER BY "offset"', paths)) == sent
    [row] = read_with_duckdb(server, 'SELECT count(*), max("offset") FROM read_parquet(?)', paths).to_pylist()
    assert list(row.values()) == [len(sent), len(sent) - 1]
    [row] = read_with_duckdb(
        server,
        "SELECT count(*) AS n FROM read_parquet(?) WHERE routing_key = 'key-3' AND producer_name = 'one by one'",
        paths,
    ).to_pylist()
    assert row["n"] == sum(each.key == "key-3" and each.producer == "one by one" for each in sent)
    # The bucket itself, without asking a broker: what is described is everything that looks like data.
    s3 = arrow_s3(server)
    lying = s3.get_file_info(fs.FileSelector(f"{bucket}/some/prefix/default/orders"))
    assert {f"s3://{info.path}" for info in lying if info.base_name.endswith(".parquet")} >= set(paths)


def arrow_s3(server: S3Server) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key=server.access_key,
        secret_key=server.secret_key,
        endpoint_override=server.endpoint,
        region=server.region,
    )


def read_with_pyarrow(server: S3Server, paths: list[str]) -> pa.Table:
    names = [path.removeprefix("s3://") for path in paths]
    return ds.dataset(names, filesystem=arrow_s3(server), format="parquet").to_table()


def read_with_duckdb(server: S3Server, query: str, paths: list[str]) -> pa.Table:
    [httpfs] = Path(duckdb_extension_httpfs.__path__[0]).rglob("httpfs.duckdb_extension")
    with duckdb.connect() as connection:
        connection.execute(f"LOAD '{httpfs}'")
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{server.access_key}', SECRET '{server.secret_key}', "
            f"REGION '{server.region}', ENDPOINT '{server.endpoint.removeprefix('http://')}', "
            "URL_STYLE 'path', USE_SSL false)"
        )
        return connection.execute(query, [paths]).to_arrow_table()


def stored_of(table: pa.Table) -> list[Stored]:
    """Rows as messages. In order already: nobody sorts them here."""
    columns = ["offset", "payload", "routing_key", "attributes", "publish_time", "producer_name"]
    return [
        Stored(
            row["offset"],
            row["payload"],
            row["routing_key"],
            dict(row["attributes"] or ()),
            row["publish_time"].astimezone(UTC),
            row["producer_name"],
        )
        for row in table.select(columns).to_pylist()
    ]


async def produce_large(broker: BrokerProcess, count: int) -> None:
    async with (
        pydanube.connect(url_of(broker), timeout=20) as client,
        client.producer(TOPIC, name="large") as producer,
    ):
        for number in range(count):
            producer.send_nowait(b"large %d" % number + os.urandom(100_000))
        await producer.flush()


def processes_beside(broker: BrokerProcess) -> list[int]:
    assert broker.process is not None
    children = Path(f"/proc/{broker.process.pid}/task").glob("*/children")  # a thread's own
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if b"pydanube.stores.work.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_large_objects_are_stored_by_a_process_beside_the_broker_and_also_when_it_dies(
    tmp_path: Path, s3_server: S3Server
) -> None:
    config = tmp_path / "broker.yml"
    upload = {"interval_seconds": 1}
    config.write_text(yaml.safe_dump({"storage": {"durable": s3_server.options, "upload": upload}}))
    with forgetful_broker(tmp_path, "--config-file", str(config), "--storage-url", s3_server.url()) as broker:
        broker.admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable")
        run(produce_large(broker, 40))
        wait_until_uploaded(broker, 40)
        [beside] = processes_beside(broker)
        secret = s3_server.secret_key.encode()
        assert secret not in Path(f"/proc/{beside}/cmdline").read_bytes()
        os.kill(beside, signal.SIGKILL)
        run(produce_large(broker, 40))
        wait_until_uploaded(broker, 80)
        assert beside not in processes_beside(broker) != []
        assert verify(broker)["problems"] == []
        broker.stop()
        lose_the_log(broker)
        broker.start()
        found = run(consume(broker, "after", 80))
        assert [each.payload[:9].split()[0] for each in found] == [b"large"] * 80
        assert [each.offset for each in found] == list(range(80))


def test_a_broker_that_was_told_nothing_keeps_history_beside_its_log(tmp_path: Path) -> None:
    with forgetful_broker(tmp_path, "--upload-interval", "1") as broker:
        broker.admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable")
        run(produce(broker))
        count = ONE_BY_ONE + BATCHED
        wait_until_uploaded(broker, count)
        paths = broker.admin("storage", "list", TOPIC, "--output", "paths").splitlines()
        assert all(Path(path).is_file() and broker.data_dir in Path(path).parents for path in paths)
        with duckdb.connect() as connection:
            query = 'SELECT count(*), max("offset") FROM read_parquet(?)'
            assert connection.execute(query, [paths]).fetchall() == [(count, count - 1)]
        broker.kill()
        lose_the_log(broker)
        broker.start()
        found = run(consume(broker, "after", count))
        assert [each.offset for each in found] == list(range(count))
        # Nobody knows any more what else was given out, so the log goes on behind everything that could have been.
        places = [(place["first"], place["where"]) for place in verify(broker)["places"]]
        assert places[:2] == [(0, "objects"), (count, "void")]


def test_a_broker_whose_store_cannot_be_reached_starts_and_catches_up(tmp_path: Path, s3_server: S3Server) -> None:
    with Line(s3_server.port) as line:
        line.refuse()
        durable = {**s3_server.options, "endpoint": line.endpoint}
        config = tmp_path / "broker.yml"
        config.write_text(yaml.safe_dump({"storage": {"durable": durable, "upload": {"interval_seconds": 1}}}))
        with BrokerProcess(tmp_path, "--config-file", str(config), "--storage-url", s3_server.url()) as broker:
            assert "object store is away" in broker.output.read_text()
            broker.admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable")
            run(produce(broker))
            count = ONE_BY_ONE + BATCHED
            found = listed(broker)
            assert (found["cloud"], found["only_in_log"]) == ([], [{"first": 0, "end": count}])
            assert len(run(consume(broker, "meanwhile", count))) == count
            line.heal()
            wait_until_uploaded(broker, count)
            assert verify(broker)["problems"] == []
