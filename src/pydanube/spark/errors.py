"""What a Spark query can fail with, beyond the errors of the client and the log."""

from __future__ import annotations

from typing import Final

from pydanube.core.declared import says
from pydanube.errors import DataDamaged, Refused, Unavailable

MADE_ANEW: Final = (
    "the topic was deleted and another one made under its name, for which a stream needs a new checkpoint"
)


@says()
class MessagesLost(Refused):
    """Offsets [first, end) of a topic are not kept any more, and the query wanted them. `why`: who removed them."""

    topic: str
    first: int
    end: int
    why: str

    def __str__(self) -> str:
        return (
            f"offsets {self.first} to {self.end - 1} of {self.topic} cannot be read: {self.why}. "
            "Start the query behind them, or set failOnDataLoss to false to go on without them"
        )


@says("{topic}: {what}")
class OffsetsWrong(Refused):
    """Offsets that a query gives do not fit the topic."""

    topic: str
    what: str


@says()
class NotUploaded(Unavailable):
    """Offsets [first, end) are on a broker's disk only, and no broker was given, or none answers."""

    topic: str
    first: int
    end: int

    def __str__(self) -> str:
        return (
            f"offsets {self.first} to {self.end - 1} of {self.topic} are not in the object store: "
            "start its broker and give service.url, or read up to what is uploaded"
        )


@says(
    "the objects of {topic} are in {url} on its broker's machine, and not in that directory of this one: mount it "
    'here, start the broker with --storage-url for a store that both reach, or read with format("danube"), which '
    "asks the broker"
)
class StoreNotHere(Unavailable):
    """A topic's objects are in a directory of the broker's machine, which this machine does not have."""

    topic: str
    url: str


@says("batch {batch} of query {query} was not published: {why}")
class BatchRefused(DataDamaged):
    """A batch of a streaming query cannot be made visible exactly once. Nothing was published that is not told here."""

    query: str
    batch: int
    why: str
