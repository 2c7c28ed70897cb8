"""What the log may give out, and what the store has confirmed: idle topics give offsets back, publishes ask for more.

Whatever the order: every offset that is acknowledged lies below the stored end in that moment, so that the next owner,
who begins at the stored end, gives it to nobody else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from pydanube.broker.ownership import look
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.ownership import RESERVE_OFFSETS_MIN
from pydanube.core.names import BrokerId
from pydanube.errors import DanubeError, Unreachable
from pydanube.ports import Compare, Delete, Put, Revision
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, one_topic, publish, settle, simulated

KEY = keys.reserve(ORDERS)
Compares = Sequence[Compare]
Operations = Sequence[Put | Delete]


async def reserved(host: BrokerFixture) -> int:
    value = await host.metadata.value(KEY)
    return 0 if value is None else int(json.loads(value)["end"])


def written_end(operations: Operations) -> int | None:
    """Where a transaction puts the end of the reservation."""
    ends = [json.loads(each.value)["end"] for each in operations if isinstance(each, Put) and each.key == KEY]
    return ends[0] if ends else None


class Gate:
    """Holds back transactions that write a reservation, before or behind the store, until it is opened."""

    def __init__(
        self, host: BrokerFixture, holds: Callable[[int], bool], *, behind: bool = False, lost: bool = False
    ) -> None:
        self.open = asyncio.Event()
        self.met = 0
        transact = host.metadata.transact

        async def held(compares: Compares, operations: Operations) -> Revision | None:
            end = written_end(operations)
            if end is None or not holds(end):
                return await transact(compares, operations)
            self.met += 1
            if not behind:
                await self.open.wait()
            revision = await transact(compares, operations)
            if behind:
                await self.open.wait()
            if lost:
                raise Unreachable("metadata", "the answer was lost")
            return revision

        host.metadata.transact = held  # type: ignore[method-assign]

        def heal() -> None:
            self.open.set()
            host.metadata.transact = transact  # type: ignore[method-assign]

        self.heal = heal


def is_extension(end: int) -> bool:
    return end > RESERVE_OFFSETS_MIN


def is_rest(end: int) -> bool:
    return end <= RESERVE_OFFSETS_MIN


async def check(host: BrokerFixture, topic: Topic) -> None:
    """What an owner that takes over now would do collides with nothing that was acknowledged, or will be."""
    end = await reserved(host)
    assert end >= topic.log.head
    assert (topic.log.reserved_end or 0) <= max(end, topic.log.head)
    seen = await look(host.metadata, ORDERS, BrokerId(99))
    assert seen.start.offset is not None and seen.start.offset >= topic.log.head
    if topic.log.head:
        assert seen.leaves is not None and seen.leaves.end >= topic.log.head


async def ended(*tasks: asyncio.Task[object]) -> None:
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert not isinstance(result, BaseException) or isinstance(result, DanubeError | asyncio.CancelledError), result


@simulated
async def test_a_publish_beside_a_rest_that_waits_for_another_topics_commit_is_below_the_stored_end() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    assert await publish(topic, "a", "b") == [0, 1]
    lock = topic.log.between_groups()
    await lock.acquire()  # another topic's commit is in flight
    resting = asyncio.create_task(topic.release_reservation())
    await settle()
    gate = Gate(host, is_extension)  # the store takes a moment
    producing = asyncio.create_task(publish(topic, "c"))
    await settle()
    lock.release()
    await settle()
    gate.open.set()
    assert await producing == [2]
    await resting
    await check(host, topic)
    host.kill()
    topic = await find_topic(await host.boot())
    assert await publish(topic, "d") == [3], "and it is the next, for the log has the others"


@pytest.mark.parametrize(
    ("slow", "behind", "lost", "cancelled"),
    [
        each
        for each in product(("rest", "extension"), (False, True), (False, True), ("", "rest", "extension"))
        if not (each[2] and each[3])
    ],
)
@simulated
async def test_whatever_is_slow_lost_or_cancelled_nothing_is_given_out_beyond_the_stored_end(
    slow: str, behind: bool, lost: bool, cancelled: str
) -> None:
    """A rest and an extension, each held before or behind the store, with an answer or without, cancelled or not."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish(topic, "a", "b")
    lock = topic.log.between_groups()
    await lock.acquire()
    resting = asyncio.create_task(topic.release_reservation())
    await settle()
    gate = Gate(host, is_rest if slow == "rest" else is_extension, behind=behind, lost=lost)
    producing = asyncio.create_task(publish(topic, "c"))
    await settle()
    lock.release()
    await settle()
    assert (topic.log.reserved_end or 0) <= max(await reserved(host), topic.log.head)
    if cancelled == "rest":
        resting.cancel()
    elif cancelled == "extension":
        await topic._reservation.stop()
        topic._reservation.need(0)
    await settle()
    assert (topic.log.reserved_end or 0) <= max(await reserved(host), topic.log.head)
    gate.heal()
    await asyncio.sleep(1.0)
    assert await producing == [2]
    await check(host, topic)
    await ended(resting)
    assert await publish(topic, "d") == [3]
    await check(host, topic)


