"""The commit decision: which batches become a group, where it goes, and what follows from how its write went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.commit.machine import ROLL_EARLY, SYNC_COST_BYTES, CommitMachine, by_severity
from pydanube.core.commit.sessions import Sessions
from pydanube.core.commit.values import (
    FAILURE,
    FIRST,
    PREPARED,
    SIZE,
    SPACE,
    TIME,
    Answers,
    Commit,
    CommitReceipt,
    CommitTarget,
    GroupPart,
    JournalState,
    RefusePart,
    Route,
    Stop,
    WriteAgain,
)
from pydanube.errors import (
    DanubeError,
    DiskFailed,
    DiskFull,
    LimitReached,
    LogClosed,
    LogStopped,
    NotServed,
    OutOfSequence,
    ProducerFenced,
    ResourcesShort,
    SessionUnknown,
)

P, S = 7, (1 << 32) + 1  # a producer, and its session in epoch 1
FULL, BROKEN = DiskFull("wal/t/1.wal"), DiskFailed("wal/t/1.wal", "sync", "EIO")
SHORT = ResourcesShort("wal/t/1.wal", "too many open files")


@dataclass(frozen=True, slots=True)
class Header:
    rows: int = 1
    size_bytes: int = 100
    producer_id: int = 0
    session: int = 0
    first_sequence: int = 0
    body_crc: int = 0
    flags: int = 0
    ends_session: bool = False
    max_publish_time: int = 0


@dataclass(frozen=True, slots=True)
class FakeBatch:
    header: Header


@dataclass(slots=True, eq=False)
class Caller:
    """Who waits for a receipt. `left`: has given up."""

    name: str = ""
    left: bool = False

    def done(self) -> bool:
        return self.left


@dataclass(frozen=True, slots=True)
class Segment:
    start: int = 64
    end: int = 64
    created_us: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    segment_bytes: int = 10_000
    segment_seconds: float = 100.0
    group_bytes: int = 1_000
    journal_bytes: int = 1_000_000
    copy_bytes: int = 4_096
    sessions_max: int = 10


Target: TypeAlias = CommitTarget[FakeBatch, Caller]
Machine: TypeAlias = CommitMachine[Target, FakeBatch, Caller]
Part: TypeAlias = GroupPart[Target, FakeBatch, Caller]


@dataclass
class CommitDriver:
    """A machine and one topic."""

    limits: Limits = field(default_factory=Limits)
    durability: str = "fsync"
    machine: Machine = field(init=False)
    orders: Target = field(init=False)

    def __post_init__(self) -> None:
        self.machine = CommitMachine(self.limits)
        self.orders = CommitTarget("/default/orders", epoch=1, durability=self.durability)

    def submit(self, to: Target | None = None, on_decided: Callable[[], None] | None = None, **header: Any) -> Caller:
        caller = Caller()
        assert self.machine.submit(to or self.orders, FakeBatch(Header(**header)), caller, on_decided) is None
        return caller

    def form(self, now: int = 50, *, may_answer: bool = True) -> tuple[list[Part], Answers[Caller]]:
        return self.machine.form(list(self.machine.ready), now, may_answer=may_answer)

    def part(self, now: int = 50) -> Part:
        (part,), answers = self.form(now)
        assert answers == []
        return part

    def commit(self, part: Part) -> Commit[Caller]:
        return self.machine.committed(part, may_answer=True)

    def with_session(self) -> CommitDriver:
        """The producer's session is open, and decided."""
        self.submit(rows=0, producer_id=P, session=S, flags=1)
        self.commit(self.part())
        return self


def sequenced(sequence: int, rows: int = 1, crc: int = 0, session: int = S) -> dict[str, int]:
    return {"producer_id": P, "session": session, "first_sequence": sequence, "rows": rows, "body_crc": crc}


def outcomes(answers: Answers[Caller]) -> list[CommitReceipt | type[DanubeError]]:
    return [outcome if isinstance(outcome, CommitReceipt) else type(outcome) for _, outcome in answers]


def next_sequence(of: Target) -> int:
    known = of.sessions.get(P)
    assert known is not None
    return known.next_sequence


# --- forming ----------------------------------------------------------------------------------------


