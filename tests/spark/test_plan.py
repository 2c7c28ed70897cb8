"""Where offsets are, how far a trigger goes, who reads what. No Spark is started."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydanube.core.history.tiers import Descriptor, LogRun
from pydanube.errors import ConfigError
from pydanube.spark.errors import MessagesLost, NotUploaded, OffsetsWrong
from pydanube.spark.options import EARLIEST, LATEST, AtTime, Everywhere, PerTopic
from pydanube.spark.plan import (
    Bounds,
    Mark,
    Offsets,
    RangeSource,
    TopicState,
    advance,
    between,
    hold_back,
    layout,
    resolve,
)
from pydanube.spark.shares import shares

T = "/default/orders"
U = "/default/refunds"


def described(first: int, end: int, size: int = 1000, times: tuple[int, int] = (0, 0)) -> Descriptor:
    return Descriptor(
        start_offset=first,
        end_offset=end - 1,
        object_id=f"data-{first}-{end - 1}-1.parquet",
        size=size,
        etag="",
        min_publish_time=times[0],
        max_publish_time=times[1],
        epoch=1,
        created_at=0,
    )


def state(head: int, *objects: tuple[int, int], topic: str = T, first_offset: int = 0, **more: object) -> TopicState:
    return TopicState(topic, first_offset, head, [described(*each) for each in objects], **more)  # type: ignore[arg-type]


def ranges(pieces: Sequence[RangeSource]) -> list[tuple[int, int, str]]:
    return [(piece.first, piece.end, "object" if piece.described else "broker") for piece in pieces]


# --- where offsets are --------------------------------------------------------------------------------


def test_uploaded_ranges_are_read_from_objects_and_the_rest_from_the_broker() -> None:
    found = layout(state(120, (0, 50), (50, 100)), 20, 110)
    assert ranges(found.pieces) == [(20, 50, "object"), (50, 100, "object"), (100, 110, "broker")]


def test_voids_are_stepped_over_and_orphans_are_told() -> None:
    found = layout(state(100, (0, 40), (60, 80), voids=[(40, 50)], orphans=[(50, 60)]), 0, 100)
    assert ranges(found.pieces) == [(0, 40, "object"), (60, 80, "object"), (80, 100, "broker")]
    assert (found.voids, found.orphans) == ([(40, 50)], [(50, 60)])


def test_an_orphan_that_became_an_object_meanwhile_is_read() -> None:
    found = layout(state(100, (0, 40), (40, 60), orphans=[(40, 60)]), 0, 60)
    assert ranges(found.pieces) == [(0, 40, "object"), (40, 60, "object")]
    assert found.orphans == []


def test_without_a_broker_what_is_not_uploaded_is_missing() -> None:
    found = layout(state(100, (0, 40), live=False), 0, 100)
    assert found.missing == [(40, 100)]


spans = st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True).map(sorted)


@settings(deadline=None)
@given(spans, spans, spans, st.booleans())
def test_every_offset_is_in_exactly_one_place(
    objects: list[int], voids: list[int], orphans: list[int], live: bool
) -> None:
    def pairs(numbers: list[int]) -> list[tuple[int, int]]:
        return list(zip(numbers[::2], numbers[1::2], strict=False))

    found = layout(state(60, *pairs(objects), voids=pairs(voids), orphans=pairs(orphans), live=live), 5, 55)
    parts = [(piece.first, piece.end) for piece in found.pieces]
    covered = sorted(
        at for first, end in [*parts, *found.voids, *found.orphans, *found.missing] for at in range(first, end)
    )
    assert covered == list(range(5, 55))
    assert parts == sorted(parts)


# --- where to begin -----------------------------------------------------------------------------------


def test_edges_offsets_and_times_become_offsets() -> None:
    states = [state(100, first_offset=10), state(7, topic=U)]
    assert resolve(Everywhere("earliest"), states, {}) == {T: 10, U: 0}
    assert resolve(Everywhere("latest"), states, {}) == {T: 100, U: 7}
    assert resolve(PerTopic({T: EARLIEST, U: LATEST}), states, {}) == {T: 10, U: 7}
    assert resolve(AtTime(5), states, {T: 33, U: 1}) == {T: 33, U: 1}


def test_offsets_must_name_the_topics_that_are_read_and_exist() -> None:
    with pytest.raises(ConfigError, match="refunds is missing"):
        resolve(PerTopic({T: 1}), [state(100), state(7, topic=U)], {})
    with pytest.raises(ConfigError, match="a topic that is read"):
        resolve(PerTopic({T: 1, U: 1}), [state(100)], {})
    with pytest.raises(OffsetsWrong, match="up to 100 only"):
        resolve(PerTopic({T: 101}), [state(100)], {})


# --- how far ------------------------------------------------------------------------------------------


def test_a_trigger_without_limits_goes_to_the_head() -> None:
    assert advance([state(100)], Offsets(next={T: 20})).end.next == {T: 100}


def test_a_limit_is_shared_by_what_waits_and_starves_nobody() -> None:
    end = advance([state(900), state(3, topic=U)], Offsets(next={T: 0, U: 2}), rows_max=100).end
    assert end.next == {T: 99, U: 3}


def test_a_limit_counts_messages_and_not_offsets() -> None:
    gappy = state(100, (0, 10), (50, 100), voids=[(10, 50)])
    advanced = advance([gappy], Offsets(next={T: 0}), rows_max=20)
    assert (advanced.end.next, advanced.rows) == ({T: 60}, 20)
    assert advanced.end.gaps == {T: 40}


def test_bytes_limit_a_trigger_by_the_size_of_objects() -> None:
    assert advance([state(100, (0, 100))], Offsets(next={T: 0}), bytes_max=250).end.next == {T: 25}


def test_a_stream_stops_in_front_of_an_orphan_and_says_so() -> None:
    blocked = state(100, (0, 40), orphans=[(40, 60)])
    advanced = advance([blocked], Offsets(next={T: 10}))
    assert advanced.end.next == {T: 40}
    assert "stops in front of offsets 40 to 59" in advanced.notes[0]
    again = advance([blocked], advanced.end)
    assert again.end == advanced.end


def test_a_skipped_orphan_is_kept_and_read_once_it_is_rescued() -> None:
    start = Offsets(next={T: 10})
    blocked = state(100, (0, 40), orphans=[(40, 60)])
    passed = advance([blocked], start, orphans="skip").end
    assert (passed.next, passed.skipped) == ({T: 100}, {T: [(40, 60)]})
    assert ranges(between([blocked], start, passed)) == [(10, 40, "object"), (60, 100, "broker")]
    same = advance([blocked], passed, orphans="skip")
    assert same.end == passed
    rescued = state(100, (0, 40), (40, 55), voids=[(55, 60)])
    later = advance([rescued], passed, orphans="skip")
    assert (later.end.skipped, later.rows) == ({}, 15)
    assert ranges(between([rescued], passed, later.end)) == [(40, 55, "object")]


def test_an_orphan_is_read_once_when_it_becomes_live_history_in_the_same_trigger() -> None:
    passed = Offsets(next={T: 100}, skipped={T: [(40, 60)]})
    rescued = state(120, (0, 40), (40, 60))
    later = advance([rescued], passed, orphans="skip")
    assert ranges(between([rescued], passed, later.end)) == [(40, 60, "object"), (100, 120, "broker")]


def test_what_retention_removed_fails_the_query_or_is_counted() -> None:
    kept = state(100, first_offset=30)
    with pytest.raises(MessagesLost, match="offsets 10 to 29") as caught:
        advance([kept], Offsets(next={T: 10}))
    assert "failOnDataLoss" in str(caught.value)
    advanced = advance([kept], Offsets(next={T: 10}), fail_on_data_loss=False)
    assert (advanced.end.next, advanced.end.lost) == ({T: 100}, {T: 20})
    assert "goes on without them" in advanced.notes[0]
    assert ranges(between([kept], Offsets(next={T: 10}), advanced.end)) == [(30, 100, "broker")]


def test_a_topic_that_begins_anew_never_moves_a_query_back() -> None:
    with pytest.raises(MessagesLost, match="made anew"):
        advance([state(5)], Offsets(next={T: 10}))
    assert advance([state(5)], Offsets(next={T: 10}), fail_on_data_loss=False).end.next == {T: 10}


def test_a_topic_that_vanished_fails_the_query_or_stays_where_it_was() -> None:
    with pytest.raises(MessagesLost, match="the topic is gone"):
        advance([state(5)], Offsets(next={T: 2, U: 9}))
    assert advance([state(5)], Offsets(next={T: 2, U: 9}), fail_on_data_loss=False).end.next == {T: 5, U: 9}


def test_while_no_broker_answers_nothing_is_lost_that_is_only_not_uploaded() -> None:
    start = Offsets(next={T: 100, U: 9})
    uploaded = state(60, (0, 60), live=False)
    advanced = advance([uploaded], start)
    assert (advanced.end.to_json(), advanced.notes, advanced.rows) == (start.to_json(), [], 0)
    with pytest.raises(NotUploaded):
        between([uploaded], start, Offsets(next={T: 100, U: 12}))


def test_a_new_topic_is_read_from_where_its_history_begins() -> None:
    start = Offsets(next={T: 5})
    states = [state(5), state(20, topic=U, first_offset=8)]
    end = advance(states, start).end
    assert ranges(between(states, start, end)) == [(8, 20, "broker")]


def test_available_now_reads_what_was_there_when_it_began() -> None:
    assert advance([state(500)], Offsets(next={T: 0}), upto={T: 100}).end.next == {T: 100}


def test_small_triggers_wait_until_there_is_enough_or_it_took_too_long() -> None:
    start = Offsets(next={T: 0})
    small = advance([state(5)], start)
    assert hold_back(small, start, rows_min=10, waited=1.0, delay_max=60.0)
    assert not hold_back(small, start, rows_min=10, waited=60.0, delay_max=60.0)
    assert not hold_back(advance([state(10)], start), start, rows_min=10, waited=0.0, delay_max=60.0)


# --- offsets in the checkpoint --------------------------------------------------------------------------


def test_offsets_survive_their_json() -> None:
    offsets = Offsets(next={T: 5, U: 7}, skipped={T: [(1, 3)]}, gaps={T: 4}, lost={U: 2}, marks={T: Mark(4, 9)})
    assert Offsets.from_json(json.dumps(offsets.to_json())) == offsets
    assert Offsets(next={T: 5}).to_json() == {"format": 1, "offsets": {T: 5}}


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 2, "offsets": {}}', '{"format": 1, "offsets": {"a": "b"}}'])
def test_a_checkpoint_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(OffsetsWrong, match="the checkpoint"):
        Offsets.from_json(text)


# --- the same messages whatever happens meanwhile ---------------------------------------------------------


# How long an example takes says nothing here: many draws, and a machine that others use too.
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_trigger_reads_every_message_once_whatever_tier_it_is_in_and_however_it_is_replayed(
    data: st.DataObject,
) -> None:
    """A topic grows, is uploaded, and has orphans that are rescued; a query with limits follows it to the end."""
    head, uploaded, orphan = data.draw(st.integers(1, 40)), 0, data.draw(st.integers(0, 30))
    orphaned = (orphan, orphan + data.draw(st.integers(1, 5)))
    rescued = False
    offsets, read = Offsets(next={T: 0}), []
    for _ in range(60):
        objects = [(0, min(uploaded, orphaned[0])), (orphaned[1], uploaded)]
        known = [each for each in objects if each[0] < each[1]]
        if rescued:
            known.append(orphaned)
        now = state(max(head, orphaned[1]), *sorted(known), orphans=[] if rescued else [orphaned])
        end = advance([now], offsets, rows_max=data.draw(st.integers(1, 9)), orphans="skip").end
        assert all(end.next[t] >= offsets.next[t] for t in offsets.next)
        read += [at for piece in between([now], offsets, end) for at in range(piece.first, piece.end)]
        offsets = end
        uploaded = data.draw(st.integers(uploaded, max(head, uploaded)))
        rescued = rescued or data.draw(st.booleans())
        head += data.draw(st.integers(0, 3))
    assert len(read) == len(set(read))
    missing = {at for each in offsets.skipped.get(T, ()) for at in range(*each)}
    assert set(read) | missing == set(range(offsets.next[T]))


def test_ranges_that_no_reader_can_have_are_an_error_and_not_a_hole() -> None:
    start, end = Offsets(next={T: 0}), Offsets(next={T: 100})
    with pytest.raises(NotUploaded):
        between([state(100, (0, 40), live=False)], start, end)
    with pytest.raises(MessagesLost):
        between([state(100, first_offset=1)], start, end)
    with pytest.raises(MessagesLost):
        between([], start, end)


# --- who reads what ---------------------------------------------------------------------------------------


def test_many_small_objects_are_one_task_and_a_large_one_is_several() -> None:
    small = between(
        [state(100, *((n, n + 10) for n in range(0, 100, 10)))], Offsets(next={T: 0}), Offsets(next={T: 100})
    )
    assert len(shares(small)) == 1
    [large] = between([state(5_000_000, (0, 5_000_000))], Offsets(next={T: 0}), Offsets(next={T: 5_000_000}))
    cut = shares([large])
    assert [share.rows for share in cut] == [1_666_666, 1_666_667, 1_666_667]


def test_partitions_can_be_asked_for() -> None:
    pieces = [RangeSource(T, 0, 100, None), RangeSource(U, 0, 10, None)]
    assert [share.rows for share in shares(pieces, partitions_min=4)] == [25, 25, 25, 25, 10]
    assert max(share.rows for share in shares(pieces, rows_max=7)) <= 7


def test_tasks_follow_the_cluster_if_there_is_enough_for_each() -> None:
    many = [RangeSource(T, 0, 1_000_000, described(0, 1_000_000, size=13_000_000))]
    assert len(shares(many, parallelism=16)) == 16
    assert len(shares(many, parallelism=200)) == 20  # 50,000 messages are worth a task
    assert len(shares(many, parallelism=200, partitions_min=3)) == 3
    few = [RangeSource(T, 0, 1000, described(0, 1000, size=100_000))]
    assert len(shares(few, parallelism=16)) == 1
    large = [RangeSource(T, 0, 1000, None, row_bytes=50_000)]  # of a broker
    assert len(shares(large, parallelism=4)) == 4


def test_shares_of_the_tail_go_by_the_size_of_its_messages() -> None:
    [piece] = [RangeSource(T, 0, 262_144, None, row_bytes=50_000)]
    assert max(share.rows for share in shares([piece])) * 50_000 <= 64 * (1 << 20)


def test_a_limit_in_bytes_ends_where_messages_get_large() -> None:
    log = (LogRun(0, 1000, 100_000, 1), LogRun(1000, 2000, 50_000_000, 1), LogRun(2000, 3000, 100_000, 2))
    live = TopicState(T, 0, 3000, log=log)
    first = advance([live], Offsets(next={T: 0}), bytes_max=1_000_000)
    assert first.end.next == {T: 1018}
    assert advance([live], first.end, bytes_max=10_000).end.next == {T: 1019}  # one, whatever its size
    assert [(piece.first, piece.end, piece.epoch) for piece in layout(live, 500, 2500).pieces] == [
        (500, 1000, 1),
        (1000, 2000, 1),
        (2000, 2500, 2),
    ]


def test_a_filter_prunes_topics_offsets_and_objects_by_their_times() -> None:
    pieces = [
        RangeSource(T, 0, 100, described(0, 100, times=(0, 9))),
        RangeSource(T, 100, 200, described(100, 200, times=(10, 19))),
        RangeSource(U, 0, 50, None),
    ]
    bounds = Bounds().narrowed(first=120).narrowed(end=150, time_first=15)
    assert ranges(bounds.of(pieces)) == [(120, 150, "object")]
    assert ranges(Bounds().narrowed(topics=frozenset({U})).of(pieces)) == [(0, 50, "broker")]
    assert bounds.narrowed(first=10).first == 120
