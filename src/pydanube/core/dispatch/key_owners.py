"""Which consumer of a Key-Shared subscription a key belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from pydanube.core.dispatch.hash_ring import HashRing, accepts
from pydanube.core.names import ConsumerId


class KeyOwners:
    """The ring of consumers that are sent messages, and the filters of those registered that are not: they are away,
    or connected and out of turn. Their keys are kept for them if no other consumer accepts them.
    """

    __slots__ = ("_away", "_ring")

    def __init__(self, away: Mapping[ConsumerId, tuple[str, ...]]) -> None:
        self._ring = HashRing()
        self._away = dict(away)

    def owner(self, key: str, place: int | None = None) -> ConsumerId | None:
        """`place`: the key's `ring_hash`, if known."""
        return self._ring.owner(key, place)

    def filters(self, consumer: ConsumerId) -> tuple[str, ...]:
        return self._ring.filters(consumer)

    def put(self, consumer: ConsumerId, filters: tuple[str, ...]) -> None:
        self._away.pop(consumer, None)
        self._ring.put(consumer, filters)

    def set_away(self, consumer: ConsumerId) -> bool:
        """False if it is away already."""
        if consumer in self._away:
            return False
        self._away[consumer] = self._ring.filters(consumer)
        self._ring.remove(consumer)
        return True

    def put_again(self, consumer: ConsumerId) -> None:
        """With the filters that it had."""
        self._ring.put(consumer, self._away.pop(consumer))

    def forget(self, consumer: ConsumerId) -> None:
        """Its registration was removed."""
        self._away.pop(consumer, None)

    def is_kept(self, key: str) -> bool:
        """Whether a consumer that is away accepts the key."""
        return any(accepts(filters, key) for filters in self._away.values())
