"""What the Tab key offers: names of topics, namespaces, brokers and subscriptions, asked of the broker.

`danube --install-completion` sets it up for bash, zsh and fish. A broker that is not there, or slow, offers nothing: a
shell must not wait, and whoever presses Tab has not asked for an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import typer

from pydanube.cli.contexts import DEFAULT_ENDPOINT, completed_endpoint
from pydanube.errors import DanubeError

ANSWER_SECONDS: Final = 1.0
Complete: TypeAlias = Callable[[typer.Context, str], list[str]]


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """/namespace/topic. Once the namespace is typed, only its topics are asked for."""
    from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb

    _, _, typed = incomplete.partition("/")
    namespace, is_complete, _ = typed.partition("/")

    async def ask(broker: Any) -> list[str]:
        names = [namespace] if is_complete else await _namespaces(broker)
        found = []
        for name in names:
            request = pb.NamespaceRequest(name=name)
            answer = await broker.call(
                "danube_admin.NamespaceAdmin/GetNamespaceTopics", request, pb.TopicListResponse, seconds=ANSWER_SECONDS
            )
            found += [f"/{each.lstrip('/')}" for each in answer.topics]
        return found

    return _offer(context, incomplete, ask)


def namespace_names(context: typer.Context, incomplete: str) -> list[str]:
    return _offer(context, incomplete, _namespaces)


def broker_ids(context: typer.Context, incomplete: str) -> list[str]:
    from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb

    async def ask(broker: Any) -> list[str]:
        method = "danube_admin.BrokerAdmin/ListBrokers"
        answer = await broker.call(method, pb.Empty(), pb.BrokerListResponse, seconds=ANSWER_SECONDS)
        return [each.broker_id for each in answer.brokers]

    return _offer(context, incomplete, ask)


def subscription_names(context: typer.Context, incomplete: str) -> list[str]:
    """Of the topic that was typed before."""
    from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb

    topic = context.params.get("topic")
    if not topic:
        return []

    async def ask(broker: Any) -> list[str]:
        answer = await broker.call(
            "danube_admin.TopicAdmin/ListSubscriptions",
            pb.TopicRequest(name=topic),
            pb.SubscriptionListResponse,
            seconds=ANSWER_SECONDS,
        )
        return list(answer.subscriptions)

    return _offer(context, incomplete, ask)


async def _namespaces(broker: Any) -> list[str]:
    from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb

    method = "danube_admin.BrokerAdmin/ListNamespaces"
    answer = await broker.call(method, pb.Empty(), pb.NamespaceListResponse, seconds=ANSWER_SECONDS)
    return list(answer.namespaces)


def _offer(context: typer.Context, incomplete: str, ask: Callable[[Any], Coroutine[Any, Any, list[str]]]) -> list[str]:
    from pydanube.cli.rpc import Connection

    async def run() -> list[str]:
        async with asyncio.timeout(2 * ANSWER_SECONDS), Connection(_endpoint(context), "--endpoint") as broker:
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
