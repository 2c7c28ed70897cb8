"""Figures that are kept topic by topic are those that counting everything gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.cluster.load import Figures, LoadReport, LoadTally, TopicLoad, measure
from pydanube.core.names import BrokerId, TopicName

BROKERS = [BrokerId(number) for number in (1, 2, 3)]
TOPICS = [TopicName(f"/default/t{number}") for number in range(4)]

brokers = st.sampled_from(BROKERS)
topics = st.sampled_from(TOPICS)
loads = st.builds(
    TopicLoad,
    topic_name=topics,
    byte_rate=st.integers(0, 8).map(lambda n: n * 125_000.0),  # sums of these are exact
    producer_count=st.integers(0, 3),
    backlog_messages=st.integers(0, 3),
)
reports = st.builds(
    LoadReport, broker_id=brokers, timestamp=st.integers(0, 3), cpu=st.none() | st.just(5.0), topics=st.lists(loads)
)
changes = st.one_of(
    st.tuples(st.just("assign"), brokers, topics),
    st.tuples(st.just("unassign"), brokers, topics),
    st.tuples(st.just("report"), brokers, st.none() | reports),
    st.tuples(st.just("look"), brokers, st.none()),
)


@given(st.lists(changes, max_size=30))
def test_a_tally_is_what_counting_everything_anew_gives(history: list[tuple[str, BrokerId, object]]) -> None:
    tally = LoadTally()
    assigned: dict[BrokerId, set[TopicName]] = {broker: set() for broker in BROKERS}
    known: dict[BrokerId, LoadReport] = {}
    for what, broker, value in [*history, ("look", BROKERS[0], None)]:
        if what == "assign" and isinstance(value, TopicName):
            tally.assign(broker, value)
            assigned[broker].add(value)
        elif what == "unassign" and isinstance(value, TopicName):
            tally.unassign(broker, value)
            assigned[broker].discard(value)
        elif what == "report":
            assert value is None or isinstance(value, LoadReport)
            tally.report(broker, value)
            known = {**known, broker: value} if value else {b: r for b, r in known.items() if b != broker}
        else:
            counted = {each: tally.figures.get(each, Figures()) for each in BROKERS}
            assert counted == measure(assigned, known)
