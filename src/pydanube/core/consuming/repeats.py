"""What was delivered before: which arrival may be a copy, and what of it is not shown again. No I/O and no clock.

If messages whose acks had no answer come again, from a broker that knows nothing of their delivery, the application
does not see them twice: it has said that they are done. What only has the same offsets is not held back: messages of a
newer epoch than any that came before (the topic was made anew), those of a non-reliable topic, and what comes again
after a seek back.

What the application has when a connection is lost is delivered by the next owner as if for the first time. So whatever
lies below the end of all that came on earlier connections, in no newer epoch, may be a copy: what is acknowledged is
not shown from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydanube.core.consuming.values import Arrival, Ranges, Verdict
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges


class Repeats:
    """Of one lane, over all its connections."""

    __slots__ = ("_known_end", "_settled_epoch", "delivered_end", "epoch", "seen_end", "seen_epoch", "settled")

    def __init__(self) -> None:
        self.epoch = 0  # the newest of all batches so far
        self.settled = OffsetRanges()  # acknowledged, and perhaps not known to the broker
        self._settled_epoch = 0  # their batches are not newer
        self._known_end = 0  # the broker knew everything below to be acknowledged
        self.delivered_end = 0  # the end of all that came
        self.seen_end = 0  # what lies below came on an earlier connection: the application may have it
        self.seen_epoch = 0  # their batches are not newer

    def is_copy(self, arrival: Arrival) -> bool:
        """Whether the application may have some of it already."""
        if arrival.attempt > 1:
            return True
        return arrival.ranges[0][0] < self.seen_end and 0 < arrival.epoch <= self.seen_epoch

    def without_settled(self, arrival: Arrival) -> tuple[Ranges, list[OffsetRange]]:
        """What the application has not acknowledged; and the rest, to be acknowledged again."""
        if arrival.ranges[0][0] < self._known_end:
            self.settled.clear()  # a seek back: what is done is to be done again
        if not 0 < arrival.epoch <= self._settled_epoch:
            return arrival.ranges, []  # other messages, which have the same offsets
        rest: list[OffsetRange] = []
        settled: list[OffsetRange] = []
        for first, end in arrival.ranges:
            rest += self.settled.gaps(first, end)
            for each in self.settled.overlap(first, end):
                self.settled.remove(*each)
                settled.append(each)
        return rest, settled

    def remember(self, unsent: Iterable[Verdict], next_unacked: int) -> None:
        """These acks, for as long as a broker may take to deliver again what it does not know to be done."""
        self._settled_epoch = self.epoch
        self._known_end = next_unacked
        for verdict in unsent:
            if verdict.is_ack:
                for first, end in verdict.ranges:
                    self.settled.add(max(first, next_unacked), end)

    def known(self, end: int) -> None:
        """The broker knows everything below to be acknowledged."""
        self._known_end = max(self._known_end, end)

    def lost(self) -> None:
        self.settled.clear()
        self.seen_end, self.seen_epoch = self.delivered_end, self.epoch
