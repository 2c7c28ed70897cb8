"""What the Tab key offers: names of topics, namespaces, brokers and subscriptions, asked of the broker.

`danube --install-completion` sets it up for bash, zsh and fish. A broker that cannot be reached, or is slow, offers
nothing: a shell must not wait, and an error would end up in the middle of the line that is being typed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import typer

from pydanube.admin import calls
from pydanube.cli.contexts import DEFAULT_ENDPOINT, completed_endpoint
from pydanube.client.grpc.connection import GrpcConnection
from pydanube.errors import DanubeError

ANSWER_SECONDS: Final = 1.0
Complete: TypeAlias = Callable[[typer.Context, str], list[str]]
Ask: TypeAlias = Callable[[GrpcConnection], Coroutine[Any, Any, list[str]]]


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """/namespace/topic. Once the namespace is typed, only its topics are asked for."""
    _, _, typed = incomplete.partition("/")
    namespace, is_complete, _ = typed.partition("/")

    async def ask(broker: GrpcConnection) -> list[str]:
        names = [namespace] if is_complete else await _namespaces(broker)
        found = []
        for name in names:
            answer = await broker.ask(calls.topic_names(name), seconds=ANSWER_SECONDS)
            found += [f"/{each.lstrip('/')}" for each in answer.topics]
        return found

    return _offer(context, incomplete, ask)


def namespace_names(context: typer.Context, incomplete: str) -> list[str]:
    return _offer(context, incomplete, _namespaces)


def broker_ids(context: typer.Context, incomplete: str) -> list[str]:
    async def ask(broker: GrpcConnection) -> list[str]:
        answer = await broker.ask(calls.list_brokers(), seconds=ANSWER_SECONDS)
        return [each.broker_id for each in answer.brokers]

    return _offer(context, incomplete, ask)


def subscription_names(context: typer.Context, incomplete: str) -> list[str]:
    """Of the topic that was typed before."""
    topic = context.params.get("topic")
    if not topic:
        return []

    async def ask(broker: GrpcConnection) -> list[str]:
        answer = await broker.ask(calls.subscriptions_of(topic), seconds=ANSWER_SECONDS)
        return list(answer.subscriptions)

    return _offer(context, incomplete, ask)


async def _namespaces(broker: GrpcConnection) -> list[str]:
    answer = await broker.ask(calls.list_namespaces(), seconds=ANSWER_SECONDS)
    return list(answer.namespaces)


def _offer(context: typer.Context, incomplete: str, ask: Ask) -> list[str]:
    async def run() -> list[str]:
        async with asyncio.timeout(2 * ANSWER_SECONDS), GrpcConnection(_endpoint(context), "--endpoint") as broker:
            return await ask(broker)

    try:
        found = asyncio.run(run())
    except (DanubeError, TimeoutError, OSError):
        return []
    return sorted(name for name in found if name.startswith(incomplete))


def _endpoint(context: Any) -> str:
    """What was typed before, or the variable: callbacks do not run while a line is completed."""
    params: dict[str, Any] = {}
    while context is not None:
        params = {**context.params, **params}
        context = context.parent
    typed = params.get("endpoint")
    if typed and typed != DEFAULT_ENDPOINT:
        return str(typed)
    return os.environ.get("DANUBE_ADMIN_ENDPOINT") or completed_endpoint(params)
