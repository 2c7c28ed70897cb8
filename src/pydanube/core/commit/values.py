"""The values of the commit decision: what comes in (batches, targets, limits) and what comes out (parts, effects).

`machine.py` says what is decided; nothing here decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from pydanube.core.commit.sessions import ProducerState, Sessions
from pydanube.errors import DanubeError, DiskFull

# Why a segment is made. The first three end the one before it because of a group that needs another.
SIZE, TIME, FAILURE = "size", "time", "failure"
FIRST, PREPARED, SPACE = "first", "prepared", "room"

# --- what comes in ------------------------------------------------------------------------------------


class BatchHeader(Protocol):
    """What the decision needs to know of a batch."""

    @property
    def flags(self) -> int: ...  # not 0: a record without rows, of a session that begins or ends
    @property
    def ends_session(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def producer_id(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def first_sequence(self) -> int: ...
    @property
    def body_crc(self) -> int: ...
    @property
    def max_publish_time(self) -> int: ...


class AnyBatch(Protocol):
    @property
    def header(self) -> BatchHeader: ...


class Waiter(Protocol):
    """The producer's end of a batch. Only asked whether it has left; the shell answers it."""

    def done(self) -> bool: ...


class SegmentState(Protocol):
    """The file that a target is written to."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def created_us(self) -> int: ...
    @property
    def failed(self) -> bool: ...


class CommitLimits(Protocol):
    """The settings that the decision looks at; see WalConfig."""

    @property
    def segment_bytes(self) -> int: ...
    @property
    def segment_seconds(self) -> float: ...
    @property
    def group_bytes(self) -> int: ...
    @property
    def journal_bytes(self) -> int: ...
    @property
    def copy_bytes(self) -> int: ...
    @property
    def sessions_max(self) -> int: ...


class JournalState(NamedTuple):
    """The commit journal, as the shell sees it before a group is written."""

    start: int  # where the first record of a journal goes
    end: int | None = None  # where the next one goes; None: there is no journal
    is_being_made: bool = False  # ahead, for groups that come later
    is_retiring: bool = False  # the one before still waits for the syncs of its segments


B = TypeVar("B", bound=AnyBatch)
W = TypeVar("W", bound=Waiter)


class Pending(NamedTuple, Generic[B, W]):
    """A batch in the queue. `on_decided` may be called as soon as its receipt is there."""

    batch: B
    waiter: W
    on_decided: Callable[[], None] | None = None


class CommitTarget(Generic[B, W]):
    """One topic's log as the decision sees it. The machine changes it; everything else reads it."""

    def __init__(
        self,
        topic: str,
        *,
        topic_hash: int = 0,
        epoch: int = 0,
        durability: str = "fsync",
        head: int = 0,
        append_time: int = 0,
        max_publish_time: int = 0,
        sessions: Sessions | None = None,
    ) -> None:
        self.topic = topic
        self.topic_hash = topic_hash
        self.epoch = epoch
        self.durability = durability
        self.is_synced = durability != "os"  # its batches are acknowledged only when they are synced
        self.head = head
        self.append_time = append_time
        self.max_publish_time = max_publish_time
        self.sessions = Sessions() if sessions is None else sessions
        self.reserved_end: int | None = None  # batches beyond it wait; None: no bound
        self.pending: deque[Pending[B, W]] = deque()
        self.closed = False


T = TypeVar("T", bound="CommitTarget[Any, Any]")


# --- what comes out -----------------------------------------------------------------------------------


class CommitReceipt(NamedTuple):
    """What an acknowledged batch got: its first offset, the owner's epoch, and how safe it is."""

    offset: int
    epoch: int
    durability: str
    duplicate: bool = False  # it was stored before: this is where


Answers: TypeAlias = list[tuple[W, CommitReceipt | DanubeError]]


@dataclass(slots=True, eq=False)
class GroupPart(Generic[T, B, W]):
    """One target's part of the group that is being written, with what is needed to take it back."""

    target: T
    batches: list[tuple[B, int]] = field(default_factory=list)  # with the offset that each gets
    waiters: list[tuple[W, int, bool]] = field(default_factory=list)  # offset, duplicate
    on_decided: dict[Callable[[], None], None] = field(default_factory=dict)
    undo: dict[int, ProducerState | None] = field(default_factory=dict)
    size_bytes: int = 0
    end_offset: int = 0
    append_time: int = 0
    max_publish_time: int = 0
    decided: bool = False
    again: bool = False  # its first write failed: the next failure is the last

    def take_back(self) -> None:
        """The sessions are as if the part had never been formed. Repeating it changes nothing."""
        for producer_id, producer in self.undo.items():
            self.target.sessions.put(producer_id, producer)


@dataclass(slots=True)  # not frozen: one is made for every part of every group
class Commit(Generic[W]):
    """The part is safe. It becomes visible first, then its producers are answered, then `on_decided` is called."""

    answers: Answers[W]
    on_decided: tuple[Callable[[], None], ...]


@dataclass(frozen=True, slots=True)
class RefusePart(Generic[W]):
    """The part was not written, and nothing of it can reappear: its producers get the error."""

    answers: Answers[W]
    error: DiskFull


@dataclass(frozen=True, slots=True)
class WriteAgain:
    """What the file holds is unknown from its last good sync on. The same goes to a new one, once."""

    error: DanubeError


@dataclass(frozen=True, slots=True)
class Stop:
    """The disk has failed for good: `CommitMachine.given_up` has the answers."""

    error: DanubeError


class Route(Enum):
    DIRECT = "direct"  # each part to its segment, a sync each
    JOURNAL = "journal"  # one record and one sync
    NEW_JOURNAL = "new journal"  # the same, behind a new file
