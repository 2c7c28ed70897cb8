"""Dead letters back to the topics they came from: chosen by a selection, each sent once, however often it is tried.

    outcome = await redrive(client, "/default/orders-dlq", Selection(subscription="billing"), dry_run=True)
    outcome = await redrive(client, "/default/orders-dlq", Selection(subscription="billing"))

A dead-letter topic is only read, never changed: what a selection leaves out is there for the next one. What was sent is
written to a topic beside it, the ledger (ledger.py):

    publisher opened ─► "send" in the ledger ─► one batch to the topic ─► receipt ─► "sent" in the ledger
    (the fence)         └──── a run that finds "send" without "sent": fence, read the topic from `head` on, see ─┘

Opening a publisher refuses whatever an older one of the same name still has on its way, and a redriven message carries
the dead letter's offset (`request_id` and the attribute `x-redrive-offset`). So what is read behind the fence is all
that will ever have arrived, wherever the run before was killed. Two concurrent runs: the ledger takes one writer, and a
run whose "send" is not the ledger's next record stops before it sends.

Not covered: a topic's broker that died with its disk, while a batch had no receipt yet. If its disk may have the batch
(an orphan range), redriving is refused until the broker is back or the range was discarded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from pydanube.admin.ledger import Ledger, RedriveInterrupted, RedriveUncertain, SendRecord, mark_of
from pydanube.admin.letters import ATTEMPTS, REASON, Letter, Selection, letters_of, offsets_of
from pydanube.client.client import NAME_SIZE_MAX_BYTES, Client
from pydanube.client.publisher import Publisher
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.names import TopicName, partition_of_key
from pydanube.errors import ConfigError, DanubeError, TopicUnknown
from pydanube.formats.batch import Envelope, encode, rows_of

log = logging.getLogger(__name__)

REDRIVE_TOPIC: Final = "x-redrive-topic"
REDRIVE_OFFSET: Final = "x-redrive-offset"
# How the message failed is not true of the copy; where it came from is.
FAILURE: Final = frozenset({REASON, ATTEMPTS, "x-poison-policy"})
CHUNK_MESSAGES: Final = 500
CHUNK_BYTES: Final = 2 * 1024 * 1024
SAMPLES_MAX: Final = 10
REASONS_MAX: Final = 20
TRIES: Final = 8
PAUSE_SECONDS: Final = 0.25
OTHER: Final = "other reasons"
NO_REASON: Final = "no reason given"


@dataclass(slots=True)
class Outcome:
    """What was found and sent so far; with `dry_run`, `selected` is what would be sent."""

    topic: str
    dry_run: bool
    first: int = 0  # offsets that were, or will be, looked at: [first, end)
    end: int = 0
    at: int = 0  # looked at up to here
    looked_at: int = 0
    left_out: int = 0  # by the selection
    sent_before: int = 0  # by earlier runs
    homeless: int = 0  # selected, but nothing says where they came from: `to` would
    selected: int = 0
    sent: int = 0
    by_target: dict[str, int] = field(default_factory=dict)  # of the selected
    by_reason: dict[str, int] = field(default_factory=dict)
    samples: list[Letter] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # topics that take none, and why

    def take(self, letter: Letter, target: str) -> None:
        self.selected += 1
        self.by_target[target] = self.by_target.get(target, 0) + 1
        reason = letter.reason or NO_REASON
        if reason not in self.by_reason and len(self.by_reason) >= REASONS_MAX:
            reason = OTHER
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        if len(self.samples) < SAMPLES_MAX:
            self.samples.append(letter)


OnProgress: TypeAlias = Callable[[Outcome], None]
Step: TypeAlias = Callable[[str], None]


async def redrive(
    client: Client,
    topic: str,
    selection: Selection | None = None,
    *,
    to: str | None = None,
    dry_run: bool = False,
    limit: int | None = None,
    progress: OnProgress = lambda _: None,
    step: Step = lambda _: None,
) -> Outcome:
    """Sends the dead letters of `topic` that `selection` takes back where they came from, or all of them to `to`.

    Only what is there when it begins; at most `limit` of them. A message that any earlier run sent is not sent again.
    `progress` is called now and then. A topic that refuses its messages is in `failures`; the others go on. Safe to
    cancel or kill at any moment: the next run goes on. Raises RedriveInterrupted and RedriveUncertain.

    `step` is for tests that die at a certain step.
    """
    name = TopicName(topic)
    wanted = selection or Selection()
    info = await client.describe_topic(name)
    if info.partitions:
        raise ConfigError("topic", topic, f"one partition of it, as {name.partition_name(0)}")
    if to is not None and TopicName(to).base == name.base:
        raise ConfigError("to", to, "another topic than the dead letters'")
    targets = None if to is None else [*await _parts(client, TopicName(to))]
    outcome = Outcome(name, dry_run)
    outcome.first = outcome.at = min(max(info.first_offset, wanted.first), info.head)
    outcome.end = max(outcome.first, min(info.head, info.head if wanted.end is None else wanted.end))
    async with AsyncExitStack() as stack:
        ledger = Ledger(client, name)
        await ledger.read()
        sending: Sending | None = None
        if dry_run:
            await ledger.check_identity()
            for record in list(ledger.pending.values()):
                for part in await _arrived(client, name, record):
                    ledger.done.add(*part)
        else:
            sending = Sending(client, ledger, outcome, step)
            stack.push_async_callback(sending.close)
            await sending.begin()
        async for letters in letters_of(client, name, outcome.first, outcome.end):
            chosen: dict[str, list[Letter]] = {}
            for letter in letters:
                if limit is not None and outcome.selected >= limit:
                    break
                _sort(letter, wanted, ledger.done, targets, outcome, chosen)
            if sending is not None:
                for target, found in chosen.items():
                    await sending.send(target, found, lambda: progress(outcome))
            outcome.at = letters[-1].offset + 1
            progress(outcome)
            if limit is not None and outcome.selected >= limit:
                break
        else:
            outcome.at = outcome.end
    return outcome


async def discard(client: Client, topic: str, selection: Selection) -> int:
    """Writes down that the dead letters of `topic` which `selection` takes are done with. Returns how many it were.

    No redrive sends them from now on. They are not removed from the topic: a log loses its oldest messages, by
    retention, and none from its middle. What was sent or discarded before is not counted again. Raises
    RedriveInterrupted and RedriveUncertain, as `redrive`.
    """
    name = TopicName(topic)
    info = await client.describe_topic(name)
    if info.partitions:
        raise ConfigError("topic", topic, f"one partition of it, as {name.partition_name(0)}")
    first = max(info.first_offset, selection.first)
    end = info.head if selection.end is None else min(info.head, selection.end)
    count = 0
    ledger = Ledger(client, name)
    sending = Sending(client, ledger, Outcome(name, dry_run=False), lambda _: None)
    try:
        await sending.begin()
        async for letters in letters_of(client, name, first, end):
            chosen = [each for each in letters if selection.takes(each) and each.offset not in ledger.done]
            if chosen:
                await ledger.discard(chosen)
                count += len(chosen)
    finally:
        await sending.close()
    return count


def _sort(
    letter: Letter,
    wanted: Selection,
    done: OffsetRanges,
    targets: Sequence[str] | None,
    outcome: Outcome,
    chosen: dict[str, list[Letter]],
) -> None:
    outcome.looked_at += 1
    if not wanted.takes(letter):
        outcome.left_out += 1
    elif letter.offset in done:
        outcome.sent_before += 1
    elif targets is None and letter.original_topic is None:
        outcome.homeless += 1
    else:
        target = letter.original_topic if targets is None else _one_of(targets, letter)
        assert target is not None
        outcome.take(letter, target)
        chosen.setdefault(target, []).append(letter)


def _one_of(targets: Sequence[str], letter: Letter) -> str:
    """A partition by key, as every client chooses; without a key by the offset, so that a second run agrees."""
    if len(targets) == 1:
        return targets[0]
    key = letter.message.routing_key
    return targets[letter.offset % len(targets) if key is None else partition_of_key(key, len(targets))]


async def _parts(client: Client, topic: TopicName) -> list[TopicName]:
    partitions = (await client.lookup(topic)).partitions
    return topic.partition_names(partitions) if partitions else [topic]


# --- sending --------------------------------------------------------------------------------------------


class Sending:
    """Publishers of the topics that get messages, opened when the first is sent."""

    def __init__(self, client: Client, ledger: Ledger, outcome: Outcome, step: Step) -> None:
        self._client = client
        self._step = step
        self._ledger = ledger
        self._outcome = outcome
        self._topic = outcome.topic
        self._publishers: dict[str, Publisher] = {}

    async def begin(self) -> None:
        """Takes the ledger, and finds out what interrupted runs have sent."""
        await self._ledger.open()
        await self._ledger.read()
        if not await self._ledger.check_identity():
            await self._ledger.write(b'{"forget": true}')
        for record in list(self._ledger.pending.values()):
            await self._settle(record)

    async def close(self) -> None:
        for target in list(self._publishers):
            await self._drop(target)
        await self._ledger.close()

    async def send(self, target: str, letters: Sequence[Letter], told: Callable[[], None]) -> None:
        for chunk in _chunks(letters):
            if target in self._outcome.failures:
                return
            await self._send_patiently(target, chunk)
            told()

    async def _send_patiently(self, target: str, chunk: Sequence[Letter]) -> None:
        for attempt in range(TRIES):
            record: SendRecord | None = None
            try:
                publisher = await self._publisher(target)
                head = (await self._client.describe_topic(target)).head
                left = [letter for letter in chunk if letter.offset not in self._ledger.done]
                if not left:
                    return
                pairs = tuple((part.first, part.end) for part in OffsetRanges((o, o + 1) for o in offsets_of(left)))
                record = SendRecord(self._ledger.next_number, target, head, pairs, mark_of(left[-1]))
                self._step("write send")
                await self._ledger.write(record.to_bytes())
                self._step("send")
                await publisher.send(encode(rows_of([self._copy(letter) for letter in left]), topic=target))
                await publisher.flush()
                self._step("write sent")
                await self._write_sent(record, pairs)
                self._outcome.sent += len(left)
                return
            except (RedriveInterrupted, RedriveUncertain):
                raise
            except DanubeError as error:
                log.warning("redriving is refused", extra={"to": target, "why": str(error)})
                await self._drop(target)
                if record is not None and record.number in self._ledger.pending:
                    self._outcome.sent += await self._settle(record)
                if not error.retryable or attempt == TRIES - 1:
                    self._outcome.failures[target] = str(error)
                    return
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)

    def _copy(self, letter: Letter) -> Envelope:
        kept = {name: value for name, value in letter.message.attributes.items() if name not in FAILURE}
        return letter.message._replace(
            producer_name=producer_name(self._topic),
            attributes={**kept, REDRIVE_TOPIC: self._topic, REDRIVE_OFFSET: str(letter.offset)},
            request_id=letter.offset,
        )

    async def _publisher(self, target: str) -> Publisher:
        publisher = self._publishers.get(target)
        if publisher is None:
            publisher = self._client.publisher(target, producer_name(self._topic))
            self._publishers[target] = await publisher.__aenter__()
        return publisher

    async def _drop(self, target: str) -> None:
        publisher = self._publishers.pop(target, None)
        if publisher is not None:
            # Told that there was an error it waits for nothing; what is on its way is the fence's business.
            await publisher.__aexit__(DanubeError, DanubeError("given up"), None)

    async def _settle(self, record: SendRecord) -> int:
        """Finds out how much of a "send" arrived, behind the fence, and writes it down."""
        for attempt in range(TRIES):
            try:
                await self._publisher(record.to)
                arrived = OffsetRanges(await _arrived(self._client, self._topic, record))
                break
            except TopicUnknown:
                arrived = OffsetRanges()  # the topic was deleted, with all that was in it
                break
            except DanubeError as error:
                if not error.retryable or attempt == TRIES - 1:
                    raise
                await self._drop(record.to)
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        await self._write_sent(record, [(part.first, part.end) for part in arrived])
        return arrived.count

    async def _write_sent(self, record: SendRecord, pairs: Sequence[tuple[int, int]]) -> None:
        await self._ledger.write(json.dumps({"sent": record.number, "offsets": pairs}).encode())


def producer_name(topic: str) -> str:
    """What redriven messages have as their producer; one per dead-letter topic, because the name is the fence."""
    name = f"redrive:{topic}"
    return name if len(name) <= NAME_SIZE_MAX_BYTES else f"redrive:{hashlib.sha256(topic.encode()).hexdigest()}"


def _chunks(letters: Sequence[Letter]) -> list[list[Letter]]:
    """One batch each, in order."""
    chunks: list[list[Letter]] = []
    size = CHUNK_BYTES
    for letter in letters:
        own = len(letter.message.payload) + 256
        if not chunks or size + own > CHUNK_BYTES or len(chunks[-1]) == CHUNK_MESSAGES:
            chunks.append([])
            size = 0
        chunks[-1].append(letter)
        size += own
    return chunks


async def _arrived(client: Client, topic: str, record: SendRecord) -> list[tuple[int, int]]:
    """Which dead letters of a "send" are in its topic. Raises RedriveUncertain."""
    info = await client.describe_storage(record.to)
    for first, end in info.orphans:
        if end > record.head:
            raise RedriveUncertain(
                record.to, f"offsets {first} to {end - 1} are on a broker that is away: start it, or give them up with "
                f"`danube admin topics orphan discard {record.to} {first}`, then run it again"
            )  # fmt: skip
    if info.first_offset > record.head:
        raise RedriveUncertain(record.to, f"retention removed offsets {record.head} to {info.first_offset - 1}")
    wanted = OffsetRanges(record.offsets)
    found = OffsetRanges()
    if info.head > record.head:
        name = pa.scalar(producer_name(topic), pa.string())
        async for rows in client.fetch(record.to, record.head, info.head):
            ours = rows.filter(pc.equal(rows.column("producer_name"), name))
            for offset in ours.column("request_id").to_pylist():
                if offset in wanted:
                    found.add(offset, offset + 1)
    return [(part.first, part.end) for part in found]
