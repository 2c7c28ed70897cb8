"""Saves cursors: often enough that little is repeated after a crash, seldom enough that the store does not notice.

A subscription is written when it has 1,000 acks that are not saved, or when the oldest of them is 5 s old, but at most
once a second; and immediately when a consumer leaves or the topic closes. Many subscriptions share one transaction.
What is acknowledged above the cursor takes at most 4 KiB, so that writing often stays cheap. The last write before a
hand-over or a close takes up to 256 KiB, in transactions of at most 1 MiB: the store takes 1.5 MiB. It comes before the
topic is released and is right without what follows it. What does not fit even then is counted and named.
Losing a write repeats messages, it never skips one. Each compares the cursor that it replaces, so that one whose answer
was lost, and that comes late, does not put an older cursor over a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from pydanube.broker.ownership import Ownership
from pydanube.core import keys
from pydanube.core.dispatch.window import HOLES_LAST_SIZE_MAX_BYTES, SavedPosition
from pydanube.core.names import SubscriptionName
from pydanube.errors import DanubeError, OwnershipLost
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put
from pydanube.telemetry import Count

log = logging.getLogger(__name__)

Made = TypeVar("Made")

ACKS_MAX: Final = 1_000
AGE_MAX_SECONDS: Final = 5.0
ROUND_SECONDS: Final = 1.0
# A transaction takes 128 operations and as many compares; each subscription has two values, and its topic's owner and
# its cursor are compared.
PER_TRANSACTION: Final = 60
BYTES_PER_TRANSACTION: Final = 1024 * 1024


@dataclass(slots=True)
class StoredCursor:
    """What is known of the cursor in the metadata store: its revision, 0 if there is none, None if an answer was lost.

    Made with the subscription, and changed only by what saves it.
    """

    revision: int | None


class Positioned(Protocol):
    """A subscription, as far as its cursor goes."""

    @property
    def name(self) -> SubscriptionName: ...
    @property
    def ownership(self) -> Ownership: ...
    @property
    def stored_cursor(self) -> StoredCursor: ...

    @property
    def changes(self) -> int:
        """As in `saved`, without making it."""

    def saved(self) -> SavedPosition: ...

    def saving(self, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        """As `saved`, in so many bytes, with pauses."""


class _Dirty:
    __slots__ = ("changes", "since")

    def __init__(self, since: float, changes: int) -> None:
        self.since = since  # of the oldest change that is not saved
        self.changes = changes  # counted when it was last saved


class Cursors:
    """All subscriptions' cursors. `run` is the task; `changed` never waits."""

    def __init__(self, metadata: MetadataStore, clock: Clock, cut_messages: Count | None = None) -> None:
        """`cut_messages` counts what does not fit when a position is saved for good."""
        self._metadata = metadata
        self._clock = clock
        self._cut_messages = cut_messages or Count()
        self._dirty: dict[Positioned, _Dirty] = {}
        # Weak: a write that ends after its subscription was closed must not keep it.
        self._saved_changes: WeakKeyDictionary[Positioned, int] = WeakKeyDictionary()
        self._cut: WeakKeyDictionary[Positioned, int] = WeakKeyDictionary()  # messages that were acknowledged, and
        # that do not fit into the stored position
        self._told: WeakSet[Positioned] = WeakSet()  # of these, those whose last save said so: no more fits
        self._something = asyncio.Event()
        self._leaving: dict[Positioned, None] = {}  # a consumer has left
        self._somebody_left = asyncio.Event()
        self._writing = asyncio.Lock()
        self.transactions = 0

    def changed(self, subscription: Positioned) -> None:
        if subscription not in self._dirty:
            self._dirty[subscription] = _Dirty(self._clock.elapsed(), self._saved_changes.get(subscription, 0))
            self._something.set()

    def left(self, subscription: Positioned) -> None:
        """A consumer has left: what it acknowledged is saved now."""
        self._leaving[subscription] = None
        self._somebody_left.set()

    def forget(self, subscription: Positioned) -> None:
        self._leaving.pop(subscription, None)
        self._dirty.pop(subscription, None)
        self._saved_changes.pop(subscription, None)
        self._cut.pop(subscription, None)
        self._told.discard(subscription)

    def cut(self, subscription: Positioned) -> int:
        """How many acknowledged messages did not fit into the position that was stored last."""
        return self._cut.get(subscription, 0)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save_rounds(), name="cursors, in rounds")
            group.create_task(self._save_leaving(), name="cursors, at once")

    async def _save_leaving(self) -> None:
        while True:
            await self._somebody_left.wait()
            self._somebody_left.clear()
            leaving, self._leaving = self._leaving, {}
            await self.flush(list(leaving))

    async def _save_rounds(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while self._dirty:
                await self._clock.sleep(ROUND_SECONDS)
                await self._save([each for each in list(self._dirty) if self._is_due(each)])

    def _is_due(self, subscription: Positioned) -> bool:
        dirty = self._dirty[subscription]
        if self._clock.elapsed() - dirty.since >= AGE_MAX_SECONDS - ROUND_SECONDS:
            return True
        return subscription.changes - dirty.changes >= ACKS_MAX

    async def flush(self, subscriptions: Sequence[Positioned], *, last: bool = False) -> None:
        """Saves these now. A failure is logged: it costs repetitions after a crash, nothing else.

        `last`: this broker does not write them again, so as much of them is saved as fits.
        """
        if last:
            await self._save_last([each for each in subscriptions if each in self._dirty or self._cut.get(each)])
        else:
            await self._save([each for each in subscriptions if each in self._dirty])

    async def save_one(self, subscription: Positioned) -> None:
        """Saves this one for good, if that is not done yet. Raises what goes wrong."""
        async with self._writing:  # an older write that is under way must not come behind this one
            changed = self._saved_changes.get(subscription, 0) != subscription.changes
            if not changed and (not self._cut.get(subscription) or subscription in self._told):
                return
            position = await _last_of(subscription)
            await self._replace(subscription, operations_of(subscription, position))
            self.transactions += 1
            self._dirty.pop(subscription, None)
            self._saved(subscription, position, last=True)

    async def _save(self, due: Sequence[Positioned]) -> None:
        for start in range(0, len(due), PER_TRANSACTION):
            async with self._writing:
                group = []
                # Checked now: a subscription removed since must not move the cursor of a later one with its name.
                for each in [one for one in due[start : start + PER_TRANSACTION] if one in self._dirty]:
                    group.append((each, each.saved()))
                    if group[-1][1].holes:
                        await asyncio.sleep(0)  # sixty of two thousand ranges each take a while
                if group:
                    await self._save_together(group)

    async def _save_last(self, due: Sequence[Positioned]) -> None:
        async with self._writing:
            group: list[tuple[Positioned, SavedPosition]] = []
            size_bytes = 0
            for each in due:
                position = await _last_of(each)
                if group and (
                    size_bytes + len(position.holes) > BYTES_PER_TRANSACTION or len(group) == PER_TRANSACTION
                ):
                    await self._save_together(group, last=True)
                    group, size_bytes = [], 0
                group.append((each, position))
                size_bytes += len(position.holes)
            if group:
                await self._save_together(group, last=True)

    def _saved(self, subscription: Positioned, position: SavedPosition, *, last: bool) -> None:
        self._saved_changes[subscription] = position.changes
        self._told.discard(subscription)
        if not position.cut:
            self._cut.pop(subscription, None)
            return
        self._cut[subscription] = position.cut
        if last:
            self._told.add(subscription)
            self._cut_messages.inc(position.cut)
            log.warning(
                "acknowledged messages will be delivered again: too scattered to be saved",
                extra={
                    "topic": subscription.ownership.topic,
                    "subscription": subscription.name,
                    "messages": position.cut,
                    "holes_bytes": len(position.holes),
                },
            )

    async def _replace(self, subscription: Positioned, operations: Sequence[Put | Delete]) -> None:
        """Writes over the stored cursor, and over no other than the one we know. Raises OwnershipLost, Unreachable."""
        key, stored = keys.cursor(subscription.ownership.topic, subscription.name), subscription.stored_cursor
        while True:
            if stored.revision is None:
                item = await self._metadata.get(key)
                stored.revision = item.revision if item else 0
            known, stored.revision = stored.revision, None
            revision = await subscription.ownership.write_if([Compare(key, known)], operations)
            if revision is not None:
                stored.revision = revision
                return

    async def _save_together(
        self, positions: Sequence[tuple[Positioned, SavedPosition]], *, last: bool = False
    ) -> None:
        """One transaction for all. If one topic was lost, or one cursor is not known, each is written on its own."""
        for each, position in positions:
            self._dirty.pop(each, None)  # what changes from now on counts anew
            if each.changes != position.changes:
                self._dirty[each] = _Dirty(self._clock.elapsed(), position.changes)
        self.transactions += 1
        try:
            if len(positions) == 1:
                await self._replace(positions[0][0], operations_of(*positions[0]))
            elif not await self._replace_all(positions):
                for one in positions:
                    await self._save_together([one], last=last)
                return
        except DanubeError as error:
            names = [str(each.name) for each, _ in positions]
            log.warning("cursor not saved", extra={"subscriptions": names, "why": str(error)})
            if error.retryable and not isinstance(error, OwnershipLost):
                for each, _ in positions:
                    self.changed(each)
            return
        for each, position in positions:
            self._saved(each, position, last=last)

    async def _replace_all(self, positions: Sequence[tuple[Positioned, SavedPosition]]) -> bool:
        """One transaction: all of them, or nothing and False."""
        compares = {each.ownership.topic: each.ownership.compare for each, _ in positions}
        known = [
            Compare(keys.cursor(each.ownership.topic, each.name), each.stored_cursor.revision)
            for each, _ in positions
            if each.stored_cursor.revision is not None
        ]
        if len(known) < len(positions):
            return False
        operations = [operation for each, position in positions for operation in operations_of(each, position)]
        for each, _ in positions:
            each.stored_cursor.revision = None  # until it is known what became of the write
        revision = await self._metadata.transact([*compares.values(), *known], operations)
        if revision is None:
            return False
        for each, _ in positions:
            each.stored_cursor.revision = revision
        return True


async def _last_of(subscription: Positioned) -> SavedPosition:
    """There may be a hundred thousand ranges."""
    return await in_turns(subscription.saving(HOLES_LAST_SIZE_MAX_BYTES))


async def in_turns(making: Generator[None, None, Made]) -> Made:
    """What it makes; others have their turn whenever it pauses."""
    while True:
        try:
            next(making)
        except StopIteration as end:
            made: Made = end.value
            return made
        await asyncio.sleep(0)


def operations_of(subscription: Positioned, position: SavedPosition) -> list[Put | Delete]:
    """The stored form of a position: the seeds' integer, and what is acknowledged above it."""
    topic = subscription.ownership.topic
    holes = keys.ack_holes(topic, subscription.name)
    return [
        Put(keys.cursor(topic, subscription.name), str(position.cursor).encode()),
        Put(holes, position.holes) if position.holes else Delete(holes),
    ]
