"""Which dead letters of a topic were sent or discarded: a topic beside it, `{dead-letter topic}-redriven`.

    {"send": 7, "to": "/default/orders", "head": 4711, "offsets": [[0, 3], [5, 9]], "last": [8, 1763…, 2868…]}
    {"sent": 7, "offsets": [[0, 3], [5, 9]]}
    {"sent": 0, "discarded": true, "offsets": [[4, 5]], "last": [4, 1763…, 2868…]}

A "send" is written before its batch, "sent" after its receipt; redrive.py has the order and why it is safe. Discarding
a dead letter writes a line of the third kind: no redrive sends it any more, and pages leave it out. Its bytes stay in
the dead-letter topic, as those of every message do, until retention or the topic's deletion takes them; a consumer of
the dead-letter topic still gets it. (A version that does not know `discarded` reads it as sent: the same effect.)

If ledger and dead-letter topic are not kept equally long, what was redriven is forgotten with the ledger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any, Final, NamedTuple
from zlib import crc32

from pydanube.admin.letters import Letter, letters_of, offsets_of
from pydanube.client.client import NAME_SIZE_MAX_BYTES, Client
from pydanube.client.producer import Producer
from pydanube.core.declared import says
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, DataDamaged, ProducerExists, Refused, TopicUnknown
from pydanube.formats.batch import messages

LEDGER_SUFFIX: Final = "-redriven"


@says("{topic}: {why}; run it again later, it goes on where this one stopped")
class RedriveInterrupted(Refused):
    """Another run redrives the same topic, or the ledger is away: this run stops before it sends anything twice."""

    topic: str
    why: str


@says("it cannot be read what an interrupted redrive sent to {topic}: {why}")
class RedriveUncertain(DataDamaged):
    """Whether messages of an interrupted run arrived cannot be read now."""

    topic: str
    why: str


class SendRecord(NamedTuple):
    """A "send" of the ledger."""

    number: int
    to: str
    head: int
    offsets: tuple[tuple[int, int], ...]
    last: tuple[int, int, int]  # offset, publish time and checksum of the last dead letter in it

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SendRecord:
        pairs = tuple((int(first), int(end)) for first, end in record["offsets"])
        offset, time, crc = record["last"]
        return cls(int(record["send"]), str(record["to"]), int(record["head"]), pairs, (offset, time, crc))

    def to_bytes(self) -> bytes:
        record = {"send": self.number, "to": self.to, "head": self.head, "offsets": self.offsets, "last": self.last}
        return json.dumps(record).encode()


class Ledger:
    """Which dead letters were sent, and which may have been."""

    def __init__(self, client: Client, topic: TopicName) -> None:
        self._client = client
        self._topic = topic
        self.name = ledger_name(topic)
        self.done = OffsetRanges()  # sent, or discarded
        self.discarded = OffsetRanges()
        self.pending: dict[int, SendRecord] = {}
        self.next_offset = 0  # of the ledger
        self.next_number = 1
        self._last: tuple[int, int, int] | None = None
        self._producer: Producer | None = None

    async def read(self) -> bool:
        """What is new in it. Returns whether anything was."""
        try:
            info = await self._client.describe_topic(self.name)
        except TopicUnknown:
            return False
        before, first = self.next_offset, max(self.next_offset, info.first_offset)
        if first < info.head:
            async for _, _, batches in self._client.fetch(self.name, first, info.head).stored():
                for batch in batches:
                    for offset, message in enumerate(messages(batch), batch.header.base_offset):
                        if first <= offset < info.head:
                            self._learn(offset, message.payload)
        self.next_offset = max(self.next_offset, info.head)
        return self.next_offset > before

    def _learn(self, offset: int, payload: bytes) -> None:
        try:
            record = json.loads(payload)
            if "forget" in record:
                self._forget()
            elif "send" in record:
                send = SendRecord.of(record)
                self.pending[send.number] = send
                self.next_number = max(self.next_number, send.number + 1)
                self._last = max(self._last or send.last, send.last)
            else:
                self.pending.pop(record["sent"], None)
                for first, end in record["offsets"]:
                    self.done.add(first, end)
                    if record.get("discarded"):
                        self.discarded.add(first, end)
                if "last" in record:
                    offset_of_last, time, crc = record["last"]
                    self._last = max(self._last or (0, 0, 0), (offset_of_last, time, crc))
        except (ValueError, KeyError, TypeError) as error:
            why = f"offset {offset} of {self.name} is no record of a redrive ({error}); delete that topic only if every"
            raise RedriveUncertain(self._topic, f"{why} dead letter may be sent again") from error

    async def check_identity(self) -> bool:
        """Whether the dead letters are those the ledger is about: the topic may have been deleted and made anew.

        If they are not, nothing was sent.
        """
        if self._last is None:
            return True
        offset, time, crc = self._last
        info = await self._client.describe_topic(self._topic)
        if info.first_offset <= offset < info.head:
            async for found in letters_of(self._client, self._topic, offset, offset + 1):
                if mark_of(found[0]) == (offset, time, crc):
                    return True
        elif offset < info.first_offset:
            return True  # retention took it
        self._forget()
        return False

    def _forget(self) -> None:
        self.done.clear()
        self.discarded.clear()
        self.pending.clear()
        self._last = None

    async def open(self) -> None:
        """From here on this run alone writes it. Raises RedriveInterrupted."""
        producer = self._client.producer(self.name, name=f"redrive-{token_hex(4)}", exclusive=True)
        try:
            self._producer = await producer.open()
        except ProducerExists:
            raise RedriveInterrupted(self._topic, "another redrive of it is running") from None

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()

    async def discard(self, letters: Sequence[Letter]) -> None:
        """To be called while it is open. Raises RedriveInterrupted."""
        pairs = [(part.first, part.end) for part in OffsetRanges((o, o + 1) for o in offsets_of(letters))]
        record = {"sent": 0, "discarded": True, "offsets": pairs, "last": mark_of(letters[-1])}
        await self.write(json.dumps(record).encode())

    async def write(self, payload: bytes) -> None:
        """Raises RedriveInterrupted if it is not the record behind the last one we know."""
        assert self._producer is not None, "it is open"
        try:
            receipt = await self._producer.send(payload)
        except DanubeError as error:
            raise RedriveInterrupted(self._topic, f"{self.name} cannot be written: {error}") from error
        if receipt.offset != self.next_offset:
            raise RedriveInterrupted(self._topic, f"somebody else wrote to {self.name}")
        self._learn(receipt.offset, payload)
        self.next_offset += 1


def ledger_name(topic: str) -> str:
    """The topic beside a dead-letter topic that says what of it was redriven."""
    name = TopicName(topic)
    if len(name.name.encode()) + len(LEDGER_SUFFIX) > NAME_SIZE_MAX_BYTES:
        return TopicName.of(name.namespace, f"{hashlib.sha256(name.encode()).hexdigest()}{LEDGER_SUFFIX}")
    return TopicName(f"{topic}{LEDGER_SUFFIX}")


def mark_of(letter: Letter) -> tuple[int, int, int]:
    return letter.offset, letter.message.publish_time, crc32(letter.message.payload)
