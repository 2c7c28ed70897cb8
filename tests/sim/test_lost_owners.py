"""Idempotent producers whose owner is lost, comes back, is lost again: everything acknowledged is there, and once.

docs/adr/0003-the-cluster.md has the table. Producers behave as the client does: at most eight batches in flight, resent
unchanged and in order; one whose session is not known opens another and numbers anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pydanube.broker.ownership import Ownership
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.cluster.placement import BROKER_LOST, Marker
from pydanube.core.commit.sessions import Sessions
from pydanube.core.history.ownership import RESERVE_OFFSETS_MIN
from pydanube.core.history.rescue import Brought
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import ProducerId, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import DanubeError, DiskFull, SessionUnknown, Unavailable, Unreachable
from pydanube.formats.batch import encode, rows_of
from pydanube.history import rescue
from pydanube.history.rescue import Rescuer
from pydanube.log.segment_maker import SegmentMaker
from pydanube.log.wal import TopicLog
from pydanube.ports import Item, Put
from pydanube.testing.cluster import Cluster, Node
from tests.harness.brokers import consume, message, simulated
from tools.sim.cluster_recorder import everything

SELDOM = TierConfig(upload_seconds=3600.0)


async def opened(cluster: Cluster, topic: TopicName, producer: int = 7) -> int:
    return await cluster.publish(topic, lambda found: found.open_session(ProducerId(producer)))


async def native(
    cluster: Cluster, topic: TopicName, session: int, sequence: int, text: str, *, producer: int = 7
) -> int:
    """One batch of an idempotent producer; its offset."""

    async def submit(found: Topic) -> int:
        rows = rows_of([message(text)])
        batch = encode(rows, topic=topic, producer_id=producer, session=session, first_sequence=sequence)
        return (await found.submit_batch(batch)).offset

    return await cluster.publish(topic, submit)


async def send(cluster: Cluster, topic: TopicName, session: int, sequences: Iterable[int]) -> None:
    for sequence in sequences:
        await native(cluster, topic, session, sequence, f"{sequence}")


async def kept(cluster: Cluster, topic: TopicName) -> list[tuple[int, str]]:
    return [(offset, text) for offset, text, _ in await everything(await cluster.served(topic))]


async def texts(cluster: Cluster, topic: TopicName) -> list[str]:
    return sorted(text for _, text in await kept(cluster, topic))


async def orphans(cluster: Cluster, topic: TopicName) -> int:
    return len(await cluster.metadata.list(keys.orphans(topic)))


async def lose(cluster: Cluster, topic: TopicName) -> Node:
    """Its owner dies, and another takes over."""
    host = cluster.host(topic)
    assert host is not None
    host.kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    return host


async def boot_active(node: Node) -> None:
    broker = await node.boot()
    assert broker.cluster is not None
    await node.call(broker.cluster.requests.activate(broker.broker_id))


@simulated
async def test_what_the_lost_owner_had_uploaded_and_not_answered_is_not_there_twice() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    sent = [await native(cluster, topic, session, sequence, f"{sequence}") for sequence in range(10)]
    assert sent == list(range(10))
    await asyncio.sleep(8)  # uploaded
    assert await native(cluster, topic, session, 10, "10") == 10
    for in_flight in (8, 7):  # for the next owner, and for the one after it, when 10 is back
        host = cluster.host(topic)
        assert host is not None
        host.kill()
        await cluster.until(lambda: cluster.host(topic) is not None)
        first = 10 - in_flight
        again = [await native(cluster, topic, session, sequence, f"{sequence}") for sequence in range(first, 10)]
        assert again == list(range(first, 10)), "all that may have been in flight"
        await host.boot()
        await asyncio.sleep(20)
    assert await native(cluster, topic, session, 10, "10") == 10, "it came back with its broker"
    assert await native(cluster, topic, session, 11, "11") >= RESERVE_OFFSETS_MIN


@simulated
async def test_what_the_lost_owner_had_on_its_disk_is_known_when_it_is_back() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    for sequence in range(10):
        assert await native(cluster, topic, session, sequence, f"{sequence}") == sequence
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    again = [await native(cluster, topic, session, sequence, f"{sequence}") for sequence in range(2, 10)]
    assert again == list(range(2, 10))
    adopter = cluster.host(topic)
    assert adopter is not None
    adopter.kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    assert await native(cluster, topic, session, 9, "9") == 9, "the next owner knows it from the store"


@simulated
async def test_what_is_resent_while_a_lost_epoch_is_adopted_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the two worst moments: what the new owner took was looked at; what is kept was decided and not written yet."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    sessions = [await opened(cluster, topic, by) for by in (7, 8)]
    for sequence in range(3):
        await native(cluster, topic, sessions[0], sequence, f"7.{sequence}")
        await native(cluster, topic, sessions[1], sequence, f"8.{sequence}", producer=8)
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    resent: dict[int, int] = {}
    look, store = rescue.later_batches, Rescuer._store_run

    async def looked(*args: Any) -> Any:
        found = await look(*args)
        resent[7] = await native(cluster, topic, sessions[0], 1, "7.1")
        return found

    async def stored(self: Rescuer, *args: Any) -> Any:
        resent[8] = await native(cluster, topic, sessions[1], 1, "8.1", producer=8)
        return await store(self, *args)

    monkeypatch.setattr(rescue, "later_batches", looked)
    monkeypatch.setattr(Rescuer, "_store_run", stored)
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert resent[7] >= RESERVE_OFFSETS_MIN, "it was new then, and what came back of it was dropped"
    assert resent[8] == 3, "it was known then"
    assert await native(cluster, topic, sessions[0], 2, "7.2") == resent[7] + 1
    assert await kept(cluster, topic) == [
        (0, "7.0"),
        (1, "8.0"),
        (3, "8.1"),
        (5, "8.2"),
        (resent[7], "7.1"),
        (resent[7] + 1, "7.2"),
    ]


@simulated
async def test_what_an_older_owner_left_waits_for_what_a_newer_one_left() -> None:
    """The newer took what was resent and gave receipts for it."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await native(cluster, topic, session, 0, "0")
    await native(cluster, topic, session, 1, "1")
    cluster.node(1).kill()
    again = await native(cluster, topic, session, 1, "1")
    second = cluster.host(topic)
    assert second is not None and again >= RESERVE_OFFSETS_MIN
    second.kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert len(await cluster.metadata.list(keys.orphans(topic))) == 2
    await second.boot()
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert await kept(cluster, topic) == [(0, "0"), (again, "1")]


