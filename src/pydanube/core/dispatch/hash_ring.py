"""Which consumer a key belongs to.

    key ──hash──► a circle with 100 points per consumer ──► the first point at or after it, wrapping round,
                                                            whose consumer accepts the key

Bit for bit the reference's ring: after a migration a key goes to the consumer it went to before.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from itertools import chain
from typing import Final

from pydanube.core.names import ConsumerId, fnv1a_64

POINTS_PER_CONSUMER: Final = 100


def ring_hash(text: str) -> int:
    """FNV-1a 64 folded to 32 bits, then murmur3's finaliser: the reference's, bit by bit."""
    wide = fnv1a_64(text.encode())
    number = (wide >> 32) ^ (wide & 0xFFFF_FFFF)
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFF_FFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFF_FFFF
    return number ^ number >> 16


def accepts(filters: tuple[str, ...], key: str) -> bool:
    """`*` is any text, `?` any one character, everything else itself. No filter accepts every key."""
    return not filters or any(_pattern(glob).fullmatch(key) for glob in filters)


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """Each `*` is settled at the first place where the text after it fits (an atomic group): going back
    cannot help, and a filter made of stars must not cost the broker exponential time.
    """
    first, *rest = ["".join("." if char == "?" else re.escape(char) for char in part) for part in glob.split("*")]
    middle = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    last = f".*{rest[-1]}" if rest else ""
    return re.compile(first + middle + last, re.DOTALL)


@lru_cache(maxsize=1024)
def _points_of(consumer: ConsumerId) -> tuple[int, ...]:
    """Consumers come back: their points are the same, and cost a millisecond."""
    return tuple(ring_hash(f"{consumer}-{number}") for number in range(POINTS_PER_CONSUMER))


class HashRing:
    """Consumers on a circle. Adding or removing one moves only the keys of its own arcs."""

    __slots__ = ("_filters", "_hashes", "_owners", "_points")

    def __init__(self) -> None:
        self._filters: dict[ConsumerId, tuple[str, ...]] = {}
        self._points: dict[ConsumerId, list[tuple[int, ConsumerId]]] = {}
        self._hashes: list[int] = []
        self._owners: list[ConsumerId] = []

    def put(self, consumer: ConsumerId, filters: tuple[str, ...]) -> None:
        self._filters[consumer] = filters
        if consumer not in self._points:
            self._points[consumer] = [(point, consumer) for point in _points_of(consumer)]
            self._build()

    def remove(self, consumer: ConsumerId) -> None:
        del self._filters[consumer], self._points[consumer]
        self._build()

    def filters(self, consumer: ConsumerId) -> tuple[str, ...]:
        return self._filters[consumer]

    def owner(self, key: str, place: int | None = None) -> ConsumerId | None:
        """The same as on a ring of only those consumers that accept the key. `place`: the key's `ring_hash`, if known.

        Mostly the first point decides: a consumer is asked once whether it accepts the key, and only when it is met.
        """
        start = bisect_left(self._hashes, ring_hash(key) if place is None else place)
        refused: set[ConsumerId] = set()
        count = len(self._owners)
        for step in range(count):
            owner = self._owners[(start + step) % count]
            if owner in refused:
                continue
            if accepts(self._filters[owner], key):
                return owner
            refused.add(owner)
            if len(refused) == len(self._filters):
                break
        return None

    def _build(self) -> None:
        points = sorted(chain.from_iterable(self._points.values()))
        self._hashes = [point for point, _ in points]
        self._owners = [consumer for _, consumer in points]
