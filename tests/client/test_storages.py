"""Where the messages of many topics are: each broker is asked once, and tells only what is new."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import pydanube
from pydanube.api.native import storages as answers
from pydanube.api.native.requests import NativeRequests
from pydanube.client.messages import StorageInfo
from pydanube.errors import DeadlineExceeded, DeliveryMismatch, TopicUnknown
from pydanube.testing.brokers import TestBroker
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.server_cluster import ServerCluster, clustered
from tests.support import run


class Answered:
    """What brokers answered since the last look."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.questions = 0
        self.infos: list[pb.StorageInfo] = []
        answer = answers.StorageAnswers.answer

        async def watched(made: Any, question: pb.StorageQuestion, bytes_max: int) -> pb.StorageAnswer:
            found = await answer(made, question, bytes_max)
            self.questions += 1
            self.infos += found.infos
            return found

        patch.setattr(answers.StorageAnswers, "answer", watched)

    def take(self) -> tuple[int, list[pb.StorageInfo]]:
        found = self.questions, self.infos
        self.questions, self.infos = 0, []
        return found


@clustered(3)
async def test_every_broker_is_asked_once_for_its_topics(cluster: ServerCluster) -> None:
    with pytest.MonkeyPatch.context() as patch:
        answered = Answered(patch)
        topics = [await cluster.create(f"/default/t{number}", on=1 + number % 3) for number in range(6)]
        async with pydanube.connect(cluster.node(1).broker.stream_url) as client:
            first = await client.describe_storages(topics)
            assert list(first) == topics and all(isinstance(each, StorageInfo) for each in first.values())
            assert answered.take()[0] == 3  # one to find out, and one to each of the two others
            again = await client.describe_storages(topics)
            questions, infos = answered.take()
            assert questions == 3 and again == first
            assert len(infos) == 6 and all(info.unchanged and not info.descriptors for info in infos)
            await cluster.node(2).cluster.requests.unload(topics[0], cluster.node(2).id)
            await cluster.settled(topics[0], 2)
            moved = await client.describe_storages(topics)
            assert isinstance(moved[topics[0]], StorageInfo)
            assert all(not info.unchanged for info in answered.take()[1] if info.topic == topics[0])


def test_what_has_changed_is_told_and_nothing_else() -> None:
    async def history() -> None:
        with pytest.MonkeyPatch.context() as patch:
            answered = Answered(patch)
            async with TestBroker() as broker, pydanube.connect(broker.url) as client:
                await client.create_topic("/default/base", partitions=3)
                await client.create_topic("/default/lost", reliable=False)
                found = await client.describe_storages(["/default/base", "/default/lost", "/default/nobody"])
                *parts, lost, nobody = found.values()
                assert [each.head for each in parts] == [0, 0, 0]
                assert isinstance(lost, DeliveryMismatch) and isinstance(nobody, TopicUnknown)
                answered.take()
                async with client.producer("/default/base-part-1") as producer:
                    await producer.send(b"x" * 1000)
                told = await client.describe_storages(["/default/base"])
                questions, infos = answered.take()
                assert questions == 1 and [info.unchanged for info in infos] == [True] * 3
                changed = told["/default/base-part-1"]  # type: ignore[index]
                assert isinstance(changed, StorageInfo) and changed.head == 1
                [run_] = changed.log
                assert (run_.first, run_.end) == (0, 1) and 1000 < run_.size_bytes < 10_000 and run_.epoch >= 1
                await client.delete_topic("/default/base")
                gone = await client.describe_storages(["/default/base"])
                assert [type(each) for each in gone.values()] == [TopicUnknown]

    run(history())


def test_an_answer_that_does_not_fit_into_a_frame_comes_in_parts() -> None:
    async def history() -> None:
        with pytest.MonkeyPatch.context() as patch:
            answered = Answered(patch)
            whole = answers.StorageAnswers.answer

            async def cramped(made: Any, question: pb.StorageQuestion, bytes_max: int) -> pb.StorageAnswer:
                return await whole(made, question, 200)

            patch.setattr(answers.StorageAnswers, "answer", cramped)
            async with TestBroker() as broker, pydanube.connect(broker.url) as client:
                await client.create_topic("/default/base", partitions=4)
                found = await client.describe_storages(["/default/base"])
                assert [str(name) for name in found] == [f"/default/base-part-{number}" for number in range(4)]
                assert all(isinstance(each, StorageInfo) for each in found.values()) and answered.questions > 1

    run(history())


def test_a_question_that_is_none_ends_the_connection_and_too_many_topics_are_refused() -> None:
    with pytest.raises(pydanube.errors.ProtocolViolation, match="no StorageQuestion"):
        answers.question_of(memoryview(b"\xff\xff"))
    many = pb.StorageQuestion(topics=["/default/a"] * (answers.TOPICS_MAX + 1))
    with pytest.raises(pydanube.errors.LimitReached):
        answers.question_of(memoryview(many.SerializeToString()))


def test_a_broker_that_is_gone_is_asked_for_until_the_deadline() -> None:
    async def history() -> None:
        counted: Counter[str] = Counter()
        take = NativeRequests.take

        def counting(self: NativeRequests, kind: str, *rest: Any) -> None:
            counted[kind] += 1
            take(self, kind, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeRequests, "take", counting)
            async with TestBroker() as broker:
                client = pydanube.connect(broker.url)
                await client.open()
                await client.create_topic("/default/a")
                assert isinstance((await client.describe_storages(["/default/a"]))["/default/a"], StorageInfo)  # type: ignore[index]
            with pytest.raises(DeadlineExceeded):
                await client.describe_storages(["/default/a"], timeout=0.3)
            await client.close()
            assert counted["describe_storages"] == 1

    run(history())
