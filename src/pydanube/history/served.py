"""What history knows of the broker around it: the topics that it serves, and what they are made of.

History is below the broker and never imports it. The broker's own types fit these protocols as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.history.ownership import Orphan
from pydanube.core.history.tiers import Retention, TierConfig
from pydanube.core.names import TopicName
from pydanube.history.reader import CloudReader
from pydanube.history.tier import TopicTier
from pydanube.history.uploader import Uploader
from pydanube.history.uploads import TopicUploads
from pydanube.log.closed_log import ClosedLog
from pydanube.log.topic_log import TopicLog
from pydanube.ports import Clock, Delete, MetadataStore, ObjectStore, Put, Work


class Cloud(NamedTuple):
    """The cloud tier of this broker."""

    store: ObjectStore
    config: TierConfig
    reader: CloudReader
    uploader: Uploader
    work: Work  # for making objects


class Storage(NamedTuple):
    """The cloud tier, as one topic has it."""

    tier: TopicTier
    uploads: TopicUploads
    reader: CloudReader
    uploader: Uploader


class AnyServed(Protocol):
    """A topic of either kind that this broker serves."""

    @property
    def name(self) -> TopicName: ...
    @property
    def reliable(self) -> bool: ...


class Owned(Protocol):
    async def write(self, operations: Sequence[Put | Delete], /) -> object:
        """All operations, if the topic is still ours. Raises OwnershipLost."""
        ...


class ServedTopic(AnyServed, Protocol):
    """A reliable topic that this broker serves."""

    @property
    def log(self) -> TopicLog: ...
    @property
    def storage(self) -> Storage | None: ...
    @property
    def orphans(self) -> Sequence[Orphan]: ...
    @property
    def ownership(self) -> Owned: ...
    @property
    def head(self) -> int: ...
    @property
    def first_offset(self) -> int: ...

    def adopted(
        self, orphans: Sequence[Orphan], *, rescued: tuple[OffsetRange, ...], voided: tuple[OffsetRange, ...]
    ) -> None:
        """Offsets of a lost owner have their place now; `orphans` is what is left of them."""
        ...

    async def forget_own(self, orphan: Orphan, damaged: Sequence[tuple[int, int]] = (), /) -> None:
        """What this disk has of the orphan goes."""
        ...


class Timed(Protocol):
    @property
    def clock(self) -> Clock: ...


class HistoryContext(Protocol):
    """What the broker is made of, as far as history needs it."""

    @property
    def metadata(self) -> MetadataStore: ...
    @property
    def work(self) -> Work: ...
    @property
    def cloud(self) -> Cloud | None: ...
    @property
    def services(self) -> Timed: ...


class ServedTopics(Protocol):
    """The topics of this broker."""

    @property
    def context(self) -> HistoryContext: ...
    @property
    def loaded(self) -> Sequence[AnyServed]: ...

    def get(self, name: TopicName, /) -> AnyServed | None: ...

    async def exists(self, name: TopicName, /) -> bool: ...

    async def require(self, name: TopicName, /) -> AnyServed:
        """The topic, opened if it exists. Raises TopicUnknown."""
        ...

    async def retention(self, name: TopicName, /) -> Retention:
        """What is stored now, whichever broker wrote it."""
        ...

    async def lost_log(self, name: TopicName, /) -> TopicLog | ClosedLog:
        """What this disk has of a topic, whether it is open here or not. Raises LogClosed while it is being closed."""
        ...

    async def forget_epochs(self, name: TopicName, last: int, /) -> bool:
        """Removes what this disk has of a topic up to this epoch, as far as the store has it. False: not yet."""
        ...


def keeps_history(topic: AnyServed | None) -> TypeGuard[ServedTopic]:
    """Whether the topic is served here, and reliable."""
    return topic is not None and topic.reliable
