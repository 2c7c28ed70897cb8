"""What pages can do: one function for each form. All are POST, all end in a redirect with a sentence.

`guard.py` has refused what may not be done before one of these is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls, values
from pydanube.admin.letters import REASON, Selection
from pydanube.admin.redrive import Outcome, redrive
from pydanube.core.cluster.conditions import count as counted
from pydanube.core.names import TopicName, parse_broker_id
from pydanube.errors import ConfigError, DanubeError, MoveRefused
from pydanube.web.formats import count
from pydanube.web.message_pages import moment_of
from pydanube.web.operations import PHASES, Operation
from pydanube.web.site import (
    Site,
    broker_url,
    form_of,
    query_text,
    sentence_of,
    subscription_of,
    subscription_url,
    topic_of,
    topic_url,
    whole,
)

MOVE_SECONDS: Final = 120
DRAIN_SECONDS: Final = 300
LOOK_SECONDS: Final = 0.2
PARTITIONS_MAX: Final = 10_000


# --- brokers --------------------------------------------------------------------------------------------------


async def drain(site: Site, request: Request) -> Response:
    broker_id = request.path_params["broker_id"]
    try:
        start_drain(site, broker_id)
    except DanubeError as error:
        return site.back(broker_url(broker_id), failed=sentence_of(error))
    return site.back("/cluster", said=f"Broker {broker_id} hands its topics over.")


def start_drain(site: Site, broker_id: str, more: values.UnloadBrokerRequest | None = None) -> Operation:
    """In the background: it takes as long as the topics do."""
    parse_broker_id(broker_id)
    request = more or values.UnloadBrokerRequest()
    request.broker_id = broker_id
    request.timeout_seconds = request.timeout_seconds or DRAIN_SECONDS

    async def run(operation: Operation) -> None:
        operation.sentence = "its topics go to other brokers, one after the other"
        done = await site.gateway.ask(calls.drain_broker(request), seconds=request.timeout_seconds + 5)
        operation.facts = [
            ("topics", count(done.total)),
            ("moved", count(done.succeeded)),
            ("failed", count(done.failed)),
            ("pending", count(done.pending)),
        ]
        operation.sentence = f"{done.succeeded} of {counted(done.total, 'topic')} moved"
        if done.failed_topics:
            operation.failure = "; ".join(done.failed_topics)

    return site.operations.begin("drain", broker_id, f"Drain broker {broker_id}", run)


async def activate(site: Site, request: Request) -> Response:
    broker_id = request.path_params["broker_id"]
    try:
        await site.gateway.ask(calls.activate_broker(broker_id, "web admin"))
    except DanubeError as error:
        return site.back(broker_url(broker_id), failed=sentence_of(error))
    return site.back(broker_url(broker_id), said="It is active: topics may be given to it again.")


async def rebalance(site: Site, request: Request) -> Response:
    form = await form_of(request)
    dry_run = form.get("dry_run") == "1"
    try:
        done = await site.gateway.ask(calls.rebalance(values.RebalanceRequest(dry_run=dry_run)), seconds=30)
    except DanubeError as error:
        return site.back("/cluster", failed=sentence_of(error))
    if not done.success:
        return site.back("/cluster", failed=f"Nothing was moved: {done.error_message}.")
    if done.proposed_moves:
        move = done.proposed_moves[0]
        verb = "would move" if dry_run else "moves"
        more = len(done.proposed_moves) - 1
        others = f" And {more} more." if more else ""
        said = f"{move.topic_name} {verb} from broker {move.from_broker} to {move.to_broker}: {move.reason}.{others}"
    else:
        said = f"Nothing to move: {done.error_message or 'the load is even'}."
    return site.back("/cluster", said=said)


# --- topics -----------------------------------------------------------------------------------------------------


async def create_topic(site: Site, request: Request) -> Response:
    form = await form_of(request)
    try:
        name = TopicName.of(form.get("namespace", "").strip(), form.get("name", "").strip())
        await make_topic(site, name, form.get("dispatch", "reliable"), whole(form, "partitions", 0, 0, PARTITIONS_MAX))
    except DanubeError as error:
        return site.back("/topics/new", failed=sentence_of(error))
    partitions = whole(form, "partitions", 0)
    with_partitions = f", with {counted(partitions, 'partition')}" if partitions else ""
    return site.back(topic_url(name), said=f"{name} was created{with_partitions}.")


async def make_topic(site: Site, name: TopicName, dispatch: str, partitions: int) -> None:
    if dispatch not in ("reliable", "non_reliable"):
        raise ConfigError("dispatch_strategy", dispatch[:50], "reliable or non_reliable")
    call = calls.create_topic(name, reliable=dispatch == "reliable", partitions=partitions)
    await site.gateway.ask(call, seconds=60 if partitions else None)


async def delete_topic(site: Site, request: Request) -> Response:
    name = topic_of(request)
    form = await form_of(request)
    if form.get("confirm", "").strip() != name:
        return site.back(topic_url(name, "delete"), failed=f"Type {name} to delete it.")
    try:
        await site.gateway.ask(calls.delete_topic(name), seconds=30)
    except DanubeError as error:
        return site.back(topic_url(name), failed=sentence_of(error))
    return site.back("/topics", said=f"{name} was deleted, with everything it had.")


async def move_topic(site: Site, request: Request) -> Response:
    name = topic_of(request)
    to = (await form_of(request)).get("to", "").strip()
    try:
        start_move(site, name, to)
    except DanubeError as error:
        return site.back(topic_url(name), failed=sentence_of(error))
    return site.back(topic_url(name))


def start_move(site: Site, name: TopicName, to: str = "") -> Operation:
    """In the background; the page of the topic shows how far it is. Raises MoveRefused, if it is on its way already."""
    if site.operations.running("move", name) is not None:
        raise MoveRefused(name, "it is on its way already")
    to_broker = parse_broker_id(to) if to else 0
    call = calls.move_topic(name, to_broker=to_broker, wait=True, timeout_seconds=MOVE_SECONDS)

    async def run(operation: Operation) -> None:
        looking = asyncio.create_task(_look(site, name, operation), name=f"look at the move of {name}")
        try:
            async for answer in site.gateway.follow(call):
                if answer.HasField("result"):
                    _moved(operation, answer.result)
                else:
                    operation.sentence = answer.progress.sentence
                    if answer.progress.sentence.startswith("the old owner has let go"):
                        operation.phase = "claim"
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            site.gateway.forget()

    return site.operations.begin("move", name, f"Move {name}", run)


async def _look(site: Site, name: str, operation: Operation) -> None:
    """The phase, as the old owner tells it."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            state = await site.gateway.ask(calls.topic_state(name))
        except DanubeError:
            continue
        if state.phase in PHASES and operation.phase != "claim":
            operation.phase = state.phase


