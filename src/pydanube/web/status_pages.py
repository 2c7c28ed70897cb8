"""The pages about the whole cluster: all subscriptions by lag, who is connected, what happened.

A broker that does not answer is named on the page: what it has is not known, and not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.admin.gateway import KnownBroker
from pydanube.admin.partitioned import (
    ConnectionGroup,
    SubscriptionGroup,
    connection_groups,
    one_of,
    partition_count,
    subscription_groups,
)
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
PARTIAL: Final = views.Chip("warn", "unknown", "of some partitions nobody said anything")


class SubscriptionRow(NamedTuple):
    state: values.SubscriptionState
    chip: views.Chip
    lag: int | None
    lag_seconds: float | None
    catch_up_seconds: float | None
    owner: str
    lag_at_least: int = 0  # what is known of it
    parts: Sequence[SubscriptionRow] = ()  # of a partitioned topic, by number
    partitions: str = ""  # how many, and how many are unanswered
    is_partial: bool = False

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
    def of_group(cls, group: SubscriptionGroup, addresses: Mapping[str, str]) -> SubscriptionRow:
        row = cls.of(group.state, addresses)
        if not group.parts:
            return row
        parts = [cls.of(part, addresses) for part in group.parts]
        is_partial = group.unanswered > 0
        return row._replace(
            chip=PARTIAL if is_partial and row.chip is COURSES["unknown"] else row.chip,
            lag_at_least=group.lag_at_least,
            owner=one_of({part.owner for part in parts}, "brokers"),
            parts=parts,
            partitions=partition_count(group),
            is_partial=is_partial,
        )


class ConnectionRow(NamedTuple):
    state: values.ConnectionState
    since_us: int | None
    unacked: int | None
    rate: float | None
    broker: str
    partitions: str = ""  # as of a SubscriptionRow

    @classmethod
    def of_group(cls, group: ConnectionGroup, addresses: Mapping[str, str]) -> ConnectionRow:
        state = group.state
        brokers = {each.broker_id for each in group.parts or [state]}
        return cls(
            state,
            state.since_us if state.HasField("since_us") else None,
            state.unacked if state.HasField("unacked") else None,
            state.rate if state.HasField("rate") else None,
            one_of({addresses.get(str(each), str(each)) for each in brokers}, "brokers"),
            partition_count(group),
        )


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
        rows=[SubscriptionRow.of_group(each, addresses) for each in subscription_groups(found)],
        left_out=found.left_out,
        unknown=list(found.unknown),
        unserved=found.unserved,
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
        rows=[ConnectionRow.of_group(each, addresses) for each in connection_groups(found)],
        left_out=found.left_out,
        unknown=list(found.unknown),
        unserved=found.unserved,
        topic=topic,
    )


async def events(site: Site, request: Request) -> Response:
    found, brokers = await asyncio.gather(site.gateway.ask(calls.list_events(EVENTS_MAX)), site.gateway.brokers())
    return site.show(
        request, "events.html", active="events", happened=list(found.events), addresses=_addresses(brokers)
    )  # fmt: skip
