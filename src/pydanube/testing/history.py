"""What happened to a cluster, as seen from outside, in one list and in one file.

    history = History()
    history.add(Acked("/default/orders", "order 7", offset=12, epoch=3, broker=1, at=4.2))
    history.write(path)
    check(History.read(path))                      checkers.py

Clients write down what they sent, what was acknowledged and what they received; a recorder at the metadata store
writes down cursors and owners; at the end a reader reads the topics. Nothing here knows how brokers work, so simulated
clusters, real ones and a soak test of your own are judged by the same rules. Events stand in the order in which they
happened; `at` is in seconds. What a recorder does not know it leaves out: a checker without evidence says nothing.

Messages are texts, and no text is sent twice as two messages. A topic that was deleted and made again is another topic:
record it under another name (`life`).

The file has one JSON object per line. The first names the format, the last counts the others, so a file that was cut is
known as such.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from pydanube.errors import DanubeError

FORMAT: Final = "pydanube history"
VERSION: Final = 1


class InvalidHistory(DanubeError):
    """A file that is no history of this version, from line `line` on."""

    def __init__(self, path: str, line: int, why: str) -> None:
        super().__init__(path, line, why)
        self.path = path
        self.line = line
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.why}"


# --- what can happen ----------------------------------------------------------------------------------------


class Created(NamedTuple):
    """A topic is there."""

    topic: str
    reliable: bool
    at: float = 0.0


class Sent(NamedTuple):
    """A producer tries to send a message, for the first time. `topic` is its plain name: who gets it is not known.

    `once`: in a session that numbers messages. A producer that begins another session for it sends it anew.
    """

    topic: str
    message: str
    key: str = ""
    once: bool = False
    at: float = 0.0


class Acked(NamedTuple):
    """A producer got the receipt of its message, at this offset, by this broker in this epoch."""

    topic: str
    message: str
    offset: int
    epoch: int = 0
    broker: int = 0
    at: float = 0.0


class Given(NamedTuple):
    """A broker gave out this offset when the store had `reserved` for it, and its own log believed in `believed`."""

    topic: str
    offset: int
    epoch: int
    reserved: int
    believed: int
    at: float = 0.0


class Fetched(NamedTuple):
    """A reader of the log itself found this message there."""

    topic: str
    message: str
    offset: int
    at: float = 0.0


class Subscribed(NamedTuple):
    """A subscription exists from now on; every message from `start` on is meant for it."""

    topic: str
    subscription: str
    kind: str
    start: int = 0
    at: float = 0.0


class Policy(NamedTuple):
    """What becomes of a message that fails: after so many redeliveries it is a dead letter, or nothing is said."""

    topic: str
    subscription: str
    redeliveries: int
    dead_letter: bool
    at: float = 0.0


class Got(NamedTuple):
    """A consumer received a message, from a broker that serves the topic in `epoch`.

    `rescued` if it may come late: from a lost broker's disk, or from one whose lease was forgotten before its time.
    """

    topic: str
    subscription: str
    consumer: str
    message: str
    offset: int
    key: str = ""
    attempt: int = 1
    epoch: int = 0
    rescued: bool = False
    at: float = 0.0


class Done(NamedTuple):
    """The broker took a consumer's acknowledgement. `consumer`: whose it was, if that is known."""

    topic: str
    subscription: str
    offset: int
    epoch: int = 0
    at: float = 0.0
    consumer: str = ""


class Flushed(NamedTuple):
    """A consumer's client said that the broker has taken this acknowledgement."""

    topic: str
    subscription: str
    offset: int
    consumer: str
    at: float = 0.0


class Nacked(NamedTuple):
    """The broker took a consumer's refusal."""

    topic: str
    subscription: str
    offset: int
    epoch: int = 0
    at: float = 0.0


class Cursor(NamedTuple):
    """The metadata store took this cursor: the last acknowledged offset."""

    topic: str
    subscription: str
    cursor: int
    at: float = 0.0