def test_batches_get_offsets_from_the_head_on_in_the_order_in_which_they_came() -> None:
    driver = CommitDriver()
    driver.orders.head = 40
    for rows in (3, 1, 2):
        driver.submit(rows=rows)
    part = driver.part()
    assert [offset for _, offset in part.batches] == [40, 43, 44]
    assert (part.end_offset, part.size_bytes) == (46, 300)
    assert driver.orders.head == 40, "nothing is decided yet"
    assert driver.machine.pending_bytes == 0


def test_the_head_moves_when_the_group_is_written_and_receipts_have_the_offsets() -> None:
    driver = CommitDriver()
    first, second = driver.submit(rows=3, max_publish_time=9), driver.submit(rows=2, max_publish_time=4)
    effect = driver.commit(driver.part(now=77))
    assert effect.answers == [(first, CommitReceipt(0, 1, "fsync")), (second, CommitReceipt(3, 1, "fsync"))]
    assert (driver.orders.head, driver.orders.append_time, driver.orders.max_publish_time) == (5, 77, 9)


def test_append_times_never_go_back() -> None:
    driver = CommitDriver()
    driver.submit()
    driver.commit(driver.part(now=100))
    driver.submit()
    assert driver.part(now=60).append_time == 100


def test_a_group_has_a_size_and_topics_share_it() -> None:
    driver = CommitDriver(Limits(group_bytes=400))
    other: Target = CommitTarget("/default/payments", epoch=1)
    for _ in range(5):
        driver.submit()
        driver.submit(other)
    parts, _ = driver.form()
    assert [(part.target.topic, len(part.batches)) for part in parts] == [
        ("/default/orders", 2),
        ("/default/payments", 2),
    ]
    assert list(driver.machine.ready) == [driver.orders, other], "the rest goes to the end of the line"


def test_the_first_batch_fits_however_large_it_is_and_leaves_nothing_for_the_others() -> None:
    driver = CommitDriver(Limits(group_bytes=400))
    other: Target = CommitTarget("/default/payments", epoch=1)
    driver.submit(size_bytes=5_000)
    driver.submit(other)
    parts, _ = driver.form()
    assert [part.target for part in parts] == [driver.orders]
    assert list(driver.machine.ready) == [other]


def test_a_caller_that_left_before_its_batch_was_formed_takes_no_offset() -> None:
    driver = CommitDriver()
    gone = driver.submit(rows=5)
    gone.left = True
    stays = driver.submit()
    assert driver.commit(driver.part()).answers == [(stays, CommitReceipt(0, 1, "fsync"))]


def test_a_batch_beyond_the_reservation_waits_for_a_larger_one() -> None:
    driver = CommitDriver()
    driver.orders.reserved_end = 2
    first = driver.submit(rows=2)
    driver.submit(rows=1)
    assert driver.commit(driver.part()).answers == [(first, CommitReceipt(0, 1, "fsync"))]
    assert driver.form() == ([], []), "the line has not heard of it yet"
    assert list(driver.machine.waiting) == [driver.orders] and not driver.machine.awaits_turn(driver.orders)
    assert not driver.machine.ready
    driver.orders.reserved_end = 3
    assert driver.machine.reservation_grew(driver.orders) and not driver.machine.reservation_grew(driver.orders)
    assert driver.commit(driver.part()).answers[0][1] == CommitReceipt(2, 1, "fsync")


# --- sessions ---------------------------------------------------------------------------------------


def test_a_repetition_of_what_is_stored_is_answered_without_a_write() -> None:
    driver = CommitDriver().with_session()
    driver.submit(**sequenced(0, rows=2, crc=5))
    driver.commit(driver.part())
    again = driver.submit(**sequenced(0, rows=2, crc=5))
    assert driver.form() == ([], [(again, CommitReceipt(0, 1, "fsync", duplicate=True))])


def test_a_repetition_of_what_is_in_the_same_group_shares_its_fate() -> None:
    driver = CommitDriver().with_session()
    first, again = driver.submit(**sequenced(0, crc=5)), driver.submit(**sequenced(0, crc=5))
    part = driver.part()
    assert len(part.batches) == 1
    assert driver.commit(part).answers == [
        (first, CommitReceipt(0, 1, "fsync")),
        (again, CommitReceipt(0, 1, "fsync", duplicate=True)),
    ]


