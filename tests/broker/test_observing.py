"""How late a subscription is: the age of the oldest message not acknowledged, from wherever it is cheap to know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pydanube.broker.observing import _age, _Behind, appended_at
from pydanube.broker.topic import Topic
from pydanube.core.dispatch.lag import Standing
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.history.tiers import Descriptor
from pydanube.errors import DataDamaged, OffsetOutOfRange

CAME_US = 1_700_000_000_000_000


class Log:
    """Holds messages from `first` on."""

    def __init__(self, first: int, end: int, failure: Exception | None = None) -> None:
        self.first, self.end, self.failure = first, end, failure

    async def read(self, offset: int, *, bytes_max: int) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        if offset < self.first:
            raise OffsetOutOfRange("/default/a", offset, self.first, self.end)
        return [SimpleNamespace(header=SimpleNamespace(append_time=CAME_US + offset))] if offset < self.end else []


def topic(log: Log, *stored: Descriptor) -> Topic:
    def find(offset: int) -> Descriptor | None:
        return next((each for each in stored if each.start_offset <= offset < each.end), None)

    storage = SimpleNamespace(tier=SimpleNamespace(objects=SimpleNamespace(find=find)))
    return cast(Topic, SimpleNamespace(log=log, head=log.end, storage=storage))


def stored(first: int, end: int, *, came_us: int) -> Descriptor:
    return Descriptor(
        start_offset=first,
        end_offset=end - 1,
        object_id="o",
        size=1,
        etag="",
        min_publish_time=0,
        max_publish_time=0,
        epoch=1,
        created_at=0,
        max_append_time=came_us,
    )


@pytest.mark.parametrize(
    ("place", "offset", "came_us"),
    [
        (topic(Log(0, 10)), 4, CAME_US + 4),
        (topic(Log(8, 10), stored(0, 8, came_us=77)), 4, 77),  # only the object store has it: at least so old
        (topic(Log(8, 10), stored(0, 8, came_us=0)), 4, None),  # of an object that does not say
        (topic(Log(8, 10)), 4, CAME_US + 8),  # nobody has it: the next one counts
        (topic(Log(10, 10)), 4, None),
        (topic(Log(0, 10)), 10, None),  # nothing is there
        (topic(Log(0, 10, DataDamaged("torn"))), 4, None),
    ],
)
def test_when_a_message_came_is_known_from_the_log_or_at_least_from_its_object(
    place: Topic, offset: int, came_us: int | None
) -> None:
    assert asyncio.run(appended_at(place, offset)) == came_us


def test_messages_of_a_lost_broker_do_not_make_those_behind_them_late() -> None:
    each = _Behind(offset=40, appended_us=1_000_000, head=100, head_us=10_000_000)
    held = Standing(head=300, next_unacked=40, lag=10, undispatched=0, missing=50, skipped=250)
    assert _age(each, held, 14_000_000) == pytest.approx(0.2)
    taken_over = SubscriptionProgress(40, head=300, missing=[(40, 90)])
    taken_over.settle(90, 290)
    assert taken_over.oldest_open() == held.oldest_open == 290 and taken_over.lag() == held.lag


def test_what_came_since_the_last_look_waits_no_longer_than_that() -> None:
    each = _Behind(offset=40, appended_us=1_000_000, head=100, head_us=10_000_000)
    now_us = 14_000_000  # 200 messages came in four seconds
    assert _age(each, Standing(head=300, next_unacked=290, lag=10, undispatched=0), now_us) == pytest.approx(0.2)
    assert _age(each, Standing(head=300, next_unacked=90, lag=210, undispatched=0), now_us) == 13.0
    assert _age(each, Standing(head=300, next_unacked=40, lag=260, undispatched=0), now_us) == 13.0
    assert (
        _age(each, Standing(head=300, next_unacked=20, lag=280, undispatched=0), now_us) is None
    )  # it was sought back
