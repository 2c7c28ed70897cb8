"""Idempotent producers: what is new, what is a repetition, what is refused."""

from __future__ import annotations

import struct
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pydanube.core.commit.sessions import RECENT_MAX, ProducerState, Sessions, Stored
from pydanube.errors import OutOfSequence, ProducerFenced, Refused, SessionUnknown

P = 7  # the producer
S = 1  # its session


def opened(session: int = S) -> Sessions:
    sessions = Sessions()
    sessions.opened(P, session)
    return sessions


def send(sessions: Sessions, sequence: int, offset: int = 0, *, rows: int = 1, crc: int = 0, session: int = S) -> None:
    """A batch that must be new: checked, then accepted."""
    assert sessions.check(P, session, sequence, rows, crc) is None
    sessions.accepted(P, session, sequence, rows, crc, offset, epoch=1)


def with_batches(count: int) -> Sessions:
    """`count` batches of one row; batch i has sequence i, checksum 1000 + i and offset 100 + i."""
    sessions = opened()
    for i in range(count):
        send(sessions, i, 100 + i, crc=1000 + i)
    return sessions


# --- what is next -----------------------------------------------------------------------------------


def test_a_session_begins_at_sequence_0() -> None:
    assert opened().check(P, S, 0, 1, 0) is None


def test_the_first_batch_of_a_session_may_not_begin_later() -> None:
    with pytest.raises(OutOfSequence) as refusal:
        opened().check(P, S, 1, 1, 0)
    assert (refusal.value.producer_id, refusal.value.sequence, refusal.value.expected) == (P, 1, 0)
    assert str(refusal.value).startswith("producer 7 sent sequence 1 where 0 is next")


def test_a_batch_must_begin_where_the_last_one_ended() -> None:
    sessions = opened()
    send(sessions, 0, rows=5)
    assert sessions.check(P, S, 5, 3, 0) is None
    for wrong in (1, 4, 6, 10):
        with pytest.raises(OutOfSequence, match=f"sent sequence {wrong} where 5 is next"):
            sessions.check(P, S, wrong, 1, 0)


def test_a_check_changes_nothing() -> None:
    sessions = with_batches(3)
    before = Sessions(dict(sessions))
    assert sessions.check(P, S, 3, 1, 0) is None
    assert sessions.check(P, S, 2, 1, 1002) is not None
    with pytest.raises(OutOfSequence):
        sessions.check(P, S, 5, 1, 0)
    with pytest.raises(SessionUnknown):
        sessions.check(P, S + 1, 0, 1, 0)
    assert sessions == before


def test_producers_do_not_know_of_each_other() -> None:
    sessions = with_batches(3)
    sessions.opened(P + 1, S)
    assert sessions.check(P + 1, S, 0, 1, 0) is None
    assert sessions.check(P, S, 3, 1, 0) is None
    assert len(sessions) == 2


# --- repetitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", range(RECENT_MAX))
def test_a_resend_of_any_of_the_last_eight_gets_the_stored_offset(back: int) -> None:
    sessions = with_batches(20)
    i = 19 - back
    assert sessions.check(P, S, i, 1, 1000 + i) == Stored(i, 1, 1000 + i, 100 + i, 1)


def test_a_resend_of_the_ninth_is_out_of_sequence() -> None:
    sessions = with_batches(20)
    with pytest.raises(OutOfSequence, match="sent sequence 11 where 20 is next"):
        sessions.check(P, S, 11, 1, 1011)


def test_only_eight_batches_are_remembered() -> None:
    producer = with_batches(20).get(P)
    assert producer is not None
    assert [stored.first_sequence for stored in producer.recent] == list(range(12, 20))


def test_a_resend_with_another_checksum_is_out_of_sequence() -> None:
    with pytest.raises(OutOfSequence):
        with_batches(3).check(P, S, 2, 1, 9999)


def test_a_resend_with_another_number_of_rows_is_out_of_sequence() -> None:
    with pytest.raises(OutOfSequence):
        with_batches(3).check(P, S, 1, 2, 1001)


