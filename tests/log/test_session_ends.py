"""Sessions of idempotent producers that nobody uses end, as a record of the log; there are never too many of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pydanube.core.commit.sessions import SESSION_SIZE_MAX_BYTES, SESSIONS_LIMIT, Sessions
from pydanube.errors import ConfigError, DiskFull, LimitReached, OutOfSequence, ProducerFenced, SessionUnknown
from pydanube.formats.segment import SNAPSHOT_LENGTH_MAX, decode_segment_header, segment_header_length
from pydanube.log import segment_maker
from pydanube.log.wal import HandedOver, TopicLog, WalConfig
from tests.harness.logs import TOPIC, LogFixture, Producer, batch, contents, fill, numbered, settle, simulated, sized

HOUR = 3600.0
DAY = 24 * HOUR
every_end = pytest.mark.parametrize("end", ["close", "kill", "power cut"])


async def started(machine: LogFixture, **config: Any) -> TopicLog:
    wal = await machine.boot(**{"session_seconds": 7 * DAY, **config})
    return await wal.topic(TOPIC, epoch=1)


async def reopened(end: str, machine: LogFixture, log: TopicLog, *, epoch: int, **options: Any) -> TopicLog:
    if end == "close":
        assert machine.wal is not None
        await machine.wal.close()
    elif end == "kill":
        machine.kill()
    else:
        machine.cut_power(5)
    again = await machine.boot(session_seconds=7 * DAY)
    return await again.topic(TOPIC, epoch=epoch, **options)


async def end_idle(log: TopicLog, *, is_sure: bool = True) -> int:
    """As the broker does every few minutes."""
    count = log.end_idle_sessions(is_sure=is_sure)
    await settle()
    return count


# --- that they end ----------------------------------------------------------------------------------


@every_end
@simulated
async def test_a_session_that_nobody_used_for_the_set_time_ends_and_recovery_agrees(end: str) -> None:
    machine = LogFixture()
    log = await started(machine)
    idle, busy = await Producer.open(log, 7), await Producer.open(log, 8)
    made = idle.make("a")
    await log.append(made)
    await asyncio.sleep(6 * DAY)
    await log.append(busy.make("b"))
    assert await end_idle(log) == 0
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 1
    assert log.sessions.get(7) is None and log.sessions.get(8) is not None
    with pytest.raises(SessionUnknown):
        await log.append(made)
    assert log.metrics.sessions_ended.value == 1
    log = await reopened(end, machine, log, epoch=2)
    assert [producer for producer, _ in log.sessions] == [8]
    with pytest.raises(SessionUnknown):
        await log.append(made)
    await log.append(busy.make("c"))
    assert await contents(log) == numbered("a", "b", "c")


@simulated
async def test_a_session_of_which_the_record_was_lost_in_a_crash_goes_on() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    made = producer.make("a")
    receipt = await log.append(made)
    await asyncio.sleep(8 * DAY)
    machine.disk.hold_syncs()
    assert log.end_idle_sessions(is_sure=True) == 1
    machine.cut_power(1)
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=2)
    again = await log.append(made) if log.sessions.get(7) is not None else None
    assert again is None or again == receipt._replace(duplicate=True)
    assert await contents(log) == numbered("a")


@simulated
async def test_the_time_of_the_last_use_outlives_restarts() -> None:
    machine = LogFixture()
    log = await started(machine)
    await Producer.open(log, 7)
    for epoch in range(2, 5):
        await asyncio.sleep(2 * DAY)
        log = await reopened("close" if epoch % 2 else "kill", machine, log, epoch=epoch)
        assert await end_idle(log) == 0
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 1


@simulated
async def test_no_number_of_a_session_is_given_twice() -> None:
    machine = LogFixture()
    log = await started(machine)
    first = await Producer.open(log)
    late = first.make("a")
    await log.append(late)
    await asyncio.sleep(8 * DAY)
    assert await end_idle(log) == 1
    second = await Producer.open(log)
    assert second.session > first.session
    await log.append(second.make("b"))
    with pytest.raises(ProducerFenced):  # with the same number it would be a repetition, or out of sequence
        await log.append(late)


# --- what is used meanwhile -------------------------------------------------------------------------


@simulated
async def test_a_batch_in_front_of_the_record_in_the_same_group_keeps_the_session() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    await asyncio.sleep(8 * DAY)
    appended = log.submit(producer.make("a"))
    assert log.end_idle_sessions(is_sure=True) == 1
    behind = log.submit(producer.make("b"))
    assert [(await appended).offset, (await behind).offset] == [0, 1]
    assert log.sessions.get(7) is not None and log.metrics.sessions_ended.value == 0


@simulated
async def test_a_batch_behind_the_record_in_the_same_group_is_refused_as_unknown() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    await asyncio.sleep(8 * DAY)
    assert log.end_idle_sessions(is_sure=True) == 1
    with pytest.raises(SessionUnknown):
        await log.submit(producer.make("a"))


@simulated
async def test_a_record_that_finds_no_room_ends_nothing() -> None:
    machine = LogFixture(capacity_bytes=1 << 20)
    log = await started(machine, ballast_bytes=0)
    producer = await Producer.open(log)
    made = producer.make("a")
    receipt = await log.append(made)
    await asyncio.sleep(8 * DAY)
    machine.hardware.capacity_bytes = machine.hardware.used_bytes
    with pytest.raises(DiskFull):
        while True:
            await log.append(sized(40_000))
    assert await end_idle(log) == 1
    machine.hardware.capacity_bytes = 4 << 20
    await asyncio.sleep(1)
    assert await log.append(made) == receipt._replace(duplicate=True)


@simulated
async def test_an_opener_beside_the_record_gets_a_session_that_lasts() -> None:
    machine = LogFixture()
    log = await started(machine)
    old = await Producer.open(log)
    await asyncio.sleep(8 * DAY)
    opening = asyncio.ensure_future(Producer.open(log))
    await asyncio.sleep(0)
    log.end_idle_sessions(is_sure=True)
    producer = await opening
    assert producer.session > old.session
    assert (await log.append(producer.make("a"))).offset == 0


# --- clocks -----------------------------------------------------------------------------------------


@simulated
async def test_a_clock_that_jumps_forward_ends_nothing() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    await asyncio.sleep(2 * DAY)
    machine.clock.jump(1000 * DAY)
    assert await end_idle(log) == 0
    await log.append(producer.make("a"))  # its time is far ahead now
    machine.clock.jump(-1000 * DAY)
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 0
    assert (await log.append(producer.make("b"))).offset == 1


@simulated
async def test_a_clock_that_was_ahead_at_the_start_and_is_put_right_ends_nothing() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    machine.clock.jump(1000 * DAY)
    log = await reopened("kill", machine, log, epoch=2)
    await asyncio.sleep(HOUR)
    machine.clock.jump(-1000 * DAY)
    await log.append(producer.make("a"))
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 0
    assert (await log.append(producer.make("b"))).offset == 1


@simulated
async def test_a_clock_that_is_wrong_at_the_start_ends_nothing_that_may_be_resent() -> None:
    machine = LogFixture()
    log = await started(machine)
    producer = await Producer.open(log)
    made = producer.make("a")
    receipt = await log.append(made)
    machine.clock.jump(1000 * DAY)
    log = await reopened("kill", machine, log, epoch=2)
    await asyncio.sleep(DAY)  # for so long a client sends again
    assert await end_idle(log) == 0
    assert await log.append(made) == receipt._replace(duplicate=True)


# --- owners -----------------------------------------------------------------------------------------


@simulated
async def test_nothing_ends_while_unknown_sessions_are_adopted_and_then_nothing_is_adopted() -> None:
    machine = LogFixture()
    wal = await machine.boot(session_seconds=7 * DAY)
    log = await wal.topic(TOPIC, epoch=3, handed_over=HandedOver(Sessions(adopts_unknown=True)))
    known = await Producer.open(log, 7)
    made = known.make("a")
    await log.append(made)
    await asyncio.sleep(6 * DAY)
    stranger = Producer(8, (2 << 32) + 1)
    assert (await log.append(stranger.make("b"))).offset == 1
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log, is_sure=False) == 0  # a lost owner may have more
    assert (await log.append(made)).duplicate
    assert await end_idle(log) == 1
    with pytest.raises(SessionUnknown):  # and is not taken for a session that nobody has seen
        await log.append(made)
    with pytest.raises(SessionUnknown):
        await log.append(Producer(9, (2 << 32) + 1).make("c"))
    assert (await log.append(stranger.make("d"))).offset == 2


@simulated
async def test_sessions_that_were_handed_over_have_their_whole_time_again() -> None:
    machine = LogFixture()
    sessions = Sessions()
    sessions.opened(7, 1 << 32, 5)
    sessions.accepted(7, 1 << 32, 0, 1, 3, 0, 1, 5)
    received = Sessions.from_bytes(sessions.to_bytes(timed=False))
    wal = await machine.boot(session_seconds=7 * DAY)
    log = await wal.topic(TOPIC, epoch=2, start_offset=1, handed_over=HandedOver(received))
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 0
    await asyncio.sleep(6 * DAY)
    assert await end_idle(log) == 0
    await asyncio.sleep(2 * DAY)
    assert await end_idle(log) == 1


# --- bounds -----------------------------------------------------------------------------------------


@simulated
async def test_an_opener_beyond_the_bound_is_told_so_and_others_go_on() -> None:
    machine = LogFixture()
    log = await started(machine, sessions_max=3)
    producers = [await Producer.open(log, number) for number in (1, 2, 3)]
    for _ in range(2):
        with pytest.raises(LimitReached, match="at most 3 sessions of producers in the topic"):
            await log.open_session(4)
    opened = await asyncio.gather(*(Producer.open(log, number) for number in (1, 2, 4, 5)), return_exceptions=True)
    assert [isinstance(each, LimitReached) for each in opened] == [False, False, True, True]
    await log.append(producers[2].make("a"))
    await asyncio.sleep(8 * DAY)
    assert await log.open_session(4)  # those that are idle make room


@simulated
async def test_openers_at_the_same_time_do_not_pass_the_bound_together() -> None:
    log = await started(LogFixture(), sessions_max=3)
    opened = await asyncio.gather(*(log.open_session(number) for number in range(1, 9)), return_exceptions=True)
    assert sum(isinstance(each, LimitReached) for each in opened) == 5 and len(log.sessions) == 3


@simulated
async def test_no_unknown_session_is_adopted_beyond_the_bound() -> None:
    machine = LogFixture()
    wal = await machine.boot(sessions_max=2)
    log = await wal.topic(TOPIC, epoch=3, adopts_unknown=True)
    for number in (1, 2):
        await log.append(Producer(number, (1 << 32) + 1).make("a"))
    with pytest.raises(LimitReached):
        await log.append(Producer(3, (1 << 32) + 1).make("a"))
    known = Producer(2, (1 << 32) + 1)
    known.next_sequence = 1
    assert (await log.append(known.make("b"))).offset == 2
    with pytest.raises(OutOfSequence):
        known.next_sequence = 9
        await log.append(known.make("c"))


@simulated
async def test_a_header_never_gets_a_snapshot_that_nobody_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_maker, "SNAPSHOT_LENGTH_MAX", 1000)
    machine = LogFixture()
    log = await started(machine, segment_bytes=2000)
    for number in range(1, 30):
        producer = await Producer.open(log, number)
        await log.append(producer.make("a"))
    await fill(log, "b" * 3000, "c")
    for path in machine.segments():
        content = await machine.disk.read(path, 0, 1 << 20)
        length = segment_header_length(content)
        assert length is not None
        header = decode_segment_header(content[:length])
        assert header is not None and len(header.snapshot) <= 1000
    assert log.metrics.sessions_cut["segment"] > 0


def test_the_bound_leaves_room_for_twice_as_many_in_a_header() -> None:
    assert WalConfig(sessions_max=SESSIONS_LIMIT)
    assert 2 * SESSIONS_LIMIT * SESSION_SIZE_MAX_BYTES <= SNAPSHOT_LENGTH_MAX
    for wrong in (0, SESSIONS_LIMIT + 1):
        with pytest.raises(ConfigError):
            WalConfig(sessions_max=wrong)
    with pytest.raises(ConfigError):
        WalConfig(session_seconds=0)


@simulated
async def test_a_log_without_sessions_has_nothing_to_end() -> None:
    log = await started(LogFixture())
    await log.append(batch("a"))
    await asyncio.sleep(8 * DAY)
    assert await end_idle(log) == 0
    await log.close()
    assert log.end_idle_sessions(is_sure=True) == 0
