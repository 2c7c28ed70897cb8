"""/ui/v1: the JSON routes of the reference's admin gateway, for tools, as far as the thing exists here.

What a broker answers is passed on field by field (json_bodies.py), with ids as strings; the rest is put together here
from samples. What could not be found out is said in `errors` and left at 0 or null; the rest is answered. What does not
exist here answers 501 and says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pydanube.admin import calls, values
from pydanube.admin.calls import RELIABLE
from pydanube.admin.gateway import KnownBroker, TopicRow
from pydanube.admin.metrics_text import TopicCounts
from pydanube.admin.sampler import scrape
from pydanube.admin.samples import ERRORS, Samples
from pydanube.admin.series import Series
from pydanube.client.search import search
from pydanube.core.names import TopicName, parse_broker_id
from pydanube.errors import ConfigError, Unreachable
from pydanube.web import actions
from pydanube.web.json_bodies import json_of, order_of, read_body, text, whole
from pydanube.web.message_pages import MESSAGES_DEFAULT, MESSAGES_MAX, query_of, record_of
from pydanube.web.sends import log_of, sends_to
from pydanube.web.settings import BACKOFF_WORDS
from pydanube.web.site import NotHere, Site, sentence_of, status_of, tell_if_unexpected
from pydanube.web.site import whole as number
from pydanube.web.topic_pages import KINDS, or_why

JsonRoute = Callable[[Site, Request], Awaitable[Any]]

NO_SCHEMAS: Final = "this broker has no schema registry"
NO_SECURITY: Final = "this broker has no authentication, and so no roles and no bindings"
SERIES: Final = {
    "publish_rate_1m": "messages_in",
    "dispatch_rate_1m": "messages_out",
    "bytes_in_rate_1m": "bytes_in",
    "bytes_out_rate_1m": "bytes_out",
}
STEP_SECONDS: Final = 15
RPC_TOTAL: Final = "danube_broker_rpc_total"
DELAYS: Final = ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms")
POISON: Final = {"DeadLetter": "dead_letter", "Block": "block", "Drop": "drop"}
SCHEMA: Final = ("schema_subject", "schema_id", "schema_version", "schema_type", "compatibility_mode")


def routes(site: Site) -> list[BaseRoute]:
    found: list[tuple[str, str, JsonRoute]] = [
        ("GET", "/health", health),
        ("GET", "/cluster", cluster),
        ("POST", "/cluster/actions", cluster_action),
        ("GET", "/cluster/balance", balance),
        ("POST", "/cluster/rebalance", rebalance),
        ("GET", "/cluster/raft", raft),
        ("POST", "/cluster/raft/actions", raft_action),
        ("GET", "/topics", topics),
        ("POST", "/topics/actions", topic_action),
        ("GET", "/topics/{topic:path}/series", series),
        ("GET", "/topics/{topic:path}/messages", messages),
        ("GET", "/topics/{topic:path}", topic),
        ("GET", "/namespaces", namespaces),
        ("GET", "/brokers/{broker_id}", broker),
        *(("GET", path, _absent(NO_SCHEMAS)) for path in ("/schemas", "/schemas/{subject:path}")),
        ("POST", "/schemas/actions", _absent(NO_SCHEMAS)),
        *(("GET", f"/security/{path}", _absent(NO_SECURITY)) for path in ("roles", "bindings")),
        *(("POST", f"/security/{path}/actions", _absent(NO_SECURITY)) for path in ("roles", "bindings")),
    ]
    return [Route(f"/ui/v1{path}", _answering(site, route), methods=[method]) for method, path, route in found]


def _answering(site: Site, route: JsonRoute) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        site.sampler.watch()
        try:
            found = await route(site, request)
            return found if isinstance(found, Response) else JSONResponse(found)
        except Exception as error:  # whatever it is, a tool gets JSON
            tell_if_unexpected(request, error)
            return JSONResponse({"success": False, "message": sentence_of(error)}, status_of(error))

    return answer


def _absent(sentence: str) -> JsonRoute:
    async def refuse(site: Site, request: Request) -> Any:
        return JSONResponse({"success": False, "message": sentence}, 501)

    return refuse


def _now() -> int:
    return int(time.time())


# --- the cluster ------------------------------------------------------------------------------------------------


async def health(site: Site, request: Request) -> Any:
    leader = await site.gateway.ask(calls.leader())
    return {"status": "ok", "leader": leader.leader, "leader_reachable": leader.leader != "not_found"}


async def cluster(site: Site, request: Request) -> Any:
    samples = site.sampler.samples
    brokers, (rows, why) = await asyncio.gather(site.gateway.brokers(), or_why(site.gateway.topics()))
    stats = {each.broker_id: broker_stats(samples, each.broker_id) for each in brokers}
    return {
        "timestamp": _now(),
        "brokers": [{**_broker(each), "stats": stats[each.broker_id]} for each in brokers],
        "totals": {
            "broker_count": len(brokers),
            "topics_total": len(rows) if rows is not None else 0,
            "rpc_total": sum(each["rpc_total"] for each in stats.values()),
            "active_connections": sum(each["active_connections"] for each in stats.values()),
        },
        "errors": [*([why] if why else []), *_silent(samples)],
    }


def _broker(broker: KnownBroker) -> dict[str, str]:
    return {
        "broker_id": broker.broker_id,
        "broker_addr": broker.address,
        "broker_role": broker.role,
        "broker_status": broker.status,
        "admin_addr": broker.admin_addr,
    }


def broker_stats(samples: Samples, broker_id: str) -> dict[str, int]:
    numbers = samples.numbers(broker_id)
    own: Mapping[str, float] = numbers.broker if numbers is not None else {}
    things = numbers.topics.values() if numbers is not None else ()
    consumers = numbers.subscriptions.values() if numbers is not None else ()
    connected = sum(each.producers for each in things) + sum(each.consumers for each in consumers)
    return {
        "topics_owned": int(own.get("danube_broker_topics_owned", 0)),
        "rpc_total": int(own.get(RPC_TOTAL, 0)),
        "active_connections": int(connected),
        "errors_5xx_total": int(own.get(f"{RPC_TOTAL}:error", 0)),
    }


def _silent(samples: Samples) -> list[str]:
    return [f"broker {broker}: {why}" for broker, why in sorted(samples.failures.items())]


async def cluster_action(site: Site, request: Request) -> Any:
    body = await read_body(request)
    broker_id = text(body, "broker_id")
    match body.get("action"):
        case "unload":
            order = order_of(body, values.UnloadBrokerRequest, ("broker_id",), max_parallel=1, timeout_seconds=60)
            seconds = order.timeout_seconds + 5.0
            done = await site.gateway.ask(calls.drain_broker(order), seconds=seconds)
            counts = " ".join(f"{name}={getattr(done, name)}" for name in ("total", "succeeded", "failed", "pending"))
            return {"success": not done.failed, "message": f"started={str(done.started).lower()} {counts}"}
        case "activate":
            activation = order_of(body, values.ActivateBrokerRequest, ("broker_id",))
            await site.gateway.ask(calls.activate_broker(activation.broker_id, activation.reason))
            return {"success": True, "message": f"broker {broker_id} is active"}
    raise ConfigError("action", str(body.get("action"))[:50], "unload or activate")


async def balance(site: Site, request: Request) -> Any:
    return json_of(await site.gateway.ask(calls.balance()))


async def rebalance(site: Site, request: Request) -> Any:
    order = order_of(await read_body(request), values.RebalanceRequest)
    return json_of(await site.gateway.ask(calls.rebalance(order), seconds=30))


async def raft(site: Site, request: Request) -> Any:
    return json_of(await site.gateway.ask(calls.metadata_status()), numbers=("current_term", "last_applied"))


async def raft_action(site: Site, request: Request) -> Any:
    body = await read_body(request)
    node_id = parse_broker_id(text(body, "node_id"))
    match body.get("action"):
        case "promote_node":
            return json_of(await site.gateway.ask(calls.promote_member(node_id)))
        case "remove_node":
            return json_of(await site.gateway.ask(calls.remove_member(node_id)))
    raise ConfigError("action", str(body.get("action"))[:50], "promote_node or remove_node")


async def broker(site: Site, request: Request) -> Any:
    broker_id = request.path_params["broker_id"]
    brokers, rows = await asyncio.gather(site.gateway.brokers(), site.gateway.topics())
    found = next((each for each in brokers if each.broker_id == broker_id), None)
    if found is None:
        raise NotHere(f"there is no broker {broker_id}")
    samples = site.sampler.samples
    stats, numbers = broker_stats(samples, broker_id), samples.numbers(broker_id)
    published = numbers.topics.values() if numbers is not None else ()
    delivered = numbers.subscriptions.values() if numbers is not None else ()
    return {
        "timestamp": _now(),
        "broker": {key: value for key, value in _broker(found).items() if key != "admin_addr"},
        "metrics": {
            "rpc_total": stats["rpc_total"],
            "topics_owned": stats["topics_owned"],
            "inbound_bytes_total": int(sum(each.bytes_in for each in published)),
            "outbound_bytes_total": int(sum(each.bytes_out for each in delivered)),
            "errors_5xx_total": stats["errors_5xx_total"],
        },
        "topics": [_topic_row(samples, row) for row in rows if row.broker_id == broker_id],
        "errors": _silent(samples),
    }


# --- topics -----------------------------------------------------------------------------------------------------


async def topics(site: Site, request: Request) -> Any:
    brokers, rows = await asyncio.gather(site.gateway.brokers(), site.gateway.topics())
    samples = site.sampler.samples
    by_broker: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_broker.setdefault(row.broker_id, []).append(_topic_row(samples, row))
    ownerless = [f"topic {each['name']}: no broker serves it just now" for each in by_broker.get("", [])]
    return {
        "timestamp": _now(),
        "brokers": [{"broker": _broker(each), "topics": by_broker.get(each.broker_id, [])} for each in brokers],
        "errors": [*ownerless, *_silent(samples)],
    }


def _topic_row(samples: Samples, row: TopicRow) -> dict[str, Any]:
    thing = samples.topic(row.name)
    return {
        "name": row.name,
        "delivery": row.delivery,
        "producers_connected": int(thing.level("producers")),
        "consumers_connected": int(thing.level("consumers")),
        "subscriptions": int(thing.level("subscriptions")),
    }


async def topic(site: Site, request: Request) -> Any:
    name = _topic_name(request)
    found = await site.gateway.ask(calls.describe_topic(name))
    samples = site.sampler.samples
    errors = _silent(samples)
    subscriptions = []
    for each in found.subscriptions:
        policy, why = await or_why(site.gateway.ask(calls.failure_policy(name, each)))
        subscriptions.append(_subscription(each, policy))
        errors += [why] if why else []
    printed, why = await or_why(_printed(site, name, found.broker_id))
    errors += [why] if why else []
    sends = sends_to(name, printed or "")
    if printed and found.delivery == RELIABLE:
        sends["reliable"] = log_of(printed)
    described = json_of(found, numbers=("schema_id",))
    return {
        "timestamp": _now(),
        "topic": {
            "name": name,
            **{key: described[key] for key in SCHEMA},
            "subscriptions": subscriptions,
        },
        "metrics": {**_metrics(samples, name, found), **sends},
        "errors": errors,
    }


async def _printed(site: Site, name: str, broker_id: str) -> str:
    """All metrics of the topic's broker. Raises Unreachable."""
    for broker in await site.gateway.brokers():
        if broker.broker_id == broker_id:
            return await scrape(broker.metrics_addr)
    raise Unreachable(f"the broker of {name}", "no broker serves it just now")


