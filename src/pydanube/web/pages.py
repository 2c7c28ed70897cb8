"""The pages about the cluster: brokers, topics in a list, namespaces. One function for each."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pydanube.admin import calls, values
from pydanube.errors import DanubeError
from pydanube.web import conditions, formats, views
from pydanube.web.operations import Operation
from pydanube.web.settings import LIMITS, RetentionView
from pydanube.web.site import NotHere, Site, range_of, sentence_of, whole
from pydanube.web.topic_pages import or_why

PAGE_ROWS: Final = 50
REBALANCING_SHOWN: Final = 8
EVENTS_SHOWN: Final = 10


async def home(site: Site, request: Request) -> Response:
    return RedirectResponse("/cluster", 307)


# --- the cluster --------------------------------------------------------------------------------------------


async def cluster(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    brokers, topics, balance, (status, why), happened = await asyncio.gather(
        gateway.brokers(), gateway.topics(), gateway.balance(), _status(site), _happened(site)
    )
    moves = await _rebalanced(site) if balance is not None else []
    # From here on nothing waits: tile, legend and state are then of one moment.
    lines = views.grouped(views.topic_lines(topics, samples, site.operations, brokers), samples)
    loads = {str(each.broker_id): each for each in balance.brokers} if balance is not None else {}
    owned: dict[str, int] = {}
    for row in topics:
        owned[row.broker_id] = owned.get(row.broker_id, 0) + 1
    lagging = sorted((line for line in lines if line.lag), key=views.SORTS["lag"])
    now = time.time()
    shown = conditions.broker_lines(brokers, status, samples, owned, loads)
    missing = sum(not row.broker_id for row in topics)
    complete, said = conditions.is_complete(status, samples), conditions.banner(status, why)
    return site.show(
        request,
        "cluster.html",
        active="cluster",
        banner=said,
        health=status,
        complete=complete,
        unserved=max(status.topics_unserved, missing) if status is not None else missing,
        now=now,
        brokers=shown,
        topics_max=max(owned.values(), default=0),
        is_alone=balance is None,
        balance=balance,
        topics=topics,
        lagging=lagging[:5],
        lagging_count=sum(line.is_known and views.is_lagging(line.thing) for line in lines),
        throughput=views.throughput(
            samples,
            samples.cluster,
            "Throughput of all topics",
            seconds=range_of(request),
            is_known=complete,
        ),
        operations=_operations(site, said),
        moves=moves,
        happened=happened,
        addresses={line.broker_id: formats.bare(line.address) or line.broker_id for line in shown},
    )


def _operations(site: Site, said: conditions.Banner) -> list[Operation]:
    """Those that are under way or have just ended; during an outage what went well does not push the rest down."""
    found = site.operations.of("drain", "move", "rebalance", "redrive")
    is_outage = said.kind == "bad" and bool(said.conditions or said.unknown)
    return [each for each in found if not (is_outage and each.state == "done")][:4]


async def _status(site: Site) -> tuple[values.ClusterStatus | None, str]:
    """Or why it is not known: the page has more to show than this."""
    try:
        return await site.gateway.status(), ""
    except DanubeError as error:
        return None, sentence_of(error)


async def _happened(site: Site) -> list[Any]:
    try:
        return list((await site.gateway.ask(calls.list_events(EVENTS_SHOWN))).events)
    except DanubeError:
        return []  # the page is about more than this


async def _rebalanced(site: Site) -> list[Any]:
    try:
        return list((await site.gateway.ask(calls.rebalancing_history(REBALANCING_SHOWN))).moves)
    except DanubeError:
        return []  # the page is about more than this


async def broker(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    brokers, topics = await asyncio.gather(gateway.brokers(), gateway.topics())
    found = next((each for each in brokers if each.broker_id == request.path_params["broker_id"]), None)
    if found is None:
        raise NotHere(f"there is no broker {request.path_params['broker_id']} in this cluster now")
    lines = views.topic_lines(
        [row for row in topics if row.broker_id == found.broker_id], samples, site.operations, brokers
    )
    lines.sort(key=views.SORTS["in"])
    numbers = samples.numbers(found.broker_id)
    status, _ = await _status(site)
    now = time.time()
    [own] = [line for line in conditions.broker_lines([found], status, samples, {}, {}) if line.broker is not None]
    return site.show(
        request,
        "broker.html",
        active="cluster",
        broker=found,
        others=len(brokers) > 1,
        chip=own.chip,
        own=own,
        now=now,
        thing=samples.broker(found.broker_id),
        numbers=numbers.broker if numbers is not None and own.thing is not None else {},
        lines=lines[:PAGE_ROWS],
        lines_count=len(lines),
        throughput=views.throughput(
            samples,
            samples.broker(found.broker_id),
            seconds=range_of(request),
            is_known=own.thing is not None,
        ),
        operations=site.operations.of("drain", subject=found.broker_id)[:2],
    )


# --- topics ---------------------------------------------------------------------------------------------------


async def topics(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    rows, brokers = await asyncio.gather(gateway.topics(), gateway.brokers())
    search = request.query_params.get("q", "").strip()
    namespace = request.query_params.get("namespace", "")
    state = request.query_params.get("state", "")
    sort = request.query_params.get("sort", "name")
    every = views.grouped(views.topic_lines(rows, samples, site.operations, brokers), samples)
    lines = [line for line in every if _is_wanted(line, search.lower(), namespace)]
    if state:
        lines = [line for line in lines if line.chip.word == state]
    lines.sort(key=views.SORTS.get(sort, views.SORTS["name"]))
    pages = max((len(lines) + PAGE_ROWS - 1) // PAGE_ROWS, 1)
    page = min(whole(request.query_params, "page", 1, 1), pages)
    return site.show(
        request,
        "topics.html",
        active="topics",
        lines=lines[(page - 1) * PAGE_ROWS : page * PAGE_ROWS],
        found=len(lines),
        total=len(every),
        namespaces=sorted({row.namespace for row in rows}),
        search=search,
        namespace=namespace,
        state=state,
        sort=sort,
        page=page,
        pages=pages,
    )


def _is_wanted(line: views.TopicLine, search: str, namespace: str) -> bool:
    """A partitioned topic also by the name of one of its partitions."""
    names = [line.row.name, *(part.row.name for part in line.parts)]
    return (not namespace or line.row.namespace == namespace) and any(search in name.lower() for name in names)


async def new_topic(site: Site, request: Request) -> Response:
    return site.show(
        request, "new_topic.html", active="topics", namespaces=await site.gateway.namespaces(),
        namespace=request.query_params.get("namespace", "default"),
    )  # fmt: skip


# --- namespaces -------------------------------------------------------------------------------------------------


async def namespaces(site: Site, request: Request) -> Response:
    gateway, samples = site.gateway, site.sampler.samples
    names, rows = await asyncio.gather(gateway.namespaces(), gateway.topics())
    found = []
    for name in names:
        own = [row for row in rows if row.namespace == name]
        things = [samples.topic(row.name) for row in own]
        limits, why = await limits_of(site, name)
        retention, no_retention = await or_why(gateway.ask(calls.retention(namespace=name)))
        found.append(
            {
                "name": name,
                "topics": len(own),
                "messages_in": sum(thing.messages_in for thing in things),
                "messages_out": sum(thing.messages_out for thing in things),
                "limits": {key: value for key, value in limits.items() if value},
                "every_limit": {key: limits.get(key, 0) for key in LIMITS},
                "why": why,
                "retention": RetentionView.of(retention) if retention is not None else None,
                "no_retention": no_retention,
            }
        )
    return site.show(request, "namespaces.html", active="namespaces", found=found)


async def limits_of(site: Site, namespace: str) -> tuple[dict[str, Any], str]:
    """The seven limits, 0 for none; and why they are not known."""
    try:
        limits = json.loads((await site.gateway.ask(calls.namespace_policies(namespace))).policies)
    except DanubeError as error:
        return {}, sentence_of(error)
    return limits, ""