def _moved(operation: Operation, result: values.MoveResult) -> None:
    operation.phases_ms = {phase.name: phase.duration_ms for phase in result.phases}
    if result.failure:
        operation.failure = result.failure
        return
    operation.facts = [("from", str(result.from_broker)), ("to", str(result.to_broker) if result.to_broker else "")]
    operation.sentence = f"publishers waited {operation.pause_ms:,.0f} ms"


# --- subscriptions ------------------------------------------------------------------------------------------------


async def seek(site: Site, request: Request) -> Response:
    name, own = topic_of(request), subscription_of(request)
    here = subscription_url(name, own)
    try:
        done = await site.gateway.ask(calls.seek(name, own, start_of(await form_of(request))))
    except DanubeError as error:
        return site.back(here, failed=sentence_of(error))
    return site.back(here, said=f"It goes on at offset {done.offset:,}.")


def start_of(form: Mapping[str, str]) -> str | int | datetime:
    """Where a subscription is to go on. Raises ConfigError."""
    match form.get("to", ""):
        case "earliest" | "latest" as end:
            return end
        case "offset":
            if not form.get("offset", "").strip():
                raise ConfigError("offset", "", "the offset to go on at")
            return whole(form, "offset", 0)
        case "time":
            return moment_of(form.get("time", "").strip())
        case other:
            raise ConfigError("to", other[:50], "earliest, latest, offset or time")


async def unsubscribe(site: Site, request: Request) -> Response:
    name, own = topic_of(request), subscription_of(request)
    if (await form_of(request)).get("confirm", "").strip() != own:
        return site.back(subscription_url(name, own), failed=f"Type {own} to remove it.")
    try:
        await site.gateway.ask(calls.unsubscribe(name, own))
    except DanubeError as error:
        return site.back(subscription_url(name, own), failed=sentence_of(error))
    return site.back(topic_url(name), said=f"Subscription {own} was removed, with its place.")


