"""What a Spark query can fail with, beyond the errors of the client and the log."""

from __future__ import annotations

from typing import Final

from pydanube.errors import DataDamaged, Refused, Unavailable

MADE_ANEW: Final = (
    "the topic was deleted and another one made under its name, for which a stream needs a new checkpoint"
)


class MessagesLost(Refused):
    """Offsets [first, end) of a topic are not kept any more, and the query wanted them. `why`: who removed them."""

    def __init__(self, topic: str, first: int, end: int, why: str) -> None:
        super().__init__(topic, first, end, why)
        self.topic = topic
        self.first = first
        self.end = end
        self.why = why

    def __str__(self) -> str:
        return (
            f"offsets {self.first} to {self.end - 1} of {self.topic} cannot be read: {self.why}. "
            "Start the query behind them, or set failOnDataLoss to false to go on without them"
        )


class OffsetsWrong(Refused):
    """Offsets that a query gives do not fit the topic."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(topic, what)
        self.topic = topic
        self.what = what

    def __str__(self) -> str:
        return f"{self.topic}: {self.what}"


class NotUploaded(Unavailable):
    """Offsets [first, end) are on a broker's disk only, and no broker was given, or none answers."""

    def __init__(self, topic: str, first: int, end: int) -> None:
        super().__init__(topic, first, end)
        self.topic = topic
        self.first = first
        self.end = end

    def __str__(self) -> str:
        return (
            f"offsets {self.first} to {self.end - 1} of {self.topic} are not in the object store: "
            "start its broker and give service.url, or read up to what is uploaded"
        )


class StoreNotHere(Unavailable):
    """A topic's objects are in a directory of the broker's machine, which this machine does not have."""

    def __init__(self, topic: str, url: str) -> None:
        super().__init__(topic, url)
        self.topic = topic
        self.url = url

    def __str__(self) -> str:
        return (
            f"the objects of {self.topic} are in {self.url} on its broker's machine, and not in that directory of this "
            "one: mount it here, start the broker with --storage-url for a store that both reach, or read with "
            'format("danube"), which asks the broker'
        )


class BatchRefused(DataDamaged):
    """A batch of a streaming query cannot be made visible exactly once. Nothing was published that is not told here."""

    def __init__(self, query: str, batch: int, why: str) -> None:
        super().__init__(query, batch, why)
        self.query = query
        self.batch = batch
        self.why = why

    def __str__(self) -> str:
        return f"batch {self.batch} of query {self.query} was not published: {self.why}"
