"""The pages about one topic: the topic itself, its subscriptions, its messages; and dead letters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Final, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.admin.calls import RELIABLE
from pydanube.admin.gateway import Gateway, TopicRow
from pydanube.admin.samples import sum_of
from pydanube.admin.series import Thing
from pydanube.admin.values import BACKOFF, POISON
from pydanube.client.grpc.connection import BrokerRefused
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_DEFAULT
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError
from pydanube.web import formats, views
from pydanube.web.settings import (
    HEARTBEATS,
    RetentionView,
    default_policy,
    default_sentence,
    policy_rows,
)
from pydanube.web.site import Site, range_of, sentence_of, subscription_of, topic_of

T = TypeVar("T")

SUBSCRIPTIONS_SHOWN: Final = 25
MOVES_SHOWN: Final = 10
SETTLE_SECONDS: Final = 10.0
KINDS: Final = ("exclusive", "shared", "failover", "key_shared")


async def or_why(asked: Awaitable[T]) -> tuple[T | None, str]:
    """The answer, or a sentence: a page shows what it can."""
    try:
        return await asked, ""
    except DanubeError as error:
        return None, sentence_of(error)


# --- a topic --------------------------------------------------------------------------------------------------


class SubscriptionLine(NamedTuple):
    name: str
    thing: Thing
    chip: views.Chip
    sentence: str
    is_known: bool = True


async def topic(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    name = topic_of(request)
    try:
        found = await gateway.ask(calls.describe_topic(name))
    except BrokerRefused as refused:
        if refused.code == "NOT_FOUND" and await gateway.parts(name) != [name]:
            return await partitioned(site, request, name)
        raise
    is_reliable = found.delivery == RELIABLE
    (state, _), (storage, no_storage), (moves, _), (retention, no_retention), brokers = await asyncio.gather(
        or_why(gateway.ask(calls.topic_state(name))),
        or_why(gateway.ask(calls.list_storage(name, summary=True))) if is_reliable else _nothing(),
        or_why(gateway.ask(calls.topic_moves(name))),
        or_why(gateway.ask(calls.retention(topic=name))) if is_reliable else _nothing(),
        gateway.brokers(),
    )
    names = list(found.subscriptions)
    shown = names[:SUBSCRIPTIONS_SHOWN]
    explained = await asyncio.gather(*(_explained(gateway, name, each, is_reliable) for each in shown))
    silent = views.silence(found.broker_id, samples, [each.broker_id for each in brokers])
    lines = [
        _line(each, samples.subscription(name, each), lag, sentence, samples.topic(name).messages_in, silent)
        for each, (lag, sentence) in zip(shown, explained, strict=True)
    ]
    lags = [lag for lag, _ in explained if lag is not None]
    is_complete = bool(lags) and len(lags) == len(names)
    thing = views.with_lag(samples.topic(name), max(lags) if is_complete else None)
    row = TopicRow(name, found.broker_id, found.delivery)
    tiers = storage.tiers if storage is not None else None
    orphans = list(state.orphans) if state is not None else []
    return site.show(
        request,
        "topic.html",
        active="topics",
        topic=name,
        row=row,
        is_reliable=is_reliable,
        state=state,
        chip=_opening(site, name, _chip(state, views.topic_chip(row, thing, site.operations, silent))),
        thing=thing,
        is_known=silent is None and thing.is_sampled,
        addresses={each.broker_id: formats.bare(each.address) for each in brokers},
        targets=[each for each in brokers if each.broker_id != found.broker_id and each.status == "active"],
        is_alone=len(brokers) < 2,
        subscriptions=lines,
        subscriptions_count=len(names),
        tiers=views.tiers_of(tiers, orphans) if tiers is not None else [],
        span=(tiers.first_offset, tiers.head) if tiers is not None else (0, 0),
        no_storage=no_storage or (storage.upload_failing if storage is not None else ""),
        orphans=orphans,
        retention=RetentionView.of(retention) if retention is not None else None,
        no_retention=no_retention,
        moves=list(moves.moves if moves is not None else [])[:MOVES_SHOWN],
        operations=site.operations.of("move", subject=name)[:1],
        throughput=views.throughput(samples, thing, seconds=range_of(request), is_known=silent is None),
        lag=views.lag_chart(samples, thing, seconds=range_of(request), is_known=silent is None),
    )


async def partitioned(site: Site, request: Request, base: TopicName) -> Response:
    """A partitioned topic as one thing. Its numbers are sums over the partitions."""
    gateway, samples = site.gateway, site.sampler.samples
    rows, brokers, names = await asyncio.gather(gateway.topics(), gateway.brokers(), gateway.parts(base))
    own = set(names)
    lines = views.topic_lines([row for row in rows if row.name in own], samples, site.operations, brokers)
    line = views.partitioned_line(base, lines, samples)
    found, why = await or_why(gateway.ask(calls.describe_topic(names[0])))
    lags = views.subscription_lags(names, samples)
    subscriptions = []
    for each in sorted({*lags, *(found.subscriptions if found is not None else ())}):
        things = [samples.subscription(part, each) for part in names]
        thing = sum_of(things, lags.get(each, math.nan))
        chip = views.flow_chip(thing, line.thing.messages_in) if line.is_known else views.PARTLY_UNKNOWN
        subscriptions.append(SubscriptionLine(each, thing, chip, "", line.is_known))
    subscriptions.sort(key=lambda each: (-(each.thing.lag or 0), each.name))
    return site.show(
        request,
        "partitioned.html",
        active="topics",
        topic=base,
        line=line,
        names=names,
        why=why,
        subscriptions=subscriptions[:SUBSCRIPTIONS_SHOWN],
        subscriptions_count=len(subscriptions),
        throughput=views.throughput(samples, line.thing, seconds=range_of(request), is_known=line.is_known),
        lag=views.lag_chart(samples, line.thing, seconds=range_of(request), is_known=line.is_known),
    )


async def _nothing() -> tuple[None, str]:
    return None, ""


def _chip(state: values.TopicState | None, chip: views.Chip) -> views.Chip:
    """What the owner says is better than what can be guessed from numbers."""
    if state is None:
        return chip
    if state.state == "moving":
        return views.Chip("moving", "moving", state.sentence)
    if state.state == "unassigned":
        return views.Chip("bad", "no owner", state.sentence)
    if state.orphans:
        return views.ORPHAN
    return chip


def _opening(site: Site, topic: str, chip: views.Chip) -> views.Chip:
    """A topic that has just been moved has its owner, only the broker that was asked does not know it yet."""
    moved = next(iter(site.operations.of("move", subject=topic)), None)
    if chip.word == "no owner" and moved is not None and moved.state == "done" and moved.age_seconds() < SETTLE_SECONDS:
        return views.Chip("moving", "moving", "its new owner opens it")
    return chip


def _line(
    name: str, thing: Thing, lag: int | None, sentence: str, messages_in: float, silent: views.Chip | None
) -> SubscriptionLine:
    own = views.with_lag(thing, lag)
    return SubscriptionLine(name, own, silent or views.flow_chip(own, messages_in), sentence, silent is None)


async def _explained(gateway: Gateway, topic: str, subscription: str, is_reliable: bool) -> tuple[int | None, str]:
    """Its lag as the owner has just said it, None if it is not known, and the sentence."""
    if not is_reliable:
        return None, "A topic that is not reliable keeps nothing: whoever is connected gets it."
    explained, why = await or_why(gateway.ask(calls.explain(topic, subscription)))
    return (explained.lag.lag_messages, explained.sentence) if explained is not None else (None, why)


async def delete_topic(site: Site, request: Request) -> Response:
    name = topic_of(request)
    name = name.base if name.partition_number is not None else name  # partitions go together
    names = await site.gateway.parts(name)
    found = await site.gateway.ask(calls.describe_topic(names[0]))
    samples = site.sampler.samples
    return site.show(
        request, "delete_topic.html", active="topics", topic=name, subscriptions=list(found.subscriptions),
        partitions=len(names) if names != [name] else 0,
        thing=sum_of([samples.topic(each) for each in names], math.nan),
    )  # fmt: skip


# --- a subscription ---------------------------------------------------------------------------------------------


async def subscription(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    name, own = topic_of(request), subscription_of(request)
    found = await gateway.ask(calls.describe_topic(name))
    is_reliable = found.delivery == RELIABLE
    if own not in found.subscriptions:
        raise ConfigError(
            "subscription", own, f"one of topic {name}: {', '.join(found.subscriptions) or 'it has none'}"
        )
    (explained, why), policy, dispatch, brokers = await asyncio.gather(
        or_why(gateway.ask(calls.explain(name, own))) if is_reliable else _nothing(),
        gateway.ask(calls.failure_policy(name, own)),
        gateway.ask(calls.dispatch_config(name, own)),
        gateway.brokers(),
    )
    silent = views.silence(found.broker_id, samples, [each.broker_id for each in brokers])
    effective = policy.failure_policy if policy.HasField("failure_policy") else default_policy()
    thing = views.with_lag(
        samples.subscription(name, own), explained.lag.lag_messages if explained is not None else None
    )
    return site.show(
        request,
        "subscription.html",
        active="topics",
        topic=name,
        subscription=own,
        is_reliable=is_reliable,
        explained=explained,
        why=why,
        chip=silent or views.flow_chip(thing, samples.topic(name).messages_in),
        thing=thing,
        is_known=silent is None,
        kind=KINDS[policy.subscription_type] if policy.subscription_type < len(KINDS) else "unknown",
        is_policy_set=policy.HasField("failure_policy"),
        policy=effective,
        policy_rows=policy_rows(effective),
        default_sentence=default_sentence(),
        default_window=UNACKED_MAX_DEFAULT,
        backoffs=BACKOFF,
        poisons=POISON,
        heartbeats=HEARTBEATS,
        dead_letter_topic=effective.dead_letter_topic,
        dispatch=dispatch.dispatch_config.max_unacked_messages if dispatch.HasField("dispatch_config") else None,
        lag=views.lag_chart(samples, thing, seconds=range_of(request), is_known=silent is None),
        delivered=views.delivered(samples, thing, seconds=range_of(request), is_known=silent is None),
    )