# --- namespaces ---------------------------------------------------------------------------------------------------


async def create_namespace(site: Site, request: Request) -> Response:
    name = (await form_of(request)).get("name", "").strip()
    try:
        await site.gateway.ask(calls.create_namespace(name))
    except DanubeError as error:
        return site.back("/namespaces", failed=sentence_of(error))
    return site.back("/namespaces", said=f"Namespace {name} was created.")


async def delete_namespace(site: Site, request: Request) -> Response:
    name = (await form_of(request)).get("name", "").strip()
    try:
        await site.gateway.ask(calls.delete_namespace(name))
    except DanubeError as error:
        return site.back("/namespaces", failed=sentence_of(error))
    return site.back("/namespaces", said=f"Namespace {name} was deleted.")


# --- dead letters ---------------------------------------------------------------------------------------------------


async def redrive_letters(site: Site, request: Request) -> Response:
    form = await form_of(request)
    topic = form.get("topic", "").strip()
    here = f"/dead-letters{query_text({'topic': topic})}"
    try:
        start_redrive(site, TopicName(topic), form)
    except DanubeError as error:
        return site.back(here, failed=sentence_of(error))
    return site.back(here)


def start_redrive(site: Site, topic: TopicName, form: Mapping[str, str]) -> Operation:
    """In the background. Raises ConfigError, or MoveRefused while another one of the topic is on its way."""
    if site.operations.running("redrive", topic) is not None:
        raise MoveRefused(topic, "its dead letters are being redriven already")
    selection = selection_of(form)
    dry_run = form.get("dry_run") == "1"
    limit = whole(form, "limit", 0, 0) or None
    to = TopicName(form["to"].strip()) if form.get("to", "").strip() else None

    async def run(operation: Operation) -> None:
        sent = 0

        def tell(outcome: Outcome) -> None:
            nonlocal sent
            sent = outcome.sent
            operation.sentence = f"looked at {outcome.at - outcome.first:,} of {outcome.end - outcome.first:,}"
            operation.facts = outcome_facts(outcome)

        client = await site.gateway.client()
        try:
            outcome = await redrive(client, topic, selection, to=to, dry_run=dry_run, limit=limit, progress=tell)
            sent = outcome.sent
        finally:
            site.gateway.forget()
            if sent:
                await site.gateway.note("RedriveLetters", topic, to=to or "", sent=sent)
        operation.facts = outcome_facts(outcome)
        verb = "would be sent" if dry_run else "sent"
        number = outcome.selected if dry_run else outcome.sent
        operation.sentence = f"{counted(number, 'dead letter')} {verb}"
        operation.failure = "; ".join(f"{name}: {why}" for name, why in outcome.failures.items())

    title = f"{'Try to redrive' if dry_run else 'Redrive'} {topic}"
    return site.operations.begin("redrive", topic, title, run, sentence="reading dead letters")


def selection_of(form: Mapping[str, str]) -> Selection:
    """Raises ConfigError."""

    def text(key: str) -> str | None:
        return form.get(key, "").strip() or None

    end = text("end")
    return Selection(
        topic=text("from_topic"),
        subscription=text("subscription"),
        reason=text("reason"),
        first=whole(form, "first", 0),
        end=None if end is None else whole(form, "end", 0) + 1,  # people name the last one
        since=moment_of(since) if (since := text("since")) else None,
        until=moment_of(until) if (until := text("until")) else None,
        key=text("key"),
        attributes={REASON: form["reason_is"]} if form.get("reason_is") else {},
    )


def outcome_facts(outcome: Outcome) -> list[tuple[str, str]]:
    facts = [
        ("looked at", count(outcome.looked_at)),
        ("selected", count(outcome.selected)),
        ("sent", count(outcome.sent)),
        ("sent before", count(outcome.sent_before)),
        ("left out", count(outcome.left_out)),
    ]
    if outcome.homeless:
        facts.append(("of unknown origin", count(outcome.homeless)))
    facts += [(f"to {target}", count(number)) for target, number in list(outcome.by_target.items())[:5]]
    return facts
