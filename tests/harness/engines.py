"""Engines that nobody here wrote, as they read tables through the catalog. `catalog` is its URL, up to /iceberg."""

from __future__ import annotations

import hashlib
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

EXTENSIONS: Final = ("avro", "httpfs", "iceberg")
NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def duckdb_alone() -> duckdb.DuckDBPyConnection:
    """With its extensions."""
    connection = duckdb.connect(config={"threads": 2})
    for name in EXTENSIONS:  # from packages: nothing is downloaded
        [file] = Path(importlib.import_module(f"duckdb_extension_{name}").__path__[0]).rglob(f"{name}.duckdb_extension")
        connection.execute(f"LOAD '{file}'")
    return connection


def duckdb_at(catalog: str) -> duckdb.DuckDBPyConnection:
    """With the catalog attached as `danube`, and no keys of any store."""
    connection = duckdb_alone()
    connection.execute(f"ATTACH 'danube' AS danube (TYPE iceberg, ENDPOINT '{catalog}', AUTHORIZATION_TYPE 'none')")
    return connection


def pyiceberg_at(catalog: str) -> RestCatalog:
    return RestCatalog("danube", uri=catalog)


def ask(url: str, method: str = "GET", data: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Code, body as JSON (or bytes if it is none), headers."""
    request = urllib.request.Request(url, data, headers=headers, method=method)
    try:
        with NO_PROXY.open(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, json.loads(body) if body.startswith(b"{") else body, error.headers


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    """Of rows in their order: two readers that agree on it read the same bytes."""
    found = hashlib.sha256()
    for row in rows:
        for value in row:
            piece = value if isinstance(value, bytes) else str(value).encode()
            found.update(len(piece).to_bytes(8, "big") + piece)
    return found.hexdigest()


def rows_of(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    """Sorted by the columns, in their order."""
    return sorted(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
