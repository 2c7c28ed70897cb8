"""The pages about the whole cluster: all subscriptions by lag, who is connected, what happened.

A broker that does not answer is named on the page: what it has is not known, and not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.admin.gateway import KnownBroker
from pydanube.core.names import TopicName
from pydanube.web import formats, views
from pydanube.web.site import Site

ROWS_MAX: Final = 500
EVENTS_MAX: Final = 200
COURSES: Final[Mapping[str, views.Chip]] = {
    "caught_up": views.Chip("ok", "caught up"),
    "catching_up": views.Chip("moving", "catching up"),
    "falling_behind": views.Chip("warn", "falling behind"),
    "keeping_up": views.Chip("ok", "keeps up", "what waits came in the last few seconds"),
    "standing": views.Chip("warn", "standing", "it is behind, and comes no nearer"),
    "unknown": views.Chip("idle", "unknown", "not looked at long enough to say"),
}
BLOCKED: Final = views.Chip("bad", "blocked", "a message failed too often and blocks what is behind it")


class SubscriptionRow(NamedTuple):
    state: values.SubscriptionState
    chip: views.Chip
    lag: int | None
    lag_seconds: float | None
    catch_up_seconds: float | None
    owner: str
    parts: Sequence[SubscriptionRow] = ()  # of a partitioned topic, by number

    @classmethod
    def of(cls, state: values.SubscriptionState, addresses: Mapping[str, str]) -> SubscriptionRow:
        chip = BLOCKED if state.is_blocked else COURSES.get(state.course, COURSES["unknown"])
        return cls(
            state,
            chip,
            state.lag_messages if state.HasField("lag_messages") else None,
            state.lag_seconds if state.HasField("lag_seconds") else None,
            state.catch_up_seconds if state.HasField("catch_up_seconds") else None,
            addresses.get(str(state.broker_id), str(state.broker_id)),
        )

    @classmethod
    def of_parts(cls, base: str, parts: Sequence[SubscriptionRow]) -> SubscriptionRow:
        """One subscription of a partitioned topic: lag added up, as late as the latest, as bad as the worst."""
        parts = sorted(parts, key=lambda row: TopicName(row.state.topic).partition_number or 0)
        first, owners = parts[0].state, {row.owner for row in parts}
        state = values.SubscriptionState(
            topic=base,
            name=first.name,
            type=first.type,
            consumers=max(row.state.consumers for row in parts),  # a consumer is connected to every partition
            unacked=sum(row.state.unacked for row in parts),
            waiting=sum(row.state.waiting for row in parts),
        )
        worst = min(parts, key=lambda row: (views.SEVERITY.index(row.chip.kind), -(row.lag or 0)))
        return cls(
            state,
            worst.chip,
            None if any(row.lag is None for row in parts) else sum(row.lag or 0 for row in parts),
            max((row.lag_seconds for row in parts if row.lag_seconds is not None), default=None),
            max((row.catch_up_seconds for row in parts if row.catch_up_seconds is not None), default=None),
            parts[0].owner if len(owners) == 1 else f"{len(owners)} brokers",
            parts,
        )


def grouped(rows: Sequence[SubscriptionRow]) -> list[SubscriptionRow]:
    """Those of the partitions of one topic as one, furthest behind first."""
    found: dict[tuple[str, str], list[SubscriptionRow]] = {}
    for row in rows:
        topic = TopicName(row.state.topic)
        base = topic.base if topic.partition_number is not None else topic
        found.setdefault((base, row.state.name), []).append(row)
    every = [
        own[0] if own[0].state.topic == base else SubscriptionRow.of_parts(base, own)
        for (base, _), own in found.items()
    ]
    return sorted(every, key=lambda row: (-(row.lag or 0), row.state.topic, row.state.name))


class ConnectionRow(NamedTuple):
    state: values.ConnectionState
    since_us: int | None
    unacked: int | None
    rate: float | None
    broker: str
    parts: Sequence[ConnectionRow] = ()  # of a partitioned topic, by number

    @classmethod
    def of(cls, state: values.ConnectionState, addresses: Mapping[str, str]) -> ConnectionRow:
        return cls(
            state,
            state.since_us if state.HasField("since_us") else None,
            state.unacked if state.HasField("unacked") else None,
            state.rate if state.HasField("rate") else None,
            addresses.get(str(state.broker_id), str(state.broker_id)),
        )

    @classmethod
    def of_parts(cls, base: str, parts: Sequence[ConnectionRow]) -> ConnectionRow:
        """One producer or consumer of a partitioned topic: from when it came first, what it does added up."""
        parts = sorted(parts, key=lambda row: TopicName(row.state.topic).partition_number or 0)
        first = parts[0].state
        state = values.ConnectionState(
            kind=first.kind,
            name=first.name,
            topic=base,
            subscription=first.subscription,
            # A connection to each broker: their ports differ.
            address=_one_of({row.state.address.rpartition(":")[0] for row in parts}, "addresses"),
            client=first.client,
            protocol=first.protocol,
        )
        return cls(
            state,
            min((row.since_us for row in parts if row.since_us is not None), default=None),
            None if any(row.unacked is None for row in parts) else sum(row.unacked or 0 for row in parts),
            None if any(row.rate is None for row in parts) else sum(row.rate or 0.0 for row in parts),
            _one_of({row.broker for row in parts}, "brokers"),
            parts,
        )


def grouped_connections(rows: Sequence[ConnectionRow]) -> list[ConnectionRow]:
    """What one producer or consumer has with several partitions of a topic as one, in the order they came."""
    found: dict[tuple[str, ...], list[ConnectionRow]] = {}
    for row in rows:
        state, topic = row.state, TopicName(row.state.topic)
        base = topic.base if topic.partition_number is not None else topic
        found.setdefault((base, state.kind, state.name, state.subscription, state.client), []).append(row)
    return [own[0] if len(own) == 1 else ConnectionRow.of_parts(base, own) for (base, *_), own in found.items()]


def _one_of(words: Collection[str], several: str) -> str:
    return next(iter(words)) if len(words) == 1 else f"{len(words)} {several}"


def _addresses(brokers: Sequence[KnownBroker]) -> dict[str, str]:
    return {each.broker_id: formats.bare(each.address) for each in brokers}


async def subscriptions(site: Site, request: Request) -> Response:
    namespace = request.query_params.get("namespace", "").strip()
    found, brokers, namespaces = await asyncio.gather(
        site.gateway.ask(calls.list_subscriptions(ROWS_MAX, namespace=namespace)),
        site.gateway.brokers(),
        site.gateway.namespaces(),
    )
    addresses = _addresses(brokers)
    return site.show(
        request,
        "subscriptions.html",
        active="subscriptions",
        rows=grouped([SubscriptionRow.of(each, addresses) for each in found.subscriptions]),
        left_out=found.left_out,
        unknown=list(found.unknown),
        namespace=namespace,
        namespaces=namespaces,
    )


async def connections(site: Site, request: Request) -> Response:
    topic = request.query_params.get("topic", "").strip()
    found, brokers = await asyncio.gather(
        site.gateway.ask(calls.list_connections(topic, ROWS_MAX)), site.gateway.brokers()
    )
    addresses = _addresses(brokers)
    return site.show(
        request,
        "connections.html",
        active="connections",
        rows=grouped_connections([ConnectionRow.of(each, addresses) for each in found.connections]),
        left_out=found.left_out,
        unknown=list(found.unknown),
        topic=topic,
    )


async def events(site: Site, request: Request) -> Response:
    found, brokers = await asyncio.gather(site.gateway.ask(calls.list_events(EVENTS_MAX)), site.gateway.brokers())
    return site.show(
        request, "events.html", active="events", happened=list(found.events), addresses=_addresses(brokers)
    )  # fmt: skip
