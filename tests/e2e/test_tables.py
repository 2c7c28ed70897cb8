"""Topics read as Iceberg tables through a real broker's catalog, by an engine that nobody here wrote."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchTableError

import pydanube
from pydanube.testing.brokers import TestBroker
from tests.support import run

pytestmark = pytest.mark.timeout(60)


def metrics_addr(broker: TestBroker) -> str:
    assert broker._doors is not None
    return broker._doors.metrics_addr


def catalog_of(broker: TestBroker) -> RestCatalog:
    return RestCatalog("danube", uri=f"http://{metrics_addr(broker)}/iceberg")


def ask(broker: TestBroker, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
    request = urllib.request.Request(f"http://{metrics_addr(broker)}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else body, error.headers


def test_pyiceberg_reads_what_was_acknowledged_a_moment_ago(tmp_path: Path) -> None:
    async def inside() -> None:
        async with (
            TestBroker(tmp_path) as broker,
            pydanube.connect(broker.url) as client,
            client.producer("/default/orders") as producer,
        ):
            await producer.send_many(pa.table({"payload": [f"order {n}".encode() for n in range(500)]}))
            catalog = await asyncio.to_thread(catalog_of, broker)
            assert await asyncio.to_thread(catalog.list_tables, "default") == [("default", "orders")]
            table = await asyncio.to_thread(catalog.load_table, "default.orders")
            while table.properties["danube.head"] != "500":
                await asyncio.to_thread(table.refresh)
            rows = await asyncio.to_thread(lambda: table.scan().to_arrow().sort_by("offset"))
            assert rows.column("payload").to_pylist() == [f"order {n}".encode() for n in range(500)]
            await producer.send_many(pa.table({"payload": [b"more"] * 100}))
            while table.properties["danube.head"] != "600":  # a topic is flushed once a second
                await asyncio.to_thread(table.refresh)
            assert await asyncio.to_thread(lambda: table.scan("offset >= 500").count()) == 100

    run(inside())


def test_the_catalog_answers_as_icebergs_clients_expect_and_takes_no_writes(tmp_path: Path) -> None:
    async def inside() -> None:
        async with TestBroker(tmp_path) as broker, pydanube.connect(broker.url) as client:
            async with client.producer("/default/orders") as producer:
                await producer.send(b"one")

            def check() -> None:
                _, config, _ = ask(broker, "/iceberg/v1/config?warehouse=danube")
                assert all(each.split()[0] in ("GET", "HEAD") for each in config["endpoints"])
                assert ask(broker, "/iceberg/v1/danube/namespaces")[1] == {"namespaces": [["default"], ["system"]]}
                assert ask(broker, "/iceberg/v1/danube/namespaces/default")[0] == 200
                path = "/iceberg/v1/danube/namespaces/default/tables/orders"
                code, body, headers = ask(broker, path)
                assert (code, body["metadata"]["properties"]["danube.topic"]) == (200, "/default/orders")
                assert Path(body["metadata-location"]).is_file()
                assert ask(broker, path, **{"If-None-Match": headers["ETag"]})[0] == 304
                assert ask(broker, path, "HEAD")[0] == 200
                assert ask(broker, path, "POST")[0] == 405
                code, body, _ = ask(broker, path + "s")
                assert (code, body["error"]["type"]) == (404, "NoSuchTableException")
                code, body, _ = ask(broker, "/iceberg/v1/danube/namespaces/none/tables")
                assert (code, body["error"]["type"]) == (404, "NoSuchNamespaceException")
                with pytest.raises(NoSuchTableError):
                    catalog_of(broker).load_table("default.none")

            await asyncio.to_thread(check)

    run(inside())
