"""What the cluster asks of the broker that it runs in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from pydanube.core.cluster.load import LoadReport
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import TopicName


class TopicHost(Protocol):
    """Implemented by the broker's topic table. `AssignmentReconciler` and `Membership` call it, for one topic once at a
    time.
    """

    async def take_over(
        self,
        topic: TopicName,
        marker: Marker,
        *,
        marker_revision: int | None = None,
        owner_revision: int | None = None,
    ) -> None:
        """Claims a topic that was assigned to this broker, and serves it; the claim deletes the marker.

        The claim compares the revision of the marker that assigns the topic, and that of the owner key as it was read
        after the marker was seen. Every claim deletes the marker, so as long as it exists no broker has claimed the
        topic: neither before the owner was read nor since. A repeated take-over has no marker; then `owner_revision` is
        compared. An answer of the store that was lost leaves the topic claimed and not served: then it is asked again.

        Raises Conflict if marker, owner key or registration is not what it was, or if a broker owns the topic that the
        marker does not call lost; TopicUnknown if the topic was deleted (then the marker is removed); or any other
        DanubeError: then it is asked again, or another broker is.
        """
        ...

    async def hand_over(self, topic: TopicName, marker: Marker) -> None:
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

    async def why_not_home(self) -> str:
        """What this disk has of topics that others own, or are to own, and that is not in the store yet; empty if there
        is nothing of the kind.
        """
        ...

    def load_report(self) -> LoadReport:
        """What is going on here now. Never waits."""
        ...

    def owned_topics(self) -> Collection[TopicName]:
        """Topics that this broker serves now, or is just moving away."""
        ...
