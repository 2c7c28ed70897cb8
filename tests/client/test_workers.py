"""Native consumers as a team of workers: deadlines from the hand-over, shares for all, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from typing import Any

import pytest

import pydanube
import pydanube.testing
from pydanube.api.native.server import NativeServer
from pydanube.broker.topic import Topic
from pydanube.client.client import Client
from pydanube.client.messages import Message
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.errors import ClientClosed, DeadlineExceeded, Refused
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import ORDERS, BrokerFixture, make_topic, make_volatile, publish, settle, simulated
from tests.harness.peers import Peer
from tests.harness.wired import Wires, wired

TOPIC = "/default/orders"
SUB = "workers"


async def fill(client: Client, count: int, topic: str = TOPIC, keys: int = 0) -> None:
    async with client.producer(topic) as producer:
        for number in range(count):
            producer.send_nowait(str(number).encode(), key=f"k{number % keys}" if keys else None)
        await producer.flush()


class Worker:
    """Takes one message after the other, and needs a while for each."""

    def __init__(self, client: Client, seconds: float, **settings: Any) -> None:
        self.handled: list[int] = []
        self.again = 0  # shown although it had acknowledged them
        self.keys: list[tuple[str | None, int]] = []  # in the order in which they were handled, perhaps by several
        self._seconds = seconds
        settings = {"type": "shared", "start": "earliest"} | settings
        self.consumer = client.consumer(TOPIC, subscription=SUB, **settings)

    async def work(self) -> None:
        async with self.consumer as consumer:
            async for message in consumer:
                self.again += message.offset in self.handled
                self.keys.append((message.key, message.offset))
                await asyncio.sleep(self._seconds)
                self.handled.append(message.offset)
                await message.ack()


async def caught_up(client: Client, *workers: Worker, seconds: float = 1000.0) -> None:
    tasks = [asyncio.create_task(worker.work()) for worker in workers]
    await until_caught_up(client, seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_caught_up(client: Client, seconds: float = 1000.0) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.sleep(0.05)
        while (await client.lag(TOPIC, SUB)).messages:  # noqa: ASYNC110, only the broker knows
            await asyncio.sleep(0.1)


# --- deadlines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("exclusive", 5_000), ("shared", 1_500), ("key_shared", 1_500)])
@wired
async def test_minutes_of_work_for_one_worker_with_defaults_are_handled_once(
    kind: str, count: int, wires: Wires
) -> None:
    async with wires.connect() as client:
        await fill(client, count, keys=500 if kind == "key_shared" else 0)
        worker = Worker(client, 0.06, type=kind)
        await caught_up(client, worker)
        assert sorted(worker.handled) == list(range(count))
        assert wires.subscription(TOPIC, SUB).standing().timed_out == 0


@wired
async def test_a_handler_that_takes_longer_than_the_ack_timeout_gets_its_message_again(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 3)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            first = await consumer.receive()
            await asyncio.sleep(29.0)
            second = await consumer.receive()  # waited unseen for 29 s, and has its 30 s before it
            await asyncio.sleep(3.0)
            assert wires.subscription(TOPIC, SUB).standing().timed_out == 1
            await asyncio.sleep(20.0)
            await second.ack()
            again = [await consumer.receive(), await consumer.receive()]
            assert {(each.offset, each.attempt) for each in again} == {(0, 2), (2, 1)}
            assert first.offset == 0


@wired
async def test_a_message_that_is_extended_is_not_delivered_again(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 1)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            message = await consumer.receive()
            await message.extend(100)
            await asyncio.sleep(99)
            assert wires.subscription(TOPIC, SUB).standing().timed_out == 0
            await message.ack()
            await consumer.flush()
            assert (await client.lag(TOPIC, SUB)).messages == 0


@wired
async def test_extending_never_shortens_and_is_refused_when_it_is_too_late(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 1)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            wires.subscription(TOPIC, SUB).change(policy=FailurePolicy(base_redelivery_delay_ms=60_000))
            message = await consumer.receive()
            await message.extend(1)
            await asyncio.sleep(20)
            assert wires.subscription(TOPIC, SUB).standing().timed_out == 0
            await asyncio.sleep(20)
            with pytest.raises(Refused, match="not held by this consumer"):
                await message.extend(10)


@wired
async def test_a_copy_of_what_the_consumer_has_acknowledged_is_never_shown(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 4)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            slow = [await consumer.receive() for _ in range(3)]
            await asyncio.sleep(33)  # all three have failed by then, and come again
            for message in slow:
                await message.ack()
            assert (await consumer.receive()).offset == 3
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(timeout=10)


@wired
async def test_what_a_silent_consumer_has_not_seen_goes_to_one_with_room(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 8)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest", type="shared", window_messages=8) as one:
            stuck = await one.receive()
            await asyncio.sleep(1)
            standing = wires.subscription(TOPIC, SUB).standing()
            assert (standing.unacked, standing.unseen) == (8, 7)
            worker = Worker(client, 0.01)
            task = asyncio.create_task(worker.work())
            await asyncio.sleep(35)
            assert sorted(worker.handled) == [*range(8)], "also what was handed over, when its time was over"
            assert stuck.offset == 0
            await stuck.ack()
            next_one = asyncio.create_task(one.receive(timeout=5))
            await asyncio.sleep(0.1)
            await fill(client, 4)
            assert (await next_one).offset >= 8, "and who comes back is served again"
            task.cancel()


# --- sharing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
@pytest.mark.parametrize(("seconds", "late"), [(0.001, 0.0), (0.005, 0.2), (0.02, 0.2), (0.5, 0.2)])
@wired
async def test_three_workers_share_what_waits_also_with_one_that_joins_later(
    kind: str, seconds: float, late: float, wires: Wires
) -> None:
    async with wires.connect() as client:
        await fill(client, 500, keys=500)
        workers = [Worker(client, seconds, type=kind) for _ in range(3)]
        tasks = [asyncio.create_task(worker.work()) for worker in workers[:2]]
        await asyncio.sleep(late)
        tasks.append(asyncio.create_task(workers[2].work()))
        await until_caught_up(client)
        for task in tasks:
            task.cancel()
        shares = [len(worker.handled) for worker in workers]
        assert sum(shares) == 500 and all(100 <= share <= 250 for share in shares), shares
        assert Counter(offset for worker in workers for offset in worker.handled) == Counter(range(500))


@wired
async def test_keys_move_to_those_who_come_and_stay_in_order(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 600, keys=20)
        workers = [Worker(client, 0.01, type="key_shared") for _ in range(4)]
        tasks = []
        for worker in workers:
            worker.keys = workers[0].keys
            tasks.append(asyncio.create_task(worker.work()))
            await asyncio.sleep(0.3)
        tasks[0].cancel()
        await until_caught_up(client)
        for task in tasks:
            task.cancel()
        order: dict[str | None, list[int]] = {}
        assert sorted({offset for worker in workers for offset in worker.handled}) == [*range(600)]
        for key, offset in workers[0].keys:
            order.setdefault(key, []).append(offset)
        assert all(offsets == sorted(offsets) for offsets in order.values()), order
        assert all(len(worker.handled) > 20 for worker in workers)


@wired
async def test_what_waits_unseen_at_a_slow_worker_is_given_to_an_idle_one(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 9)
        slow = Worker(client, 20.0, window_messages=100)
        slowly = asyncio.create_task(slow.work())
        await asyncio.sleep(1)
        fast = Worker(client, 0.1)
        fastly = asyncio.create_task(fast.work())
        await asyncio.sleep(15)
        assert len(fast.handled) >= 7 and len(set(fast.handled)) == len(fast.handled)
        await until_caught_up(client)
        assert sorted(fast.handled + slow.handled) == [*range(9)], "nothing twice"
        for task in (slowly, fastly):
            task.cancel()


# --- shutdown -------------------------------------------------------------------------------------------


@wired
async def test_a_stopped_consumer_receives_no_more_while_its_acks_travel(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 20)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest", type="shared") as consumer:
            mine = [await consumer.receive() for _ in range(3)]
            await consumer.stop()
            with pytest.raises(ClientClosed):
                await consumer.receive(timeout=1)
            assert [message async for message in consumer] == []
            other = Worker(client, 0.001)
            task = asyncio.create_task(other.work())
            await asyncio.sleep(2)
            assert sorted(other.handled) == [*range(3, 20)], "what nobody had taken is with others at once"
            for message in mine:
                await message.ack()
            await consumer.flush()
            assert (await client.lag(TOPIC, SUB)).messages == 0
            task.cancel()


@wired
async def test_close_waits_for_what_is_out_and_nothing_of_it_comes_again(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 20)
        consumer = await client.consumer(TOPIC, subscription=SUB, start="earliest").open()
        done: list[int] = []

        async def work() -> None:
            async for message in consumer:
                await asyncio.sleep(0.3)
                await message.ack()
                done.append(message.offset)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        await asyncio.sleep(0.7)
        await consumer.close()
        await asyncio.gather(*workers)
        assert len(done) == 12
        assert (await client.lag(TOPIC, SUB)).messages == 20 - 12


@wired
async def test_close_has_a_deadline_and_an_ack_after_it_raises(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 2)
        consumer = await client.consumer(TOPIC, subscription=SUB, start="earliest").open()
        message = await consumer.receive()
        before = asyncio.get_running_loop().time()
        await consumer.close(timeout=2)
        assert 2 <= asyncio.get_running_loop().time() - before < 4
        for answer in (message.ack, message.nack, lambda: message.extend(5)):
            with pytest.raises(ClientClosed):
                await answer()
        assert (await client.lag(TOPIC, SUB)).messages == 2


@wired
async def test_run_acknowledges_what_returns_and_nacks_what_raises_with_the_reason(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 30)
        attempts: Counter[int] = Counter()
        most = running = 0

        async def handle(message: Message) -> None:
            nonlocal most, running
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1
            attempts[message.offset] += 1
            if message.offset == 7 and message.attempt == 1:
                raise ValueError("no sevens today")
            if attempts.total() == 31:
                await consumer.stop()

        async with client.consumer(TOPIC, subscription=SUB, start="earliest", type="shared") as consumer:
            handled = await consumer.run(handle, concurrency=4)
        assert (handled.acked, handled.nacked, handled.given_up) == (30, 1, 0) == consumer.handled
        assert attempts == Counter(range(30)) + Counter([7])
        assert most == 4
        assert (await client.lag(TOPIC, SUB)).messages == 0


@wired
async def test_a_cancelled_run_finishes_what_it_has_begun(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 50)
        begun: list[int] = []

        async def handle(message: Message) -> None:
            begun.append(message.offset)
            await asyncio.sleep(1)

        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            work = asyncio.create_task(consumer.run(handle, concurrency=5))
            await asyncio.sleep(2.5)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert len(begun) == 15 and consumer.handled.acked == 15
            assert (await client.lag(TOPIC, SUB)).messages == 35


# --- what explain says ----------------------------------------------------------------------------------


@wired
async def test_explain_says_where_messages_are(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 5)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest", window_messages=3) as consumer:
            await consumer.receive()
            await asyncio.sleep(1)
            sentence = (await client.lag(TOPIC, SUB)).sentence
            assert "wait for an ack, " in sentence and "of them unseen in the queues of consumers" in sentence


# --- the same on a real clock -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "seconds", "ack_timeout_ms"),
    [(300, 0.005, 500), pytest.param(500, 0.02, 3_000, marks=pytest.mark.long)],
)
def test_a_queue_longer_than_the_ack_timeout_is_handled_once_for_real(
    count: int, seconds: float, ack_timeout_ms: int
) -> None:
    async def main() -> None:
        async with pydanube.testing.broker(memory=True) as broker, pydanube.connect(broker.url) as client:
            await fill(client, count)
            worker = Worker(client, seconds, type="exclusive")
            assert broker._broker is not None
            async with client.consumer(TOPIC, subscription=SUB, start="earliest"):
                pass
            subscription = Wires(broker._broker).subscription(TOPIC, SUB)
            subscription.change(policy=FailurePolicy(ack_timeout_ms=ack_timeout_ms))
            await caught_up(client, worker, seconds=60)
            assert sorted(worker.handled) == [*range(count)]

    asyncio.run(main())


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL,
    reason="somebody else hears of SIGTERM here",
)
def test_sigterm_ends_a_run_when_what_it_has_begun_is_done() -> None:
    async def main() -> None:
        async with pydanube.testing.broker(memory=True) as broker, pydanube.connect(broker.url) as client:
            await fill(client, 20)
            begun: list[int] = []

            async def handle(message: Message) -> None:
                begun.append(message.offset)
                if len(begun) == 2:
                    signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)

            async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
                handled = await consumer.run(handle, concurrency=2)
            assert handled.acked == len(begun) < 20
            assert (await client.lag(TOPIC, SUB)).messages == 20 - len(begun)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    asyncio.run(main())


def test_threads_work_and_stop_as_tasks_do() -> None:
    with pydanube.testing.broker(memory=True) as broker, pydanube.blocking.connect(broker.url) as client:
        with client.producer(TOPIC) as producer:
            for number in range(20):
                producer.send_nowait(b"%d" % number)
        with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            seen: list[int] = []

            def handle(message: pydanube.blocking.Message) -> None:
                seen.append(message.offset)
                message.extend(60)
                if message.offset == 3 and message.attempt == 1:
                    raise ValueError("not now")
                if len(seen) == 21:
                    consumer.stop()

            handled = consumer.run(handle, concurrency=3)
            assert (handled.acked, handled.nacked) == (20, 1) and sorted(seen) == sorted([*range(20), 3])
        with client.consumer(TOPIC, subscription="other", start="earliest") as consumer:
            message = consumer.receive()
        for answer in (message.ack, message.nack):
            with pytest.raises(ClientClosed):
                answer()
        assert client.lag(TOPIC, SUB).messages == 0


# --- broken connections, and peers that know less ---------------------------------------------------------


@wired
async def test_after_a_broken_connection_what_was_acknowledged_is_not_shown_and_the_rest_comes(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 300)
        workers = [Worker(client, 0.02) for _ in range(2)]
        tasks = [asyncio.create_task(worker.work()) for worker in workers]
        for _ in range(3):
            await asyncio.sleep(0.5)
            wires.cut()
        await until_caught_up(client)
        for task in tasks:
            task.cancel()
        assert {offset for worker in workers for offset in worker.handled} == {*range(300)}
        assert sum(worker.again for worker in workers) == 0


def greeted_subscribe(**more: Any) -> pb.Subscribe:
    start = pb.Place(edge=pb.EARLIEST)
    return pb.Subscribe(
        topic=ORDERS, subscription=SUB, consumer_name="c", start=start, messages=100, bytes=1 << 20, **more
    )


@simulated
async def test_a_peer_that_does_not_hand_over_has_its_deadlines_from_sending() -> None:
    broker = await BrokerFixture().boot()
    await publish(await make_topic(broker), *"abc")
    peer = await Peer.greeted(NativeServer(broker))
    answer = (await peer.ask(subscribe=greeted_subscribe(type=pb.SHARED, first_messages=1))).command.subscribed
    assert not answer.hands_over and answer.messages == 0
    await settle()
    assert sum(end - first for said in peer.heard("deliver") for first, end in ranges_in(said)) == 3
    await asyncio.sleep(30.1)
    assert Wires(broker).subscription(ORDERS, SUB).standing().timed_out == 3


@simulated
async def test_a_peer_that_hands_over_is_told_so_and_gets_few_at_first_if_it_shares() -> None:
    broker = await BrokerFixture().boot()
    await publish(await make_topic(broker), *"abc")
    peer = await Peer.greeted(NativeServer(broker))
    subscribe = greeted_subscribe(type=pb.SHARED, first_messages=2, hands_over=True)
    answer = (await peer.ask(subscribe=subscribe)).command.subscribed
    assert answer.hands_over and answer.messages == 2
    await settle()
    assert [ranges_in(said) for said in peer.heard("deliver")] == [[(0, 2)]]
    await asyncio.sleep(60)
    handle = answer.consumer
    assert (await peer.ask(handed=pb.Handed(consumer=handle, ranges=[0, 1], extend_ms=1000))).kind == "done"
    refused = await peer.ask(handed=pb.Handed(consumer=handle, ranges=[2, 3], extend_ms=1000))
    assert (refused.kind, refused.command.error.code) == ("error", pb.REFUSED)
    assert (await peer.ask(returned=pb.Returned(consumer=handle, ranges=[0, 2], stop=True))).kind == "done"
    standing = Wires(broker).subscription(ORDERS, SUB).standing()
    assert (standing.unacked, standing.unseen, standing.timed_out) == (1, 0, 0)


@simulated
async def test_a_topic_that_keeps_nothing_has_no_deadlines_and_grants_everything() -> None:
    broker = await BrokerFixture().boot()
    await make_volatile(broker)
    peer = await Peer.greeted(NativeServer(broker))
    subscribe = greeted_subscribe(type=pb.SHARED, first_messages=2, hands_over=True)
    answer = (await peer.ask(subscribe=subscribe)).command.subscribed
    assert not answer.hands_over


def ranges_in(command: pb.Command) -> list[tuple[int, int]]:
    numbers = command.deliver.ranges
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@wired
async def test_a_consumer_that_is_opened_while_it_closes_is_open_afterwards(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wires.connect() as client:
        await fill(client, 5)
        consumer = await client.consumer(TOPIC, subscription=SUB, start="earliest").open()
        (lane,) = consumer._lanes
        monkeypatch.setattr(lane, "close", lambda: asyncio.sleep(2))  # the broker takes its time
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(1)
        await asyncio.gather(closing, consumer.open())
        assert (await consumer.receive(timeout=5)).offset == 0
        await consumer.close(timeout=0.1)


@wired
async def test_keys_of_a_stopped_consumer_go_to_others_also_after_its_connection_broke(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 1, keys=16)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest", type="key_shared") as stopped:
            await stopped.receive()
            await stopped.stop()
            other = Worker(client, 0.001, type="key_shared")
            task = asyncio.create_task(other.work())
            await asyncio.sleep(1)
            wires.cut()
            await asyncio.sleep(5)
            await fill(client, 32, keys=16)
            await asyncio.sleep(5)
            assert len(set(other.handled)) == 33
            task.cancel()


@wired
async def test_what_was_returned_while_a_move_was_tried_is_sent_again(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 10)
        settings: dict[str, Any] = {"start": "earliest", "type": "shared", "window_messages": 10}
        busy = await client.consumer(TOPIC, subscription=SUB, **settings).open()
        await busy.receive()
        topic = wires.broker.topics.get(ORDERS)
        assert isinstance(topic, Topic)
        topic.pause("it is moving to another broker")
        other = Worker(client, 0.001)
        task = asyncio.create_task(other.work())
        await busy.stop()
        topic.resume()
        await asyncio.sleep(1)
        assert sorted(other.handled) == [*range(1, 10)]
        task.cancel()
        await busy.close(timeout=0.1)


@wired
async def test_a_stalled_consumer_whose_window_has_shrunk_gets_messages_when_it_asks(wires: Wires) -> None:
    async with wires.connect() as client, wires.connect() as others:
        await fill(client, 2_000)
        consumer = await client.consumer(TOPIC, subscription=SUB, start="earliest", type="shared").open()
        wires.subscription(TOPIC, SUB).change(policy=FailurePolicy(ack_timeout_ms=5_000))
        for _ in range(2_000):
            await (await consumer.receive()).ack()  # quickly: it grants the most there is
        for _ in range(20):
            await fill(client, 1)
            message = await consumer.receive()
            await asyncio.sleep(1)  # slowly: it would grant one at a time
            await message.ack()
        await consumer.flush()
        (lane,) = consumer._lanes
        assert lane.connection is not None and lane.connection._transport is not None
        other = Worker(others, 0.001)
        task = asyncio.create_task(other.work())
        await asyncio.sleep(1)
        lane.connection._transport.pause_reading()  # the process stands still
        await fill(others, 10)
        await asyncio.sleep(8)
        assert len(other.handled) == 10
        lane.connection._transport.resume_reading()
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(timeout=1)
        task.cancel()
        await asyncio.sleep(1)
        await fill(client, 1)
        await consumer.receive(timeout=100)
        await consumer.close(timeout=0.1)


@wired
async def test_what_is_given_back_makes_room_for_as_many_bytes(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 9)
        slow = Worker(client, 20.0, window_messages=100)
        slowly = asyncio.create_task(slow.work())
        await asyncio.sleep(1)
        (lane,) = slow.consumer._lanes
        fast = Worker(client, 0.1)
        fastly = asyncio.create_task(fast.work())
        await asyncio.sleep(15)
        assert len(fast.handled) >= 7
        await until_caught_up(client)
        await asyncio.sleep(1)
        first, _ = wires.subscription(TOPIC, SUB)._machine.windows.all
        assert first.size_bytes + lane.machine.owed_bytes == lane._settings.window_bytes
        for task in (slowly, fastly):
            task.cancel()
