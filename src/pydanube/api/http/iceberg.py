"""The Iceberg REST catalog, for readers: GET and HEAD below /iceberg/v1/. No endpoint that writes is offered or served.

config                              where the rest is, and that only this is there
namespaces                          all of them
namespaces/{ns}                     one
namespaces/{ns}/tables              its topics that are kept; a partitioned one is one table
namespaces/{ns}/tables/{topic}      the table as it is now, with an ETag; keys of the store for who asks for them

what is wrong                                   code    type
──────────────────────────────────────────────  ──────  ────────────────────────────
a namespace, or a name that can be none         404     NoSuchNamespaceException
a topic, one that keeps nothing, or a bad name  404     NoSuchTableException
anything but GET and HEAD                       406     UnsupportedOperationException
a parameter                                     400     BadRequestException
the store is away, or the broker starts         503     ServiceUnavailableException, with Retry-After
the history is damaged                          500     the error's own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from pydanube.broker.tables import TableDesk, may_read
from pydanube.core.names import NamespaceName, TopicName
from pydanube.errors import (
    ConfigError,
    DanubeError,
    InvalidName,
    NamespaceUnknown,
    NotATable,
    Refused,
    TopicUnknown,
    Unavailable,
)

ROOT: Final = "/iceberg/v1/"
JSON: Final = "application/json"
RETRY_SECONDS: Final = 5
STARTING: Final = "the broker is starting"
READ_ONLY: Final = (
    "this catalog is for readers: tables are topics, and rows come in through producers (danube produce, a client, or "
    "Spark's sink); nothing can be created, changed or committed here"
)
ENDPOINTS: Final = (
    "GET /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "HEAD /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "HEAD /v1/{prefix}/namespaces/{namespace}/tables/{table}",
)
PREFIX: Final = "danube"
DELEGATION: Final = "x-iceberg-access-delegation"
VENDED: Final = "vended-credentials"
PAGE_SIZE_MAX: Final = 100_000


class CatalogRequest(NamedTuple):
    """`target` is path and query; the path begins with ROOT. `headers` have names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = {}


class CatalogResponse(NamedTuple):
    code: int
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = {}

    def encoded(self) -> bytes:
        return b"" if self.body is None else json.dumps(self.body).encode()


async def answer(desk: TableDesk | None, request: CatalogRequest) -> CatalogResponse:
    """Without a desk the broker is starting."""
    if request.method not in ("GET", "HEAD"):
        return _error(406, "UnsupportedOperationException", READ_ONLY, {"Allow": "GET, HEAD"})
    path, _, query = request.target.partition("?")
    parts = [unquote(part) for part in path.removeprefix(ROOT).rstrip("/").split("/")]
    if parts[:1] == [PREFIX]:
        parts = parts[1:]
    if desk is None:
        return _later(STARTING)
    try:
        found = await _answer(desk, parts, dict(parse_qsl(query)), request.headers)
    except NamespaceUnknown as error:
        return _error(404, "NoSuchNamespaceException", str(error))
    except (TopicUnknown, NotATable) as error:
        return _error(404, "NoSuchTableException", str(error))
    except InvalidName as error:
        # Spark looks for orders.snapshots in a namespace of that name first, and for the table's own when that is none.
        return _error(404, "NoSuchTableException" if len(parts) > 3 else "NoSuchNamespaceException", str(error))
    except Unavailable as error:
        return _later(str(error))
    except Refused as error:
        return _error(400, "BadRequestException", str(error))
    except DanubeError as error:
        return _error(500, type(error).__name__, str(error))
    return CatalogResponse(204, None, found.headers) if (request.method, found.code) == ("HEAD", 200) else found


async def _answer(
    desk: TableDesk, parts: list[str], asked: Mapping[str, str], headers: Mapping[str, str]
) -> CatalogResponse:
    if not may_read(None):
        return _error(403, "ForbiddenException", "you may not use this catalog")
    match parts:
        case ["config"]:
            return CatalogResponse(200, {"defaults": {}, "overrides": {"prefix": PREFIX}, "endpoints": list(ENDPOINTS)})
        case ["namespaces"]:
            below = asked.get("parent")
            found = await desk.namespaces() if not below else []  # a namespace has none below it
            return CatalogResponse(200, {"namespaces": [[each] for each in found]})
        case ["namespaces", namespace]:
            await desk.require(NamespaceName(namespace))
            return CatalogResponse(200, {"namespace": [namespace], "properties": {}})
        case ["namespaces", namespace, "tables"]:
            page = await desk.tables(NamespaceName(namespace), asked.get("pageToken", ""), _page_size(asked))
            listed = [{"namespace": [namespace], "name": each.name} for each in page.tables]
            return CatalogResponse(200, {"identifiers": listed, "next-page-token": page.next})
        case ["namespaces", namespace, "tables", table]:
            return await _load(desk, TopicName(f"/{NamespaceName(namespace)}/{table}"), headers)
    return _error(404, "NotFoundException", f"nothing is served at {'/'.join(parts)[:200]}; {READ_ONLY}")


async def _load(desk: TableDesk, name: TopicName, headers: Mapping[str, str]) -> CatalogResponse:
    loaded = await desk.load(name)
    tag = f'"{loaded.etag}"'
    if _is_known(headers.get("if-none-match", ""), tag):
        return CatalogResponse(304, None, {"ETag": tag})
    body: dict[str, Any] = {"metadata-location": loaded.location, "metadata": loaded.metadata, "config": {}}
    if desk.vended and VENDED in headers.get(DELEGATION, "").replace(" ", "").lower().split(","):
        body["config"] = dict(desk.vended)
        body["storage-credentials"] = [{"prefix": desk.root, "config": dict(desk.vended)}]
        return CatalogResponse(200, body, {"ETag": tag, "Cache-Control": "no-store"})
    return CatalogResponse(200, body, {"ETag": tag})


def _page_size(asked: Mapping[str, str]) -> int | None:
    text = asked.get("pageSize")
    if text is None:
        return None
    if not (text.isdecimal() and 1 <= int(text) <= PAGE_SIZE_MAX):
        raise ConfigError("pageSize", text[:20], f"use 1 to {PAGE_SIZE_MAX}")
    return int(text)


def _is_known(told: str, tag: str) -> bool:
    return any(each.strip().removeprefix("W/") in (tag, "*") for each in told.split(",")) if told else False


def _later(why: str) -> CatalogResponse:
    return _error(503, "ServiceUnavailableException", why, {"Retry-After": str(RETRY_SECONDS)})


def _error(code: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> CatalogResponse:
    return CatalogResponse(code, {"error": {"message": message, "type": kind, "code": code}}, headers or {})
