"""Dead letters: which topics have some, one by one, grouped by why they failed; retried, copied, discarded.

A dead-letter topic is a log like any other. What was redriven or discarded is written down beside it
(`admin/redrive.py`), and a letter that is in that ledger is done: it is marked, or left out, and never sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from pydanube.admin import calls
from pydanube.admin.letters import ORIGINAL_SUBSCRIPTION, REASON, Selection
from pydanube.admin.redrive import discard
from pydanube.client.search import Query, search
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError
from pydanube.web.message_pages import MESSAGES_DEFAULT, PREVIEW_BYTES, MessageLine
from pydanube.web.site import NotHere, Site, form_of, query_text, sentence_of, whole
from pydanube.web.topic_pages import or_why

CANDIDATES_MAX: Final = 30
GROUPS_SHOWN: Final = 20
DEAD_LETTER_WORDS: Final = ("dlq", "dead-letter", "dead_letter", "deadletter", "poison")
COPIED_FROM: Final = "x-copied-from"


async def dead_letters(site: Site, request: Request) -> Response:
    """Those of one topic, or the topics that look like having some."""
    gateway = site.gateway
    asked = request.query_params.get("topic", "").strip()
    if asked:
        return await _letters(site, request, asked)
    rows = [row for row in await gateway.topics() if row.is_reliable and is_dead_letter_topic(row.name)]
    states = await asyncio.gather(*(or_why(gateway.ask(calls.topic_state(row.name))) for row in rows[:CANDIDATES_MAX]))
    candidates: list[dict[str, Any]] = []
    for row, (state, why) in zip(rows, states, strict=False):
        live = state.live if state is not None and state.HasField("live") else None
        candidates.append(
            {"row": row, "count": live.head - live.first_offset if live is not None else None, "why": why}
        )
    return site.show(
        request,
        "dead_letters.html",
        active="dead",
        candidates=candidates,
        left_out=len(rows) - len(candidates),
        operations=site.operations.of("redrive")[:3],
    )


def is_dead_letter_topic(name: str) -> bool:
    """By its name: where poison goes is the application's choice, and every policy would have to be asked."""
    last = name.rpartition("/")[2].lower()
    return any(word in last for word in DEAD_LETTER_WORDS) and not last.endswith("redriven")


async def _letters(site: Site, request: Request, asked: str) -> Response:
    count = MESSAGES_DEFAULT
    query = request.query_params
    show_all = query.get("all") == "1"
    offset = whole(query, "offset", 0) if query.get("offset", "").strip() else None
    found, (survey, why) = await asyncio.gather(
        site.gateway.ask(calls.peek(asked, offset, count, PREVIEW_BYTES)), or_why(site.gateway.survey(asked))
    )
    lines = [MessageLine.of(each, "auto") for each in found.messages]
    first = lines[0].message.offset if lines else offset or found.head
    following = lines[-1].message.offset + 1 if lines else min(first + count, found.head)
    done = survey.done if survey is not None else ()
    discarded = survey.discarded if survey is not None else ()
    states = {
        line.message.offset: "discarded" if line.message.offset in discarded else "redriven"
        for line in lines
        if line.message.offset in done
    }
    shown = [line for line in reversed(lines) if show_all or line.message.offset not in states]
    return site.show(
        request,
        "letters.html",
        active="dead",
        topic=asked,
        lines=shown,
        states=states,
        left_out=len(lines) - len(shown),
        show_all=show_all,
        survey=survey,
        no_survey=why,
        groups=survey.groups[:GROUPS_SHOWN] if survey is not None else [],
        span=(found.first_offset, found.head),
        older=max(found.first_offset, first - count) if first > found.first_offset else None,
        newer=following if following < found.head else None,
        operations=site.operations.of("redrive", subject=asked)[:2],
    )


# --- doing --------------------------------------------------------------------------------------------------------


def here(topic: str) -> str:
    return f"/dead-letters{query_text({'topic': topic})}"


def one_or_group(form: Mapping[str, str]) -> Selection:
    """One letter by its offset, or those of a subscription with exactly this reason. Raises ConfigError."""
    if form.get("offset", "").strip():
        offset = whole(form, "offset", 0)
        return Selection(first=offset, end=offset + 1)
    reason, subscription = form.get("reason_is", ""), form.get("subscription", "").strip()
    if not reason:
        raise ConfigError("offset", "", "the offset of a dead letter, or the reason of a group")
    named = {ORIGINAL_SUBSCRIPTION: subscription} if subscription else {}
    end = whole(form, "before", 0) or None  # what came after the page was looked at is not meant
    return Selection(attributes={REASON: reason, **named}, end=end)


async def discard_letters(site: Site, request: Request) -> Response:
    form = await form_of(request)
    topic = form.get("topic", "").strip()
    try:
        name, selection = TopicName(topic), one_or_group(form)
        count = await discard(await site.gateway.client(), name, selection)
    except DanubeError as error:
        return site.back(here(topic), failed=sentence_of(error))
    finally:
        site.gateway.forget()
    if not count:
        return site.back(here(topic), failed="Nothing was discarded: it was redriven or discarded before, or is gone.")
    await site.gateway.note("DiscardLetters", topic, sent=count)
    noun = "dead letter was" if count == 1 else "dead letters were"
    return site.back(
        here(topic),
        said=f"{count:,} {noun} discarded: no redrive sends them. The bytes stay in {topic} until retention takes them,"
        " and a consumer of it still gets them.",
    )


async def copy_letter(site: Site, request: Request) -> Response:
    """To a topic of the operator's choice, as it is, with where it is from. The letter stays open."""
    form = await form_of(request)
    topic, offset = form.get("topic", "").strip(), whole(form, "offset", 0)
    try:
        name, to = TopicName(topic), TopicName(form.get("to", "").strip())
        if to.base == name.base:
            raise ConfigError("to", to, "another topic than the dead letters'")
        client = await site.gateway.client()
        found = await search(client, name, Query(), first=offset, end=offset + 1)
        if not found.messages or found.messages[0].offset != offset:
            raise NotHere(f"offset {offset} of {name} holds no message")
        letter = found.messages[0]
        async with client.producer(to, create=False) as producer:
            receipt = await producer.send(
                letter.payload,
                key=letter.routing_key,
                attributes={**letter.attributes, COPIED_FROM: f"{name} {offset}"},
            )
    except DanubeError as error:
        return site.back(here(topic), failed=sentence_of(error))
    await site.gateway.note("CopyLetter", topic, to=receipt.topic, offset=offset)
    return site.back(
        here(topic), said=f"Copied to offset {receipt.offset:,} of {receipt.topic}. It is still open here."
    )
