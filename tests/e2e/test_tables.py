"""Topics read as Iceberg tables through a real broker's catalog, by engines that nobody here wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.exceptions import NoSuchTableError

import pydanube.blocking
from pydanube.client.thread import LoopThread
from pydanube.config import StorageConfig
from pydanube.testing.brokers import TestBroker
from pydanube.web.app import WebSettings
from pydanube.web.server import bind, serving
from tests.e2e.objectstores import S3Server
from tests.e2e.processes import until
from tests.harness.engines import ask, digest, duckdb_at, pyiceberg_at, rows_of

pytestmark = pytest.mark.timeout(60)
os.environ.setdefault("POLARS_ICEBERG_PLANNER", "pyiceberg")  # else it warns that it does just that

ORDERS = 'SELECT "offset", payload FROM danube.default.orders ORDER BY 1'


class TableSetup:
    """A broker with three topics, and what was acknowledged of them."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        assert broker._servers is not None
        self.catalog = f"http://{broker._servers.metrics_addr}/iceberg"
        self.tables = f"{self.catalog}/v1/danube/namespaces/default/tables"
        self.sent: list[bytes] = []
        self.duck = duckdb_at(self.catalog)
        with pydanube.blocking.connect(broker.url) as client:
            client.create_topic("/default/clicks", partitions=2)
            client.create_topic("/default/ticks", reliable=False)
        self.send("orders", 500)
        self.send("clicks", 300)

    def send(self, name: str, count: int) -> None:
        first = len(self.sent)
        payloads = [f"{name} {first + n}".encode() for n in range(count)]
        keys = [str(n) for n in range(count)]
        with (
            pydanube.blocking.connect(self.broker.url) as client,
            client.producer(f"/default/{name}") as producer,
        ):
            producer.send_many(pa.table({"payload": payloads, "routing_key": keys}))
        if name == "orders":
            self.sent += payloads

    def asked(self, query: str) -> list[tuple[Any, ...]]:
        return self.duck.execute(query).fetchall()

    def await_rows(self) -> None:
        """A load has what waits uploaded; the next one sees it."""
        until(lambda: len(self.asked(ORDERS)) >= len(self.sent), "DuckDB sees all rows", seconds=10)
        count = "SELECT count(*) FROM danube.default.clicks"
        until(lambda: self.asked(count) == [(300,)], "DuckDB sees all rows of partitions", seconds=10)

    def check(self) -> None:
        """DuckDB, PyIceberg and Polars read what was acknowledged, byte for byte."""
        wanted = digest(enumerate(self.sent))
        assert digest(self.asked(ORDERS)) == wanted
        table = pyiceberg_at(self.catalog).load_table("default.orders")
        assert digest(rows_of(table.scan().to_arrow(), "offset", "payload")) == wanted
        # Of a store elsewhere Polars' own reader takes the bucket from the metadata, and the server from nowhere.
        reader: Any = None if table.location().startswith("/") else "pyiceberg"
        some = (
            pl.scan_iceberg(table, reader_override=reader)
            .filter(pl.col("offset") >= 100)
            .select("offset", "payload")
            .collect()
        )
        assert digest(rows_of(some.to_arrow(), "offset", "payload")) == digest([*enumerate(self.sent)][100:])
        assert [
            pair[0] for pair in self.asked("SELECT part, count(*) FROM danube.default.clicks GROUP BY 1 ORDER BY 1")
        ] == [0, 1]
        clicks = pyiceberg_at(self.catalog).load_table("default.clicks")
        of_one = clicks.scan("part = 1")
        assert all("clicks-part-1/" in each.file.file_path for each in of_one.plan_files())
        assert {each for each in of_one.to_arrow().column("part").to_pylist()} == {1}
        assert len(rows_of(clicks.scan().to_arrow(), "part", "offset")) == 300


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TableSetup]:
    with TestBroker(tmp_path_factory.mktemp("tables")) as broker:
        yield TableSetup(broker)


def test_every_engine_reads_what_was_acknowledged_a_moment_ago(setup: TableSetup) -> None:
    setup.await_rows()
    setup.check()
    setup.send("orders", 100)
    began = time.monotonic()
    setup.await_rows()
    assert time.monotonic() - began < 10  # the interval is half a minute
    setup.check()


def test_the_catalog_lists_topics_that_are_kept_and_says_what_the_others_are(setup: TableSetup) -> None:
    names = [each[0] for each in setup.asked("SELECT table_name FROM duckdb_tables() WHERE database_name = 'danube'")]
    assert sorted(names) == ["clicks", "orders"]
    catalog = pyiceberg_at(setup.catalog)
    assert catalog.list_tables("default") == [("default", "clicks"), ("default", "orders")]
    assert ("system",) in catalog.list_namespaces()
    assert catalog.table_exists("default.orders") and not catalog.table_exists("default.none")
    with pytest.raises(NoSuchTableError, match="non-reliable"):
        catalog.load_table("default.ticks")
    with pytest.raises(NoSuchTableError, match="unable to find"):
        catalog.load_table("default.none")


def test_the_versions_of_the_last_minutes_are_read_by_number_and_by_time(setup: TableSetup) -> None:
    setup.await_rows()
    before = len(setup.sent)
    time_before = setup.asked("SELECT now()::VARCHAR")[0][0]
    [(version,)] = setup.asked("SELECT max(snapshot_id) FROM iceberg_snapshots(danube.default.orders)")
    setup.send("orders", 50)
    setup.await_rows()
    count = "SELECT count(*) FROM danube.default.orders"
    assert setup.asked(count) == [(before + 50,)]
    assert setup.asked(f"{count} AT (VERSION => {version})") == [(before,)]
    assert setup.asked(f"{count} AT (TIMESTAMP => '{time_before}'::TIMESTAMPTZ)") == [(before,)]
    table = pyiceberg_at(setup.catalog).load_table("default.orders")
    assert table.scan(snapshot_id=version).count() == before
    assert table.scan().count() == table.scan(f"offset < {before + 50}").count() == before + 50


