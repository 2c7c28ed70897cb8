"""The Iceberg REST catalog, for readers: GET and HEAD below /iceberg/v1/. No endpoint that writes is offered or served.

config                              where the rest is, and that only this is there
namespaces                          all of them
namespaces/{ns}                     one
namespaces/{ns}/tables              its topics; a partitioned one is one table
namespaces/{ns}/tables/{topic}      the table as it is now, with an ETag
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from pydanube.broker.tables import TableDesk
from pydanube.core.names import NamespaceName, TopicName
from pydanube.errors import DanubeError, InvalidName, NamespaceUnknown, TopicUnknown, Unavailable

ROOT: Final = "/iceberg/v1/"
JSON: Final = "application/json"
RETRY_SECONDS: Final = 5
ENDPOINTS: Final = (
    "GET /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "HEAD /v1/{prefix}/namespaces/{namespace}/tables/{table}",
)
PREFIX: Final = "danube"


class CatalogResponse(NamedTuple):
    code: int
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = {}


async def answer(desk: TableDesk, path: str, headers: Mapping[str, str]) -> CatalogResponse:
    """To a GET of `path`, which begins with ROOT and has no query. `headers` have names in lower case."""
    parts = [unquote(part) for part in path.removeprefix(ROOT).rstrip("/").split("/")]
    if parts[:1] == [PREFIX]:
        parts = parts[1:]
    try:
        return await _answer(desk, parts, headers)
    except NamespaceUnknown as error:
        return _error(404, "NoSuchNamespaceException", str(error))
    except (TopicUnknown, InvalidName) as error:
        return _error(404, "NoSuchTableException", str(error))
    except Unavailable as error:
        return _error(503, "ServiceUnavailableException", str(error))._replace(
            headers={"Retry-After": str(RETRY_SECONDS)}
        )
    except DanubeError as error:
        return _error(500, type(error).__name__, str(error))


async def _answer(desk: TableDesk, parts: list[str], headers: Mapping[str, str]) -> CatalogResponse:
    match parts:
        case ["config"]:
            return CatalogResponse(200, {"defaults": {}, "overrides": {"prefix": PREFIX}, "endpoints": list(ENDPOINTS)})
        case ["namespaces"]:
            return CatalogResponse(200, {"namespaces": [[each] for each in await desk.namespaces()]})
        case ["namespaces", namespace]:
            await desk.tables(NamespaceName(namespace))
            return CatalogResponse(200, {"namespace": [namespace], "properties": {}})
        case ["namespaces", namespace, "tables"]:
            found = await desk.tables(NamespaceName(namespace))
            return CatalogResponse(
                200, {"identifiers": [{"namespace": [namespace], "name": each.name} for each in found]}
            )
        case ["namespaces", namespace, "tables", table]:
            loaded = await desk.load(TopicName(f"/{namespace}/{table}"))
            tag = f'"{loaded.etag}"'
            if headers.get("if-none-match") == tag:
                return CatalogResponse(304, None, {"ETag": tag})
            body = {"metadata-location": loaded.location, "metadata": loaded.metadata, "config": {}}
            return CatalogResponse(200, body, {"ETag": tag})
    return _error(404, "NotFoundException", f"nothing is served at {'/'.join(parts)}; this catalog is for readers")


def _error(code: int, kind: str, message: str) -> CatalogResponse:
    return CatalogResponse(code, {"error": {"message": message, "type": kind, "code": code}})


def encoded(reply: CatalogResponse) -> bytes:
    return b"" if reply.body is None else json.dumps(reply.body).encode()
