"""The Iceberg catalog beside the pages: every request is passed to a broker, word for word, and so is its answer.

Brokers have the keys of the object store, this process has none. Any broker answers for all topics; the gateway asks
the next one if one is away.
"""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pydanube.admin import calls
from pydanube.client.grpc.connection import BrokerRefused
from pydanube.errors import DanubeError, Unavailable
from pydanube.web.guard import ICEBERG
from pydanube.web.site import Site, sentence_of

PASSED_ON: Final = ("if-none-match", "x-iceberg-access-delegation")
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH")
SECONDS: Final = 30.0  # a load may put some objects
RETRY_SECONDS: Final = 5


def route(site: Site) -> Route:
    async def answer(request: Request) -> Response:
        target = request.scope["raw_path"].decode("latin-1")
        if request.url.query:
            target += f"?{request.url.query}"
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        try:
            found = await site.gateway.ask(calls.read_catalog(request.method, target, headers), seconds=SECONDS)
        except BrokerRefused as refused:
            if refused.code == "UNIMPLEMENTED":
                return _error(501, "UnsupportedOperationException", "the broker is of a version that has no tables")
            return _error(
                503 if refused.code == "UNAVAILABLE" else 500, "ServiceFailureException", sentence_of(refused)
            )
        except DanubeError as error:
            return _error(503 if isinstance(error, Unavailable) else 500, "ServiceFailureException", sentence_of(error))
        return Response(found.body, found.code, dict(found.headers), media_type="application/json")

    return Route(f"{ICEBERG}{{rest:path}}", answer, methods=list(METHODS))


def _error(code: int, kind: str, message: str) -> Response:
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "code": code}}
    headers = {"Retry-After": str(RETRY_SECONDS)} if code == 503 else {}
    return Response(json.dumps(body), code, headers, media_type="application/json")