class Claimed(NamedTuple):
    """The metadata store took a new owner."""

    topic: str
    epoch: int
    broker: int
    start: int
    at: float = 0.0
    registered: bool = True  # the broker was a member then, under the session that it claims for


class Released(NamedTuple):
    """The owner sealed the topic. `clean`: its cursors were stored before, as far as the recorder knows."""

    topic: str
    epoch: int
    next_offset: int
    clean: bool
    at: float = 0.0


class Orphaned(NamedTuple):
    """Offsets [start, end) wait on the disk of a lost owner."""

    topic: str
    start: int
    end: int
    at: float = 0.0


class Head(NamedTuple):
    """A broker that holds the topic in `epoch` says where it ends."""

    topic: str
    epoch: int
    broker: int
    head: int
    at: float = 0.0


class Serving(NamedTuple):
    """These brokers all said, at one moment, that they may serve the topic."""

    topic: str
    brokers: Sequence[int]
    at: float = 0.0


class Damaged(NamedTuple):
    """Bytes of this topic were changed on a disk, so that what was there may be lost, if that is recorded as a void."""

    topic: str
    at: float = 0.0


class Lease(NamedTuple):
    """So long a broker that was replaced may go on without knowing it."""

    seconds: float
    at: float = 0.0


class Forgot(NamedTuple):
    """Retention by size moved a topic's beginning. Before the newest object went that did, there were `size_bytes`."""

    topic: str
    first: int
    size_bytes: int
    limit_bytes: int
    at: float = 0.0


class Stopped(NamedTuple):
    """A broker ended by itself. `failed_seconds` ago its disk had failed a call; -1: none of its disk's calls did."""

    broker: int
    why: str
    failed_seconds: float
    at: float = 0.0


class Grew(NamedTuple):
    """There is more of this in a broker than there was before clients did something that leaves nothing behind."""

    broker: int
    what: str
    before: int
    after: int
    at: float = 0.0


class Worked(NamedTuple):
    """The longest step of the event loop touched so many ranges of offsets."""

    ranges: int
    at: float = 0.0


class Fault(NamedTuple):
    """The harness broke something. For readers of the history; no rule rests on it."""

    kind: str
    node: int
    at: float = 0.0


class Quiet(NamedTuple):
    """From now on nothing fails and all clients are connected: what can be delivered comes within so many seconds."""

    patience_seconds: float
    at: float = 0.0


class Departed(NamedTuple):
    """The consumers of a topic, which ends at `head`, leave for good: what is stored from there on has no receiver."""

    topic: str
    head: int
    at: float = 0.0


class Dead(NamedTuple):
    """A dead-letter topic has a copy of this message."""

    topic: str
    subscription: str
    message: str
    offset: int
    at: float = 0.0


class Kept(NamedTuple):
    """A topic at the end: its messages by offset, where it begins and ends, and the offsets without a message."""

    topic: str
    first: int
    head: int
    messages: Mapping[int, str]
    voids: Sequence[tuple[int, int]] = ()
    orphans: Sequence[tuple[int, int]] = ()
    at: float = 0.0


Event: TypeAlias = (
    Created
    | Sent
    | Acked
    | Given
    | Fetched
    | Subscribed
    | Policy
    | Got
    | Done
    | Flushed
    | Nacked
    | Cursor
    | Claimed
    | Released
    | Orphaned
    | Head
    | Serving
    | Damaged
    | Lease
    | Forgot
    | Stopped
    | Grew
    | Worked
    | Fault
    | Quiet
    | Departed
    | Dead
    | Kept
)
E = TypeVar("E", bound=tuple[Any, ...])

EVENT_TYPES: Final[Mapping[str, type[Any]]] = {
    kind.__name__.lower(): kind
    for kind in (
        Created,
        Sent,
        Acked,
        Given,
        Fetched,
        Subscribed,
        Policy,
        Got,
        Done,
        Flushed,
        Nacked,
        Cursor,
        Claimed,
        Released,
        Orphaned,
        Head,
        Serving,
        Damaged,
        Lease,
        Forgot,
        Stopped,
        Grew,
        Worked,
        Fault,
        Quiet,
        Departed,
        Dead,
        Kept,
    )
}
_NAMES: Final = {kind: name for name, kind in EVENT_TYPES.items()}


