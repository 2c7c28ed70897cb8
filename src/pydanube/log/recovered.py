"""What recovery finds: the logs of a topic's epochs, how sure their ends are, what is torn and what is damaged."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pydanube.core.commit.sessions import Sessions
from pydanube.log.catalog import SegmentFile


class TailState(Enum):
    """How sure the end of a log is."""

    CLEAN = "clean"  # nothing behind the last group
    TORN = "torn"  # an unfinished write behind the last group; it was never acknowledged
    UNPROVEN = "unproven"  # acknowledged messages may be missing at the end


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes that recovery cut off and kept in `kept_as`."""

    path: str
    position: int
    length: int
    kept_as: str


@dataclass(frozen=True, slots=True)
class Damage:
    """Offsets [first, end) cannot be read; `end` is None when its extent is not known."""

    path: str
    position: int
    first: int
    end: int | None
    why: str

    def __str__(self) -> str:
        until = "an unknown offset" if self.end is None else str(self.end)
        return f"{self.path} at position {self.position}: {self.why}; offsets {self.first} up to {until} are lost"


@dataclass(slots=True)
class RecoveredEpoch:
    """One epoch's log, read-only from now on."""

    epoch: int
    directory: str
    segments: list[SegmentFile] = field(default_factory=list)
    first_offset: int = 0
    end_offset: int = 0
    sessions: Sessions = field(default_factory=Sessions)
    append_time: int = 0
    max_publish_time: int = -(2**63)
    torn: list[Torn] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    tail: TailState = TailState.CLEAN
    why: str = ""

    def unproven(self, why: str) -> None:
        self.tail, self.why = TailState.UNPROVEN, why


@dataclass(frozen=True, slots=True)
class Recovered:
    """A topic's log over all epochs that this disk has, oldest first."""

    topic: str
    epochs: list[RecoveredEpoch]

    @property
    def segments(self) -> list[SegmentFile]:
        return [segment for epoch in self.epochs for segment in epoch.segments]

    @property
    def head(self) -> int:
        return self.epochs[-1].end_offset if self.epochs else 0

    @property
    def tail(self) -> TailState:
        return self.epochs[-1].tail if self.epochs else TailState.CLEAN

    @property
    def torn(self) -> list[Torn]:
        return [torn for epoch in self.epochs for torn in epoch.torn]

    @property
    def damage(self) -> list[Damage]:
        return [damage for epoch in self.epochs for damage in epoch.damage]
