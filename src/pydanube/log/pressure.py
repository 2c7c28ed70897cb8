"""How many bytes have come and are not on disk yet, wherever they wait, and what follows when they are too many.

    waiting      unary messages that are being gathered, native batches that are being parsed
    pending      batches in the committer's queue
    partial      frames that have come in part

One bound for all topics (`wal.pending_bytes`). A server that can make its peer wait stops reading from it (`holds`) and
goes on when it is called (`call_when_relieved`); one that cannot refuses (`check`), and the same call may be tried
again. Both only keep more from coming: what has come goes on, so a batch larger than the bound is stored like others.
"""

from __future__ import annotations

from collections.abc import Callable

from pydanube.errors import LogBusy


class Pressure:
    """One per log. Never waits."""

    def __init__(self, limit_bytes: int, pending: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.refused = 0  # calls and batches
        self.partial_bytes = 0
        self._waiting_bytes = 0
        self._pending = pending
        self._held: dict[Callable[[], None], None] = {}

    @property
    def queued_bytes(self) -> int:
        """Complete, and not on disk."""
        return self._waiting_bytes + self._pending()

    @property
    def held(self) -> int:
        """Peers that are not read from."""
        return len(self._held)

    @property
    def is_over(self) -> bool:
        return self.queued_bytes > self.limit_bytes

    @property
    def holds(self) -> bool:
        """Whether a peer that sends should wait. Never if nothing is queued: then nothing would wake it."""
        queued = self.queued_bytes
        return queued > 0 and queued + self.partial_bytes > self.limit_bytes

    @property
    def refuses(self) -> bool:
        """Whether a call that cannot be made to wait has to be tried again. Frames that have come in part take up to
        half of the bound from calls: not all of it, and they do not come on top of a whole bound of calls.
        """
        return self.queued_bytes + min(self.partial_bytes, self.limit_bytes // 2) > self.limit_bytes

    def check(self) -> None:
        """Raises LogBusy if nothing more should be taken."""
        if (busy := self.why_busy()) is not None:
            raise busy

    def why_busy(self) -> LogBusy | None:
        """The same, as a value: the caller refuses something with it."""
        if not self.refuses:
            return None
        self.refused += 1
        return LogBusy(self.queued_bytes + self.partial_bytes, self.limit_bytes)

    def add(self, size_bytes: int) -> None:
        self._waiting_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        self._waiting_bytes -= size_bytes
        assert self._waiting_bytes >= 0
        if self._held:
            self.relieve()

    def call_when_relieved(self, callback: Callable[[], None]) -> None:
        """Once, when half of the bound is free again."""
        self._held[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        self._held.pop(callback, None)

    def relieve(self) -> None:
        """Something has left the queue."""
        if self._held and self.queued_bytes <= self.limit_bytes // 2:
            held, self._held = self._held, {}
            for callback in held:
                callback()