def life(topic: str, created: int) -> str:
    """The name under which a topic is recorded that was made in epoch `created`, after others of its name."""
    return topic if created <= 1 else f"{topic}@{created}"


# --- the list -----------------------------------------------------------------------------------------------


class History:
    """Events in the order in which they happened."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)
        self._index: dict[tuple[type[Any], str], list[Any]] = {}
        self._indexed = 0

    def add(self, event: Event) -> None:
        self.events.append(event)

    def all(self, kind: type[E]) -> list[E]:
        """Every event of one kind."""
        return self.of(kind, "")

    def of(self, kind: type[E], topic: str) -> list[E]:
        """The events of one kind about one topic."""
        if self._indexed != len(self.events):
            index: dict[tuple[type[Any], str], list[Any]] = defaultdict(list)
            for event in self.events:
                index[type(event), ""].append(event)
                about = getattr(event, "topic", "")
                if about:
                    index[type(event), about].append(event)
            self._index, self._indexed = dict(index), len(self.events)
        return cast("list[E]", self._index.get((kind, topic), []))

    def topics(self, *kinds: type[Any]) -> list[str]:
        """The topics of which there are such events, sorted."""
        return sorted({event.topic for kind in kinds for event in self.all(kind)})

    # --- the file -------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        yield json.dumps({"format": FORMAT, "version": VERSION})
        for event in self.events:
            yield to_line(event)
        yield json.dumps({"event": "end", "events": len(self.events)})

    def write(self, path: Path) -> None:
        path.write_text("".join(line + "\n" for line in self.lines()), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> History:
        """Raises InvalidHistory for a file that was cut, damaged, or written by another version."""
        return cls.parse(path.read_text(encoding="utf-8", errors="replace"), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "history") -> History:
        lines = text.split("\n")
        _check_format(lines[0], name)
        history = cls()
        for number, line in enumerate(lines[1:], 2):
            fields = _object(line, name, number)
            if fields.get("event") == "end":
                if fields.get("events") != number - 2:
                    raise InvalidHistory(
                        name, number, f"{fields.get('events')} events were written and {number - 2} are here"
                    )
                if "".join(lines[number:]):
                    raise InvalidHistory(name, number + 1, "there is more behind its end")
                return history
            history.add(_event(fields, name, number))
        raise InvalidHistory(name, len(lines), "it ends here without its last line, so it was cut")


def to_line(event: Event) -> str:
    """One event as it stands in the file."""
    fields: dict[str, Any] = {"event": _NAMES[type(event)], **event._asdict()}
    if isinstance(event, Kept):
        fields["messages"] = sorted(event.messages.items())
    return json.dumps(fields)


def _check_format(line: str, name: str) -> None:
    fields = _object(line, name, 1)
    if fields.get("format") != FORMAT:
        raise InvalidHistory(name, 1, f"it is no history: the first line must name the format {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise InvalidHistory(name, 1, f"it has version {fields.get('version')!r}; this program reads {VERSION}")


def _object(line: str, name: str, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        why = "it ends in the middle of a line, so it was cut" if line else "an empty line, so the file was cut"
        raise InvalidHistory(name, number, f"{why} ({error})") from error
    if not isinstance(fields, dict):
        raise InvalidHistory(name, number, "it is no JSON object")
    return fields


def _event(fields: dict[str, Any], name: str, number: int) -> Event:
    kind = EVENT_TYPES.get(fields.pop("event", None))
    if kind is None:
        raise InvalidHistory(name, number, "it has no event of this version")
    try:
        if kind is Kept:
            fields["messages"] = {int(offset): str(message) for offset, message in fields["messages"]}
            fields["voids"] = [(int(first), int(end)) for first, end in fields["voids"]]
            fields["orphans"] = [(int(first), int(end)) for first, end in fields["orphans"]]
        return cast(Event, kind(**fields))
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidHistory(name, number, f"its fields are not those of this version: {error}") from error
