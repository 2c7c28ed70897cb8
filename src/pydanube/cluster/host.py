"""What the cluster asks of the broker that it runs in."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from pydanube.core.load import LoadReport
from pydanube.core.names import TopicName
from pydanube.core.placement import Marker


class Offer(NamedTuple):
    """A topic that this broker is to claim, or to claim again: it was assigned to it, and it does not serve it.

    `owner_revision` is that of the owner key when it was seen to be nobody's (0: there is none). The claim compares
    exactly this revision, and never one read later: meanwhile another broker may have claimed the topic and serve it.
    """

    topic: TopicName
    marker: Marker
    owner_revision: int


class Host(Protocol):
    """Implemented by the broker; called by `Duties` and `Membership`, never twice at once for one topic."""

    async def claim(self, offer: Offer) -> None:
        """Claims the topic and serves it; the claim deletes the marker.

        An answer of the store that was lost leaves the topic claimed and not served: then it is offered again.
        Raises Conflict if the owner key or the registration is not what it was, TopicUnknown if the topic was deleted
        (then the marker is removed), or any other DanubeError: then it is asked again, or another broker is.
        """
        ...

    async def let_go(self, topic: TopicName, marker: Marker) -> None:
        """Moves a topic that this broker owns away, towards `marker.to`; returns when it is sealed and released.

        The seal writes `marker.as_ready()` under the marker's key. Raises a DanubeError after it undid everything:
        the topic is served on, and the error's sentence is what the operator reads.
        """
        ...

    async def lost(self, reason: str) -> None:
        """The leader declared this broker dead and gives its topics to others: close all topics here without writing
        any metadata. WAL that is not in the cloud tier stays. Called before the broker registers again, drained.
        """
        ...

    def load_report(self) -> LoadReport:
        """What is going on here now. Never waits."""
        ...

    def owned_topics(self) -> Collection[TopicName]:
        """Topics that this broker serves now, or is just moving away."""
        ...