def test_a_resend_does_not_make_the_next_batch_wait() -> None:
    sessions = with_batches(3)
    assert sessions.check(P, S, 0, 1, 1000) is not None
    assert sessions.check(P, S, 3, 1, 0) is None


def test_a_repetition_of_a_pending_batch_is_one_too() -> None:
    sessions = opened()
    send(sessions, 0, 40, crc=5)  # accepted into a group that is not written yet
    assert sessions.check(P, S, 0, 1, 5) == Stored(0, 1, 5, 40, 1)


# --- undo: the case that loses data elsewhere -------------------------------------------------------


def test_a_batch_behind_a_refused_one_is_refused_and_both_are_accepted_when_resent_in_order() -> None:
    sessions = with_batches(5)
    before = sessions.get(P)
    send(sessions, 5, 105, crc=1005)  # goes into a group ...
    sessions.put(P, before)  # ... that did not reach the disk: batch 5 is refused

    with pytest.raises(OutOfSequence) as refusal:  # 6 was in flight behind it
        sessions.check(P, S, 6, 1, 1006)
    assert refusal.value.expected == 5

    send(sessions, 5, 105, crc=1005)
    send(sessions, 6, 106, crc=1006)
    assert sessions == with_batches(7)


def test_both_in_one_undone_group_are_refused_and_no_repetition_is_remembered() -> None:
    sessions = with_batches(5)
    before = sessions.get(P)
    send(sessions, 5, 105, crc=1005)
    send(sessions, 6, 106, crc=1006)
    sessions.put(P, before)
    assert sessions == with_batches(5)
    with pytest.raises(OutOfSequence):
        sessions.check(P, S, 6, 1, 1006)
    assert sessions.check(P, S, 5, 1, 1005) is None, "a receipt for a batch that is nowhere would lose it"


def test_undo_brings_back_the_batch_that_had_fallen_out_of_the_last_eight() -> None:
    sessions = with_batches(8)
    before = sessions.get(P)
    send(sessions, 8)
    with pytest.raises(OutOfSequence):
        sessions.check(P, S, 0, 1, 1000)
    sessions.put(P, before)
    assert sessions.check(P, S, 0, 1, 1000) == Stored(0, 1, 1000, 100, 1)


def test_the_undo_of_a_first_opening_forgets_the_producer() -> None:
    sessions = Sessions()
    before = sessions.get(P)
    sessions.opened(P, S)
    sessions.put(P, before)
    assert len(sessions) == 0
    with pytest.raises(SessionUnknown):
        sessions.check(P, S, 0, 1, 0)
    sessions.put(P, None)  # a second undo finds nothing to do


def test_the_undo_of_an_opening_leaves_the_older_session_at_work() -> None:
    sessions = with_batches(3)
    before = sessions.get(P)
    sessions.opened(P, S + 1)
    sessions.put(P, before)
    assert sessions == with_batches(3)


# --- sessions and fencing ---------------------------------------------------------------------------


def test_a_batch_of_a_producer_that_opened_no_session_is_refused() -> None:
    with pytest.raises(SessionUnknown, match="session 1 of producer 7 is not known here: open a session first"):
        Sessions().check(P, S, 0, 1, 0)


def test_a_batch_of_a_session_that_is_newer_than_the_known_one_is_refused() -> None:
    with pytest.raises(SessionUnknown):
        with_batches(3).check(P, S + 1, 0, 1, 0)


def test_a_newer_session_fences_the_older() -> None:
    sessions = with_batches(3)
    sessions.opened(P, S + 1)
    with pytest.raises(ProducerFenced) as refusal:
        sessions.check(P, S, 3, 1, 0)
    assert (refusal.value.producer_id, refusal.value.session, refusal.value.current) == (P, S, S + 1)
    with pytest.raises(ProducerFenced, match="session 1 of producer 7 was replaced by session 2"):
        sessions.check(P, S, 2, 1, 1002)  # even a repetition


