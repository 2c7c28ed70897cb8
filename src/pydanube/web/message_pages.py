"""The pages about messages: by offset or time, searched, followed as they come, downloaded; and one by hand.

Without a filter messages are looked at through the admin service (`PeekTopic`). Everything else needs the native port:
`client/search.py` looks through a bounded part of the topic per request, and the page says where it goes on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pydanube.admin import calls, values
from pydanube.admin.calls import RELIABLE
from pydanube.client.search import FoundMessage, Query, SearchResult, search
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError
from pydanube.web import formats
from pydanube.web.site import BadRequest, Site, form_of, sentence_of, topic_of, topic_url, whole

MESSAGES_DEFAULT: Final = 25
MESSAGES_MAX: Final = 200
PREVIEW_BYTES: Final = 2_000
WHOLE_BYTES: Final = 1_000_000
TAIL_LOOKS: Final = (1_000, 100, 10, 1)  # of the newest offsets
DOWNLOAD_FOUND_MAX: Final = 10_000
DOWNLOAD_LOOK_MAX: Final = 100_000
DOWNLOAD_BYTES_MAX: Final = 32 * 1024 * 1024
DOWNLOADS: Final = ("ndjson", "csv")
# What a spreadsheet would take for a formula.
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
FILTERS: Final = ("key", "attribute", "text", "until")


class MessageLine(NamedTuple):
    message: values.PeekedMessage
    shown: formats.Shown
    attributes: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, message: values.PeekedMessage, mode: str) -> MessageLine:
        shown = formats.payload(message.payload, message.payload_size_bytes, mode)
        return cls(message, shown, sorted(message.attributes.items()))

    @property
    def key(self) -> str | None:
        return self.message.routing_key if self.message.HasField("routing_key") else None

    @property
    def preview(self) -> str:
        """One line of it."""
        text = self.shown.text if self.shown.kind != "json" else self.message.payload.decode("utf-8", "replace")
        return " ".join(text.split())[:300] if self.shown.kind != "hex" else self.message.payload[:32].hex(" ")


def peeked(found: FoundMessage) -> values.PeekedMessage:
    """As the admin service would have said it, cut for a list."""
    return values.PeekedMessage(
        offset=found.offset,
        payload=found.payload[:PREVIEW_BYTES],
        payload_size_bytes=len(found.payload),
        publish_time_us=found.publish_time_us,
        append_time_us=found.append_time_us,
        producer_name=found.producer_name,
        attributes=found.attributes,
        routing_key=found.routing_key,
    )


# --- looking ----------------------------------------------------------------------------------------------------


class Looked(NamedTuple):
    """What a page of messages shows."""

    lines: list[MessageLine]
    span: tuple[int, int]
    older: int | None = None
    newer: int | None = None
    found: SearchResult | None = None  # of a search


async def messages(site: Site, request: Request) -> Response:
    name, query = topic_of(request), request.query_params
    siblings = await site.gateway.parts(name.base if name.partition_number is not None else name)
    if siblings[0].startswith(f"{name}-part-"):  # a base has no messages of its own
        return RedirectResponse(topic_url(siblings[0], "messages", **query), 303)
    count = whole(query, "count", MESSAGES_DEFAULT, 1, MESSAGES_MAX)
    mode = mode_of(query)
    wanted = query_of(query)
    is_tail, filtered, time = query.get("tail") == "1", is_filtered(query), query.get("time", "").strip()
    if is_tail:
        async with site.gateway.searching:
            looked = await _tail(site, name, wanted, count, mode)
    elif filtered:
        first = whole(query, "offset", 0)
        async with site.gateway.searching:
            found = await search(await site.gateway.client(), name, wanted, first=first, found_max=count)
        lines = [MessageLine.of(peeked(each), mode) for each in found.messages]
        looked = Looked(lines, (found.first_kept, found.head), found=found)
    else:
        looked = await _page(site, name, query, count, mode)
    filters = {each: query.get(each, "").strip() for each in FILTERS}
    return site.show(
        request,
        "messages.html",
        active="topics",
        topic=name,
        lines=looked.lines,
        span=looked.span,
        offset=query.get("offset", "").strip() if filtered or not time else "",
        time=time,
        count=count,
        mode=mode,
        older=looked.older,
        newer=looked.newer,
        found=looked.found,
        filters=filters,
        is_filtered=filtered,
        tail=is_tail,
        siblings=siblings if len(siblings) > 1 else [],
        download_max=DOWNLOAD_FOUND_MAX,
        download_bytes_max=DOWNLOAD_BYTES_MAX,
    )


async def _page(site: Site, name: str, query: Mapping[str, str], count: int, mode: str) -> Looked:
    time = query.get("time", "").strip()
    offset: int | None = None
    if time:
        offset = await (await site.gateway.client()).find_offset(name, moment_of(time))
    elif query.get("offset", "").strip():
        offset = whole(query, "offset", 0)
    found = await site.gateway.ask(calls.peek(name, offset, count, PREVIEW_BYTES))
    lines = [MessageLine.of(each, mode) for each in found.messages]
    first = lines[0].message.offset if lines else offset or found.head
    following = lines[-1].message.offset + 1 if lines else min(first + count, found.head)
    return Looked(
        lines,
        (found.first_offset, found.head),
        older=max(found.first_offset, first - count) if first > found.first_offset else None,
        newer=following if following < found.head else None,
    )


async def _tail(site: Site, name: str, wanted: Query, count: int, mode: str) -> Looked:
    """The newest that match, newest first; the page asks again by itself.

    Looks at the last offsets only, at fewer if they are too large for one look, and never at older ones instead.
    """
    client = await site.gateway.client()
    head = (await client.describe_topic(name)).head
    for look in TAIL_LOOKS:
        found = await search(client, name, wanted, first=max(head - look, 0), end=head, found_max=look)
        if found.next_offset is None:
            break
    lines = [MessageLine.of(peeked(each), mode) for each in found.messages[-count:]]
    return Looked(list(reversed(lines)), (found.first_kept, found.head), found=found)


async def message(site: Site, request: Request) -> Response:
    """One, whole."""
    name = topic_of(request)
    offset = whole(request.path_params, "offset", 0)
    mode = mode_of(request.query_params)
    found = await site.gateway.ask(calls.peek(name, offset, 1, WHOLE_BYTES))
    line = MessageLine.of(found.messages[0], mode) if found.messages else None
    return site.show(
        request,
        "message.html",
        active="topics",
        topic=name,
        offset=offset,
        line=line,
        mode=mode,
        span=(found.first_offset, found.head),
    )


def mode_of(query: Mapping[str, str]) -> str:
    mode = query.get("as", "auto")
    return mode if mode in formats.MODES else "auto"


def is_filtered(query: Mapping[str, str]) -> bool:
    return any(query.get(each, "").strip() for each in FILTERS)


def query_of(query: Mapping[str, str]) -> Query:
    """Raises ConfigError. An attribute is a name, or name=value."""
    given = {each: query.get(each, "").strip() for each in (*FILTERS, "time")}
    attribute, equals, value = given["attribute"].partition("=")
    if equals and not attribute.strip():
        raise ConfigError("attribute", given["attribute"][:50], "a name, or name=value")
    return Query(
        key=given["key"] or None,
        text=given["text"] or None,
        attribute=attribute.strip() or None,
        value=value.strip() if equals else None,
        since=moment_of(given["time"]) if given["time"] else None,
        until=moment_of(given["until"], "until") if given["until"] else None,
    )


def moment_of(text: str, key: str = "time") -> datetime:
    """A time as people or a browser's field write it; without a zone it is UTC. Raises ConfigError."""
    try:
        time = datetime.fromisoformat(text.replace(" ", "T", 1))
    except ValueError:
        raise ConfigError(key, text[:50], "a time as 2026-11-15T09:00:00Z") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


