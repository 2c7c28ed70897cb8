"""A real S3-compatible server behind a network that fails: what RemoteObjectStore tells its caller then."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Literal, TypeVar

import pytest

from pydanube.errors import Conflict, StoreRefused, Unreachable
from pydanube.ports import ObjectStore
from pydanube.stores.objects import cloud
from pydanube.stores.objects.cloud import Patience
from pydanube.stores.objects.upload_rate import BURST_BYTES, RATE_MIN, UploadRate
from pydanube.stores.objects.urls import open_object_store
from pydanube.stores.work.memory_clock import MemoryClock
from tests.e2e.objectstores import S3Server
from tests.e2e.tcp_proxy import Answer, Cut, Fault, FaultProxy, Picked, Refuse, Silence, Slow, Stall
from tests.support import run

pytestmark = pytest.mark.slow

T = TypeVar("T")

MIB = 1 << 20
BUSY = Answer(
    "503 Slow Down", b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
LATE = 10.0  # seconds more than a deadline; a busy machine is late by less
HASTY = Patience(
    attempt_seconds=0.3,
    deadline_seconds=1.0,
    pause_seconds_first=0.01,
    pause_seconds_max=0.05,
    bytes_per_second_min=100 * MIB,
)
STEADY = Patience(attempt_seconds=30.0, deadline_seconds=100.0, pause_seconds_first=0.01, pause_seconds_max=0.05)


@asynccontextmanager
async def behind_proxy(
    server: S3Server, patience: Patience, pace: UploadRate | None = None
) -> AsyncIterator[tuple[ObjectStore, ObjectStore, FaultProxy]]:
    """One place seen twice: through the proxy, and directly."""
    url = server.url()
    async with FaultProxy(server.port) as proxy:
        options = {**server.options, "endpoint": proxy.endpoint}
        far = await open_object_store(url, options, patience=patience, upload_rate=pace)
        yield far, await open_object_store(url, server.options), proxy


@pytest.mark.parametrize("fault", [Refuse(), Silence(), Cut(0), Cut(20), Stall(20), BUSY], ids=repr)
def test_a_store_that_does_not_answer_is_unreachable_by_the_deadline(s3_server: S3Server, fault: Fault) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, HASTY) as (far, near, proxy):
            await near.put("there", [b"before"])
            proxy.fault = fault
            calls = [
                far.put("new", [b"x" * MIB]),
                far.put("created", [b"x"], create=True),
                far.get("there"),
                far.get_range("there", 1, 2),
                far.head("there"),
                anext(far.list("")),
                far.delete("there"),
            ]
            began = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert asyncio.get_running_loop().time() - began < HASTY.deadline_seconds + LATE
            for error in outcomes:
                assert type(error) is Unreachable and error.why, outcomes
                assert error.peer.startswith("s3://") and s3_server.secret_key not in str(error)
            assert len(proxy.met) > len(calls)  # some were tried more than once
            proxy.fault = None
            info = await until_it_works(lambda: far.put("there", [b"after"]))
            assert info.size_bytes == 5
            assert await until_it_works(lambda: far.get("there")) == b"after"

    run(main())


async def until_it_works(call: Callable[[], Awaitable[T]]) -> T:
    """Of a hasty store: a busy machine may not answer as soon as that."""
    async with asyncio.timeout(30):
        while True:
            with suppress(Unreachable):
                return await call()


@pytest.mark.parametrize("fault", [Refuse(), Cut(0), Cut(20), BUSY], ids=repr)
def test_what_fails_a_few_times_is_tried_again_until_it_succeeds(s3_server: S3Server, fault: Fault) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            proxy.faults += [fault] * 3
            info = await far.put("a", [b"content"])
            for wanted, call in (
                (info, lambda: far.head("a")),
                (b"content", lambda: far.get("a")),
                (b"tent", lambda: far.get_range("a", 3, 10)),
                (info, lambda: anext(far.list(""))),
                (None, lambda: far.delete("a")),
            ):
                proxy.cut()
                proxy.faults += [fault] * 3
                assert await call() == wanted
                assert not proxy.faults
            assert [info async for info in near.list("")] == []

    run(main())


def test_a_put_that_waits_goes_through_when_the_store_comes_back(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            proxy.fault = Refuse()
            putting = asyncio.create_task(far.put("a", [b"x"]))
            await proxy.have_met(5)
            assert not putting.done()
            proxy.fault = None
            await putting
            assert await near.get("a") == b"x"

    run(main())


@pytest.mark.parametrize("size_bytes", [300_000, 5 * MIB, 20 * MIB])
def test_a_half_downloaded_object_is_never_returned(s3_server: S3Server, size_bytes: int) -> None:
    async def main() -> None:
        data = Random(size_bytes).randbytes(size_bytes)
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            await near.put("a", [data])
            for call, wanted in (
                (lambda: far.get("a"), data),
                (lambda: far.get_range("a", 1, size_bytes), data[1:]),
                (lambda: far.get_range("a", 0, size_bytes // 2), data[: size_bytes // 2]),
            ):
                proxy.cut()
                proxy.faults += [Cut(1000), Cut(size_bytes // 3), Cut(size_bytes // 2 - 100)]
                assert await call() == wanted
                assert not proxy.faults
        async with behind_proxy(s3_server, HASTY) as (far, near, proxy):
            await near.put("a", [data])
            for fault in (Cut(size_bytes // 2), Stall(size_bytes // 2)):
                proxy.fault = fault
                with pytest.raises(Unreachable):
                    await far.get("a")

    run(main())


def test_a_slow_download_that_never_stalls_is_waited_for(s3_server: S3Server) -> None:
    """Each piece comes long before an attempt gives up; all of them together take longer than that."""

    async def main() -> None:
        data = [bytes([number]) * MIB for number in range(20)]
        patience = Patience(attempt_seconds=1.5, deadline_seconds=60.0, bytes_per_second_min=100.0 * MIB)
        async with behind_proxy(s3_server, patience) as (far, near, proxy):
            await near.put("a", data)
            proxy.fault = Slow(0.01)
            assert await far.get("a") == b"".join(data)
            assert len(proxy.met) == 1

    run(main())


def test_a_large_put_that_is_cut_leaves_nothing_or_is_tried_again(s3_server: S3Server) -> None:
    async def main() -> None:
        data = [bytes([number]) * MIB for number in range(20)]
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            proxy.faults += [Cut(0), Cut(0), Refuse(), Cut(0)]
            info = await far.put("a", data)
            assert await near.get("a") == b"".join(data)
            assert await near.head("a") == info
        async with behind_proxy(s3_server, HASTY) as (far, near, proxy):
            proxy.fault = Cut(0)
            with pytest.raises(Unreachable):
                await far.put("a", data)
            assert [info async for info in near.list("")] == []  # parts are no object

    run(main())


def test_a_create_whose_answer_was_lost_knows_its_own_object(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            proxy.faults.append(Cut(0))
            info = await far.put("a", [b"mine"], create=True)
            assert proxy.met[0] == Cut(0) and len(proxy.met) > 1
            assert await near.head("a") == info
            assert await near.get("a") == b"mine"
            with pytest.raises(Conflict):
                await far.put("a", [b"mine"], create=True)  # the same bytes, but another call

    run(main())


def test_a_create_whose_answer_was_lost_does_not_take_anothers_object_for_its_own(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            await near.put("a", [b"equal bytes"], create=True)
            proxy.faults.append(Cut(0))
            with pytest.raises(Conflict):
                await far.put("a", [b"equal bytes"], create=True)
            assert len(proxy.met) > 1

    run(main())


LARGE = [bytes([number]) * MIB for number in range(20)]
HEAD, NEW_UPLOAD, PART_2, END = rb"HEAD ", rb"POST .*\?uploads", rb"PUT .*partNumber=2", rb"POST .*\?uploadId="


def test_a_large_object_is_created_in_parts(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            info = await far.put("a", LARGE, create=True)
            kinds = Counter((line.partition(b" ")[0], b"partNumber=" in line) for line in proxy.requests)
            assert kinds == {(b"HEAD", False): 1, (b"POST", False): 2, (b"PUT", True): 3}
            assert info.etag.endswith("-3") and await near.head("a") == info
            assert await near.get("a") == b"".join(LARGE)
            small = await far.put("b", LARGE[:15], create=True)
            assert "-" not in small.etag

    run(main())


class Sleepless(MemoryClock):
    """Nobody waits, and the time passes all the same."""

    async def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))
        await asyncio.sleep(0)


def test_a_large_object_is_sent_at_a_pace_and_arrives_whole(s3_server: S3Server) -> None:
    async def main() -> None:
        clock = Sleepless()
        async with behind_proxy(s3_server, STEADY, UploadRate(clock)) as (far, near, _):
            begun = clock.elapsed()
            info = await far.put("a", [b"", *LARGE[:19], LARGE[19] * 2], create=True)
            assert clock.elapsed() - begun == pytest.approx((21 * MIB - BURST_BYTES) / RATE_MIN)
            assert await near.head("a") == info
            assert await near.get("a") == b"".join(LARGE) + LARGE[19]
            await far.put("a", LARGE)
            assert await near.get("a") == b"".join(LARGE)

    run(main())


def test_an_object_at_a_pace_that_is_cut_on_its_way_is_sent_again_from_its_beginning(
    s3_server: S3Server, six: list[bytes]
) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY, UploadRate(Sleepless())) as (far, near, proxy):
            proxy.picked.append(Picked(PART_2, "request"))
            await far.put("a", six, create=True)
            assert not proxy.picked, "it was met"
            assert await near.get("a") == b"".join(six)

    run(main())


@pytest.fixture
def six() -> Iterator[list[bytes]]:
    """6 MiB, which are large enough to go in two parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cloud, "PARTS_FROM_BYTES", 6 * MIB)
        patch.setattr(cloud, "PART_BYTES", 5 * MIB)
        yield LARGE[:6]