def test_a_newer_session_begins_at_0_and_knows_no_repetitions_of_the_older() -> None:
    sessions = with_batches(3)
    sessions.opened(P, S + 1)
    assert sessions.check(P, S + 1, 0, 1, 1000) is None
    with pytest.raises(OutOfSequence):
        sessions.check(P, S + 1, 2, 1, 1002)


def test_opening_a_session_again_or_an_older_one_changes_nothing() -> None:
    sessions = opened(5)
    send(sessions, 0, session=5)
    before = sessions.get(P)
    sessions.opened(P, 5)
    sessions.opened(P, 4)
    assert sessions.get(P) == before


def test_session_numbers_begin_with_the_epoch_and_grow() -> None:
    sessions = Sessions()
    first = sessions.next_session(P, epoch=3)
    assert first == (3 << 32) + 1
    sessions.opened(P, first)
    assert sessions.next_session(P, epoch=3) == first + 1
    assert sessions.next_session(P, epoch=4) == (4 << 32) + 1
    assert sessions.next_session(P + 1, epoch=3) == first


def test_a_session_number_is_greater_than_a_known_one_of_a_later_epoch() -> None:
    sessions = opened((9 << 32) + 4)
    assert sessions.next_session(P, epoch=3) == (9 << 32) + 5


# --- after a takeover or damage ---------------------------------------------------------------------


def test_the_first_batch_of_an_unknown_session_sets_its_baseline_after_an_unsealed_takeover() -> None:
    sessions = Sessions(adopts_unknown=True)
    send(sessions, 40, 500, rows=2, crc=1)
    assert sessions.check(P, S, 40, 2, 1) == Stored(40, 2, 1, 500, 1)
    assert sessions.check(P, S, 42, 1, 0) is None
    for wrong in (0, 39, 41, 43):
        with pytest.raises(OutOfSequence):
            sessions.check(P, S, wrong, 1, 0)


def test_an_adopted_session_fences_the_older_and_forgets_its_batches() -> None:
    sessions = with_batches(3)
    sessions.adopts_unknown = True
    send(sessions, 2, crc=1, session=S + 1)
    with pytest.raises(ProducerFenced):
        sessions.check(P, S, 3, 1, 0)
    producer = sessions.get(P)
    assert producer is not None and len(producer.recent) == 1


def test_a_fenced_session_is_not_adopted() -> None:
    sessions = Sessions(adopts_unknown=True)
    sessions.opened(P, 2)
    with pytest.raises(ProducerFenced):
        sessions.check(P, 1, 0, 1, 0)


def test_a_loosened_session_may_go_on_anywhere_once() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    assert sessions.check(P, S, 17, 1, 0) is None
    assert sessions.check(P, S, 3, 1, 0) is None
    send(sessions, 17)
    with pytest.raises(OutOfSequence, match="sent sequence 3 where 18 is next"):
        sessions.check(P, S, 3, 1, 0)


def test_a_loosened_session_still_knows_its_repetitions() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    assert sessions.check(P, S, 1, 1, 1001) == Stored(1, 1, 1001, 101, 1)


def test_the_undo_of_a_loosened_sessions_batch_leaves_it_loose() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    before = sessions.get(P)
    send(sessions, 17)
    sessions.put(P, before)
    assert sessions.check(P, S, 30, 1, 0) is None


def test_what_somebody_else_stored_is_a_repetition_and_what_follows_may_begin_anywhere() -> None:
    sessions = Sessions(adopts_unknown=True)
    sessions.recall(7, 1, Stored(0, 2, 10, 0, 1))
    sessions.recall(7, 1, Stored(2, 1, 11, 2, 1))
    assert sessions.check(7, 1, 0, 2, 10) == Stored(0, 2, 10, 0, 1)
    assert sessions.check(7, 1, 2, 1, 11) == Stored(2, 1, 11, 2, 1)
    assert sessions.check(7, 1, 3, 1, 12) is None
    assert sessions.check(7, 1, 30, 1, 12) is None, "the lost owner may have taken more"


def test_only_eight_batches_are_recalled() -> None:
    sessions = Sessions()
    for sequence in range(20):
        sessions.recall(7, 1, Stored(sequence, 1, sequence, sequence, 1))
    known = sessions.get(7)
    assert known is not None and [each.first_sequence for each in known.recent] == list(range(12, 20))


