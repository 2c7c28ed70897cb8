"""A web application that publishes and consumes: one client for the process, opened and closed with it.

    POST /orders    stores the body, answers with its offset when it is on disk
    GET /orders     how many orders the application's own consumer has seen
    GET /readyz     200 while a broker answers, else 503 and why

It is written for Starlette. A FastAPI application is a Starlette one: `make_app(url, FastAPI)` is this one, and in one
of your own `FastAPI(lifespan=…)` and `request.app.state` are the same.

uvicorn --app-dir examples web_app:app
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import pydanube

TOPIC = "/default/orders.web"
READY_SECONDS = 2.0  # whoever asks does not wait for longer


async def create_order(request: Request) -> JSONResponse:
    body = await request.body()
    try:
        receipt = await request.app.state.orders.send(body, timeout=5)
    except pydanube.DanubeError as error:
        # Unavailable: time may help, and the browser may try again. It may be stored all the same: see dedupe.py.
        return JSONResponse({"error": str(error)}, status_code=503 if error.retryable else 400)
    return JSONResponse({"offset": receipt.offset}, status_code=201)


async def count_orders(request: Request) -> JSONResponse:
    return JSONResponse({"seen": request.app.state.seen})


async def ready(request: Request) -> JSONResponse:
    if request.app.state.watching.done():
        return JSONResponse({"ready": False, "why": "the consumer has ended"}, status_code=503)
    try:
        seconds = await request.app.state.client.ping(timeout=READY_SECONDS)
    except pydanube.DanubeError as error:
        return JSONResponse({"ready": False, "why": str(error)}, status_code=503)
    return JSONResponse({"ready": True, "seconds": seconds})


async def watch(app: Any) -> None:
    """The application's own consumer: every process of it sees its share."""
    options: Any = {"subscription": "web", "type": "shared", "start": "earliest"}
    async with app.state.client.consumer(TOPIC, **options) as consumer:
        async for message in consumer:
            app.state.seen += 1
            await message.ack()


def make_app(url: str, kind: type[Starlette] = Starlette) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        app.state.seen = 0
        async with pydanube.connect(url) as app.state.client, app.state.client.producer(TOPIC) as app.state.orders:
            app.state.watching = asyncio.create_task(watch(app))
            try:
                yield
            finally:
                app.state.watching.cancel()
                with suppress(asyncio.CancelledError):
                    await app.state.watching

    routes = [
        Route("/orders", create_order, methods=["POST"]),
        Route("/orders", count_orders),
        Route("/readyz", ready),
    ]
    return kind(routes=routes, lifespan=lifespan)


app = make_app(os.environ.get("DANUBE_URL", "danube://127.0.0.1:6651"))
