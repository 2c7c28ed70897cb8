"""Where the consumer or producer with an id is: for requests that name nothing but the id, and may name any number.

An entry is where to look, not whether it is there: the subscription, or the topic's producers, knows that. Every
registration has an entry; those of topics that are closed end with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

from pydanube.core.names import ConsumerId, ProducerId

if TYPE_CHECKING:
    from pydanube.broker.base_subscription import BaseSubscription
    from pydanube.broker.registrations import TopicProducers

K = TypeVar("K", bound=int)
V = TypeVar("V")


class IdIndex(Generic[K, V]):
    def __init__(self) -> None:
        self._places: WeakValueDictionary[K, Any] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, identity: K, place: V) -> None:
        """A topic that is opened anew takes the ids over."""
        self._places[identity] = place

    def remove(self, identity: K, place: V) -> None:
        if self._places.get(identity) is place:
            del self._places[identity]

    def find(self, identity: K) -> V | None:
        return self._places.get(identity)


class ClientIndex:
    """Of one broker."""

    def __init__(self) -> None:
        self.consumers: IdIndex[ConsumerId, BaseSubscription] = IdIndex()
        self.producers: IdIndex[ProducerId, TopicProducers] = IdIndex()
