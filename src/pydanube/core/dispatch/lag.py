"""The hybrid lag monitor's decisions: when to poll, how far behind, and why a subscription is quiet.

    fast path    every commit notifies: `Available(head)`
    safety net   every heartbeat compares: poll if something committed is undispatched and a consumer has a free window

A lost, coalesced or early notification, a reader that returns nothing for a moment, a dead notifier task:
each delays a message by at most one heartbeat. A slow consumer is lag, never a poll: its window is full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydanube.errors import ConfigError

INTERVAL_MIN_MS: Final = 50
INTERVAL_MAX_MS: Final = 1000
PROFILES: Final = {"high_priority": 100, "normal": 500, "low_priority": 1000, "debug": 50}
OFF: Final = "off"
OBSERVE: Final = "observe"

_MILLISECONDS: Final = re.compile(r"([0-9]{1,6}) ?(?:ms)?")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`interval_ms` None: off. With `polls` False it counts lag and leaves delivery to the notifier."""

    interval_ms: int | None = PROFILES["normal"]
    polls: bool = True

    @classmethod
    def parse(cls, text: str, key: str = "dispatch.heartbeat_interval") -> Heartbeat:
        """A profile's name, `off`, `observe`, or 50 to 1000 milliseconds: `250ms` or `250`."""
        word = text.strip().lower()
        if word in PROFILES:
            return cls(PROFILES[word])
        if word == OFF:
            return cls(None, polls=False)
        if word == OBSERVE:
            return cls(polls=False)
        match = _MILLISECONDS.fullmatch(word)
        if match and INTERVAL_MIN_MS <= int(match[1]) <= INTERVAL_MAX_MS:
            return cls(int(match[1]))
        named = ", ".join(f"{name} ({ms} ms)" for name, ms in PROFILES.items())
        raise ConfigError(
            key, text, f"from {INTERVAL_MIN_MS}ms to {INTERVAL_MAX_MS}ms, or one of {named}, {OFF}, {OBSERVE}"
        )

    def __str__(self) -> str:
        """What `parse` reads."""
        if self.interval_ms is None:
            return OFF
        if not self.polls:
            return OBSERVE
        named = (name for name, ms in PROFILES.items() if ms == self.interval_ms)
        return next(named, f"{self.interval_ms}ms")


class LagInfo(NamedTuple):
    """`cursor` is the last acknowledged offset, None for none; `head` the next offset to be committed."""

    cursor: int | None
    head: int
    lag_messages: int
    has_lag: bool