def test_nothing_older_is_recalled_into_a_session_that_is_further() -> None:
    sessions = Sessions()
    sessions.opened(7, 2)
    sessions.accepted(7, 2, 0, 5, 10, 100, 3)
    before = sessions.get(7)
    sessions.recall(7, 1, Stored(9, 1, 11, 0, 1))
    sessions.recall(7, 2, Stored(4, 1, 11, 0, 1))
    assert sessions.get(7) == before


def test_of_what_others_know_only_that_is_learned_which_is_further_and_it_is_not_the_last_word() -> None:
    mine, theirs = Sessions(), Sessions()
    for sessions, producer, session, first in ((mine, 1, 1, 5), (theirs, 1, 1, 3), (mine, 2, 1, 3), (theirs, 2, 1, 5)):
        sessions.recall(producer, session, Stored(first, 1, first, first, 1))
    theirs.recall(3, 1, Stored(0, 1, 0, 0, 1))
    mine.opened(4, 9)
    theirs.recall(4, 8, Stored(0, 1, 0, 0, 1))
    mine.learn(theirs)
    assert {producer: (known.session, known.next_sequence) for producer, known in mine} == {
        1: (1, 6),
        2: (1, 6),
        3: (1, 1),
        4: (9, 0),
    }
    assert mine.check(3, 1, 7, 1, 7) is None
    with pytest.raises(OutOfSequence):
        mine.check(4, 9, 7, 1, 7)


def test_what_is_given_up_is_no_repetition_any_more() -> None:
    sessions = Sessions()
    for sequence in range(4):
        sessions.recall(7, 1, Stored(sequence, 1, sequence, 10 * sequence, 1))
    sessions.forget([(5, 15), (25, 40)])
    assert [sessions.check(7, 1, sequence, 1, sequence) is None for sequence in range(4)] == [False, True, False, True]


def test_if_not_all_producers_fit_those_that_sent_last_are_kept() -> None:
    sessions = Sessions()
    sessions.recall(1, 1, Stored(0, 1, 0, 0, 1))
    for producer in range(2, 50):
        sessions.recall(producer, producer, Stored(0, 1, 0, producer, 1))
    sessions.recall(1, 1, Stored(1, 1, 0, 100, 1))
    newest = sessions.newest(300)
    assert sorted(producer for producer, _ in newest) == [1, 47, 48, 49] and len(newest.to_bytes()) <= 300
    assert sessions.newest(100_000) is sessions


def test_loosening_adopts_sessions_that_nobody_has_seen() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    assert sessions.check(P + 1, S, 12, 1, 0) is None
    assert sessions.check(P, S + 1, 12, 1, 0) is None


def test_a_loosened_session_is_still_fenced_by_a_newer_one_that_is_not_loose() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    sessions.opened(P, S + 1)
    with pytest.raises(ProducerFenced):
        sessions.check(P, S, 3, 1, 0)
    with pytest.raises(OutOfSequence):
        sessions.check(P, S + 1, 4, 1, 0)


# --- snapshots --------------------------------------------------------------------------------------

u64 = st.integers(0, 2**64 - 1)
producers = st.builds(
    ProducerState,
    u64,
    u64,
    st.lists(st.binary(min_size=8, max_size=8), max_size=RECENT_MAX).map(
        lambda each: b"".join(struct.pack("<8sIIQQ", first, 1, 2, 3, 4) for first in each)
    ),
    st.booleans(),
    st.integers(0, 2**63),
)
states = st.dictionaries(u64, producers, max_size=5)


@settings(deadline=None)
@given(states)
def test_a_snapshot_brings_back_every_producer(state: dict[int, ProducerState]) -> None:
    sessions = Sessions(state)
    again = Sessions.from_bytes(sessions.to_bytes())
    assert again == sessions
    assert dict(again) == state


@settings(deadline=None)
@given(states)
def test_equal_states_have_equal_snapshots(state: dict[int, ProducerState]) -> None:
    backwards = Sessions(dict(reversed(state.items())))
    assert backwards.to_bytes() == Sessions(state).to_bytes()