# --- downloading --------------------------------------------------------------------------------------------------


async def download(site: Site, request: Request) -> Response:
    """A file of what matches from an offset on. Its name says which offsets were looked at; it begins there again."""
    name, query = topic_of(request), request.query_params
    kind = query.get("format", "ndjson")
    if kind not in DOWNLOADS:
        raise ConfigError("format", kind[:50], "ndjson or csv")
    wanted, first = query_of(query), whole(query, "offset", 0)
    async with site.gateway.searching:
        return await _file(site, name, kind, wanted, first)


async def _file(site: Site, name: TopicName, kind: str, wanted: Query, first: int) -> Response:
    client = await site.gateway.client()
    found = await search(client, name, wanted, first=first, found_max=DOWNLOAD_FOUND_MAX)
    kept, begin, looked_at, size = found.messages, found.first, found.looked_at, found.size_bytes
    while (
        found.next_offset is not None
        and len(kept) < DOWNLOAD_FOUND_MAX
        and looked_at < DOWNLOAD_LOOK_MAX
        and size < DOWNLOAD_BYTES_MAX
    ):
        found = await search(client, name, wanted, first=found.next_offset, found_max=DOWNLOAD_FOUND_MAX - len(kept))
        kept += found.messages
        looked_at += found.looked_at
        size += found.size_bytes
    text = await asyncio.to_thread(as_ndjson if kind == "ndjson" else as_csv, kept)
    file = f"{name.namespace}.{name.name}.{begin}-{max(found.end - 1, begin)}.{kind}"
    headers = {
        "content-disposition": f'attachment; filename="{safe_file_name(file)}"',
        "x-danube-next-offset": "" if found.next_offset is None else str(found.next_offset),
        "x-danube-messages": str(len(kept)),
    }
    media = "application/x-ndjson" if kind == "ndjson" else "text/csv; charset=utf-8"
    return Response(text, media_type=media, headers=headers)


