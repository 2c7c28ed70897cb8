"""What the cluster asks of this broker: take over a topic that is assigned to it, hand over one that moves away.

Both are asked of the `TopicHost`, once at a time for each topic. A host is never asked to take what another broker may
still own: the marker, which every claim deletes, says that the topic was released or never owned, or that its owner was
declared dead. The claim compares the very marker that was judged here.

A topic that is assigned to this broker and not served by it, because it could not be opened or because the answer to
its claim was lost, is claimed again after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, NoReturn

from pydanube.cluster.host import TopicHost
from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.history.ownership import Owner
from pydanube.core.names import TopicName
from pydanube.errors import Conflict, DanubeError, NotServed, TopicUnknown, Unavailable
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put

log = logging.getLogger(__name__)

RECONCILE_SECONDS: Final = 1.0
TOPIC_RETRY_SECONDS: Final = 0.2  # doubled with every failure of the topic
TOPIC_RETRY_SECONDS_MAX: Final = 5.0
UNSERVED_SECONDS: Final = 5.0
CLAIMS_MAX: Final = 32  # concurrently
PASS_SECONDS: Final = 0.02  # between two looks at the markers: while topics come in, one changes every few milliseconds


class AssignmentReconciler:
    """Looks at the markers whenever they change."""

    def __init__(self, store: MetadataStore, clock: Clock, view: View, membership: Membership, host: TopicHost) -> None:
        self._store = store
        self._clock = clock
        self._view = view
        self._membership = membership
        self._host = host
        self._running: dict[TopicName, asyncio.Task[None]] = {}
        self._failures: dict[TopicName, tuple[int, float]] = {}  # how many, and when to try again
        self._missing: dict[TopicName, float] = {}  # assigned and not served, since when
        self._missed_at = 0.0  # when that was looked at
        self._slots = asyncio.Semaphore(CLAIMS_MAX)

    async def run(self) -> NoReturn:
        looked_at = -PASS_SECONDS
        try:
            while True:
                wait = looked_at + PASS_SECONDS - self._clock.elapsed()
                if self._running and wait > 0:
                    await self._clock.sleep(wait)
                version, looked_at = self._view.version, self._clock.elapsed()
                if self._membership.may_serve() and not self._membership.is_retired:
                    self._look()
                await self._view.changed(version, self._patience())
        finally:
            running = list(self._running.values())
            for task in running:
                task.cancel()
            if running:  # gathering none asks for a loop, and a simulated process that was killed has none left
                await asyncio.gather(*running, return_exceptions=True)

    def _look(self) -> None:
        me, now = self._membership.broker, self._clock.elapsed()
        served = self._host.owned_topics()
        for topic in [t for t in self._failures if t not in self._view.markers and t not in self._missing]:
            del self._failures[topic]
        for topic, seen in self._view.markers.items():
            marker = seen.value
            if marker.to is None or self._is_busy(topic, now):
                continue
            if marker.is_free and marker.to == me:
                if topic not in served:  # otherwise it was claimed, and the watch has not reported it yet
                    self._begin(topic, self._take_over)
            elif marker.is_move and marker.from_broker == me:
                self._begin(topic, self._hand_over)

        if now - self._missed_at >= RECONCILE_SECONDS:
            self._missed_at = now
            for topic in self._unserved(now, served):
                if not self._is_busy(topic, now):
                    self._begin(topic, self._take_over_again)

    def _is_busy(self, topic: TopicName, now: float) -> bool:
        return topic in self._running or now < self._failures.get(topic, (0, now))[1]

    def _unserved(self, now: float, served: Collection[TopicName]) -> list[TopicName]:
        """Of all its topics, those that have been assigned to this broker for a while and that it does not serve."""
        me = self._membership.broker
        lost = self._view.lost.get(me)
        missing = {
            topic
            for topic, revision in self._view.assigned.get(me, {}).items()
            if topic not in served and topic not in self._view.markers and revision > (lost.revision if lost else 0)
        }
        self._missing = {topic: self._missing.get(topic, now) for topic in sorted(missing)}
        return [topic for topic, since in self._missing.items() if now - since >= UNSERVED_SECONDS]

    def _patience(self) -> float:
        """Seconds until the next topic is to be tried again."""
        now = self._clock.elapsed()
        waiting = [at - now for topic, (_, at) in self._failures.items() if topic not in self._running]
        return min([RECONCILE_SECONDS, *(max(each, 0.01) for each in waiting)])

    def _begin(self, topic: TopicName, duty: Callable[[TopicName], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(duty(topic), name=f"duty {topic}")
        self._running[topic] = task
        task.add_done_callback(partial(self._end, topic))

    def _end(self, topic: TopicName, task: asyncio.Task[None]) -> None:
        del self._running[topic]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._failures.pop(topic, None)
            return
        failures = self._failures.get(topic, (0, 0.0))[0] + 1
        wait = min(TOPIC_RETRY_SECONDS * 2.0 ** min(failures - 1, 10), TOPIC_RETRY_SECONDS_MAX)
        self._failures[topic] = (failures, self._clock.elapsed() + wait)
        # A bug that one topic triggers fails that topic only: if it ended this broker, it would end the next owner too.
        trace = None if isinstance(error, DanubeError) else error
        log.warning("topic cannot be taken or moved yet", extra={"topic": topic, "why": str(error)}, exc_info=trace)

    # --- taking over ---

    async def _take_over(self, topic: TopicName) -> None:
        async with self._slots:
            # The marker is not read once more, because clients wait: if the view is behind, the claim finds it out.
            seen = self._view.markers.get(topic)
            if seen is None or not seen.value.is_free or seen.value.to != self._membership.broker:
                return
            try:
                await self._host.take_over(topic, seen.value, marker_revision=seen.revision)
            except Conflict:
                # Perhaps it was behind; or the registration is not what it was, which `Membership` finds out by itself.
                await self._view.look_again([keys.unassigned(topic)])
                raise
            except TopicUnknown:
                marker = keys.unassigned(topic)
                await self._view.transact([Compare(marker, seen.revision)], [Delete(marker)])
                log.info("marker of a deleted topic removed", extra={"topic": topic})

    async def _take_over_again(self, topic: TopicName) -> None:
        async with self._slots:
            item = await self._store.get(keys.owner(topic))
            owner = _read(item.value) if item else None
            if item is None or owner is None or owner.released or owner.broker_id != self._membership.broker:
                await self._view.look_again([keys.assignment(self._membership.broker, topic), keys.unassigned(topic)])
                return
            log.info("topic is ours and not open", extra={"topic": topic})
            await self._host.take_over(topic, Marker(), owner_revision=item.revision)

    # --- handing over ---

    async def _hand_over(self, topic: TopicName) -> None:
        item = await self._store.get(keys.unassigned(topic))
        marker = Marker.from_bytes(item.value) if item else None
        if marker is None or not marker.is_move or marker.from_broker != self._membership.broker:
            await self._view.look_again([keys.unassigned(topic)])  # the view was behind
            return
        try:
            if topic not in self._host.owned_topics():
                raise NotServed(topic, "it could not be opened on the broker that has it")
            await self._host.hand_over(topic, marker)
        except DanubeError as error:
            log.warning("topic stays where it is", extra={"topic": topic, "why": str(error)})
            await self._undo(topic, str(error))

    async def _undo(self, topic: TopicName, why: str) -> None:
        """Writes into the marker, for the operator who asked, that the topic stays and why."""
        while True:
            try:
                item = await self._store.get(keys.unassigned(topic))
                marker = Marker.from_bytes(item.value) if item else None
                if item is None or marker is None or not marker.is_move:
                    return
                if marker.from_broker != self._membership.broker:
                    return
                put = Put(item.key, marker.as_failed(why).to_bytes())
                if await self._view.transact([Compare(item.key, item.revision)], [put]) is not None:
                    return
            except Unavailable:
                await self._clock.sleep(TOPIC_RETRY_SECONDS_MAX)


def _read(owner: bytes) -> Owner | None:
    try:
        return Owner.from_bytes(owner)
    except (ValueError, TypeError, KeyError):
        return None