def test_what_writes_is_refused_with_a_sentence_and_nothing_changes(setup: TableSetup) -> None:
    setup.await_rows()
    objects = Path(setup.broker.data_dir or "", "objects", "default")
    before = set(objects.rglob("data-*.parquet"))
    for statement in (
        "CREATE TABLE danube.default.more (a INT)",
        "CREATE SCHEMA danube.more",
        "DROP TABLE danube.default.orders",
    ):
        with pytest.raises(duckdb.Error, match="this catalog is for readers"):
            setup.asked(statement)
    for statement in (
        "INSERT INTO danube.default.orders SELECT * FROM danube.default.orders",
        'DELETE FROM danube.default.orders WHERE "offset" < 10',
        "UPDATE danube.default.orders SET payload = 'x'::BLOB",
    ):
        with pytest.raises(duckdb.Error):
            setup.asked(statement)
    code, body, headers = ask(setup.tables, "POST", b"x" * 500_000)
    assert (code, headers["Allow"]) == (406, "GET, HEAD") and "producers" in body["error"]["message"]
    setup.duck = duckdb_at(setup.catalog)
    setup.check()
    assert before <= set(objects.rglob("data-*.parquet"))


def test_answers_have_what_http_clients_look_for(setup: TableSetup) -> None:
    setup.await_rows()
    code, body, headers = ask(f"{setup.tables}/orders?snapshots=all")
    assert (code, body["metadata"]["properties"]["danube.topic"]) == (200, "/default/orders")
    assert Path(body["metadata-location"]).is_file() and body["config"] == {}
    code, empty, again = ask(f"{setup.tables}/orders", **{"If-None-Match": headers["ETag"]})
    assert (code, empty, again["ETag"]) == (304, b"", headers["ETag"])
    code, empty, again = ask(f"{setup.tables}/orders", "HEAD")
    assert (code, empty, again["ETag"]) == (204, None, headers["ETag"])
    listed = ask(f"{setup.tables}?pageSize=1&pageToken=")[1]
    assert [each["name"] for each in listed["identifiers"]] == ["clicks"]
    listed = ask(f"{setup.tables}?pageSize=1&pageToken={listed['next-page-token']}")[1]
    assert [each["name"] for each in listed["identifiers"]] == ["orders"] and listed["next-page-token"] is None


@contextmanager
def web_admin(endpoint: str) -> Iterator[str]:
    """What `danube admin serve --read-only` serves, without a process of its own."""
    thread, held = LoopThread("web admin"), AsyncExitStack()
    settings = WebSettings(endpoint=endpoint, read_only=True)
    try:
        address = thread.call(held.enter_async_context(serving(bind("127.0.0.1:0"), "127.0.0.1:0", settings)))
        yield f"http://{address}"
    finally:
        thread.call(held.aclose())
        thread.stop()


def test_the_web_admin_serves_the_same_catalog_and_has_no_keys_of_the_store(setup: TableSetup) -> None:
    setup.await_rows()
    with web_admin(setup.broker.admin_url) as site:
        there, here = f"{site}/iceberg/v1", f"{setup.catalog}/v1"
        for path in (
            "/config?warehouse=danube",
            "/danube/namespaces",
            "/danube/namespaces/default/tables?pageSize=1",
            "/danube/namespaces/default/tables/orders",
            "/danube/namespaces/default/tables/ticks",
            "/danube/namespaces/default/tables/or%20ders",
            "/danube/namespaces/none",
        ):
            assert ask(there + path)[:2] == ask(here + path)[:2], path
        path = "/danube/namespaces/default/tables/orders"
        tag = ask(here + path)[2]["ETag"]
        assert ask(there + path, **{"If-None-Match": tag})[0] == 304
        assert ask(there + path, "HEAD")[0] == 204
        for method in ("POST", "PUT", "DELETE"):
            assert ask(there + path, method, b"{}")[:2] == ask(here + path, method, b"{}")[:2]
        assert ask(there + path, Host="evil.example")[0] == 421
        rows = duckdb_at(f"{site}/iceberg").execute(ORDERS).fetchall()
        assert digest(rows) == digest(enumerate(setup.sent))
        assert pyiceberg_at(f"{site}/iceberg").load_table("default.orders").scan().count() == len(setup.sent)


def test_clients_without_keys_read_a_bucket_with_those_that_the_catalog_hands_out(
    tmp_path: Path, s3_server: S3Server
) -> None:
    readers = {"access_key": s3_server.reader_access_key, "secret_key": s3_server.reader_secret_key}
    kept = StorageConfig(url=s3_server.url(), options=s3_server.options, readers=readers)
    with TestBroker(tmp_path, storage=kept) as broker:
        setup = TableSetup(broker)
        setup.await_rows()
        setup.check()
        with pytest.raises(duckdb.Error, match=r"403|Forbidden"):
            setup.asked("INSERT INTO danube.default.orders SELECT * FROM danube.default.orders")
        setup.duck = duckdb_at(setup.catalog)
        setup.check()
        path = f"{setup.tables}/orders"
        told = ask(path, **{"X-Iceberg-Access-Delegation": "vended-credentials"})[1]
        assert told["config"]["s3.access-key-id"] == s3_server.reader_access_key
        assert s3_server.access_key not in str(told) and s3_server.secret_key not in str(told)
        assert s3_server.reader_secret_key not in str(ask(path)[1])