@simulated
async def test_sessions_that_cannot_be_read_keep_nobody_from_serving_the_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await native(cluster, topic, session, 0, "0")
    await asyncio.sleep(8)
    assert len(Sessions.from_bytes((await cluster.metadata.list(keys.sessions(topic)))[0].value)) == 1
    await cluster.metadata.transact([], [Put(keys.sessions(topic), b"!")])
    cluster.node(1).kill()
    assert await native(cluster, topic, session, 1, "1") > 0
    assert "sessions of producers cannot be read" in caplog.messages


# --- an owner that knows less than it seems -----------------------------------------------------------------------


@simulated
async def test_an_owner_with_old_files_does_not_take_a_session_for_shorter_than_it_is() -> None:
    """Its own disk ends at 4, the orphan of the owner between has 5 to 9, and it was started again itself."""
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(5))
    await asyncio.sleep(40)  # uploaded, and at rest: no orphan
    await boot_active(await lose(cluster, topic))
    await send(cluster, topic, session, range(5, 10))
    second = await lose(cluster, topic)
    cluster.node(1).kill()
    await cluster.node(1).boot()
    await cluster.until(lambda: cluster.host(topic) is cluster.node(1))
    assert await native(cluster, topic, session, 10, "10") >= RESERVE_OFFSETS_MIN
    await second.boot()
    await asyncio.sleep(40)
    assert await texts(cluster, topic) == sorted(f"{sequence}" for sequence in range(11))