def _subscription(name: str, found: values.SubscriptionSettings | None) -> dict[str, Any]:
    kind = policy = None
    if found is not None:
        kind = KINDS[found.subscription_type] if found.subscription_type < len(KINDS) else None
    if found is not None and found.HasField("failure_policy"):
        policy = json_of(found.failure_policy, numbers=DELAYS)
        policy["backoff_strategy"] = BACKOFF_WORDS.get(found.failure_policy.backoff_strategy)
        policy["poison_policy"] = POISON.get(policy["poison_policy"])
    return {"name": name, "subscription_type": kind, "failure_policy": policy}


def _metrics(samples: Samples, name: str, found: values.TopicDescription) -> dict[str, Any]:
    """What is counted per topic here; what is not is absent."""
    numbers = samples.numbers(found.broker_id)
    published = numbers.topics.get(name, TopicCounts()) if numbers is not None else TopicCounts()
    delivered = [each for (of, _), each in numbers.subscriptions.items() if of == name] if numbers is not None else []
    thing = samples.topic(name)
    return {
        "core": {
            "msg_in_total": int(published.messages_in),
            "msg_out_total": int(sum(each.messages_out for each in delivered)),
            "bytes_in_total": int(published.bytes_in),
            "bytes_out_total": int(sum(each.bytes_out for each in delivered)),
        },
        "active": {
            "producers": int(thing.level("producers")),
            "consumers": int(thing.level("consumers")),
            "subscriptions": len(found.subscriptions),
        },
        "rates": {
            "publish_rate_1m": samples.minute_rate(thing, "messages_in"),
            "dispatch_rate_1m": samples.minute_rate(thing, "messages_out"),
        },
        "lag_messages": thing.lag,
        "is_reliable": found.delivery == RELIABLE,
    }


