"""Progress of several moves goes to one client, a message at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pydanube.api.grpc.moves import MoveCalls
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from tests.support import run


class Stream:
    """As gRPC's: a message must be out before the next one, also if its writer was cancelled meanwhile."""

    def __init__(self, turns: int = 1) -> None:
        self.written: list[str] = []
        self._busy = False
        self._turns = turns
        self.begun = asyncio.Event()

    async def write(self, message: pb.UnloadTopicResponse) -> None:
        assert not self._busy, "a second message while one is on its way"
        self._busy = True
        self.begun.set()
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self._busy = False
        self.written.append(message.progress.topic or message.result.topic)


def test_partitions_that_move_side_by_side_tell_of_it_one_after_the_other() -> None:
    parts = [f"/default/orders-part-{number}" for number in range(3)]

    async def unload(topic: str, to: object, *, on_progress: Any, **more: object) -> list[pb.UnloadResult]:
        await asyncio.gather(*(on_progress(pb.UnloadProgress(topic=part)) for part in parts))
        return [pb.UnloadResult(topic=part) for part in parts]

    calls = MoveCalls.__new__(MoveCalls)
    calls._moves = cast(Any, SimpleNamespace(unload=unload))
    stream = Stream()
    run(calls.UnloadTopic(pb.UnloadTopicRequest(topic="/default/orders"), stream))
    assert stream.written == parts + parts


def test_progress_that_is_on_its_way_when_the_move_is_done_is_out_before_the_result() -> None:
    async def unload(topic: str, to: object, *, on_progress: Any, **more: object) -> list[pb.UnloadResult]:
        telling = asyncio.ensure_future(on_progress(pb.UnloadProgress(topic="progress")))
        await stream.begun.wait()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        return [pb.UnloadResult(topic="result")]

    calls = MoveCalls.__new__(MoveCalls)
    calls._moves = cast(Any, SimpleNamespace(unload=unload))
    stream = Stream(turns=5)
    run(calls.UnloadTopic(pb.UnloadTopicRequest(topic="/default/orders"), stream))
    assert stream.written == ["progress", "result"]