def test_a_repetition_in_a_group_that_finds_no_room_is_refused_with_it() -> None:
    driver = CommitDriver().with_session()
    driver.submit(**sequenced(0, crc=5))
    driver.submit(**sequenced(0, crc=5))
    effect = driver.machine.not_written(driver.part(), FULL)
    assert isinstance(effect, RefusePart) and outcomes(effect.answers) == [DiskFull, DiskFull]


@pytest.mark.parametrize(
    ("header", "refusal"),
    [
        (sequenced(1), OutOfSequence),
        (sequenced(0, session=S + 1), SessionUnknown),
        (sequenced(0, session=S - 1), ProducerFenced),
        (sequenced(0, session=(2 << 32) + 1), SessionUnknown),  # no owner up to now can have issued it
        ({"producer_id": 8, "session": S}, SessionUnknown),
    ],
)
def test_a_batch_that_is_not_next_is_refused_and_those_behind_it_go_on(
    header: dict[str, int], refusal: type[DanubeError]
) -> None:
    driver = CommitDriver().with_session()
    wrong, right = driver.submit(**header), driver.submit(**sequenced(0))
    (part,), answers = driver.form()
    assert [caller for caller, _ in answers] == [wrong] and outcomes(answers) == [refusal]
    assert driver.commit(part).answers == [(right, CommitReceipt(0, 1, "fsync"))]


def test_an_unknown_session_is_adopted_but_not_one_that_only_a_later_owner_can_issue() -> None:
    driver = CommitDriver()
    driver.orders.sessions.adopts_unknown = True
    known = driver.submit(**sequenced(5))
    later = driver.submit(producer_id=8, session=(2 << 32) + 1)
    (part,), answers = driver.form()
    assert [(caller, type(error)) for caller, error in answers] == [(later, SessionUnknown)]
    assert driver.commit(part).answers == [(known, CommitReceipt(0, 1, "fsync"))]


def test_a_session_that_would_be_adopted_is_refused_where_there_are_too_many() -> None:
    driver = CommitDriver(Limits(sessions_max=1)).with_session()
    driver.orders.sessions.adopts_unknown = True
    driver.submit(producer_id=8, session=S)
    driver.submit(**sequenced(0))
    (part,), answers = driver.form()
    assert outcomes(answers) == [LimitReached] and len(part.batches) == 1


def test_a_session_ends_if_it_is_as_it_was_and_what_comes_behind_is_unknown() -> None:
    driver = CommitDriver().with_session()
    driver.submit(rows=0, producer_id=P, session=S, flags=1, ends_session=True)
    driver.submit(**sequenced(0))
    (part,), answers = driver.form()
    assert outcomes(answers) == [SessionUnknown]
    driver.commit(part)
    assert driver.orders.sessions.get(P) is None


def test_a_session_that_was_used_in_front_of_its_end_goes_on() -> None:
    driver = CommitDriver().with_session()
    driver.submit(**sequenced(0))
    driver.submit(rows=0, producer_id=P, session=S, flags=1, ends_session=True)
    (part,), answers = driver.form()
    assert outcomes(answers) == [SessionUnknown] and len(part.batches) == 1
    assert next_sequence(driver.orders) == 1


# --- a broker that may not answer -------------------------------------------------------------------


def test_a_broker_that_lost_its_lease_stores_the_group_and_acknowledges_nothing() -> None:
    driver = CommitDriver()
    told: list[str] = []
    driver.submit(on_decided=lambda: told.append("told"))
    effect = driver.machine.committed(driver.part(), may_answer=False)
    assert outcomes(effect.answers) == [NotServed]
    assert effect.on_decided == () and driver.orders.head == 1


def test_a_broker_that_lost_its_lease_does_not_confirm_repetitions_either() -> None:
    driver = CommitDriver().with_session()
    driver.submit(**sequenced(0))
    driver.commit(driver.part())
    driver.submit(**sequenced(0))
    parts, answers = driver.form(may_answer=False)
    assert parts == [] and outcomes(answers) == [NotServed]


def test_callbacks_come_with_the_receipts_unless_others_wait_for_the_disk() -> None:
    driver = CommitDriver(Limits(group_bytes=100))

    def told() -> None: ...

    driver.submit(on_decided=told)
    driver.submit(on_decided=told)
    assert driver.commit(driver.part()).on_decided == (), "the second waits: the disk is given work first"
    assert driver.commit(driver.part()).on_decided == (told,)