def test_a_snapshot_without_times_is_what_earlier_versions_wrote() -> None:
    sessions = Sessions()
    for sequence in range(2):
        sessions.accepted(P, S, sequence, 1, 5, 40 + sequence, 3, used=1_000)
    batches = struct.pack("<QIIQQ", 0, 1, 5, 40, 3) + struct.pack("<QIIQQ", 1, 1, 5, 41, 3)
    earlier = struct.pack("<QQQB", P, S, 2, 2) + batches
    assert sessions.to_bytes(timed=False) == earlier
    read = Sessions.from_bytes(earlier).get(P)
    assert read is not None and (read.used, len(read.recent)) == (0, 2)


def test_earlier_versions_read_the_time_as_a_batch_that_nobody_can_send() -> None:
    sessions = Sessions()
    sessions.accepted(P, S, 0, 1, 5, 40, 3, used=1_000)
    snapshot = sessions.to_bytes()
    *_, count = struct.unpack_from("<QQQB", snapshot)
    first, second = struct.iter_unpack("<QIIQQ", snapshot[25:])
    assert count == 2 and first[1] == 0 and second == (0, 1, 5, 40, 3)
    assert Sessions.from_bytes(snapshot) == sessions


def test_no_producers_are_no_bytes() -> None:
    assert Sessions().to_bytes() == b""
    assert len(Sessions.from_bytes(b"")) == 0


def test_a_snapshot_remembers_that_a_session_is_loose() -> None:
    sessions = with_batches(3)
    sessions.loosen()
    assert Sessions.from_bytes(sessions.to_bytes()).check(P, S, 50, 1, 0) is None


@settings(deadline=None)
@given(states.filter(bool), st.data())
def test_a_snapshot_that_ends_early_raises_or_has_lost_whole_producers(
    state: dict[int, ProducerState], data: st.DataObject
) -> None:
    snapshot = Sessions(state).to_bytes()
    end = data.draw(st.integers(0, len(snapshot) - 1))
    try:
        left = Sessions.from_bytes(snapshot[:end])
    except ValueError as error:
        assert str(error).startswith("a producer snapshot ends in the middle of a ")
    else:
        assert left.to_bytes() == snapshot[:end]


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(struct.pack("<QQQB", 1, 1, 1, 0x7F))
def test_bytes_that_are_no_snapshot_raise_value_error_or_nothing(snapshot: bytes) -> None:
    try:
        Sessions.from_bytes(snapshot)
    except ValueError as error:
        assert "snapshot" in str(error)


def test_sessions_are_compared_by_value_and_cannot_be_keys() -> None:
    assert with_batches(3) == with_batches(3) != with_batches(4)
    assert with_batches(3) != "sessions"
    with pytest.raises(TypeError):
        hash(Sessions())


# --- against a dumb model ---------------------------------------------------------------------------


@dataclass
class History:
    """The rules said with one list of everything that happened, oldest first, and searching."""

    events: list[tuple[str, int, int, Stored | None]] = field(default_factory=list)
    adopts_unknown: bool = False

    def current(self, producer: int) -> int | None:
        return max((session for _, p, session, _ in self.events if p == producer), default=None)

    def batches(self, producer: int) -> list[Stored]:
        now = self.current(producer)
        return [b for _, p, session, b in self.events if b is not None and (p, session) == (producer, now)]

    def loose(self, producer: int) -> bool:
        """Whether the last thing that happened to the current session is that it was loosened."""
        now = self.current(producer)
        kinds = [kind for kind, p, session, _ in self.events if (p, session) == (producer, now)]
        return kinds[-1] == "loosened"

    def answer(self, producer: int, session: int, sequence: int, rows: int, crc: int) -> object:
        now = self.current(producer)
        if now is None or session > now:
            return None if self.adopts_unknown else SessionUnknown
        if session < now:
            return ProducerFenced
        batches = self.batches(producer)
        if sequence == (batches[-1].first_sequence + batches[-1].rows if batches else 0):
            return None
        for known in batches[-8:]:
            if known[:3] == (sequence, rows, crc):
                return known
        return None if self.loose(producer) else OutOfSequence

    def open(self, producer: int, session: int) -> None:
        now = self.current(producer)
        if now is None or session > now:
            self.events.append(("opened", producer, session, None))

    def accept(self, producer: int, session: int, stored: Stored) -> None:
        self.events.append(("accepted", producer, session, stored))

    def loosen(self) -> None:
        for producer in {p for _, p, _, _ in self.events}:
            now = self.current(producer)
            assert now is not None
            self.events.append(("loosened", producer, now, None))
        self.adopts_unknown = True


