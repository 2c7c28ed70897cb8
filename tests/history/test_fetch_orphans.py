"""Offsets that a lost broker may still have are no gap: who fetches them is told, and how to go without."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydanube.broker.topic import Topic
from pydanube.core.history.ownership import Orphan
from pydanube.core.names import TopicName
from pydanube.errors import Refused
from tests.spark.places import place_in


def test_a_fetch_of_what_a_lost_broker_may_have_is_refused_and_says_where_to_read_on(tmp_path: Path) -> None:
    with place_in(tmp_path) as place:
        topic = place.new_topic("orders")
        for first in (0, 10, 20):
            place.send(topic, [b"%d" % number for number in range(first, first + 10)])

        async def lose() -> None:
            assert place._broker is not None and place._broker._broker is not None
            found = await place._broker._broker.topics.require(TopicName(topic))
            assert isinstance(found, Topic)
            found.orphans = [Orphan(start=10, end=20, broker_id=7, epoch=1)]

        place.run(lose())
        with pytest.raises(Refused, match=r"offsets 10 to 19 .* broker 7, which was lost.* read from 20 on"):
            place.payloads(topic)