def test_a_large_object_is_not_created_where_one_is(s3_server: S3Server, six: list[bytes]) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            for there in (six[:1], six):
                await near.put("a", there)
                proxy.requests.clear()
                with pytest.raises(Conflict) as refused:
                    await far.put("a", six, create=True)
                assert refused.value.key == "a"
                assert [line.partition(b" ")[0] for line in proxy.requests] == [b"HEAD"], "and nothing was sent"
                assert await near.get("a") == b"".join(there)

    run(main())


@pytest.mark.parametrize("line", [HEAD, NEW_UPLOAD, PART_2, END])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_large_create_that_is_cut_anywhere_is_tried_again_and_knows_its_own_object(
    s3_server: S3Server, six: list[bytes], line: bytes, lost: Literal["request", "answer"]
) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            proxy.picked.append(Picked(line, lost))
            info = await far.put("a", six, create=True)
            assert not proxy.picked, "it was met"
            uploads = sum(re.match(NEW_UPLOAD, each) is not None for each in proxy.requests)
            done_before = line == END and lost == "answer"
            assert uploads == (1 if done_before or line == HEAD else 2)
            assert await near.head("a") == info
            assert await near.get("a") == b"".join(six)
            with pytest.raises(Conflict):
                await far.put("a", six, create=True)  # the same bytes, but another call

    run(main())