some_producer = st.integers(1, 2)
some_session = st.sampled_from([1, 1, 1, 1, 2, 3])
# Where a batch begins: relative to what is next, so that most are new, resent or one off.
some_start = st.sampled_from([0, 0, 0, 0, 0, 0, -1, -2, -3, -7, -8, -9, -10, 1, 2])
actions = st.one_of(
    st.tuples(st.just("open"), some_producer, some_session),
    st.tuples(st.just("send"), some_producer, some_session, some_start, st.integers(1, 2), st.integers(0, 1)),
    st.tuples(st.just("send"), some_producer, st.just(1), some_start, st.just(1), st.just(0)),
    st.tuples(st.just("send"), some_producer, st.just(1), st.just(0), st.just(1), st.just(0)),
    st.sampled_from([("commit",), ("commit",), ("undo",), ("restart",), ("loosen",)]),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(actions, max_size=60))
@example(
    [("open", 1, 1), *[("send", 1, 1, 0, 1, 0)] * 9, ("commit",), ("send", 1, 1, -9, 1, 0), ("send", 1, 1, -8, 1, 0)]
)
def test_sessions_answer_like_a_list_of_everything_that_happened(steps: list[tuple[object, ...]]) -> None:
    sessions, model = Sessions(), History()
    committed = deepcopy(model)
    undo: dict[int, ProducerState | None] = {}  # as the committer keeps it: values from before the group
    next_offset = 0
    for step in steps:
        match step:
            case ("open", int(producer), int(session)):
                undo.setdefault(producer, sessions.get(producer))
                sessions.opened(producer, session)
                model.open(producer, session)
            case ("send", int(producer), int(session), int(back), int(rows), int(crc)):
                known = model.batches(producer)
                sequence = max(0, (known[-1].first_sequence + known[-1].rows if known else 0) + back)
                expected = model.answer(producer, session, sequence, rows, crc)
                found: object
                try:
                    found = sessions.check(producer, session, sequence, rows, crc)
                except Refused as refusal:
                    found = type(refusal)
                assert found == expected
                if expected is None:
                    stored = Stored(sequence, rows, crc, next_offset, 1)
                    undo.setdefault(producer, sessions.get(producer))
                    sessions.accepted(producer, session, *stored)
                    model.accept(producer, session, stored)
                    next_offset += rows
            case ("undo",):
                for producer, before in undo.items():
                    sessions.put(producer, before)
                model, undo = deepcopy(committed), {}
            case _:  # a group ends well
                committed, undo = deepcopy(model), {}
                if step == ("loosen",):
                    sessions.loosen()
                    model.loosen()
                    committed = deepcopy(model)
                if step == ("restart",):
                    adopts = sessions.adopts_unknown
                    sessions = Sessions.from_bytes(sessions.to_bytes())
                    sessions.adopts_unknown = adopts


def test_a_session_of_a_newer_owner_is_not_adopted_by_an_older_one() -> None:
    """Its number proves that the log's owner has lost the topic: what it took would be a copy to the next rescue."""
    sessions = Sessions(adopts_unknown=True)
    sessions.epoch = 3
    for newer in (4 << 32 | 1, 3 << 32 | 9, 2**64 - 1):
        with pytest.raises(SessionUnknown):
            sessions.check(P, newer, 0, 1, 0)
    assert sessions.check(P, 2 << 32 | 5, 40, 1, 0) is None, "a lost owner's"