@contextlib.contextmanager
def claim_not_answered(patch: pytest.MonkeyPatch, node: Node) -> Iterator[None]:
    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    lost: list[Ownership] = []

    async def silent(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        claimed: Ownership = await claim(cls, *args, **options)
        if not lost and options["broker_id"] == node.known_id:
            lost.append(claimed)
            raise Unreachable("the metadata store", "its answer was lost")
        return claimed

    with patch.context() as inner:
        inner.setattr(Ownership, "claim", classmethod(silent))
        yield
    assert lost


@pytest.mark.parametrize("then", ["nothing", "restarts", "moves", "was not answered"])
def test_a_session_that_the_next_owner_has_not_seen_is_the_same_after_it(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @simulated
    async def story() -> None:
        cluster = await Cluster(tier=SELDOM).start(3)
        topic = await cluster.create("/default/orders", on=1)
        session = await opened(cluster, topic)
        await send(cluster, topic, session, range(3))
        if then == "was not answered":
            cluster.node(3).kill()
            await asyncio.sleep(10)
            with claim_not_answered(monkeypatch, cluster.node(2)):
                await lose(cluster, topic)
        else:
            await lose(cluster, topic)
        second = cluster.host(topic)
        assert second is not None
        if then == "restarts":
            second.kill()
            await second.boot()
        elif then == "moves":
            await cluster.unload(topic)
        again = await native(cluster, topic, session, 2, "2")  # not: this session is not known
        assert again >= RESERVE_OFFSETS_MIN
        await cluster.node(1).boot()
        await asyncio.sleep(30)
        assert await orphans(cluster, topic) == 0
        assert await kept(cluster, topic) == [(0, "0"), (1, "1"), (again, "2")]

    story()


# --- adoptions that end half-way ---------------------------------------------------------------------------------


@simulated
async def test_what_was_brought_is_never_replaced_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orphan lay on the adopter's own disk, and its files went with the first part of the adoption."""
    monkeypatch.setattr(rescue, "RUNS_MAX", 2)
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    sessions = {producer: await opened(cluster, topic, producer) for producer in (7, 8)}
    cluster.node(1).objects.away = True
    for sequence in range(6):  # what 7 sends is sent again later, so that what 8 sent is cut into pieces
        await native(cluster, topic, sessions[7], sequence, f"7.{sequence}")
        await native(cluster, topic, sessions[8], sequence, f"8.{sequence}", producer=8)
    await lose(cluster, topic)
    for sequence in range(6):
        await native(cluster, topic, sessions[7], sequence, f"7.{sequence}")
    await asyncio.sleep(60)  # uploaded, and at rest
    cluster.node(2).kill()
    await asyncio.sleep(10)
    parts: list[int] = []
    describe = Rescuer._describe

    async def described(self: Rescuer, *args: Any, **options: Any) -> None:
        await describe(self, *args, **options)
        parts.append(1)
        cluster.node(1).objects.away = len(parts) == 1

    monkeypatch.setattr(Rescuer, "_describe", described)
    await boot_active(cluster.node(1))
    await cluster.until(lambda: len(parts) == 1, 120)
    cluster.node(1).kill()
    await cluster.node(1).boot()
    cluster.node(1).objects.away = True
    await asyncio.sleep(30)
    cluster.node(1).objects.away = False
    await asyncio.sleep(60)
    assert await orphans(cluster, topic) == 0
    assert await texts(cluster, topic) == sorted(f"{by}.{sequence}" for by in (7, 8) for sequence in range(6))


@simulated
async def test_an_owner_that_died_before_it_wrote_anything_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(5))
    await lose(cluster, topic)
    second = cluster.host(topic)
    assert second is not None
    with monkeypatch.context() as patch:
        patch.setattr(SegmentMaker, "_new_segment", lambda self, of: asyncio.Event().wait())  # reserved, and no further
        waiting = asyncio.create_task(native(cluster, topic, session, 5, "5"))
        await asyncio.sleep(0.5)
        second.kill()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await cluster.until(lambda: cluster.host(topic) is not None)
    await native(cluster, topic, session, 5, "5")
    await cluster.node(1).boot()
    await second.boot()
    assert await second.disk.list("wal/default/orders") == []
    await asyncio.sleep(60)
    assert await orphans(cluster, topic) == 0
    assert await texts(cluster, topic) == [f"{sequence}" for sequence in range(6)]


@simulated
async def test_an_adoption_is_known_although_the_adopters_files_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.SHARED)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(3))
    await lose(cluster, topic)
    cluster.node(2).kill()
    await asyncio.sleep(10)

    async def full(*_: object) -> None:
        raise DiskFull("wal")

    monkeypatch.setattr(TopicLog, "forget_lost", full)
    await boot_active(cluster.node(1))
    found = await cluster.served(topic)
    stream = await consume(found, "sub", Kind.SHARED, acks=True)
    await native(cluster, topic, session, 3, "3")
    await asyncio.sleep(60)
    assert found.orphans == []
    assert sorted(stream.texts) == ["0", "1", "2", "3"]


@simulated
async def test_nobody_gets_a_receipt_for_what_an_operator_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(3))
    first = await lose(cluster, topic)
    owner = cluster.host(topic)
    assert owner is not None

    async def away(*args: Any) -> None:
        raise Unreachable("the object store", "it is away")

    monkeypatch.setattr(Rescuer, "_store_run", away)
    await first.boot()
    await asyncio.sleep(20)
    found = await cluster.served(topic)
    await owner.call(found.discard_orphan(0))
    again = await native(cluster, topic, session, 2, "2")
    assert again >= RESERVE_OFFSETS_MIN and await kept(cluster, topic) == [(again, "2")]


