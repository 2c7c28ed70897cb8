"""Moving a topic as an operator asks for it, of whichever broker; and how long the last moves took.

The old owner alone knows the phases of a move. It is asked for them while the move goes on, and afterwards: it keeps
the last few of each topic as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Final

import grpc

from pydanube.api.grpc.adapter import RpcRefusal, status_of
from pydanube.api.grpc.peers import Peers
from pydanube.broker.overview import MOVING, Overview
from pydanube.broker.service import Broker
from pydanube.cluster.cluster import ClusterNode
from pydanube.cluster.operations import SINGLE
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError, MoveRefused, TopicUnknown, Unreachable
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from pydanube.wire.status import ADMIN, Code

log = logging.getLogger(__name__)

ADMIN_SERVICE: Final = "pydanube.admin.v1.Admin"
ASK_SECONDS: Final = 2.0  # for what is nice to know
MOVE_POLL_SECONDS: Final = 0.2
UNLOAD_SECONDS: Final = 60.0
PARTITIONS_AT_ONCE: Final = 4
CLAIM: Final = "claim"
CLOSE_TRIES: Final = 20
CLOSE_POLL_SECONDS: Final = 0.05

OnProgress = Callable[[pb.UnloadProgress], Awaitable[None]]


async def _no_progress(_: pb.UnloadProgress) -> None:
    return None


class Moves:
    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._peers = peers
        self._overview = Overview(broker)

    # --- moving -------------------------------------------------------------------------------------------

    async def unload(
        self,
        name: TopicName,
        to: BrokerId | None = None,
        *,
        wait: bool = False,
        seconds: float = UNLOAD_SECONDS,
        on_progress: OnProgress = _no_progress,
    ) -> list[pb.UnloadResult]:
        """Moves the topic, or each partition of it. Returns when the old owners have released it.

        Raises what stands against moving it, if it is one topic. Of partitions each has its own result.
        """
        topics = await self._broker.topics.partitions(name)
        if not topics:
            raise TopicUnknown(name)
        if self._broker.cluster is None:
            raise MoveRefused(name, SINGLE)
        if topics == [name]:
            return [await self._unload_one(self._broker.cluster, name, to, wait, seconds, on_progress)]
        return await self._unload_all(self._broker.cluster, topics, to, wait, seconds, on_progress)

    async def _unload_all(
        self,
        cluster: ClusterNode,
        topics: Sequence[TopicName],
        to: BrokerId | None,
        wait: bool,
        seconds: float,
        on_progress: OnProgress,
    ) -> list[pb.UnloadResult]:
        slots = asyncio.Semaphore(PARTITIONS_AT_ONCE)
        refusals: list[DanubeError] = []

        async def one(topic: TopicName) -> pb.UnloadResult:
            async with slots:
                try:
                    return await self._unload_one(cluster, topic, to, wait, seconds, on_progress)
                except DanubeError as error:
                    refusals.append(error)
                    return pb.UnloadResult(topic=topic, failure=str(error))

        results = await asyncio.gather(*(one(topic) for topic in topics))
        if len(refusals) == len(topics):
            codes = {status_of(refusal, ADMIN).code for refusal in refusals}
            if len(codes) == 1:  # nothing was begun, and for one reason
                raise refusals[0]
        return results

    async def _unload_one(
        self,
        cluster: ClusterNode,
        topic: TopicName,
        to: BrokerId | None,
        wait: bool,
        seconds: float,
        on_progress: OnProgress,
    ) -> pb.UnloadResult:
        clock, requests = self._broker.clock, cluster.requests
        deadline = clock.elapsed() + seconds
        before = {move.started_at_us for move in await self._moves_of(cluster.host_of(topic), topic)}
        try:
            host = await requests.request_move(topic, to=to)
        except MoveRefused as refused:
            raise await self._with_phase(topic, refused) from None
        async with self._reporting(topic, host, on_progress):
            await requests.wait_released(topic, host, timeout_seconds=seconds)
        released_at = clock.elapsed()
        result = pb.UnloadResult(topic=topic, from_broker=host)
        claimed: pb.Phase | None = None
        if wait:
            await on_progress(pb.UnloadProgress(topic=topic, sentence="the old owner has let go; the new one opens it"))
            left = max(deadline - clock.elapsed(), 0.0)
            result.to_broker = await requests.hosted(topic, timeout_seconds=left)
            claimed = pb.Phase(name=CLAIM, duration_ms=(clock.elapsed() - released_at) * 1000)
        move = await self._new_move(host, topic, before)
        if move is not None:
            result.phases.extend(move.phases)
            result.notes.extend(move.notes)
            result.to_broker = result.to_broker or move.to_broker
        if claimed is not None:
            result.phases.append(claimed)
        return result

    async def _new_move(self, host: BrokerId, topic: TopicName, before: Collection[int]) -> pb.Move | None:
        """What the old owner says of the move that it has just made. It closes the topic first, after the release."""
        for _ in range(CLOSE_TRIES):
            for move in await self._moves_of(host, topic):
                if move.started_at_us not in before:
                    return move
            await asyncio.sleep(CLOSE_POLL_SECONDS)
        return None

    async def _with_phase(self, topic: TopicName, refused: MoveRefused) -> MoveRefused:
        """The refusal of a second move, with how far the first one is."""
        state = await self.state(topic)
        if state.state == MOVING and state.phase:
            return MoveRefused(refused.what, f"{refused.why} (phase: {state.phase})")
        return refused

    @contextlib.asynccontextmanager
    async def _reporting(self, topic: TopicName, host: BrokerId, on_progress: OnProgress) -> AsyncIterator[None]:
        async def look() -> None:
            said = ""
            while True:
                await asyncio.sleep(MOVE_POLL_SECONDS)
                try:
                    state = await self.state(topic)
                except DanubeError:
                    continue
                sentence = f"{state.phase} on broker {host}" if state.phase else state.sentence
                if sentence != said:
                    await on_progress(pb.UnloadProgress(topic=topic, sentence=sentence))
                said = sentence

        if on_progress is _no_progress:
            yield
            return
        looking = asyncio.create_task(look(), name=f"watch the move of {topic}")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    # --- looking ------------------------------------------------------------------------------------------

    async def state(self, topic: TopicName) -> pb.TopicStateResponse:
        """As its owner tells it, or else as it is written down. Raises TopicUnknown."""
        owner = self._peers.owner_of(topic)
        if owner is not None:
            request = pb.TopicStateRequest(topic=topic)
            with contextlib.suppress(grpc.aio.AioRpcError, Unreachable):
                return await self._peers.call(
                    owner, f"{ADMIN_SERVICE}/TopicState", request, pb.TopicStateResponse, seconds=ASK_SECONDS
                )
        return await self.state_here(topic)

    async def state_here(self, topic: TopicName) -> pb.TopicStateResponse:
        state = await self._overview.state(topic)
        live = state.live
        return pb.TopicStateResponse(
            topic=topic,
            state=state.state,
            sentence=state.sentence,
            phase=state.phase,
            broker_id=state.broker or 0,
            to_broker=state.to or 0,
            epoch=state.epoch,
            orphans=[
                pb.OrphanState(
                    first=each.start, end=each.end, broker_id=each.broker_id, epoch=each.epoch, sentence=sentence
                )
                for each, sentence in state.orphans
            ],
            live=None if live is None else pb.Live(**live._asdict()),
            waits=state.waits,
            heartbeat=str(state.heartbeat or ""),
        )

    async def past(self, topic: TopicName) -> list[pb.Move]:
        """Moves of the topic that any living broker remembers, newest first."""
        answers = await asyncio.gather(*(self._moves_of(peer, topic) for peer in self._peers.others()))
        found = [*self.past_here(topic), *(move for moves in answers for move in moves)]
        return sorted(found, key=lambda move: -move.started_at_us)

    def past_here(self, topic: TopicName) -> list[pb.Move]:
        return [
            pb.Move(
                topic=topic,
                from_broker=self._broker.broker_id,
                to_broker=move.to_broker or 0,
                started_at_us=move.started_at_us,
                phases=[pb.Phase(name=name, duration_ms=ms) for name, ms in move.milliseconds.items()],
                failure=move.failure,
                notes=move.notes,
            )
            for move in self._broker.topics.moves.past_moves(topic)
        ]

    async def _moves_of(self, peer: BrokerId | None, topic: TopicName) -> Sequence[pb.Move]:
        """Nothing, if it does not answer soon."""
        if peer is None:
            return []
        if peer == self._broker.broker_id:
            return self.past_here(topic)
        request = pb.MovePhasesRequest(topic=topic)
        try:
            answer = await self._peers.call(
                peer, f"{ADMIN_SERVICE}/MovePhases", request, pb.MovePhasesResponse, seconds=ASK_SECONDS
            )
        except (grpc.aio.AioRpcError, Unreachable) as error:
            log.debug("moves not told", extra={"broker_id": peer, "why": str(error)})
            return []
        return answer.moves


def whole(results: Sequence[pb.UnloadResult]) -> None:
    """Raises unless everything has moved."""
    failed = [each for each in results if each.failure]
    if failed:
        why = "; ".join(f"{each.topic}: {each.failure}" for each in failed)
        raise RpcRefusal(Code.INTERNAL, f"{len(failed)} of {len(results)} partitions did not move: {why}")
