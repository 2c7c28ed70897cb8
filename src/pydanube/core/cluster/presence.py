"""Who was there lately: the record that a leader keeps of every broker, and what it says when that changes.

    /cluster/seen/<broker>     Presence: here, or gone since; removed after a day, or when an operator forgets it

A registration ends with its lease, and then nothing tells that the broker ever was. This record is written when
something changes and at no other time: a broker comes, goes, begins anew, is drained or activated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Self

from pydanube.core.cluster.cluster_conditions import STALE_MS
from pydanube.core.cluster.conditions import count
from pydanube.core.cluster.lifecycle import BrokerRegistration, BrokerState, silent_before_end
from pydanube.core.names import BrokerId

STARTS_MAX: Final = 10  # that are remembered
START_KEPT_MS: Final = STALE_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """`gone_ms` None: it is here. Times are milliseconds since 1970."""

    address: str
    session: int
    since_ms: int  # that it is here, or was when it went
    gone_ms: int | None = None  # when it stopped; of one that died, when it had fallen silent, as its lease tells
    in_order: bool = False  # it stopped by itself
    mode: str = ""
    reason: str = ""
    starts_ms: tuple[int, ...] = ()  # of lives that followed no orderly stop
    crashes: int = 0  # of its state, when this was written

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no such record."""
        try:
            found: Any = json.loads(value)
            gone = found.get("gone_ms")
            return cls(
                address=str(found["address"]),
                session=int(found["session"]),
                since_ms=int(found["since_ms"]),
                gone_ms=None if gone is None else int(gone),
                in_order=found.get("in_order") is True,
                mode=str(found.get("mode") or ""),
                reason=str(found.get("reason") or ""),
                starts_ms=tuple(int(each) for each in found.get("starts_ms", ())),
                crashes=int(found.get("crashes", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class PresenceChange(NamedTuple):
    """Of one record: its new value, or None to remove it; and what happened, if that is worth telling."""

    broker: BrokerId
    record: Presence | None
    kind: str = ""
    sentence: str = ""


class Attendance:
    """One leader's, from when it took the office."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl_seconds = ttl_seconds
        self._seen_alive: set[BrokerId] = set()
        self._missing: dict[BrokerId, float] = {}

    def step(
        self,
        now: float,
        now_ms: int,
        *,
        alive: Mapping[BrokerId, BrokerRegistration],
        states: Mapping[BrokerId, BrokerState],
        records: Mapping[BrokerId, Presence],
        topics: Mapping[BrokerId, Sequence[Any] | Mapping[Any, Any]],
    ) -> Iterator[PresenceChange]:
        for broker, registration in sorted(alive.items()):
            self._missing.pop(broker, None)
            self._seen_alive.add(broker)
            yield from _here(broker, registration, states.get(broker), records.get(broker), now_ms)
        for broker, record in sorted(records.items()):
            if broker in alive:
                continue
            if record.gone_ms is None:
                yield from self._going(now, now_ms, broker, record, states.get(broker), len(topics.get(broker, ())))
            elif now_ms - record.gone_ms >= STALE_MS:
                yield PresenceChange(broker, None)

    def _going(
        self, now: float, now_ms: int, broker: BrokerId, record: Presence, state: BrokerState | None, topics: int
    ) -> Iterator[PresenceChange]:
        """A broker that was not there when this leader came gets the time of a lease: perhaps all were restarted."""
        since = self._missing.setdefault(broker, now)
        if broker not in self._seen_alive and now - since < self._ttl_seconds:
            return
        in_order = state is not None and state.has_left
        if in_order:
            gone = replace(record, gone_ms=now_ms, in_order=True)
            yield PresenceChange(broker, gone, "stopped", f"broker {record.address} stopped, in order")
        else:
            silent_ms = now_ms - int(silent_before_end(self._ttl_seconds) * 1000)
            gone = replace(record, gone_ms=max(record.since_ms, silent_ms), in_order=False)
            had = f", with {count(topics, 'topic')}" if topics else ""
            yield PresenceChange(broker, gone, "died", f"broker {record.address} is gone: its lease ran out{had}")


def _here(
    broker: BrokerId, registration: BrokerRegistration, state: BrokerState | None, record: Presence | None, now_ms: int
) -> Iterator[PresenceChange]:
    mode, reason = (state.mode.value, state.reason) if state is not None else ("", "")
    address = registration.broker_url.rpartition("://")[2]
    starts = tuple(each for each in record.starts_ms if now_ms - each < START_KEPT_MS) if record is not None else ()
    crashes = state.crashes if state is not None else 0
    if record is None or record.gone_ms is not None or record.session != registration.session:
        # What the broker wrote when it registered holds: the leader may have been away while it stopped.
        is_crash = record is not None and crashes > record.crashes
        fresh = Presence(
            address=address,
            session=registration.session,
            since_ms=now_ms,
            mode=mode,
            reason=reason,
            starts_ms=(*starts, now_ms)[-STARTS_MAX:] if is_crash else starts,
            crashes=crashes,
        )
        anew = "began anew, without an orderly stop before" if is_crash else "was restarted, in order"
        back = "came" if record is None else "is back" if record.gone_ms is not None else anew
        yield PresenceChange(
            broker, fresh, "came", f"broker {address} {back}: {mode or 'no state yet'}{_because(reason)}"
        )
    elif (record.mode, record.reason, record.address) != (mode, reason, address):
        changed = replace(record, mode=mode, reason=reason, address=address)
        is_worth = record.mode != mode
        sentence = f"broker {address} is {mode or 'without a state'}{_because(reason)}" if is_worth else ""
        yield PresenceChange(broker, changed, mode if is_worth else "", sentence)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


# --- what happened ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One line of the log of what happened. `by` is who did it: an address, or a broker."""

    time_ms: int
    kind: str
    sentence: str
    by: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is none."""
        try:
            found: Any = json.loads(value)
            return cls(
                time_ms=int(found["time_ms"]),
                kind=str(found["kind"]),
                sentence=str(found["sentence"]),
                by=str(found.get("by") or ""),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
