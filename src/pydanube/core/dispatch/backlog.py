"""What a dispatch machine keeps of messages that are neither settled nor in flight, nor fresh.

`RangeBacklog` keeps ranges (Exclusive, Failover, Shared), `KeyBacklog` a queue per key (Key-Shared).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pydanube.core.dispatch.delivery import Tries
from pydanube.core.dispatch.ranges import OffsetRange


class BacklogCounts(NamedTuple):
    """A backlog seen from outside; the words are those of `Standing`."""

    undispatched: int
    waiting: int
    dead_lettering: int
    blocked_offset: int | None
    blocked_key: str | None = None
    blocked_keys: int = 0
    unaccepted: int = 0


class Backlog(Protocol):
    """Keeps every offset that is handed to it until it is sent, settled or forgotten."""

    def counts(self, committed_head: int) -> BacklogCounts: ...

    def take_back(self, first: int, end: int, tries: Tries) -> None:
        """A delivery ended without an answer; it is sent again as soon as possible."""

    def failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        """A delivery failed; keeps the message until its verdict is carried out."""

    def reveal(self, first: int, end: int) -> None:
        """Keeps these: they became readable after fresh messages above them were handed out."""

    def forget(self, ranges: Sequence[OffsetRange]) -> None:
        """Keeps these no longer. They are not in flight, or are not any more: acknowledged."""

    def forget_all(self) -> None: ...

    def retry_due(self) -> None:
        """Moves what is due now to what can be sent."""

    def next_due(self) -> float | None: ...

    def judge_again(self) -> None:
        """The policy changed: what is blocked may have another fate now."""

    def dead_lettered(self, first: int, end: int) -> None: ...

    def dead_letter_failed(self, first: int, end: int) -> None: ...
