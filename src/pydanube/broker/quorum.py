"""The members of the metadata store, where this broker runs one of them. Implemented by the store's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class MetadataMember(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def peer_urls(self) -> Sequence[str]:
        """Where other members reach it: http://host:port, its --raft-addr."""
        ...

    @property
    def is_learner(self) -> bool:
        """It gets everything and votes on nothing."""
        ...


class MetadataMemberStatus(Protocol):
    """What a member says of itself; one that does not answer says 0."""

    @property
    def member(self) -> MetadataMember: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def raft_term(self) -> int: ...

    @property
    def raft_applied(self) -> int: ...


class Members(Protocol):
    """All calls raise Unavailable if time may help, and Refused if it cannot."""

    async def status(self) -> Sequence[MetadataMemberStatus]: ...

    async def add_learner(self, peer_url: str) -> Sequence[MetadataMember]:
        """One that is a member already stays as it is. Returns all."""
        ...

    async def promote(self, member_id: int) -> Sequence[MetadataMember]: ...

    async def remove(self, member_id: int) -> Sequence[MetadataMember]: ...