# --- where a group goes -----------------------------------------------------------------------------

NO_JOURNAL = JournalState(64)


@pytest.mark.parametrize(
    ("parts", "record_bytes", "journal", "route"),
    [
        (1, 1_000, JournalState(64, 5_000), Route.DIRECT),  # one sync either way
        (2, 1_000, JournalState(64, 5_000), Route.JOURNAL),
        (2, SYNC_COST_BYTES, JournalState(64, 5_000), Route.DIRECT),  # writing twice costs more than a sync
        (3, SYNC_COST_BYTES, JournalState(64, 5_000), Route.JOURNAL),
        (2, 1_000, NO_JOURNAL, Route.NEW_JOURNAL),
        (2, 1_000, JournalState(64, None, is_being_made=True), Route.DIRECT),  # it is made for later groups
        (2, 1_000, JournalState(64, 999_000), Route.JOURNAL),  # it just fits
        (2, 1_000, JournalState(64, 999_001), Route.NEW_JOURNAL),
        (2, 1_000, JournalState(64, 999_001, is_retiring=True), Route.DIRECT),  # a third journal would have to wait
        (9, 999_937, NO_JOURNAL, Route.DIRECT),  # it fits into none
        (9, 999_936, NO_JOURNAL, Route.NEW_JOURNAL),
    ],
)
def test_a_group_goes_where_it_costs_least(parts: int, record_bytes: int, journal: JournalState, route: Route) -> None:
    assert CommitDriver().machine.route(parts, record_bytes, journal) is route


def test_what_only_the_journal_has_is_copied_when_it_is_much() -> None:
    machine = CommitDriver().machine
    assert not machine.copies_are_due(4_095) and machine.copies_are_due(4_096)


# --- segments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segment", "now_us", "why"),
    [
        (None, 0, FIRST),
        (Segment(), 10**12, None),  # without a group, it does not age
        (Segment(end=9_999), 0, None),
        (Segment(end=10_000), 0, SIZE),
        (Segment(end=65), 99_999_999, None),
        (Segment(end=65), 100_000_000, TIME),
        (Segment(failed=True), 0, FAILURE),
    ],
)
def test_a_segment_ends_when_it_is_full_or_old_or_failed(segment: Segment | None, now_us: int, why: str | None) -> None:
    driver = CommitDriver()
    assert driver.machine.why_new_segment(driver.orders, segment, now_us) == why


def test_topics_that_were_opened_together_do_not_roll_together() -> None:
    driver = CommitDriver()
    early: Target = CommitTarget("/default/early", topic_hash=1023)
    at = int(100_000_000 * (1 - ROLL_EARLY * 1023 / 1024)) + 1
    assert driver.machine.why_new_segment(early, Segment(end=65), at) == TIME
    assert driver.machine.why_new_segment(driver.orders, Segment(end=65), at) is None


def test_nothing_of_a_topic_is_formed_while_its_segment_is_made() -> None:
    driver = CommitDriver()
    driver.submit()
    driver.machine.segment_begun(driver.orders)
    driver.submit()
    assert not driver.machine.ready and driver.machine.awaits_turn(driver.orders)
    driver.machine.segment_ended(driver.orders)
    assert len(driver.part().batches) == 2


@pytest.mark.parametrize(
    ("why", "refused"), [(FIRST, 1), (SIZE, 1), (TIME, 1), (FAILURE, 1), (SPACE, 0), (PREPARED, 0)]
)
def test_without_room_for_a_segment_that_a_group_needs_its_topic_is_refused(why: str, refused: int) -> None:
    driver = CommitDriver()
    driver.submit()
    driver.machine.segment_begun(driver.orders)
    answers = driver.machine.segment_not_made(driver.orders, why, FULL)
    driver.machine.segment_ended(driver.orders)
    assert outcomes(answers) == [DiskFull] * refused
    assert len(driver.machine.ready) == 1 - refused


# --- the failure table of docs/adr/0001-the-log.md --------------------------------------------------