@simulated
async def test_a_rest_whose_write_comes_late_does_not_take_back_what_was_reserved_since() -> None:
    """Its answer was lost, and so was the request, for a while: the network delivers it behind the next extension."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish(topic, "a", "b")
    transact = host.metadata.transact
    late: list[tuple[Compares, Operations]] = []

    async def delayed(compares: Compares, operations: Operations) -> Revision | None:
        end = written_end(operations)
        if end is not None and is_rest(end):
            late.append((compares, operations))
            raise Unreachable("metadata", "no answer")
        return await transact(compares, operations)

    host.metadata.transact = delayed  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        await topic.release_reservation()
    assert await publish(topic, "c") == [2]
    for each in late:
        assert await transact(*each) is None
    await check(host, topic)


@simulated
async def test_a_rest_that_fails_leaves_a_topic_that_can_be_published_to() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish(topic, "a")
    host.metadata.away = True
    with pytest.raises(Unreachable):
        await topic.release_reservation()
    assert (topic.log.reserved_end, await reserved(host), topic.has_doubt) == (1, RESERVE_OFFSETS_MIN + 1, True)
    sending = asyncio.create_task(publish(topic, "b"))
    await asyncio.sleep(5)
    assert not sending.done(), "nothing beyond what was given back, until the store confirms it"
    host.metadata.away = False
    assert await sending == [1]
    await check(host, topic)


@simulated
async def test_an_idle_topic_rests_and_an_awaited_one_does_not() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish(topic, "a")
    await topic.release_reservation()
    assert await reserved(host) == topic.log.reserved_end == 1
    gate = Gate(host, is_extension)
    sending = asyncio.create_task(publish(topic, "b"))
    await settle()
    await topic.release_reservation()
    gate.open.set()
    assert await sending == [1]
    assert await reserved(host) == topic.log.reserved_end == RESERVE_OFFSETS_MIN + 2
    await check(host, topic)


@simulated
async def test_a_close_beside_a_rest_leaves_the_head_in_the_store() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await publish(topic, "a", "b")
    gate = Gate(host, is_rest)
    resting = asyncio.create_task(topic.release_reservation())
    await settle()
    stopping = asyncio.create_task(broker.stop())
    await settle()
    gate.heal()
    await ended(resting, stopping)
    assert await reserved(host) == 2
    host.kill()
    topic = await find_topic(await host.boot())
    assert await publish(topic, "c") == [2]


@simulated
async def test_what_the_store_has_confirmed_is_never_said_to_be_more_than_it_has() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    assert topic.confirmed_end == 0
    await publish(topic, "a")
    assert topic.confirmed_end == await reserved(host) == RESERVE_OFFSETS_MIN + 1
    gate = Gate(host, is_rest, behind=True, lost=True)
    resting = asyncio.create_task(topic.release_reservation())
    await settle()
    assert (topic.confirmed_end, await reserved(host)) == (1, 1), "a shrinking that is not answered may have happened"
    gate.heal()
    await ended(resting)
    assert topic.confirmed_end == 1


@simulated
async def test_a_rest_that_failed_is_made_good_by_the_next_and_by_the_close() -> None:
    for closes in (False, True):
        host = BrokerFixture()
        broker, topic = await one_topic(host)
        await publish(topic, "a")
        host.metadata.away = True
        with pytest.raises(Unreachable):
            await topic.release_reservation()
        host.metadata.away = False
        if closes:
            await broker.stop()
        else:
            await topic.release_reservation()
        assert await reserved(host) == 1
