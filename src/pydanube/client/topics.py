"""Which topics a consumer wants: names, and patterns of names; and how it keeps to them while it runs.

    "/default/orders"                    one topic, or all partitions of one
    ["/default/orders", "/eu/orders"]    several
    "/default/orders.*"                  a pattern: `*` is any text, `?` one character, neither goes over a slash

The topics of a pattern come and go. New ones are found when the brokers are asked again, every few seconds, and are
read from their beginning: they did not exist when the consumer was opened. Those that are gone are left.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError, InvalidName, TopicUnknown

log = logging.getLogger(__name__)

WILD: Final = re.compile(r"[*?]")
ALLOWED: Final = "a topic, /namespace/name, a pattern of such names with * and ?, or a list of these"


class TopicSelection(NamedTuple):
    """Topics by name, in the order given, and patterns."""

    names: tuple[TopicName, ...]
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, topics: str | Iterable[str]) -> TopicSelection:
        """Raises ConfigError, or InvalidName."""
        if isinstance(topics, (bytes, bytearray, memoryview)) or not isinstance(topics, (str, Iterable)):
            raise ConfigError("topic", topics, ALLOWED)
        texts = [topics] if isinstance(topics, str) else list(topics)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError("topic", topics, ALLOWED)
        texts = list(dict.fromkeys(texts))
        patterns = tuple(text for text in texts if WILD.search(text))
        for pattern in patterns:
            _check_pattern(pattern)
        return cls(tuple(TopicName(text) for text in texts if not WILD.search(text)), patterns)

    def __str__(self) -> str:
        return ", ".join((*self.names, *self.patterns))

    @property
    def namespaces(self) -> list[str | None]:
        """Where topics of the patterns may be; None: anywhere."""
        found = sorted({pattern.split("/")[1] for pattern in self.patterns})
        return [None] if any(map(WILD.search, found)) else [*found]

    def matches(self, topic: str) -> bool:
        """Of a partition: whether it, or the topic that it is a part of, fits a pattern."""
        return any(_fits(name, pattern) for name in {topic, TopicName(topic).base} for pattern in self.patterns)


def _check_pattern(pattern: str) -> None:
    try:
        TopicName(WILD.sub("x", pattern))
    except InvalidName as error:
        raise ConfigError("topic", pattern, ALLOWED) from error


def _fits(topic: str, pattern: str) -> bool:
    return all(
        fnmatchcase(part, wanted) for part, wanted in zip(topic.split("/"), pattern.split("/"), strict=True)
    )  # fmt: skip


class TopicDiscovery:
    """Asks again and again which topics there are, and tells their reader what is new and what is gone."""

    def __init__(
        self,
        find: Callable[[], Awaitable[list[str]]],
        changed: Callable[[Sequence[str]], Awaitable[None]],
        seconds: float,
    ) -> None:
        """`changed` is called with all topics that there are, and opens and leaves what differs."""
        self._find = find
        self._changed = changed
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def start(self, what: str) -> None:
        self._task = asyncio.create_task(self._run(), name=f"topics of {what}")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self._changed(await self._find())
                self._is_failing = False
            except DanubeError as error:
                if not self._is_failing:
                    log.warning("topics not listed", extra={"why": str(error)})
                self._is_failing = True


def is_gone(error: DanubeError | None) -> bool:
    """Whether a topic of a pattern has ended in order: it was deleted."""
    return isinstance(error, TopicUnknown)