async def series(site: Site, request: Request) -> Any:
    """The last sixteen minutes at most. `from` and `to` are seconds since 1970, `step` seconds (15s)."""
    name, query = _topic_name(request), request.query_params
    await site.gateway.ask(calls.describe_topic(name))
    step = _seconds("step", query.get("step", f"{STEP_SECONDS}s"))
    first, last = _seconds("from", query.get("from", "0")), _seconds("to", query.get("to", "1e18"))
    samples = site.sampler.samples
    thing = samples.topic(name)

    def points(values: Series) -> list[list[float]]:
        found: list[list[float]] = []
        for at, value in values:
            if value is not None and first <= at <= last and (not found or at - found[-1][0] >= step):
                found.append([at, value])
        return found

    found: list[dict[str, Any]] = [
        {"name": label, "points": points(samples.minute_series(thing, own))} for label, own in SERIES.items()
    ]
    for own in sorted(name for name in thing.rings if name.startswith(ERRORS)):
        labels = {"error_code": own.removeprefix(ERRORS)}
        found.append(
            {"name": "producer_send_errors", "labels": labels, "points": points(samples.minute_series(thing, own))}
        )
    found.append({"name": "lag_messages", "points": points(samples.series(thing, "lag"))})
    return {"series": found, "errors": _silent(samples)}


