"""Handing a topic over: the move as its old owner makes it.

    serving ─► upload while serving ─► pause ─► quiet ─┬─► cursors ─────────┬─► seal = release ─► moved, close
       ▲              │                   │        │    └─► upload the rest ─┘         │
       └── undone ◄───┴───────────────────┴────────┴───────────┘ (cursors: best effort) └─► files removed

Until the seal any failure (also a defect in this program) or a phase that takes too long undoes everything: the topic
serves on as before. The seal is one transaction that compares the owner key, so it happens or it does not;
an answer that was lost is looked up. After it the topic is not ours, whatever else fails. The publish pause is the time
from pause to the next owner's claim; the long upload lies before it. Clients that are refused during it are redirected
to the next owner, and wait there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.core import keys
from pydanube.core.history.ownership import Owner, Seal
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Conflict, DanubeError, DeadlineExceeded, MoveFailed, OwnershipLost, Unavailable
from pydanube.history.leftovers import epochs_on, is_damaged, remove_files
from pydanube.history.tier import TopicTier, delete_objects
from pydanube.history.upload_state import UploadState
from pydanube.history.uploader import Uploader
from pydanube.history.uploads import Last
from pydanube.log.layout import epoch_directory, topic_directory
from pydanube.ports import Clock, Delete, Disk, MetadataStore, Put

log = logging.getLogger(__name__)

T = TypeVar("T")

REST_BYTES: Final = 64 * 1024  # so much may be left for the pause
UPLOAD_SECONDS: Final = 120.0  # while serving
TOPIC_DRAIN_SECONDS: Final = 10.0
CURSOR_SECONDS: Final = 5.0
REST_SECONDS: Final = 30.0
SNAPSHOTS_SECONDS: Final = 10.0
SNAPSHOTS_AT_ONCE: Final = 4
SEAL_SECONDS: Final = 30.0
SEALS_AT_ONCE: Final = 16
RELEASE_RETRY_SECONDS: Final = 0.2
SESSIONS_BYTES_MAX: Final = 256 * 1024  # of a seal: the store takes 1.5 MiB


class Phases:
    """How long each phase of one move took, in milliseconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.elapsed()
        self.name = "waiting"
        self.milliseconds: dict[str, float] = {}
        self.notes: list[str] = []  # what the operator should know of the move

    def enter(self, name: str) -> None:
        now = self._clock.elapsed()
        if self.has_begun:
            self.milliseconds[self.name] = (now - self._began) * 1000
        self.name, self._began = name, now

    @property
    def has_begun(self) -> bool:
        return self.name != "waiting"

    @property
    def pause_ms(self) -> float:
        """From the first refused publish to the release."""
        return sum(ms for name, ms in self.milliseconds.items() if name not in ("upload", "close"))


async def seal(topic: Topic, clock: Clock, marker: bytes | None, phases: Phases, moved_to: str = "") -> None:
    """Takes a topic from serving to released.

    Raises MoveFailed if the topic serves on here, and OwnershipLost if another broker has it or that cannot be ruled
    out: then the caller must close it. From the pause on clients are redirected to `moved_to`, where they wait until
    the topic is open.
    """
    assert topic.storage is not None, "what is not in the object store cannot be handed over"
    uploader = topic.storage.uploader
    upload_state: UploadState | None = None
    is_certain = True  # that no seal of ours was stored
    try:
        phases.enter("upload")
        await _within(clock, UPLOAD_SECONDS, "uploading", upload_ahead(uploader, topic.name))
        phases.enter("quiet")
        topic.pause("it is moving to another broker", moved_to)
        await _within(clock, TOPIC_DRAIN_SECONDS, "finishing commits", topic.drain())
        phases.enter("cursors")
        async with contextlib.AsyncExitStack() as held:
            uploading = uploader.upload_rest(topic.name, held)
            rest = asyncio.create_task(uploading, name=f"upload the rest of {topic.name}")
            try:
                phases.notes.extend(await save_cursors(topic, clock))
                phases.enter("rest")
                last = await _within(clock, REST_SECONDS, "uploading the rest", rest)
            finally:
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
            upload_state = await uploader.remove(topic.name)  # nothing is forgotten or merged behind the seal
            phases.enter("seal")
            is_certain = False
            await _seal(topic, clock, marker, last)
    except OwnershipLost:
        raise
    except Exception as error:
        # Any error: a topic that stayed frozen would refuse all clients until this process ends.
        trace = None if isinstance(error, DanubeError) else error
        why = str(error) or repr(error)
        log.error("topic not sealed", extra={"topic": topic.name, "phase": phases.name, "why": why}, exc_info=trace)
        if not (is_certain or isinstance(error, DanubeError)):
            await _make_certain(topic, clock)
        if not topic.is_closed:  # else this broker was declared lost in the meantime
            topic.resume()
            if upload_state is not None:
                uploader.add(upload_state)
        if (back := uploader.get(topic.name)) is not None:
            back.blocked_until = 0.0
        raise MoveFailed(topic.name, f"{phases.name}: {why}") from error
    phases.enter("close")


