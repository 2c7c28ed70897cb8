"""The web admin on a real broker, without a socket of its own: requests go straight into the application.

with opened() as web:
    page = web.get("/topics")
    page = web.post("/topics/new", namespace="default", name="orders")

with opened_cluster(2) as (browser, cluster):          the same on a cluster
    page = browser.post("/cluster/rebalance", dry_run="1")
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlencode

import pydanube.testing
from pydanube.admin.gateway import Gateway
from pydanube.admin.sampler import Sampler
from pydanube.client.client import Client
from pydanube.client.thread import LoopThread
from pydanube.testing.brokers import TestBroker
from pydanube.web.app import build
from pydanube.web.guard import Guard
from pydanube.web.operations import Operations
from pydanube.web.site import Site
from tests.harness.server_cluster import ServerCluster, server_cluster

T = TypeVar("T")

HOST = "127.0.0.1:8080"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def text(self) -> str:
        """What a reader sees, roughly: no tags, one space between words."""
        without = re.sub(r"<(script|style)\b.*?</\1>", " ", self.body, flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without)).split())

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """It follows redirects, and keeps cookies."""

    def __init__(self, thread: LoopThread, site: Site, **guard: Any) -> None:
        self.site = site
        self._thread = thread
        self._app = Guard(build(site), **guard)
        self._cookies: dict[str, str] = {}

    def run(self, coroutine: Any) -> Any:
        return self._thread.call(coroutine)

    def get(self, path: str, **headers: str) -> Answer:
        return self._follow(self.request("GET", path, headers=headers))

    def post(self, path: str, **form: str) -> Answer:
        """As a form of ours does."""
        headers = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
        return self._follow(self.request("POST", path, urlencode(form).encode(), headers))

    def order(self, path: str, **body: Any) -> Answer:
        """As a tool does: JSON, and no origin."""
        return self.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})

    def _follow(self, answer: Answer) -> Answer:
        while answer.status in (303, 307):
            answer = self.request("GET", answer.headers["location"])
        return answer

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, host: str = HOST
    ) -> Answer:
        sent = {"host": host, "content-length": str(len(body)), **(headers or {})}
        if self._cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        bare, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(bare),
            "raw_path": bare.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "server": ("127.0.0.1", 8080),
            "client": ("127.0.0.1", 50000),
        }
        return self._thread.call(self._request(scope, body))

    async def _request(self, scope: dict[str, Any], body: bytes) -> Answer:
        said: list[dict[str, Any]] = []
        heard = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if heard:
                return heard.pop()
            return await asyncio.get_running_loop().create_future()  # it neither says more nor leaves

        async def send(message: Any) -> None:
            said.append(message)

        await self._app(scope, receive, send)
        headers: dict[str, str] = {}
        for name, value in said[0]["headers"]:
            if name == b"set-cookie":
                self._keep(value.decode())
            headers[name.decode()] = value.decode()
        text = b"".join(message.get("body", b"") for message in said[1:]).decode()
        return Answer(said[0]["status"], headers, text)

    def _keep(self, cookie: str) -> None:
        name, _, rest = cookie.partition("=")
        value = rest.partition(";")[0].strip('"')
        if value and "max-age=0" not in cookie.lower():
            self._cookies[name] = value
        else:
            self._cookies.pop(name, None)

    def sample(self) -> None:
        """One look at the metrics."""
        self._thread.call(self.site.sampler.round())

    def until(self, path: str, words: str, seconds: float = 20.0) -> Answer:
        """The page, when it says so."""
        deadline = time.monotonic() + seconds
        while True:
            page = self.get(path)
            if words in page.text:
                return page
            assert time.monotonic() < deadline, f"{path} does not say {words!r}: {page.text}"
            time.sleep(0.02)


class Web(Browser):
    """With the broker that the site is of, and a client of it."""

    def __init__(self, thread: LoopThread, site: Site, broker: TestBroker, client: Client, **guard: Any) -> None:
        super().__init__(thread, site, **guard)
        self.broker = broker
        self.client = client


@contextlib.contextmanager
def opened() -> Iterator[Web]:
    thread = LoopThread("web admin under test")
    broker = pydanube.testing.broker(memory=True)
    try:
        thread.call(broker.start())
        client = thread.call(pydanube.connect(broker.url).open())
        site = thread.call(_site(broker.admin_url, broker.url))
        try:
            yield Web(thread, site, broker, client)
        finally:
            thread.call(site.operations.close())
            thread.call(site.gateway.close())
            thread.call(client.close())
            thread.call(broker.stop())
    finally:
        thread.stop()


@contextlib.contextmanager
def opened_cluster(count: int, **load_manager: Any) -> Iterator[tuple[Browser, ServerCluster]]:
    """The site is that of the first broker."""
    thread = LoopThread("web admin of a cluster under test")
    around = server_cluster(count, **load_manager)
    try:
        cluster = thread.call(around.__aenter__())
        try:
            servers = cluster.node(1).servers
            site = thread.call(_site(f"http://{servers.admin_addr}", f"danube://{servers.stream_addr}"))
            try:
                yield Browser(thread, site), cluster
            finally:
                thread.call(site.operations.close())
                thread.call(site.gateway.close())
        finally:
            thread.call(around.__aexit__(None, None, None))
    finally:
        thread.stop()


async def _site(admin_url: str, stream_url: str) -> Site:
    gateway = Gateway(admin_url, stream_url=stream_url, cache_seconds=0.0)
    return Site(gateway, Sampler(gateway.brokers, look=gateway.status), Operations())
