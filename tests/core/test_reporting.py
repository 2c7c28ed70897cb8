"""Load reports without topics in which nothing happens: whoever reads them still knows all."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.cluster.load import QUIET_BYTES_MAX, LoadReport, Reporting, TopicLoad

NAMES = [f"/default/t{number}" for number in range(4)]


class Reader:
    """Whoever looks at what was written last."""

    report: LoadReport
    quiet: LoadReport | None = None
    quiet_written = 0

    def __init__(self) -> None:
        self.reporting = Reporting()

    def write(self, now: float, *topics: TopicLoad) -> list[str]:
        """What stands in the report itself."""
        written = self.reporting.step(now, LoadReport(broker_id=1, timestamp=round(now * 1000), topics=topics))
        report = LoadReport.from_bytes(written.report)
        assert report is not None
        self.report = report
        if written.quiet is not None:
            self.quiet, self.quiet_written = LoadReport.from_bytes(written.quiet), self.quiet_written + 1
        return sorted(topic.topic_name for topic in report.topics)

    @property
    def known(self) -> dict[str, TopicLoad]:
        return {topic.topic_name: topic for topic in self.report.with_quiet(self.quiet).topics}


def load(name: str, **figures: int) -> TopicLoad:
    return TopicLoad(topic_name=f"/default/{name}", **figures)


def test_a_topic_that_is_as_it_was_is_not_written_again_and_still_known() -> None:
    reader = Reader()
    a, b = load("a", consumer_count=2, backlog_messages=7), load("b", message_rate=3)
    assert reader.write(0.0, a, b) == ["/default/a", "/default/b"], "nobody knows yet what is as it was"
    for number in range(1, 20):
        assert reader.write(30.0 * number, replace(a, age_seconds=30.0 * number), b) == ["/default/b"]
        assert reader.known["/default/a"].backlog_messages == 7
    assert reader.quiet_written == 1


def test_a_quiet_topic_grows_older_for_whoever_reads_of_it() -> None:
    reader = Reader()
    for second in (0, 30, 60, 90, 3600):
        reader.write(second, replace(load("a"), age_seconds=float(second)))
    assert reader.known["/default/a"].age_seconds == 3600.0


def test_a_topic_in_which_something_happens_is_told_at_once() -> None:
    reader = Reader()
    for second in (0, 30, 60):
        reader.write(second, load("a"), load("b"))
    for second, changed in ((90, load("a", producer_count=1)), (120, load("a", byte_rate=10)), (150, load("a"))):
        told = reader.write(second, changed, load("b"))
        assert reader.known["/default/a"] == replace(changed, age_seconds=reader.known["/default/a"].age_seconds)
        assert ("/default/a" in told) == (second != 150), "it is again as it was written"
    assert reader.quiet_written == 1


def test_topics_that_become_quiet_are_written_as_such_every_five_minutes_at_most() -> None:
    reader = Reader()
    figures = [load(f"t{number}", producer_count=1) for number in range(20)]
    for number in range(40):  # one more topic stops every half minute
        topics = [each if number <= place else replace(each, producer_count=0) for place, each in enumerate(figures)]
        reader.write(30.0 * number, *topics)
        assert {topic.topic_name: topic.producer_count for topic in topics} == {
            name: topic.producer_count for name, topic in reader.known.items()
        }
    assert reader.quiet_written <= 5


def test_a_topic_that_has_left_is_not_told_of_any_more() -> None:
    reader = Reader()
    for second in (0, 30, 60):
        reader.write(second, load("a"), load("b"))
    reader.write(90, load("b"))
    assert list(reader.known) == ["/default/b"]


def test_the_sums_of_a_report_are_over_all_topics() -> None:
    reporting = Reporting()
    topics = [load("a", backlog_messages=5), load("b", backlog_messages=6), load("c", message_rate=2)]
    for second in (0, 30, 60):
        written = reporting.step(second, LoadReport(broker_id=1, timestamp=second, topics=topics))
    stored = json.loads(written.report)
    assert [topic["topic_name"] for topic in stored["topics"]] == ["/default/c"]
    assert (stored["topics_len"], stored["total_lag_messages"], stored["total_message_rate"]) == (3, 11, 2)


def test_an_idle_broker_with_a_thousand_topics_writes_next_to_nothing() -> None:
    reporting = Reporting()
    topics = [load(f"topic-with-a-name-{number}", consumer_count=1) for number in range(1000)]
    sizes = []
    for number in range(20):
        written = reporting.step(30.0 * number, LoadReport(broker_id=1, timestamp=number, topics=topics))
        sizes.append(len(written.report) + len(written.quiet or b""))
    assert sizes[0] > 150_000 and max(sizes[2:]) < 400


def test_very_long_names_fit_into_one_value_as_far_as_they_can() -> None:
    reporting = Reporting()
    topics = [TopicLoad(topic_name=f"/{'é' * 100}/{'é' * 90}{number}") for number in range(4000)]
    for second in (0, 30):
        written = reporting.step(second, LoadReport(broker_id=1, timestamp=second, topics=topics))
    assert written.quiet is not None and len(written.quiet) <= QUIET_BYTES_MAX
    assert len(written.report) < 400


figures = st.builds(
    TopicLoad,
    topic_name=st.sampled_from(NAMES),
    message_rate=st.sampled_from([0.0, 0.0, 1.0]),
    consumer_count=st.integers(0, 1),
    backlog_messages=st.integers(0, 1),
)


@given(st.lists(st.tuples(st.sampled_from([30, 200]), st.lists(figures, unique_by=lambda each: each.topic_name))))
def test_what_is_read_is_always_what_was_so(history: list[tuple[int, list[TopicLoad]]]) -> None:
    reader, now = Reader(), 0
    for passed, topics in history:
        now += passed
        reader.write(now, *topics)
        assert {name: replace(each, age_seconds=0.0) for name, each in reader.known.items()} == {
            topic.topic_name: topic for topic in topics
        }
