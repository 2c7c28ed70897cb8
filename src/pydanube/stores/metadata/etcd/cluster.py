"""The members of an etcd: who they are, how they are, and how one is added, promoted and removed.

A new member is a learner: it gets everything and votes on nothing until it has caught up and is promoted, so adding one
never endangers the majority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from pydanube.errors import DanubeError, Refused, Unavailable, Unreachable
from pydanube.stores.metadata.etcd import endpoint as etcd
from pydanube.stores.metadata.etcd.calls import TIMEOUT_SECONDS, Calls, Refusal
from pydanube.stores.metadata.etcd.endpoint import CallFailed, Closed, Endpoint, Tls, target
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

STATUS_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """`name` and `client_urls` are empty until the member has started for the first time."""

    id: int
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member and what it says of itself. One that does not answer is not healthy, and its numbers are 0.

    `healthy`: it answers, knows a leader and has no alarm. `problems` are etcd's words.
    """

    member: Member
    healthy: bool
    is_leader: bool = False
    raft_term: int = 0
    raft_index: int = 0
    raft_applied: int = 0
    db_size_bytes: int = 0
    version: str = ""
    problems: tuple[str, ...] = ()


class EtcdCluster:
    """Asks whichever of `endpoints` answers. Belongs to the event loop that first uses it."""

    def __init__(
        self, endpoints: Sequence[str], *, tls: Tls | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._tls = tls
        self._calls = Calls(endpoints, tls=tls, timeout_seconds=timeout_seconds)

    async def use_endpoints(self, endpoints: Sequence[str]) -> None:
        """Members came or went. Calls to one that is not named any more end."""
        for endpoint in self._calls.use(endpoints):
            await endpoint.close()

    async def close(self) -> None:
        await self._calls.close()

    async def members(self) -> list[Member]:
        """By name. Works without a majority, and may then be out of date."""
        answer = await self._calls.repeatable(etcd.MEMBER_LIST, pb.MemberListRequest(), require_leader=False)
        return _members(answer.members)

    async def status(self) -> list[MemberStatus]:
        """Every member, asked by itself, concurrently."""
        members = await self.members()
        return list(await asyncio.gather(*(self._status(member) for member in members)))

    async def add_learner(self, peer_url: str) -> list[Member]:
        """Adds a member that will be at this URL, and returns all members. One that is there already stays as it is.

        Raises Unavailable while another learner is there or a member is down.
        """
        members = await self.members()
        if any(peer_url in member.peer_urls for member in members):
            return members
        request = pb.MemberAddRequest(peer_urls=[peer_url], is_learner=True)
        try:
            answer = await self._calls.once(etcd.MEMBER_ADD, request)
        except Refusal as refusal:
            if MEMBER_NOT_FOUND in refusal.details:  # the one that is asked is still taking leave of another
                raise Unavailable(
                    f"{peer_url} cannot be added yet: a member that was removed is still leaving"
                ) from None
            raise _explained(refusal, f"{peer_url} cannot be added") from None
        return _members(answer.members)

    async def promote(self, member_id: int) -> list[Member]:
        """Makes a voter of a learner. Raises Unavailable until it has caught up."""
        try:
            answer = await self._calls.once(etcd.MEMBER_PROMOTE, pb.MemberPromoteRequest(id=member_id))
        except Refusal as refusal:
            raise _explained(refusal, f"member {member_id} cannot be promoted") from None
        return _members(answer.members)

    async def remove(self, member_id: int) -> list[Member]:
        """Its data is of no use afterwards: to come back it joins with an empty directory."""
        try:
            answer = await self._calls.once(etcd.MEMBER_REMOVE, pb.MemberRemoveRequest(id=member_id))
        except Refusal as refusal:
            raise _explained(refusal, f"member {member_id} cannot be removed") from None
        except Unreachable:
            # The one that was asked may be the one that leaves, and gone before it could answer: the others know.
            request = pb.MemberListRequest(linearizable=True)
            left = _members((await self._calls.repeatable(etcd.MEMBER_LIST, request)).members)
            if any(each.id == member_id for each in left):
                raise
            return left
        return _members(answer.members)

    async def _status(self, member: Member) -> MemberStatus:
        problem = "it has not started yet"
        for url in member.client_urls:
            endpoint = Endpoint(target(url), None if self._tls is None else self._tls.credentials())
            try:
                said = await endpoint.ask(etcd.STATUS, pb.StatusRequest(), STATUS_SECONDS, require_leader=False)
            except CallFailed as failure:
                problem = failure.details or failure.code.name
                continue
            except Closed:
                continue
            finally:
                await endpoint.close()
            return MemberStatus(
                member,
                healthy=bool(said.leader) and not said.errors,
                is_leader=said.leader == member.id,
                raft_term=said.raft_term,
                raft_index=said.raft_index,
                raft_applied=said.raft_applied_index,
                db_size_bytes=said.db_size,
                version=said.version,
                problems=tuple(said.errors),
            )
        return MemberStatus(member, healthy=False, problems=(problem,))


def _members(found: Sequence[pb.Member]) -> list[Member]:
    members = [
        Member(each.id, each.name, tuple(each.peer_urls), tuple(each.client_urls), each.is_learner) for each in found
    ]
    return sorted(members, key=lambda member: (member.name, member.peer_urls))


# etcd's sentences, and ours: what it means and whether time helps.
LATER: Final = {
    "too many learner members": "another member has not been promoted yet; promote or remove it first",
    "unhealthy cluster": "a member is down or has only just come back; try again when all are up",
    "in sync with leader": "it has not caught up with the leader yet; try again soon",
}
MEMBER_NOT_FOUND: Final = "member not found"
NEVER: Final = {
    "not enough started members": "too few members would be left for a majority; start those that are down first",
    "can only promote a learner": "it is a voter already",
    MEMBER_NOT_FOUND: "there is no such member; `danube admin cluster status` shows those that are",
}


def _explained(refusal: Refusal, what: str) -> DanubeError:
    for words, sentence in LATER.items():
        if words in refusal.details:
            return Unavailable(f"{what}: {sentence}")
    for words, sentence in NEVER.items():
        if words in refusal.details:
            return Refused(f"{what}: {sentence}")
    if refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Unreachable(refusal.peer, refusal.details)
    return Refused(f"{what}: {refusal.details}")
