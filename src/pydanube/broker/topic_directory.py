"""Where topics are that this broker does not serve, as its cluster knows it."""

from __future__ import annotations

from collections.abc import Mapping

from pydanube.cluster.cluster import ClusterNode
from pydanube.core.names import BrokerId, TopicName


class TopicDirectory:
    """A broker's questions to its cluster about single topics. `unopened`: its own that it could not open, and why."""

    def __init__(self, cluster: ClusterNode, unopened: Mapping[TopicName, str]) -> None:
        self._cluster = cluster
        self._unopened = unopened
        self._stopping = False

    def stop(self) -> None:
        """This broker is about to leave: nothing is on its way to it any more."""
        self._stopping = True

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def where(self, topic: TopicName) -> tuple[str, str]:
        """Why the topic is not served here, in words, and the native URL of the broker that has it, if one has."""
        cluster = self._cluster
        marker = cluster.marker_of(topic)
        host = cluster.host_of(topic)
        peer = cluster.peers.get(host) if host is not None else None
        if host == cluster.broker:
            why = self._unopened.get(topic)
            return (f"it could not be opened here: {why}" if why else "it is being opened here"), ""
        if peer is not None:
            return f"broker {host} has it; look it up again", peer.stream_url
        if marker is None:
            return "no broker has it yet; look it up again in a moment", ""
        target = None if marker.error or marker.to == cluster.broker else marker.to
        return marker.stage, self.stream_url_of(target)

    def stream_url_of(self, broker: BrokerId | None) -> str:
        """Empty, if there is no such broker now."""
        peer = self._cluster.peers.get(broker) if broker is not None else None
        return peer.stream_url if peer is not None else ""

    def expects(self, topic: TopicName) -> bool:
        """Whether the topic, which is not open here, is on its way to this broker."""
        if self._stopping or not self._cluster.may_serve():
            return False
        marker = self._cluster.marker_of(topic)
        if marker is not None:
            return marker.to == self._cluster.broker and not marker.error
        return self.is_assigned_here(topic) and topic not in self._unopened

    def is_assigned_here(self, topic: TopicName) -> bool:
        """Whether the topic is this broker's, as far as this broker has heard."""
        return self._cluster.host_of(topic) == self._cluster.broker

    async def hosted(self, topic: TopicName, timeout_seconds: float) -> BrokerId:
        """The broker that serves the topic, as soon as one does. Raises DeadlineExceeded."""
        return await self._cluster.requests.hosted(topic, timeout_seconds=timeout_seconds)
