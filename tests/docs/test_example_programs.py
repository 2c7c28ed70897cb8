"""The programs in examples/ that show the client at work: each is run, on a broker in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import pydanube
import pydanube.testing
from tests.pages import DOCS, REPOSITORY

pytestmark = pytest.mark.timeout(120)

EXAMPLES = REPOSITORY / "examples"
PROGRAMS = ("dedupe.py", "key_shared_workers.py", "own_app", "polars_frames.py", "producer_callbacks.py",
            "request_reply.py", "web_app.py", "workers_with_shutdown.py")  # fmt: skip


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def url() -> Iterator[str]:
    with pydanube.testing.broker(memory=True) as broker:
        yield broker.url


def test_every_program_is_on_the_page() -> None:
    page = (DOCS / "client.md").read_text()
    assert [name for name in PROGRAMS if f"(../examples/{name})" not in page] == []


def test_a_producer_is_called_back_for_every_message(url: str) -> None:
    assert asyncio.run(example("producer_callbacks").main(url, 500)) == {"stored": 500}


def test_workers_finish_what_they_have_begun_and_leave_the_rest(url: str) -> None:
    program = example("workers_with_shutdown")
    begun: list[int] = []
    finished: list[int] = []

    async def inside() -> None:
        stopping = asyncio.Event()

        async def handle(message: pydanube.Message) -> None:
            begun.append(message.offset)
            if len(begun) == 20:
                stopping.set()
            await asyncio.sleep(0.005)
            finished.append(message.offset)

        async with pydanube.connect(url) as client, client.producer("/default/tasks") as tasks:
            for number in range(50):
                tasks.send_nowait(b"%d" % number)
            await tasks.flush()
            assert await program.run(url, handle, stopping, workers=4) == len(begun)
            assert sorted(begun) == sorted(finished) and 20 <= len(begun) < 50
            assert (await client.lag("/default/tasks", "workers")).messages == 50 - len(begun)

    asyncio.run(inside())


def test_a_worker_that_waits_stops_too(url: str) -> None:
    program = example("workers_with_shutdown")

    async def inside() -> None:
        async with pydanube.connect(url) as client:
            await client.create_topic("/default/tasks")
        stopping = asyncio.Event()

        async def handle(message: pydanube.Message) -> None:
            raise AssertionError("there is none")

        running = asyncio.create_task(program.run(url, handle, stopping, workers=2))
        await asyncio.sleep(0.05)
        stopping.set()
        assert await running == 0

    asyncio.run(inside())


def test_requests_get_their_own_replies(url: str) -> None:
    assert asyncio.run(example("request_reply").main(url)) == [0, 1, 4, 9, 16]


def test_an_order_that_is_sent_twice_is_booked_once(url: str) -> None:
    assert asyncio.run(example("dedupe").main(url)) == (2, {"ann": 350, "bob": 400})


def test_frames_become_messages_and_messages_frames(url: str) -> None:
    means, warmest = asyncio.run(example("polars_frames").main(url))
    assert means == {"attic": 24.0, "cellar": 25.0} and warmest[1] == 29.0


def test_keys_stay_in_order_while_workers_come_and_go(url: str) -> None:
    ledger = asyncio.run(example("key_shared_workers").main(url))
    assert all(numbers == list(range(25)) for numbers in ledger.events.values()) and len(ledger.events) == 20
    assert len(ledger.by_worker) >= 2


@pytest.mark.timeout(240)
def test_an_application_of_ones_own_is_tested_with_pytest() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "own_app")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


# --- the web application --------------------------------------------------------------------------------


async def ask(app: Any, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """One request, as a server would make it."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("here", 80),
        "root_path": "",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


@pytest.mark.parametrize("kind", ["starlette.applications.Starlette", "fastapi.FastAPI"])
def test_a_web_application_publishes_consumes_and_says_whether_it_is_ready(kind: str) -> None:
    module, _, name = kind.rpartition(".")
    application = getattr(importlib.import_module(module), name)
    program = example("web_app")
    program.READY_SECONDS = 30.0  # type: ignore[attr-defined]  # nobody is in a hurry while there is a broker

    async def inside() -> None:
        broker = await pydanube.testing.broker(memory=True).start()
        try:
            app = program.make_app(broker.url, application)
            async with app.router.lifespan_context(app):
                assert await ask(app, "POST", "/orders", b"2 coffees") == (201, {"offset": 0})
                assert await ask(app, "POST", "/orders", b"1 tea") == (201, {"offset": 1})
                status, said = await ask(app, "GET", "/readyz")
                assert status == 200 and said["ready"]
                async with asyncio.timeout(20):
                    while (await ask(app, "GET", "/orders"))[1] != {"seen": 2}:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await broker.stop()
                program.READY_SECONDS = 0.3  # type: ignore[attr-defined]
                status, said = await ask(app, "GET", "/readyz")
                assert status == 503 and not said["ready"] and said["why"]
        finally:
            await broker.stop()

    asyncio.run(inside())
