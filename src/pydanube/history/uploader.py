"""Carries the topics of this broker to the cloud tier: one look a second, a task per topic, a few steps at a time.

    due: something waits and is 30 s old, or as much as an object waits
         └─► upload … ─► merge … ─► manifest …                  (history/tier.py, history/maintenance.py)
    every few minutes: retention in both tiers          every hour, and soon after a merge: sweep

An idle topic costs one comparison a second. A store that is unreachable stops nothing else: publishes go on into the
log, the topic is tried again with growing pauses, a metric and one log line say so, and it catches up by itself.

Every step (an object, a merge, ...) takes its turn (`turns.py`), so that a topic with much to upload does not keep the
others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final

from pydanube.core.history.tiers import Descriptor, SteadyTime, TierConfig
from pydanube.errors import DanubeError, LogClosed, LogStopped, ObjectDamaged, OwnershipLost
from pydanube.history.turns import Turns
from pydanube.history.upload_state import UploadState
from pydanube.history.uploads import Last
from pydanube.ports import Clock
from pydanube.telemetry import CloudMetrics

log = logging.getLogger(__name__)

UPLOAD_POLL_SECONDS: Final = 1.0


class Uploader:
    """`excess_bytes`: how much of the log should leave the disk before its time, because there is too much of it.

    `set_target_rate` is called with the bytes a second at which what waits now has gone in one interval.
    """

    def __init__(
        self,
        clock: Clock,
        config: TierConfig,
        metrics: CloudMetrics,
        *,
        excess_bytes: Callable[[], int] = lambda: 0,
        set_target_rate: Callable[[float], None] = lambda rate: None,
    ) -> None:
        self._clock = clock
        self._config = config
        self._metrics = metrics
        self._excess_bytes = excess_bytes
        self._set_target_rate = set_target_rate
        self._in_a_hurry = 0  # topics that are leaving
        self._topics: dict[str, UploadState] = {}
        self._turns = Turns(clock)
        self._tasks: dict[asyncio.Task[None], str] = {}  # and its topic
        self._time = SteadyTime(clock.time_us(), clock.elapsed())

    # --- topics -------------------------------------------------------------------------------------------

    def add(self, carried: UploadState) -> None:
        carried.begin(self._clock.elapsed())
        self._topics[carried.topic] = carried

    async def upload_rest(self, topic: str, held: contextlib.AsyncExitStack) -> Last | None:
        """Uploads everything now. The last object, if there is one, is left to the caller to describe; the topic
        is the caller's as long as `held` lasts.

        What cannot be read is left: `TopicUploads.unreadable` names it, and it is given up. Raises what goes wrong.
        """
        carried = self._topics[topic]
        held.enter_context(self.at_full_speed())
        await held.enter_async_context(carried.working)
        while carried.uploads.waiting(carried.log) is not None:
            started = self._clock.elapsed()
            uploaded = await carried.uploads.upload_last(carried.log)
            if uploaded is None:
                await self._clock.sleep(UPLOAD_POLL_SECONDS)
            elif isinstance(uploaded, Last):
                self._count(uploaded.descriptor, started)
                return uploaded
            else:
                self._count(uploaded, started)
        await carried.uploads.record_lost_ranges(carried.log)
        return None

    @contextlib.contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Inside, objects are written as fast as they can be: clients, or an operator who stops the broker, wait."""
        self._in_a_hurry += 1
        self._set_target_rate(math.inf)
        try:
            yield
        finally:
            self._in_a_hurry -= 1  # the next look sets another pace

    async def remove(self, topic: str) -> UploadState | None:
        """The topic closes: nothing of it is carried when this returns. What it returns may be added again."""
        carried = self._topics.pop(topic, None)
        if carried is None:
            return None
        for task in [task for task, name in self._tasks.items() if name == topic]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return carried

    def get(self, topic: str) -> UploadState | None:
        return self._topics.get(topic)

    def flush(self, topic: str) -> asyncio.Task[None] | None:
        """Begins to upload what waits now, whatever its interval, and to merge it, when it is its turn: what is flushed
        never waits for its interval. Never waits, and never fails: what goes wrong is told and tried again as ever.
        None: nothing waits, or it cannot be uploaded just now.
        """
        carried = self._topics.get(topic)
        now = self._clock.elapsed()
        if carried is None or now < carried.blocked_until or carried.uploads.waiting(carried.log) is None:
            return None
        carried.flushed_since = now if carried.flushed_since is None else carried.flushed_since
        return self._begin(carried, partial(self._upload_and_merge, carried, only_whole=False), f"flush {topic}")

    @property
    def topics(self) -> Iterable[UploadState]:
        return self._topics.values()

    def standing(self) -> tuple[int, int, float]:
        """Topics with something to upload, how many offsets that is, and for how long the oldest has waited."""
        topics = offsets = 0
        oldest = now = self._clock.elapsed()
        for carried in self._topics.values():
            if carried.pending_since is not None:
                topics += 1
                offsets += carried.lag_offsets
                oldest = min(oldest, carried.pending_since)
        return topics, offsets, now - oldest

    def why_not_freed(self) -> str:
        """What keeps the log on the disk, as a sentence."""
        now = self._clock.elapsed()
        failing = [each for each in self._topics.values() if each.failing]
        if failing:
            first = min(failing, key=lambda each: each.failing_since)
            return f"Uploads have failed for {now - first.failing_since:.0f} s ({first.failing})"
        waiting = sum(each.lag_offsets for each in self._topics.values())
        return (
            f"{waiting} messages are on their way to the object store" if waiting else "What is uploaded is being freed"
        )

    # --- carrying -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks at all topics every second until cancelled."""
        try:
            while True:
                await self._clock.sleep(UPLOAD_POLL_SECONDS)
                now = self._clock.elapsed()
                now_us = self._time.at(self._clock.time_us(), now)
                await self._turns.let_others_by(now)
                carrying = set(self._tasks.values())
                for topic, carried in list(self._topics.items()):
                    if topic not in carrying and self._is_due(carried, now):
                        self._start(carried, now_us)
                self._set_target_rate(self._rate_needed())
        finally:
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:  # gathering none asks for a loop, and a simulated process that was killed has none left
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def _rate_needed(self) -> float:
        if self._in_a_hurry or self._excess_bytes() > 0:
            return math.inf
        waiting = [each for each in self._topics.values() if each.pending_since is not None]
        return sum(each.lag_bytes for each in waiting) / max(self._config.upload_seconds, UPLOAD_POLL_SECONDS)

    def _is_due(self, carried: UploadState, now: float) -> bool:
        if carried.working.locked() or now < carried.blocked_until:
            return False
        return (
            self._upload_is_due(carried, now)
            or carried.snapshot_is_due(now, self._config)
            or carried.retain_is_due(now, self._config)
            or carried.sweep_is_due(now, self._config)
            or self._free_is_due(carried)
        )

    def _upload_is_due(self, carried: UploadState, now: float) -> bool:
        waiting = carried.note_waiting(now)
        if waiting is None:
            return False
        return self._is_old(carried, now) or carried.log_bytes(waiting[0]) >= self._config.object_bytes

    def _is_old(self, carried: UploadState, now: float) -> bool:
        """All that waits is to be uploaded, and not only what makes whole objects."""
        return carried.is_old(now, self._config) or self._excess_bytes() > 0

    def _free_is_due(self, carried: UploadState) -> bool:
        return self._excess_bytes() > 0 and carried.uploaded_end > carried.log.first_offset

    def _start(self, carried: UploadState, now_us: int) -> None:
        self._begin(carried, partial(self._steps, carried, now_us), _task_name(carried.topic))

    def _begin(self, carried: UploadState, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._carry(carried, work), name=name)
        self._tasks[task] = carried.topic
        task.add_done_callback(lambda ended: self._ended(carried, ended))
        return task

    def _ended(self, carried: UploadState, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug. The others are carried on, and this one is not tried every second.
            log.error("carrying failed", extra={"topic": carried.topic}, exc_info=error)
            self._failed(carried, repr(error))

    async def _carry(self, carried: UploadState, work: Callable[[], Awaitable[object]]) -> None:
        topic = carried.topic
        try:
            await work()
        except (OwnershipLost, LogClosed, LogStopped):
            return  # the code that closed the topic has logged why
        except DanubeError as error:
            if str(error) != carried.failing:
                log.warning("upload delayed", extra={"topic": topic, "why": str(error)})
            self._failed(carried, str(error))
            return
        if carried.failing:
            log.info("upload goes on", extra={"topic": topic})
        carried.succeeded()

    def _failed(self, carried: UploadState, why: str) -> None:
        carried.failed(why, self._clock.elapsed())
        self._metrics.upload_errors.inc()

    async def _steps(self, carried: UploadState, now_us: int) -> None:
        tier, maintenance = carried.tier, carried.maintenance
        now = self._clock.elapsed()
        if self._upload_is_due(carried, now):
            await self._upload_and_merge(carried, only_whole=not self._is_old(carried, now))
        if carried.is_leaving:
            return
        async with self._turns.of(carried):
            await self._free_excess(carried)
            if carried.retain_is_due(now, self._config):
                carried.retained_at = now
                await self._retain(carried, now_us)
                await maintenance.free(carried.log, now_us)
            await tier.publish_snapshot()
            carried.flushed_since = None
            if carried.sweep_is_due(now, self._config):
                carried.swept_at = now
                await maintenance.sweep()

    async def _upload_and_merge(self, carried: UploadState, *, only_whole: bool) -> None:
        await self.upload_all(carried, only_whole=only_whole, in_turn=True)
        await self._merge_all(carried)
        while not carried.is_leaving:
            async with self._turns.of(carried):
                if not await carried.maintenance.move_to_manifest():
                    break

    async def _merge_all(self, carried: UploadState) -> None:
        while not carried.is_leaving:
            try:
                async with self._turns.of(carried):
                    if await carried.maintenance.merge() is None:
                        return
                self._metrics.merges.inc()
            except ObjectDamaged as error:  # the others are merged without it
                self._metrics.errors.inc()
                log.error("object not merged", extra={"topic": carried.topic, "why": str(error)})

    async def retain_now(self, carried: UploadState) -> int | None:
        """Forgets what is to be forgotten, whatever the interval. Where history begins then; None if nothing went."""
        async with carried.working:
            carried.retained_at = now = self._clock.elapsed()
            first = await self._retain(carried, self._time.at(self._clock.time_us(), now))
            await carried.tier.publish_snapshot()
            return first

    async def flush_log(self, carried: UploadState) -> int:
        """Uploads everything that is committed now, and drops from the disk what the store has.

        Ends the newest segment first: what comes later goes to another one. Returns the first offset that is still on
        the disk; below the head as it was, if a range cannot be uploaded or the topic is leaving.
        """
        with self.at_full_speed():
            async with carried.working:
                newest = carried.log.segments[-1] if carried.log.segments else None
                if newest is not None and newest.end_offset > newest.first_offset:
                    await carried.log.roll()
                await self.upload_all(carried)
                now_us = self._time.at(self._clock.time_us(), self._clock.elapsed())
                await carried.maintenance.free(carried.log, now_us, excess_bytes=carried.log.size_bytes + 1)
                carried.log.forget_dropped()
                await carried.tier.publish_snapshot()
        return carried.log.first_offset

    async def _retain(self, carried: UploadState, now_us: int) -> int | None:
        if carried.read_retention is not None:
            carried.retention = await carried.read_retention()
        return await carried.maintenance.retain(carried.retention, now_us)

    async def _free_excess(self, carried: UploadState) -> None:
        excess_bytes = self._excess_bytes()
        if excess_bytes > 0:
            now_us = self._time.at(self._clock.time_us(), self._clock.elapsed())
            await carried.maintenance.free(carried.log, now_us, excess_bytes)

    async def upload_all(self, carried: UploadState, *, only_whole: bool = False, in_turn: bool = False) -> int:
        """Uploads what waits now; what comes later has its own interval. How many objects it made.

        With `only_whole`, what is less than an object is left, too: it would only have to be merged later. `in_turn`:
        every object when it is its turn; otherwise the caller has the topic to itself and does not wait.
        """
        uploads, topic_log = carried.uploads, carried.log
        began, head = self._clock.elapsed(), topic_log.head
        count = 0
        while (waiting := uploads.waiting(topic_log)) is not None and waiting[0] < head:
            if only_whole and count and carried.log_bytes(waiting[0]) < self._config.object_bytes:
                break
            async with self._turns.of(carried) if in_turn else contextlib.nullcontext():
                if in_turn and carried.is_leaving:
                    break
                started = self._clock.elapsed()
                described = await uploads.upload(topic_log, urgent=self._in_a_hurry > 0 or self._excess_bytes() > 0)
                if described is None:
                    break
                count += 1
                self._count(described, started)
                await self._free_excess(carried)  # publishes may wait for it
        carried.pending_since = began if uploads.waiting(topic_log) is not None else None
        return count

    def _count(self, described: Descriptor, started: float) -> None:
        self._metrics.objects.inc()
        self._metrics.bytes.inc(described.size)
        self._metrics.upload_latency.observe(self._clock.elapsed() - started)


def _task_name(topic: str) -> str:
    return f"carry {topic}"
