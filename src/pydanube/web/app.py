"""The web admin as an application: which path is answered by what, and the order of things around it.

browser ─► Guard (host, origin, read-only, headers) ─► routes ─► page or action ─► gateway ─► brokers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from pydanube.admin.gateway import CACHE_SECONDS, CALL_SECONDS, Gateway
from pydanube.admin.sampler import Sampler
from pydanube.web import (
    actions,
    iceberg,
    json_routes,
    letter_pages,
    message_pages,
    pages,
    pipeline_pages,
    settings,
    status_pages,
    topic_pages,
)
from pydanube.web.guard import Guard
from pydanube.web.operations import Operations
from pydanube.web.site import NotHere, Page, Site

log = logging.getLogger(__name__)

STATIC: Final = Path(__file__).parent / "static"
TOPIC: Final = "/topics/{namespace}/{name}"
SUBSCRIPTION: Final = f"{TOPIC}/subscriptions/{{subscription}}"

PAGES: Final[tuple[tuple[str, Page], ...]] = (
    ("/", pages.home),
    ("/cluster", pages.cluster),
    ("/brokers/{broker_id}", pages.broker),
    ("/topics", pages.topics),
    ("/topics/new", pages.new_topic),
    ("/namespaces", pages.namespaces),
    ("/subscriptions", status_pages.subscriptions),
    ("/connections", status_pages.connections),
    ("/pipelines", pipeline_pages.pipelines),
    ("/events", status_pages.events),
    ("/dead-letters", letter_pages.dead_letters),
    (TOPIC, topic_pages.topic),
    (f"{TOPIC}/delete", topic_pages.delete_topic),
    (f"{TOPIC}/messages", message_pages.messages),
    (f"{TOPIC}/messages/download", message_pages.download),
    (f"{TOPIC}/messages/{{offset}}", message_pages.message),
    (f"{TOPIC}/publish", message_pages.publish_form),
    (SUBSCRIPTION, topic_pages.subscription),
)
ACTIONS: Final[tuple[tuple[str, Page], ...]] = (
    ("/brokers/{broker_id}/drain", actions.drain),
    ("/brokers/{broker_id}/activate", actions.activate),
    ("/cluster/rebalance", actions.rebalance),
    ("/topics/new", actions.create_topic),
    (f"{TOPIC}/delete", actions.delete_topic),
    (f"{TOPIC}/move", actions.move_topic),
    (f"{SUBSCRIPTION}/seek", actions.seek),
    (f"{SUBSCRIPTION}/delete", actions.unsubscribe),
    (f"{SUBSCRIPTION}/failure-policy", settings.set_policy),
    (f"{SUBSCRIPTION}/window", settings.set_window),
    (f"{SUBSCRIPTION}/heartbeat", settings.set_heartbeat),
    (f"{TOPIC}/retention", settings.set_topic_retention),
    ("/namespaces/retention", settings.set_namespace_retention),
    ("/namespaces/limits", settings.set_namespace_limits),
    ("/namespaces/create", actions.create_namespace),
    ("/namespaces/delete", actions.delete_namespace),
    (f"{TOPIC}/publish", message_pages.publish),
    ("/pipelines/{name}/pause", pipeline_pages.pause),
    ("/dead-letters/redrive", actions.redrive_letters),
    ("/dead-letters/discard", letter_pages.discard_letters),
    ("/dead-letters/copy", letter_pages.copy_letter),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """`endpoint` is one broker's admin address; it tells of the others. `stream_url` is where the native port is."""

    endpoint: str
    stream_url: str = ""
    read_only: bool = False
    allowed_hosts: Collection[str] = field(default_factory=tuple)
    call_seconds: float = CALL_SECONDS
    cache_seconds: float = CACHE_SECONDS


@contextlib.asynccontextmanager
async def web_admin(settings: WebSettings, *, flag: str = "--broker-endpoint") -> AsyncIterator[ASGIApp]:
    """The application, with what it needs running: for the length of the block. Raises ConfigError."""
    gateway = Gateway(
        settings.endpoint,
        flag=flag,
        stream_url=settings.stream_url,
        call_seconds=settings.call_seconds,
        cache_seconds=settings.cache_seconds,
    )
    sampler = Sampler(gateway.brokers, look=gateway.status)
    operations = Operations()
    sampling = asyncio.create_task(sampler.run(), name="sample metrics")
    try:
        site = Site(gateway, sampler, operations, settings.read_only)
        yield Guard(build(site), allowed_hosts=settings.allowed_hosts, read_only=settings.read_only)
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await operations.close()
        await gateway.close()


class Static(StaticFiles):
    """Files that a browser may keep: those with a version in their name for good, ours as long as they are the same."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        is_versioned = Path(full_path).parent.name == "vendor"
        response.headers["cache-control"] = "max-age=31536000, immutable" if is_versioned else "no-cache"
        return response


def build(site: Site) -> ASGIApp:
    routes: list[BaseRoute] = [
        Mount("/static", Static(directory=STATIC), name="static"),
        *json_routes.routes(site),
        iceberg.route(site),
        *(Route(path, _showing(site, page)) for path, page in PAGES),
        *(Route(path, _acting(site, act), methods=["POST"]) for path, act in ACTIONS),
    ]

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentence = f"there is nothing at {request.url.path}" if error.status_code == 404 else str(error.detail).lower()
        if request.url.path.startswith("/ui/"):
            return JSONResponse({"success": False, "message": sentence}, error.status_code)
        response = site.error(request, NotHere(sentence))
        response.status_code = error.status_code
        return response

    return Starlette(routes=routes, exception_handlers={HTTPException: missing})


def _showing(site: Site, page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        try:
            return await page(site, request)
        except Exception as error:  # whatever it is, the page says it in a sentence
            return site.error(request, error)

    return show


def _acting(site: Site, act: Page) -> Callable[[Request], Awaitable[Response]]:
    async def do(request: Request) -> Response:
        log.info("web action", extra={"path": request.url.path})
        try:
            return await act(site, request)
        except Exception as error:  # as above
            return site.error(request, error)

    return do