def safe_file_name(name: str) -> str:
    """Nothing that ends the quotes of a header, or means a folder to any system."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "messages"


def as_ndjson(found: Sequence[FoundMessage]) -> str:
    """One object per line; a payload that is no text is base64."""
    return "".join(json.dumps(record_of(each), ensure_ascii=False) + "\n" for each in found)


def as_csv(found: Sequence[FoundMessage]) -> str:
    """With a line of names. What a spreadsheet would run as a formula gets an apostrophe in front; NDJSON is exact."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["offset", "published", "appended", "producer", "key", "attributes", "encoding", "payload"])
    for each in found:
        record = record_of(each)
        encoding = "base64" if "payload_base64" in record else "utf-8"
        payload = record.get("payload", record.get("payload_base64"))
        attributes = json.dumps(record["attributes"], ensure_ascii=False) if record["attributes"] else ""
        cells = [record["producer"], record["key"] or "", attributes, encoding, payload]
        writer.writerow([each.offset, record["published"], record["appended"], *map(_cell, cells)])
    return out.getvalue()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text


def record_of(found: FoundMessage) -> dict[str, Any]:
    record: dict[str, Any] = {
        "offset": found.offset,
        "published": formats.moment_exact(found.publish_time_us),
        "appended": formats.moment_exact(found.append_time_us),
        "producer": found.producer_name,
        "key": found.routing_key,
        "attributes": found.attributes,
    }
    try:
        record["payload"] = found.payload.decode()
    except UnicodeDecodeError:
        record["payload_base64"] = base64.b64encode(found.payload).decode()
    return record


# --- one by hand ----------------------------------------------------------------------------------------------------


async def publish_form(site: Site, request: Request) -> Response:
    name = topic_of(request)
    return site.show(request, "publish.html", active="topics", topic=name)


async def publish(site: Site, request: Request) -> Response:
    """Sends one message, waits for its receipt, and shows the message where it is."""
    name = topic_of(request)
    form = await form_of(request)
    try:
        payload = payload_of(form)
        attributes = attributes_of(form.get("attributes", ""))
        said = await send_one(site, name, payload, form.get("key", "") or None, attributes)
    except DanubeError as error:
        return site.back(topic_url(name, "publish"), failed=sentence_of(error))
    return said


async def send_one(
    site: Site, name: TopicName, payload: bytes, key: str | None, attributes: Mapping[str, str]
) -> Response:
    client = await site.gateway.client()
    [first, *_] = await site.gateway.parts(name)
    is_reliable = (await site.gateway.ask(calls.describe_topic(first))).delivery == RELIABLE
    async with client.producer(name, create=False, reliable=is_reliable) as producer:
        receipt = await producer.send(payload, key=key, attributes=dict(attributes))
    await site.gateway.note("PublishMessage", receipt.topic, offset=receipt.offset if is_reliable else None)
    if not is_reliable:
        return site.back(topic_url(name), said="It was sent. The topic is not reliable: only who is connected gets it.")
    stored = topic_url(receipt.topic, "messages", str(receipt.offset))
    return site.back(stored, said=f"It is stored: offset {receipt.offset:,} of {receipt.topic}.")


def payload_of(form: Mapping[str, str]) -> bytes:
    """Raises BadRequest."""
    text = form.get("payload", "").replace("\r\n", "\n")  # what a browser makes of a line's end
    if form.get("encoding", "text") != "base64":
        return text.encode()
    try:
        return base64.b64decode(text.strip().encode(), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("the payload is no base64: use letters, digits, + and /, and = at its end") from None


def attributes_of(text: str) -> dict[str, str]:
    """name=value, one to a line. Raises BadRequest."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise BadRequest(f"{line[:50]!r} is no attribute: write name=value, one to a line")
        found[name.strip()] = value.strip()
    return found