class LastSnapshots:
    """Snapshots of topics that have left, for readers without a broker: the next owner may write none for a while, or
    never come. Written in the background; only a broker that stops waits for them.
    """

    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._at_once = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, tier: TopicTier) -> None:
        task = asyncio.create_task(self._publish(tier), name=f"last snapshot of {tier.topic}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Returns when all are written, or when that takes too long."""
        tasks = list(self._tasks)
        with contextlib.suppress(DeadlineExceeded):
            await _within(self._clock, SNAPSHOTS_SECONDS, "writing snapshots", _all(tasks))
        for task in tasks:
            task.cancel()
        await _all(tasks)

    async def _publish(self, tier: TopicTier) -> None:
        async with self._at_once:
            try:
                await tier.publish_snapshot()
                await self._remove_if_late(tier)
            except DanubeError as error:
                log.warning("snapshot not written", extra={"topic": tier.topic, "why": str(error)})

    async def _remove_if_late(self, tier: TopicTier) -> None:
        """If the topic was deleted in the meantime: the deletion may have listed objects before ours was there."""
        item = await self._metadata.get(keys.owner(tier.topic))
        owner = Owner.from_bytes(item.value) if item else None
        if owner is not None and (owner.deleted or owner.created > tier.epoch):
            await delete_objects(tier.store, tier.topic, tier.epoch)


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:  # gathering none asks for a loop, and a simulated process that was killed has none left
        await asyncio.gather(*tasks, return_exceptions=True)


async def upload_ahead(uploader: Uploader, topic: TopicName) -> None:
    """Uploads while the topic serves, until little is left, or as little as it can be.

    A busy topic never has less waiting than comes in while an object is made: when one more pass leaves more than half
    of what the pass before it left, the pause is as short as it gets.
    """
    upload_state = uploader.get(topic)
    if upload_state is None:
        return
    with uploader.at_full_speed():
        await _upload_all(uploader, upload_state)


async def _upload_all(uploader: Uploader, upload_state: UploadState) -> None:
    async with upload_state.working:
        left = upload_state.lag_bytes
        while left > REST_BYTES and await uploader.upload_all(upload_state):
            before, left = left, upload_state.lag_bytes
            if left > before / 2:
                break
        upload_state.blocked_until = math.inf  # a merge that begins now would make the pause longer


async def save_cursors(topic: Topic, clock: Clock) -> list[str]:
    """Best effort, as the last resort is a repetition: one that fails is named and the others are saved.

    Returns what will be delivered again although it was acknowledged, a sentence for each subscription.
    """
    notes: list[str] = []
    with contextlib.suppress(DanubeError):  # all in one transaction; what it did not save is saved one by one
        await _within(clock, CURSOR_SECONDS, "saving cursors", topic.save_cursors())
    failed: list[str] = []
    for subscription in topic.subscriptions.values():
        try:
            await _within(clock, CURSOR_SECONDS, "saving a cursor", subscription.save())
            if subscription.cut:
                notes.append(
                    f"subscription {subscription.name}: {subscription.cut} acknowledged messages are too scattered to"
                    " be saved and will be delivered again"
                )
        except DanubeError as error:
            failed.append(subscription.name)
            notes.append(
                f"subscription {subscription.name}: its cursor could not be saved ({error}); what was acknowledged"
                " last will be delivered again"
            )
            log.warning(
                "Failed to flush cursor for subscription",
                extra={"topic": topic.name, "subscription": subscription.name, "why": str(error)},
            )
    if failed and len(failed) == len(topic.subscriptions):
        log.error("All subscription cursor flushes failed", extra={"topic": topic.name})
    return notes


async def _seal(topic: Topic, clock: Clock, marker: bytes | None, last: Last | None) -> None:
    topic_log, ownership = topic.log, topic.ownership
    sessions = topic_log.sessions.newest(SESSIONS_BYTES_MAX)
    if sessions.cut:
        topic_log.metrics.sessions_cut["seal"] += sessions.cut
        extra = {"topic": topic.name, "sessions": sessions.cut}
        log.warning("sessions of producers cut in a seal: they begin anew with the next owner", extra=extra)
    sealed = Seal(
        last_committed_offset=topic_log.head - 1,
        next_offset=topic_log.head,
        broker_id=ownership.broker_id,
        timestamp=clock.time_us() // 1000,
        epoch=ownership.epoch,
        append_time=topic_log.append_time,
        sessions=base64.b64encode(sessions.to_bytes(timed=False)).decode(),
    )
    await _release(topic, clock, sealed, marker, last)
    if last is not None and topic.storage is not None:
        topic.storage.uploads.described(last)


async def _release(
    topic: AnyTopic,
    clock: Clock,
    sealed: Seal,
    marker: bytes | None,
    last: Last | None = None,
    also: Sequence[Put | Delete] = (),
) -> None:
    """Returns when the topic is released; raises if it is not, and no try of ours can release it any more."""
    until = clock.elapsed() + SEAL_SECONDS
    while True:
        try:
            compares, operations = ([last.change.compare], last.change.operations) if last else ([], also)
            await topic.ownership.release(sealed, marker, compares, operations)
            return
        except (OwnershipLost, Conflict):
            raise
        except Unavailable as error:
            # Whether it was written is not known: only asking again tells. Until then nothing may be undone.
            log.warning("seal delayed", extra={"topic": topic.name, "why": str(error)})
            if clock.elapsed() > until and await _still_ours(topic):
                raise
            # Either it was released after all, and the next try finds that, or the store still does not answer.
            await clock.sleep(RELEASE_RETRY_SECONDS)


async def _still_ours(topic: AnyTopic) -> bool:
    """True if the topic was not released, and no seal whose answer was lost can release it any more."""
    try:
        return await topic.ownership.reassert()
    except OwnershipLost:
        raise
    except Unavailable:
        return False


async def _make_certain(topic: AnyTopic, clock: Clock) -> None:
    """Returns if the topic is ours and no seal of ours can be stored any more; raises OwnershipLost otherwise."""
    until = clock.elapsed() + SEAL_SECONDS
    while not await _still_ours(topic):
        if clock.elapsed() > until:
            raise OwnershipLost(topic.name)
        await clock.sleep(RELEASE_RETRY_SECONDS)


async def release_volatile(topic: VolatileTopic, clock: Clock, marker: bytes | None, *, forget: bool) -> None:
    """A non-reliable topic has nothing to hand over but its name, delivery, schema and policy.

    `forget`: its subscriptions and their consumers' registrations go, in the same transaction. Not if the broker
    only stops: then clients may come back with their old ids.
    """
    sealed = Seal(
        last_committed_offset=-1,
        next_offset=0,
        broker_id=topic.ownership.broker_id,
        timestamp=clock.time_us() // 1000,
        epoch=topic.ownership.epoch,
    )
    try:
        if forget:
            async with topic.leaving() as doomed:
                await _release(topic, clock, sealed, marker, also=doomed)
        else:
            await _release(topic, clock, sealed, marker)
    except DanubeError:
        raise
    except Exception as error:
        await _make_certain(topic, clock)
        raise MoveFailed(topic.name, f"seal: {str(error) or repr(error)}") from error


async def remove_released(disk: Disk, topic: AnyTopic, broker_id: BrokerId) -> None:
    """Removes the local log: all of it is in the object store, except an orphan not adopted yet, or damage."""
    name = topic.name
    if not topic.reliable or any(each.broker_id == broker_id for each in topic.orphans):
        return
    directories = [epoch_directory(name, epoch) for epoch in await epochs_on(disk, name)]
    if topic.has_damage or any([await is_damaged(disk, each) for each in directories]):
        log.warning("damaged files are left", extra={"topic": name, "path": topic_directory(name)})
        return
    await remove_files(disk, name)


async def seal_all(
    names: Sequence[TopicName],
    clock: Clock,
    timeout_seconds: float,
    hand_over: Callable[[TopicName], Awaitable[None]],
) -> int:
    """Hands over as many topics as the time allows, a few at a time. How many were not."""
    slots = asyncio.Semaphore(SEALS_AT_ONCE)
    left = set(names)

    async def one(name: TopicName) -> None:
        async with slots:
            try:
                await hand_over(name)
                left.discard(name)
            except DanubeError as error:
                log.warning("topic not sealed at the end", extra={"topic": name, "why": str(error)})

    async def all_of_them() -> None:
        await asyncio.gather(*(one(name) for name in names))

    sealing = asyncio.create_task(all_of_them(), name="seal all topics")
    sleeping = asyncio.create_task(clock.sleep(timeout_seconds), name="time to seal")
    try:
        await asyncio.wait({sealing, sleeping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sleeping, sealing):
            task.cancel()
        await asyncio.gather(sleeping, sealing, return_exceptions=True)
    return len(left)


async def _within(clock: Clock, seconds: float, what: str, doing: Awaitable[T]) -> T:
    """What `doing` returns, or DeadlineExceeded after `seconds` of the broker's clock."""
    task = asyncio.ensure_future(doing)
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DeadlineExceeded(what, seconds)
        return await task
    finally:
        sleeping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
