"""Where the messages of many topics are: one question to each broker at once; what has changed comes back.

    round    topics whose broker is known ─► that broker ┐
             the others ──────────────────► any broker   ├─► infos · addresses of others · errors
                                                         ┘
             what was redirected goes into the next round at once; what time may heal, after a pause

A topic that was described once is asked for with the tag of what is known: a broker that has the same says so in a few
bytes. Brokers that are too old for the question (they do not name it in their Welcome) are asked topic by topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from pydanube.client.brokers import Brokers
from pydanube.client.connection import BrokerConnection
from pydanube.client.messages import StorageInfo
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, NotServed, ProtocolViolation, Unavailable
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire

KNOWN_MAX: Final = 10_000  # topics that are remembered; one more forgets all
ASKED_MAX: Final = 5_000  # topics in one question
REDIRECTS_MAX: Final = 4  # without a pause: a topic that moves is named by two brokers, then by one
AT_ONCE: Final = 16  # questions to a broker that takes topics one by one

Found: TypeAlias = StorageInfo | DanubeError
DescribeOne: TypeAlias = Callable[[TopicName], Awaitable[StorageInfo]]


@dataclass(slots=True)
class _Call:
    """One call of `describe`: what it asks for, and the answers up to now."""

    topics: Sequence[TopicName]
    found: dict[str, Found] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)  # bases whose partitions a broker has counted in this call


class Storages:
    """What brokers have said of topics' storage, and where these are. Of one client."""

    def __init__(self, brokers: Brokers, describe_one: DescribeOne) -> None:
        self._brokers = brokers
        self._describe_one = describe_one
        self._known: dict[str, StorageInfo] = {}
        self._routes: dict[str, str] = {}  # topic to the URL of the broker that had it last
        self._partitions: dict[str, int] = {}  # of a base; a topic without partitions is not here

    async def describe(self, topics: Sequence[TopicName], seconds: float) -> dict[TopicName, Found]:
        """Each topic, or each partition of it, in order. An error stands for a topic that time will not bring.

        Raises DeadlineExceeded, which says what a broker said last.
        """
        call = _Call(topics)

        async def attempt() -> None:
            for _ in range(REDIRECTS_MAX):
                asked = self._unanswered(call)
                if not asked or not await self._round(asked, call):
                    break
            waiting = [call.found.pop(name) for name in list(call.found) if _may_heal(call.found[name])]
            if left := self._unanswered(call):
                error = next((each for each in waiting if isinstance(each, DanubeError)), None)
                raise error or NotServed(left[0], "no broker said where it is")

        await self._brokers.retry_until(f"describe_storages of {len(topics)} topics", seconds, attempt)
        return {name: call.found[name] for topic in topics for name in self._parts(topic)}

    def _parts(self, topic: TopicName) -> list[TopicName]:
        count = self._partitions.get(topic, 0)
        return topic.partition_names(count) if count else [topic]

    def _unanswered(self, call: _Call) -> list[TopicName]:
        """A base comes before its partitions until they have been counted: there may be more than before."""
        wanted: dict[TopicName, None] = {}
        for topic in call.topics:
            if topic in self._partitions and topic not in call.counted:
                wanted[topic] = None
            wanted.update((name, None) for name in self._parts(topic) if name not in call.found)
        return list(wanted)

    async def _round(self, asked: Sequence[TopicName], call: _Call) -> bool:
        """Asks every broker for its topics, at once. Whether something is to be asked elsewhere."""
        groups: dict[str, list[TopicName]] = {}
        for name in asked:
            groups.setdefault(self._routes.get(name, ""), []).append(name)
        links = await asyncio.gather(*(self._link(url) for url in groups))
        together: dict[BrokerConnection, list[TopicName]] = {}
        for link, names in zip(links, groups.values(), strict=True):
            together.setdefault(link, []).extend(names)
        asks = []
        for link, names in together.items():
            # Who is asked for a base tells all its partitions.
            told = {part for name in names if name in self._partitions for part in self._parts(name)}
            alone = [name for name in names if name not in told]
            asks += [self._ask(link, alone[at : at + ASKED_MAX], call) for at in range(0, len(alone), ASKED_MAX)]
        return any(await asyncio.gather(*asks))

    async def _link(self, url: str) -> BrokerConnection:
        if url:
            try:
                return await self._brokers.connection(self._brokers.named(url))
            except Unavailable:  # its topics are somewhere else by now, or will be
                self._forget(url)
        return await self._brokers.any()

    def _forget(self, url: str) -> None:
        self._routes = {topic: where for topic, where in self._routes.items() if where != url}

    async def _ask(self, link: BrokerConnection, names: Sequence[TopicName], call: _Call) -> bool:
        """Whether something is to be asked elsewhere."""
        if "describe_storages" not in link.welcome.result().commands:
            await self._ask_one_by_one(link, names, call)
            return False
        question = pb.StorageQuestion(topics=names)
        for name in names:
            for part in self._parts(name):
                known = self._known.get(part)
                if known is not None and known.tag and self._routes.get(part) in (None, link.url):
                    question.known.add(topic=part, tag=known.tag)
        command = pb.Command(describe_storages=pb.DescribeStorages())
        try:
            frame = await link.request(command, "storage_infos", body=question.SerializeToString())
        except Unavailable as error:
            self._forget(link.url)
            self._brokers.deprioritize(link.url)
            call.found.update({name: error for name in names if name not in self._partitions})
            return False
        try:
            answer = pb.StorageAnswer.FromString(bytes(frame.body))
        except DecodeError as error:
            raise ProtocolViolation("the body of storage_infos is no StorageAnswer") from error
        return self._take(link, answer, call)

    def _take(self, link: BrokerConnection, answer: pb.StorageAnswer, call: _Call) -> bool:
        redirected = bool(answer.left)
        for info in answer.infos:
            known = self._known.get(info.topic)
            if info.unchanged and (known is None or known.tag != info.tag):
                raise ProtocolViolation(f"{info.topic} is said to be unchanged, and was never described")
            if len(self._known) >= KNOWN_MAX and known is None:
                self._known.clear()
            call.found[info.topic] = self._known[info.topic] = StorageInfo.of(info, known)
            self._routes[info.topic] = link.url
            self._partitions.pop(info.topic, None)
        for name in answer.left:
            self._routes[name] = link.url
        for located in answer.located:
            if located.partitions:
                self._partitions[located.topic] = located.partitions
                call.counted.add(located.topic)
                redirected = True
            elif located.topic not in call.found and self._routes.get(located.topic) != located.stream_url:
                self._routes[located.topic] = located.stream_url
                redirected = True
        for each in answer.errors:
            self._routes.pop(each.topic, None)
            error = from_wire(each.error)
            if not error.retryable:
                self._known.pop(each.topic, None)
                self._partitions.pop(each.topic, None)
            call.found.setdefault(each.topic, error)
        return redirected

    async def _ask_one_by_one(self, link: BrokerConnection, names: Sequence[TopicName], call: _Call) -> None:
        """As clients did before the question for many. Each topic's broker is found by a lookup."""
        turn = asyncio.Semaphore(AT_ONCE)
        wanted: dict[TopicName, None] = {}
        for name in names:
            try:
                frame = await link.request(pb.Command(lookup=pb.Lookup(topic=name)), "located")
            except DanubeError as error:
                call.found[name] = error
                continue
            count = frame.command.located.partitions
            if count:
                self._partitions[name] = count
                call.counted.add(name)
            wanted.update((part, None) for part in (name.partition_names(count) if count else [name]))

        async def one(name: TopicName) -> None:
            async with turn:
                try:
                    call.found[name] = await self._describe_one(name)
                except DanubeError as error:
                    call.found[name] = error

        await asyncio.gather(*(one(name) for name in wanted if name not in call.found))


def _may_heal(found: Found) -> bool:
    return isinstance(found, DanubeError) and found.retryable