def lag_info(next_unacked: int, head: int, lag: int) -> LagInfo:
    return LagInfo(next_unacked - 1 if next_unacked > 0 else None, head, lag, lag > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A dispatch machine seen from outside, at one moment."""

    head: int  # committed
    next_unacked: int
    lag: int
    undispatched: int  # committed, readable, not handed out, not waiting for anything
    consumers: int = 0
    has_capacity: bool = False
    unacked: int = 0
    unseen: int = 0  # of these, in the queues of consumers whose applications have not taken them
    late: int = 0  # in addition, still in queues of consumers although their time is over
    window_held: int = 0  # of these, by consumers that go by the window
    unacked_max: int | None = None  # None if all consumers go by permits
    waiting: int = 0  # failed, to be sent again later
    retry_at: float | None = None
    blocked_offset: int | None = None
    blocked_key: str | None = None
    blocked_keys: int = 0  # Key-Shared: how many keys; others go on
    dead_lettering: int = 0
    rate_ready_at: float | None = None
    first_offset: int = 0
    missing: int = 0
    unaccepted: int = 0  # Key-Shared: kept for consumers that are away
    scheduled: int = 0  # not to be delivered yet; no lag
    scheduled_full: bool = False  # more than may be: nothing more is looked at until one is due
    due_at: float | None = None  # of the first of them
    timed_out: int = 0  # taken back, since the machine was made, because no ack came in time
    skipped: int = 0  # offsets from next_unacked on that are missing, or acknowledged: what waits begins behind them

    @property
    def oldest_open(self) -> int:
        """The oldest deliverable offset that was not acknowledged; the head if there is none."""
        return self.next_unacked + self.skipped


class Beat(NamedTuple):
    """What one heartbeat found. `poll`: feed `Available(lag.head)` and `Ticked` to the machine now."""

    poll: bool
    lag: LagInfo


def beat(standing: Standing, heartbeat: Heartbeat, now: float, *, new_history: bool = False) -> Beat:
    """`standing` is the machine's, asked with the log's own committed head: it trusts no notification.

    `new_history`: the topic's history_version is not the one the machine last heard of.
    """
    lag = lag_info(standing.next_unacked, standing.head, standing.lag)
    undispatched = standing.undispatched > 0 or new_history
    stopped = standing.blocked_offset is not None and not standing.blocked_keys
    limited = standing.rate_ready_at is not None and standing.rate_ready_at > now
    return Beat(heartbeat.polls and undispatched and standing.has_capacity and not (stopped or limited), lag)


def explain(standing: Standing, now: float, *, expired: int = 0) -> str:
    """Why the subscription is, or is not, receiving: one sentence, the first cause that applies.

    `expired`: so many messages were removed by retention before they were acknowledged.
    """
    skipped = f"; retention removed {_messages(expired)} before they were acknowledged" if expired else ""
    return _cause(standing, now) + skipped + "."


def _cause(s: Standing, now: float) -> str:
    behind = f"{_messages(s.lag)} behind: acknowledged below offset {s.next_unacked}, committed below {s.head}"
    if s.scheduled:
        due = "" if s.due_at is None else f", the first due in {_seconds(s.due_at - now)}"
        waits = f"{_messages(s.scheduled)} {'is' if s.scheduled == 1 else 'are'} scheduled for later{due}"
        if s.lag == 0:
            return f"caught up with what is due below offset {s.head}: {waits}"
        behind += f"; {waits}"
        if s.scheduled_full and not s.undispatched and not s.unacked:
            return f"held: no more may be scheduled, and what is behind them waits until one is due; {behind}"
    if s.lag == 0 and s.missing:
        lost = f"up to {_messages(s.missing)} of a lost broker wait to be rescued or discarded"
        return f"caught up with what can be read below offset {s.head}; {lost}"
    if s.lag == 0:
        return f"caught up: everything below offset {s.head} is acknowledged"
    if s.consumers == 0:
        return f"no consumer is connected; {behind}"
    if s.next_unacked < s.first_offset:
        return f"behind the first kept offset {s.first_offset}: retention removed older messages; {behind}"
    if s.blocked_offset is not None and not s.blocked_keys:
        return f"blocked by poison at offset {s.blocked_offset}, which failed too often; {behind}"
    if s.rate_ready_at is not None:
        return f"rate limited: the next message may go in {_seconds(s.rate_ready_at - now)}; {behind}"
    if s.blocked_keys:
        behind += f"; poison blocks {s.blocked_keys} of its keys, {s.blocked_key!r} at offset {s.blocked_offset}"
    if s.undispatched and not s.has_capacity:
        if s.unacked_max is not None and s.window_held >= s.unacked_max:
            return f"window full: {s.window_held} of {s.unacked_max} messages wait for an ack; {behind}"
        if not (s.unacked or s.late):
            return f"no consumer asks for messages; {behind}"
        wait = "waits" if s.unacked == 1 else "wait"
        return f"no consumer has room: {_messages(s.unacked)} {wait} for an ack{_where(s)}; {behind}"
    if s.undispatched:
        return f"delivering: {_messages(s.undispatched)} can be sent now; {behind}"
    if s.waiting:
        due = "" if s.retry_at is None else f", the first in {_seconds(s.retry_at - now)}"
        return f"waiting for retry: {_messages(s.waiting)} failed and will be tried again{due}; {behind}"
    if s.dead_lettering:
        return f"copying {_messages(s.dead_lettering)} to the dead-letter topic; {behind}"
    if s.unaccepted:
        return f"no connected consumer accepts the keys of {_messages(s.unaccepted)}; {behind}"
    if s.unacked:
        return f"waiting for the ack of {_messages(s.unacked)} already sent{_where(s)}; {behind}"
    if s.blocked_keys:
        return f"blocked by poison at offset {s.blocked_offset}; {behind}"
    return f"nothing can be sent now; {behind}"


def _where(s: Standing) -> str:
    """What else there is to say of messages that consumers have. One whose messages timed out has them still."""
    unseen = f", {s.unseen} of them unseen in the queues of consumers" if s.unseen else ""
    late = f", and consumers still have {_messages(s.late)} that timed out" if s.late else ""
    return unseen + late


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s"