def formed(durability: str = "fsync") -> tuple[CommitDriver, Part, Caller]:
    """A driver whose producer's first batch is being written."""
    driver = CommitDriver(durability=durability).with_session()
    caller = driver.submit(**sequenced(0))
    return driver, driver.part(), caller


def is_as_before(driver: CommitDriver) -> bool:
    return driver.orders.head == 0 and next_sequence(driver.orders) == 0


def resent(driver: CommitDriver) -> Commit[Caller]:
    """The producer sends the same again: it must be new, not a repetition."""
    driver.submit(**sequenced(0))
    return driver.commit(driver.part())


@pytest.mark.parametrize("failure", [FULL, SHORT], ids=["no room", "no descriptor"])
def test_no_room_undo_and_refused(failure: DiskFull) -> None:
    driver, part, caller = formed()
    effect = driver.machine.not_written(part, failure)
    assert effect == RefusePart([(caller, failure)], failure)
    assert is_as_before(driver) and resent(driver).answers[0][1] == CommitReceipt(0, 1, "fsync")


def test_no_room_for_the_end_of_a_session_it_goes_on() -> None:
    driver = CommitDriver().with_session()
    driver.submit(rows=0, producer_id=P, session=S, flags=1, ends_session=True)
    driver.machine.not_written(driver.part(), FULL)
    assert next_sequence(driver.orders) == 0


def test_a_batch_behind_a_refused_one_meets_the_state_without_it() -> None:
    driver, part, _ = formed()
    driver.submit(**sequenced(1))  # it came while the first was written
    driver.machine.not_written(part, FULL)
    parts, answers = driver.form()
    assert parts == [] and outcomes(answers) == [OutOfSequence]


def test_sync_of_a_segment_fails_the_group_goes_once_to_a_new_one() -> None:
    driver, part, caller = formed()
    assert driver.machine.not_written(part, BROKEN) == WriteAgain(BROKEN)
    assert driver.machine.committed(part, may_answer=True) == Commit([(caller, CommitReceipt(0, 1, "fsync"))], ())
    assert (driver.orders.head, next_sequence(driver.orders)) == (1, 1)


def test_the_header_of_that_new_one_does_not_know_what_is_not_stored() -> None:
    driver, part, _ = formed()
    driver.machine.not_written(part, BROKEN)
    tentative = driver.machine.set_aside(part)
    assert is_as_before(driver)
    driver.machine.put_back(part, tentative)
    assert next_sequence(driver.orders) == 1


@pytest.mark.parametrize("again", [BROKEN, FULL, SHORT], ids=["fails again", "no room", "no descriptor"])
def test_whatever_fails_behind_a_failed_sync_stops_and_is_not_called_refused(again: DiskFull | DiskFailed) -> None:
    driver, part, caller = formed()
    driver.machine.not_written(part, BROKEN)
    assert driver.machine.not_written(part, again) == Stop(again)
    assert outcomes(driver.machine.given_up([part], "EIO")) == [LogStopped]
    assert is_as_before(driver), "a snapshot never knows what is not stored"
    assert not caller.left


def test_sync_fails_with_journaled_groups_not_yet_synced_in_that_file_stopped() -> None:
    driver, part, _ = formed()
    assert driver.machine.not_written(part, BROKEN, was_synced=False) == Stop(BROKEN)


def test_a_write_of_a_topic_that_is_not_synced_fails_stopped() -> None:
    driver, part, _ = formed(durability="os")
    assert driver.machine.not_written(part, BROKEN) == Stop(BROKEN)


@pytest.mark.parametrize("failure", [BROKEN, FULL], ids=["fails", "no room, though its blocks are there"])
def test_sync_of_the_journal_fails_a_new_journal_and_the_record_once_more(failure: DiskFull | DiskFailed) -> None:
    driver, part, caller = formed()
    assert driver.machine.not_recorded([part], failure) == WriteAgain(failure)
    assert driver.commit(part).answers == [(caller, CommitReceipt(0, 1, "fsync"))]


@pytest.mark.parametrize("again", [BROKEN, FULL, SHORT], ids=["fails again", "no room", "no descriptor"])
def test_the_journal_fails_again_stopped(again: DiskFull | DiskFailed) -> None:
    driver, part, _ = formed()
    driver.machine.not_recorded([part], BROKEN)
    assert driver.machine.not_recorded([part], again) == Stop(again)