@simulated
async def test_an_adoption_that_comes_beside_a_seal_is_left_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal has been made, and the metadata store does not take it yet: what it says must stay true."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(3))
    first = await lose(cluster, topic)
    second = cluster.host(topic)
    assert second is not None
    sealing, adopting = asyncio.Event(), asyncio.Event()
    release, adopt, get = Ownership.release, Rescuer._adopt, second.metadata.get
    adopted: list[str] = []

    async def slow_release(self: Ownership, *args: Any) -> None:
        sealing.set()
        await asyncio.sleep(1)
        await release(self, *args)

    async def slow_get(key: str) -> Item | None:
        found = await get(key)
        if found is not None and keys.rescue_of(key) is not None and Brought.from_bytes(found.value) is not None:
            adopting.set()
            await sealing.wait()
        return found

    async def told_adopt(self: Rescuer, *args: Any, **options: Any) -> None:
        try:
            await adopt(self, *args, **options)
            adopted.append("")
        except DanubeError as error:
            adopted.append(type(error).__name__)
            raise

    monkeypatch.setattr(Ownership, "release", slow_release)
    monkeypatch.setattr(Rescuer, "_adopt", told_adopt)
    monkeypatch.setattr(second.metadata, "get", slow_get)
    await first.boot()
    await asyncio.wait_for(adopting.wait(), 60)
    other = next(node.number for node in cluster.nodes if node not in (first, second))
    await cluster.unload(topic, to=other)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(other))
    await asyncio.sleep(30)
    assert adopted == ["", ""] and await orphans(cluster, topic) == 0
    assert await native(cluster, topic, session, 2, "2") == 2


@simulated
async def test_a_lost_owner_that_gets_its_topic_back_reads_what_was_rescued_as_it_is_stored_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its files were not removed yet: they are the same messages without the mark."""

    async def not_yet(*args: Any) -> None:
        raise Unreachable("the metadata store", "it is away")

    monkeypatch.setattr(Rescuer, "_forget", not_yet)
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await native(cluster, topic, session, 0, "0")
    await boot_active(await lose(cluster, topic))
    await asyncio.sleep(20)
    assert await orphans(cluster, topic) == 0 and await cluster.node(1).disk.list("wal/default/orders") != []
    await cluster.unload(topic, to=1)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(1))
    rescued = [
        (offset, text) for offset, text, attributes in await everything(await cluster.served(topic)) if attributes
    ]
    assert rescued == [(0, "0")]


@simulated
async def test_what_a_broker_has_of_a_later_epoch_stays_when_a_lost_ones_files_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It got its topic back, took more, and does not serve it just now: nobody has declared it lost yet."""
    forget = Rescuer._forget

    async def not_yet(*args: Any) -> None:
        raise Unreachable("the metadata store", "it is away")

    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await send(cluster, topic, session, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Rescuer, "_forget", not_yet)
        node = await lose(cluster, topic)
        await boot_active(node)
        await asyncio.sleep(20)
        await cluster.unload(topic, to=1)
        await cluster.until(lambda: cluster.host(topic) is node)
        later = await native(cluster, topic, session, 2, "2")
        assert node.broker is not None
        await node.call(node.broker.topics.lose_all("the lease is in doubt"))
        await node.call(node.broker.topics.forget_epochs(topic, 1))
    assert Rescuer._forget is forget
    await cluster.until(lambda: cluster.host(topic) is node, 120)
    assert await kept(cluster, topic) == [(0, "0"), (1, "1"), (later, "2")]


@simulated
async def test_a_producer_that_the_new_owner_has_answered_is_not_taken_back_by_the_old_one() -> None:
    """What the old owner would acknowledge now, the rescue of its epoch would drop as resent (seed 998000637)."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await opened(cluster, topic)
    await native(cluster, topic, session, 0, "0")  # it has reserved offsets, and may give them out
    old, new = cluster.node(1), cluster.node(2)
    lost = old.topic(topic)
    assert isinstance(lost, Topic) and new.broker is not None
    old.metadata.deaf = True  # it serves the topic until its lease ends
    await new.call(new.broker.topics.take_over(topic, Marker(reason=BROKER_LOST)))
    found = new.topic(topic)
    assert isinstance(found, Topic) and found.ownership.epoch > lost.ownership.epoch

    async def submit(at: Topic, session: int, sequence: int) -> int:
        rows = rows_of([message(f"{sequence}")])
        batch = encode(rows, topic=topic, producer_id=7, session=session, first_sequence=sequence)
        return (await at.submit_batch(batch)).epoch

    await old.call(submit(lost, session, 1))  # stored, and the answer is lost
    seen = await new.call(submit(found, session, 1))
    assert seen == found.ownership.epoch
    await new.call(found.ownership.check_not_older(seen, session=session))
    # Without a receipt it is the same: the new owner may have stored what it was sent.
    with pytest.raises(Unavailable):  # it asks the store, which does not answer it
        await old.call(lost.ownership.check_not_older(seen, session=session))
    # A consumer that the new owner has delivered to: what it acknowledges may lie beyond the head of the old one.
    with pytest.raises(Unavailable):
        await old.call(lost.ownership.check_not_older(seen))
    await old.call(lost.ownership.check_not_older(lost.ownership.epoch))
    newer = await new.call(found.open_session(ProducerId(7)))
    with pytest.raises(Unavailable):  # it asks the store, which does not answer it
        await old.call(lost.ownership.check_not_older(0, session=newer))
    with pytest.raises(SessionUnknown):
        await old.call(submit(lost, newer, 0))