async def messages(site: Site, request: Request) -> Any:
    """What `key`, `attribute`, `text`, `time` and `until` find from `offset` on, at most `count`: one bounded look."""
    name, query = _topic_name(request), request.query_params
    async with site.gateway.searching:
        found = await search(
            await site.gateway.client(),
            name,
            query_of(query),
            first=number(query, "offset", 0),
            found_max=number(query, "count", MESSAGES_DEFAULT, 1, MESSAGES_MAX),
        )
    return {
        "messages": [record_of(each) for each in found.messages],
        "looked_at": found.looked_at,
        "first_offset": found.first,
        "end_offset": found.end,
        "next_offset": found.next_offset,  # null: that was all
        "head": found.head,
    }


async def topic_action(site: Site, request: Request) -> Any:
    body = await read_body(request)
    named, namespace = text(body, "topic"), body.get("namespace")
    name = TopicName(f"/{namespace}/{named.lstrip('/')}" if namespace and named.count("/") < 2 else named)
    match body.get("action"):
        case "create":
            if body.get("schema_type") or body.get("schema_data"):
                raise ConfigError("schema_type", str(body.get("schema_type"))[:50], f"nothing: {NO_SCHEMAS}")
            dispatch = str(body.get("dispatch_strategy") or "non_reliable").lower().replace("-", "_")
            partitions = body.get("partitions")
            await actions.make_topic(
                site,
                name,
                {"nonreliable": "non_reliable"}.get(dispatch, dispatch),
                0 if partitions is None else whole(partitions, "partitions"),
            )
            return {"success": True, "message": f"{name} was created"}
        case "delete" | "unload" as action:
            call = calls.delete_topic(name) if action == "delete" else calls.unload_topic(name)
            await site.gateway.ask(call, seconds=30.0 if action == "delete" else 65.0)
            return {"success": True, "message": f"{name} was {action.removesuffix('e')}ed"}
    raise ConfigError("action", str(body.get("action"))[:50], "create, delete or unload")


async def namespaces(site: Site, request: Request) -> Any:
    names, rows = await asyncio.gather(site.gateway.namespaces(), site.gateway.topics())
    found, errors = [], []
    for name in names:
        policies, why = await or_why(site.gateway.ask(calls.namespace_policies(name)))
        errors += [f"namespace {name}: {why}"] if why else []
        own = [row.name for row in rows if row.namespace == name]
        found.append({"name": name, "topics": own, "policies": policies.policies if policies is not None else "{}"})
    return {"timestamp": _now(), "namespaces": found, "errors": errors}


# --- what is asked with -----------------------------------------------------------------------------------------


def _topic_name(request: Request) -> TopicName:
    """With or without its slash: `%2Fdefault%2Forders` and `default/orders` are the same."""
    return TopicName(f"/{request.path_params['topic'].strip('/')}")


def _seconds(key: str, text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    except ValueError:
        raise ConfigError(key, text[:50], "seconds, as 15 or 15s") from None