def test_no_descriptor_for_a_record_every_part_is_refused() -> None:
    driver, part, caller = formed()
    assert driver.machine.not_recorded([part], SHORT) == RefusePart([(caller, SHORT)], SHORT)
    assert is_as_before(driver)


def test_no_room_for_the_next_journal_every_part_is_refused() -> None:
    driver, part, caller = formed()
    assert driver.machine.journal_not_made([part], FULL) == RefusePart([(caller, FULL)], FULL)
    assert is_as_before(driver)


def test_the_log_stops_in_the_middle_of_a_group_what_is_decided_stays_decided() -> None:
    driver = CommitDriver()
    other: Target = CommitTarget("/default/payments", epoch=1)
    driver.submit()
    lost = driver.submit(other)
    parts, _ = driver.form()
    driver.commit(parts[0])
    assert [(caller, type(error)) for caller, error in driver.machine.given_up(parts, "EIO")] == [(lost, LogStopped)]


def test_a_log_that_stopped_refuses_what_is_queued_wherever_it_waits_and_what_comes() -> None:
    driver = CommitDriver()
    making: Target = CommitTarget("/default/making")
    waiting: Target = CommitTarget("/default/waiting")
    waiting.reserved_end = 0
    for target in (waiting, making, driver.orders):
        driver.submit(target)
    driver.machine.segment_begun(making)
    driver.machine.form([waiting], 0, may_answer=True)
    stopped = driver.machine.stop("EIO")
    answers = driver.machine.withdraw_all()
    assert [outcome for _, outcome in answers] == [stopped] * 3 and driver.machine.pending_bytes == 0
    assert driver.machine.submit(driver.orders, FakeBatch(Header()), Caller()) is stopped


def test_a_log_that_closes_refuses_what_is_queued_and_what_comes() -> None:
    driver = CommitDriver()
    driver.submit()
    driver.orders.closed = True
    assert outcomes(driver.machine.withdraw(driver.orders, LogClosed("/default/orders"))) == [LogClosed]
    assert isinstance(driver.machine.submit(driver.orders, FakeBatch(Header()), Caller()), LogClosed)
    assert (driver.machine.pending_bytes, len(driver.machine.ready)) == (0, 0)


def test_what_is_safe_is_answered_before_what_failed_is_dealt_with() -> None:
    assert list(by_severity([None, None])) == [0, 1]
    assert by_severity([BROKEN, None, FULL, SHORT, None, BROKEN]) == [1, 4, 2, 3, 0, 5]


# --- whatever happens -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=5),  # batches: sequence, rows
            st.sampled_from(["safe", "no room", "once more", "stop"]),
        ),
        max_size=12,
    )
)
def test_stored_rows_are_contiguous_and_every_sequence_is_stored_once(
    groups: Sequence[tuple[Sequence[tuple[int, int]], str]],
) -> None:
    driver = CommitDriver().with_session()
    stored: list[tuple[int, int]] = []  # offset, sequence of each row
    for batches, fate in groups:
        answered: list[Caller] = []
        callers = [
            driver.submit(**sequenced(next_sequence(driver.orders) + step, rows, crc=rows)) for step, rows in batches
        ]
        before = driver.orders.sessions.copy()
        parts, answers = driver.form()
        answered += [caller for caller, _ in answers]
        for part in parts:
            if fate == "stop":
                answered += [caller for caller, _ in driver.machine.given_up([part], "EIO")]
            elif fate == "no room":
                effect = driver.machine.not_written(part, FULL)
                assert isinstance(effect, RefusePart)
                answered += [caller for caller, _ in effect.answers]
            else:
                if fate == "once more":
                    assert isinstance(driver.machine.not_written(part, BROKEN), WriteAgain)
                answered += [caller for caller, _ in driver.commit(part).answers]
                for batch, offset in part.batches:
                    header = batch.header
                    stored += [(offset + row, header.first_sequence + row) for row in range(header.rows)]
        if fate in ("no room", "stop"):
            assert driver.orders.sessions == before
        assert sorted(map(id, answered)) == sorted(map(id, callers)), "everybody is answered, once"
    assert stored == [(number, number) for number in range(driver.orders.head)]
    assert driver.machine.pending_bytes == 0 and isinstance(driver.orders.sessions, Sessions)
