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

    def add(self, upload_state: UploadState) -> None:
        upload_state.begin(self._clock.elapsed())
        self._topics[upload_state.topic] = upload_state

    async def upload_rest(self, topic: str, held: contextlib.AsyncExitStack) -> Last | None:
        """Uploads everything now. The last object, if there is one, is left to the caller to describe; the topic
        is the caller's as long as `held` lasts.

        What cannot be read is left: `TopicUploads.unreadable` names it, and it is given up. Raises what goes wrong.
        """
        upload_state = self._topics[topic]
        held.enter_context(self.at_full_speed())
        await held.enter_async_context(upload_state.working)
        while upload_state.uploads.waiting(upload_state.log) is not None:
            started = self._clock.elapsed()
            uploaded = await upload_state.uploads.upload_last(upload_state.log)
            if uploaded is None:
                await self._clock.sleep(UPLOAD_POLL_SECONDS)
            elif isinstance(uploaded, Last):
                self._count(uploaded.descriptor, started)
                return uploaded
            else:
                self._count(uploaded, started)
        await upload_state.uploads.record_lost_ranges(upload_state.log)
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
        """The topic closes: nothing of it is uploaded when this returns. What it returns may be added again."""
        upload_state = self._topics.pop(topic, None)
        if upload_state is None:
            return None
        for task in [task for task, name in self._tasks.items() if name == topic]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return upload_state

    def get(self, topic: str) -> UploadState | None:
        return self._topics.get(topic)

    def flush(self, topic: str) -> asyncio.Task[None] | None:
        """Begins to upload what waits now, whatever its interval, and to merge it, when it is its turn: what is flushed
        never waits for its interval. Never waits, and never fails: what goes wrong is told and tried again as ever.
        None: nothing waits, or it cannot be uploaded just now.
        """
        upload_state = self._topics.get(topic)
        now = self._clock.elapsed()
        if (
            upload_state is None
            or now < upload_state.blocked_until
            or upload_state.uploads.waiting(upload_state.log) is None
        ):
            return None
        upload_state.flushed_since = now if upload_state.flushed_since is None else upload_state.flushed_since
        return self._begin(
            upload_state, partial(self._upload_and_merge, upload_state, only_whole=False), f"flush {topic}"
        )

    @property
    def topics(self) -> Iterable[UploadState]:
        return self._topics.values()

    def standing(self) -> tuple[int, int, float]:
        """Topics with something to upload, how many offsets that is, and for how long the oldest has waited."""
        topics = offsets = 0
        oldest = now = self._clock.elapsed()
        for upload_state in self._topics.values():
            if upload_state.pending_since is not None:
                topics += 1
                offsets += upload_state.lag_offsets
                oldest = min(oldest, upload_state.pending_since)
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
                for topic, upload_state in list(self._topics.items()):
                    if topic not in carrying and self._is_due(upload_state, now):
                        self._start(upload_state, now_us)
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

    def _is_due(self, upload_state: UploadState, now: float) -> bool:
        if upload_state.working.locked() or now < upload_state.blocked_until:
            return False
        return (
            self._upload_is_due(upload_state, now)
            or upload_state.snapshot_is_due(now, self._config)
            or upload_state.retain_is_due(now, self._config)
            or upload_state.sweep_is_due(now, self._config)
            or self._free_is_due(upload_state)
        )

    def _upload_is_due(self, upload_state: UploadState, now: float) -> bool:
        waiting = upload_state.note_waiting(now)
        if waiting is None:
            return False
        return self._is_old(upload_state, now) or upload_state.log_bytes(waiting[0]) >= self._config.object_bytes

    def _is_old(self, upload_state: UploadState, now: float) -> bool:
        """All that waits is to be uploaded, and not only what makes whole objects."""
        return upload_state.is_old(now, self._config) or self._excess_bytes() > 0

    def _free_is_due(self, upload_state: UploadState) -> bool:
        return self._excess_bytes() > 0 and upload_state.uploaded_end > upload_state.log.first_offset

    def _start(self, upload_state: UploadState, now_us: int) -> None:
        self._begin(upload_state, partial(self._steps, upload_state, now_us), _task_name(upload_state.topic))

    def _begin(self, upload_state: UploadState, work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run_work(upload_state, work), name=name)
        self._tasks[task] = upload_state.topic
        task.add_done_callback(lambda ended: self._ended(upload_state, ended))
        return task

    def _ended(self, upload_state: UploadState, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug. The others go on, and this one is not tried every second.
            log.error("carrying failed", extra={"topic": upload_state.topic}, exc_info=error)
            self._failed(upload_state, repr(error))

    async def _run_work(self, upload_state: UploadState, work: Callable[[], Awaitable[object]]) -> None:
        topic = upload_state.topic
        try:
            await work()
        except (OwnershipLost, LogClosed, LogStopped):
            return  # the code that closed the topic has logged why
        except DanubeError as error:
            if str(error) != upload_state.failing:
                log.warning("upload delayed", extra={"topic": topic, "why": str(error)})
            self._failed(upload_state, str(error))
            return
        if upload_state.failing:
            log.info("upload goes on", extra={"topic": topic})
        upload_state.succeeded()

    def _failed(self, upload_state: UploadState, why: str) -> None:
        upload_state.failed(why, self._clock.elapsed())
        self._metrics.upload_errors.inc()

    async def _steps(self, upload_state: UploadState, now_us: int) -> None:
        tier, maintenance = upload_state.tier, upload_state.maintenance
        now = self._clock.elapsed()
        if self._upload_is_due(upload_state, now):
            await self._upload_and_merge(upload_state, only_whole=not self._is_old(upload_state, now))
        if upload_state.is_leaving:
            return
        async with self._turns.of(upload_state):
            await self._free_excess(upload_state)
            if upload_state.retain_is_due(now, self._config):
                upload_state.retained_at = now
                await self._retain(upload_state, now_us)
                await maintenance.free(upload_state.log, now_us)
            await tier.publish_snapshot()
            upload_state.flushed_since = None
            if upload_state.sweep_is_due(now, self._config):
                upload_state.swept_at = now
                await maintenance.sweep()

    async def _upload_and_merge(self, upload_state: UploadState, *, only_whole: bool) -> None:
        await self.upload_all(upload_state, only_whole=only_whole, in_turn=True)
        await self._merge_all(upload_state)
        while not upload_state.is_leaving:
            async with self._turns.of(upload_state):
                if not await upload_state.maintenance.move_to_manifest():
                    break

    async def _merge_all(self, upload_state: UploadState) -> None:
        while not upload_state.is_leaving:
            try:
                async with self._turns.of(upload_state):
                    if await upload_state.maintenance.merge() is None:
                        return
                self._metrics.merges.inc()
            except ObjectDamaged as error:  # the others are merged without it
                self._metrics.errors.inc()
                log.error("object not merged", extra={"topic": upload_state.topic, "why": str(error)})

    async def retain_now(self, upload_state: UploadState) -> int | None:
        """Forgets what is to be forgotten, whatever the interval. Where history begins then; None if nothing went."""
        async with upload_state.working:
            upload_state.retained_at = now = self._clock.elapsed()
            first = await self._retain(upload_state, self._time.at(self._clock.time_us(), now))
            await upload_state.tier.publish_snapshot()
            return first

    async def flush_log(self, upload_state: UploadState) -> int:
        """Uploads everything that is committed now, and drops from the disk what the store has.

        Ends the newest segment first: what comes later goes to another one. Returns the first offset that is still on
        the disk; below the head as it was, if a range cannot be uploaded or the topic is leaving.
        """
        with self.at_full_speed():
            async with upload_state.working:
                newest = upload_state.log.segments[-1] if upload_state.log.segments else None
                if newest is not None and newest.end_offset > newest.first_offset:
                    await upload_state.log.roll()
                await self.upload_all(upload_state)
                now_us = self._time.at(self._clock.time_us(), self._clock.elapsed())
                await upload_state.maintenance.free(
                    upload_state.log, now_us, excess_bytes=upload_state.log.size_bytes + 1
                )
                upload_state.log.forget_dropped()
                await upload_state.tier.publish_snapshot()
        return upload_state.log.first_offset

    async def _retain(self, upload_state: UploadState, now_us: int) -> int | None:
        if upload_state.read_retention is not None:
            upload_state.retention = await upload_state.read_retention()
        return await upload_state.maintenance.retain(upload_state.retention, now_us)

    async def _free_excess(self, upload_state: UploadState) -> None:
        excess_bytes = self._excess_bytes()
        if excess_bytes > 0:
            now_us = self._time.at(self._clock.time_us(), self._clock.elapsed())
            await upload_state.maintenance.free(upload_state.log, now_us, excess_bytes)

    async def upload_all(self, upload_state: UploadState, *, only_whole: bool = False, in_turn: bool = False) -> int:
        """Uploads what waits now; what comes later has its own interval. How many objects it made.

        With `only_whole`, what is less than an object is left, too: it would only have to be merged later. `in_turn`:
        every object when it is its turn; otherwise the caller has the topic to itself and does not wait.
        """
        uploads, topic_log = upload_state.uploads, upload_state.log
        began, head = self._clock.elapsed(), topic_log.head
        count = 0
        while (waiting := uploads.waiting(topic_log)) is not None and waiting[0] < head:
            if only_whole and count and upload_state.log_bytes(waiting[0]) < self._config.object_bytes:
                break
            async with self._turns.of(upload_state) if in_turn else contextlib.nullcontext():
                if in_turn and upload_state.is_leaving:
                    break
                started = self._clock.elapsed()
                described = await uploads.upload(topic_log, urgent=self._in_a_hurry > 0 or self._excess_bytes() > 0)
                if described is None:
                    break
                count += 1
                self._count(described, started)
                await self._free_excess(upload_state)  # publishes may wait for it
        upload_state.pending_since = began if uploads.waiting(topic_log) is not None else None
        return count

    def _count(self, described: Descriptor, started: float) -> None:
        self._metrics.objects.inc()
        self._metrics.bytes.inc(described.size)
        self._metrics.upload_latency.observe(self._clock.elapsed() - started)


def _task_name(topic: str) -> str:
    return f"carry {topic}"