def test_a_large_create_does_not_take_anothers_object_for_its_own(s3_server: S3Server, six: list[bytes]) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            putting = asyncio.create_task(far.put("a", six, create=True))
            await proxy.have_seen(HEAD)
            proxy.picked += [Picked(PART_2, "request"), *[Picked(HEAD, "request")] * 10_000]
            await near.put("a", six)  # somebody else was faster, with the same bytes
            await proxy.have_seen(PART_2)
            proxy.picked.clear()
            with pytest.raises(Conflict):
                await putting

    run(main())


def test_a_large_create_that_gets_404_for_its_upload_looks_again(s3_server: S3Server, six: list[bytes]) -> None:
    """So answers a server that has made the object already, to a request that somebody on the way sent twice."""

    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            missing = Answer("404 Not Found", b"<Error><Code>NoSuchUpload</Code></Error>")
            proxy.picked.append(Picked(END, "answer", instead=missing))
            info = await far.put("a", six, create=True)
            assert sum(re.match(NEW_UPLOAD, each) is not None for each in proxy.requests) == 1
            assert await near.head("a") == info

    run(main())


def test_a_large_create_ends_by_its_deadline_and_leaves_no_object(s3_server: S3Server, six: list[bytes]) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, HASTY) as (far, near, proxy):
            proxy.picked += [Picked(PART_2, "request")] * 1000
            began = asyncio.get_running_loop().time()
            with pytest.raises(Unreachable):
                await far.put("a", six, create=True)
            assert asyncio.get_running_loop().time() - began < HASTY.deadline_seconds + LATE
            assert [info async for info in near.list("")] == []  # parts are no object

    run(main())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer("403 Forbidden", b"<Error><Code>SignatureDoesNotMatch</Code></Error>"), "403 SignatureDoesNotMatch"),
        (Answer("401 Unauthorized"), "401"),
        (
            Answer("400 Bad Request", b"<Error><Code>ExpiredToken</Code><Message>It expired.</Message></Error>"),
            "It expired",
        ),
        (Answer("301 Moved Permanently", b"<Error><Code>PermanentRedirect</Code></Error>"), "configured region"),
        (Answer("404 Not Found", b"<Error><Code>NoSuchBucket</Code></Error>"), "404 NoSuchBucket"),
    ],
)
def test_what_a_server_refuses_is_not_tried_again(s3_server: S3Server, answer: Answer, why: str) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, _, proxy):
            proxy.fault = answer
            for number, call in enumerate(
                (lambda: far.put("a", [b"x"]), lambda: far.get("a"), lambda: anext(far.list("")))
            ):
                with pytest.raises(StoreRefused, match=why):
                    await call()
                assert len(proxy.met) == number + 1

    run(main())


def test_a_create_that_meets_another_request_for_its_key_is_tried_again(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, _, proxy):
            proxy.faults.append(Answer("409 Conflict", b"<Error><Code>ConditionalRequestConflict</Code></Error>"))
            await far.put("a", [b"x"], create=True)
            assert len(proxy.met) == 2

    run(main())


def test_a_call_that_waits_can_be_cancelled(s3_server: S3Server) -> None:
    async def main() -> None:
        async with behind_proxy(s3_server, STEADY) as (far, near, proxy):
            for fault in (Silence(), Refuse()):
                proxy.fault = fault
                met = len(proxy.met)
                putting = asyncio.create_task(far.put("a", [b"x"]))
                await proxy.have_met(met + 1)
                putting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await putting
            assert [info async for info in near.list("")] == []

    run(main())
