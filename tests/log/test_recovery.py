"""Recovery: what is the log, what was never finished, what is damaged, and what cannot be known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pydanube.errors import LogDamaged, OffsetOutOfRange, OutOfSequence, TailUnproven
from pydanube.formats.batch import stamp
from pydanube.formats.segment import GROUP_HEADER_SIZE, encode_group
from pydanube.log.layout import SPARE_JOURNAL
from pydanube.log.recovered import TailState
from pydanube.log.wal import TopicLog, Wal
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    Producer,
    batch,
    contents,
    fill,
    groups_of,
    numbered,
    settle,
    simulated,
    sized,
    texts,
)

EPOCH_1 = "wal/default/orders/00000000000000000001"


async def with_log(*payloads: str, close: bool = False, seed: int = 0, **config: int) -> LogFixture:
    """A machine whose log has one group per payload; the process was killed, or closed the log."""
    machine = LogFixture(seed)
    wal = await machine.boot(**config)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *payloads)
    if close:
        await wal.close()
    else:
        machine.kill()
    return machine


async def journaled(*payloads: str, count: int = 3) -> LogFixture:
    """A machine that was killed with everything of `count` topics in the journal, and nothing in their files."""
    machine = LogFixture()
    wal = await machine.boot(copy_bytes=1 << 20)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(count)]
    for payload in payloads:
        await asyncio.gather(*(log.submit(batch(payload, topic=log.topic)) for log in logs))
    await settle()
    assert wal.committer.journaled_groups == len(payloads)
    machine.kill()
    for log in logs:  # whatever was copied in the background, the power cut took it
        (path,) = machine.segments(log.topic)
        content = machine.hardware.content(path)
        await machine.overwrite(path, log.segments[0].start, bytes(len(content) - log.segments[0].start))
    return machine


def flip(machine: LogFixture, path: str, position: int) -> None:
    machine.hardware.flip(path, position)


# --- torn: the unfinished end -----------------------------------------------------------------------


@simulated
async def test_a_torn_last_group_is_cut_off_kept_aside_and_reported() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    path, end = log.segments[0].path, log.segments[0].end
    machine.disk.hold_syncs()
    log.submit(sized(3000, "c"))
    await settle()
    machine.kill()
    whole = machine.hardware.content(path)
    await machine.overwrite(path, end + 1000, bytes(len(whole) - end - 1000))  # only its first bytes arrived
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")
    (torn,) = log.recovered.torn
    assert (torn.path, torn.position, torn.kept_as) == (path, end, f"{path}.torn")
    assert machine.hardware.content(torn.kept_as) == whole[end : end + 1000].rstrip(b"\0")
    assert torn.length == len(machine.hardware.content(torn.kept_as))
    assert log.recovered.tail is TailState.TORN and log.recovered.damage == []
    await fill(log, "d")
    assert await contents(log) == numbered("a", "b", "d")


@simulated
async def test_a_group_that_was_never_synced_is_there_whole_or_not_at_all_after_any_power_cut() -> None:
    seen = set()
    for seed in range(60):
        machine = LogFixture(seed)
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=1)
        await fill(log, "a")
        machine.disk.hold_syncs()
        log.submit(sized(3000, "b"))
        await settle()
        machine.cut_power(seed)
        log = await machine.reopened(epoch=2)
        found = await contents(log)
        assert found in (numbered("a"), numbered("a", "b"))
        assert log.recovered.damage == []
        seen.add(len(found))
    assert seen == {1, 2}


@simulated
async def test_a_whole_last_group_is_synced_into_a_new_file_before_it_is_served() -> None:
    """kill -9 leaves the page cache: what is read after the restart must not vanish with the power."""
    for seed in range(20):
        machine = LogFixture(seed)
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=1)
        await fill(log, "a")
        machine.disk.hold_syncs()
        log.submit(batch("b"))
        await settle()
        machine.kill()
        log = await machine.reopened(epoch=2)
        assert await contents(log) == numbered("a", "b")
        assert len(machine.segments()) == 2
        machine.cut_power(seed)
        log = await machine.reopened(epoch=3)
        assert await contents(log) == numbered("a", "b")


@simulated
async def test_the_copied_group_does_not_trust_the_file_whose_sync_failed() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    path = log.segments[0].path
    machine.kill()
    log = await machine.reopened(epoch=2)
    (last,) = groups_of(machine.hardware.content(path))[1:]
    await machine.overwrite(path, last.position, bytes(GROUP_HEADER_SIZE + last.length))
    assert await contents(log) == numbered("a", "b")
    machine.kill()
    assert await contents(await machine.reopened(epoch=3)) == numbered("a", "b")


@simulated
async def test_a_flipped_bit_in_the_last_group_looks_torn_and_is_kept_aside_and_reported() -> None:
    machine = await with_log("a", "b")
    (path,) = machine.segments()
    last = groups_of(machine.hardware.content(path))[-1]
    flip(machine, path, last.position + GROUP_HEADER_SIZE + 100)
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a")
    assert [(torn.path, torn.position) for torn in log.recovered.torn] == [(path, last.position)]


@simulated
async def test_an_empty_log_that_was_killed_opens_at_zero() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await wal.topic(TOPIC, epoch=1)
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert (log.head, log.first_offset, log.held(), await contents(log)) == (0, 0, [], {})


# --- stale bytes ------------------------------------------------------------------------------------


@simulated
async def test_groups_of_another_segment_behind_the_end_are_not_taken_for_groups() -> None:
    machine = await with_log("a")
    other = await with_log("x", "y", seed=9)
    (path,), (other_path,) = machine.segments(), other.segments()
    end = groups_of(machine.hardware.content(path))[-1]
    stale = other.hardware.content(other_path)[groups_of(other.hardware.content(other_path))[1].position :]
    await machine.overwrite(path, end.position + GROUP_HEADER_SIZE + end.length, stale.rstrip(b"\0"))
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a")
    assert log.recovered.damage == [] and len(log.recovered.torn) == 1


@simulated
async def test_a_group_of_this_segment_at_another_position_is_not_taken_for_one() -> None:
    machine = await with_log("a", "b")
    (path,) = machine.segments()
    content = machine.hardware.content(path)
    first, second = groups_of(content)
    end = second.position + GROUP_HEADER_SIZE + second.length
    for copied in (first, second):
        length = GROUP_HEADER_SIZE + copied.length
        await machine.overwrite(path, end, content[copied.position : copied.position + length])
        end += length
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")
    assert log.recovered.damage == []


@simulated
async def test_a_group_that_fits_in_everything_but_its_position_is_not_taken_for_one() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    segment = log.segments[0]
    machine.kill()
    elsewhere = encode_group(
        [stamp(batch("ghost"), base_offset=1, epoch=1, append_time=0)],
        segment_id=segment.segment_id,
        number=segment.next_number,
        position=segment.end + 4096,
        durable_before=segment.end,
        first_offset=1,
    )
    await machine.overwrite(segment.path, segment.end, b"".join(map(bytes, elsewhere.buffers)))
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a")
    assert log.recovered.damage == [] and len(log.recovered.torn) == 1


@simulated
async def test_old_bytes_behind_a_shorter_group_written_later_are_not_taken_for_one() -> None:
    """A refused group's bytes stay behind the end; what overwrites them in part leaves the rest of them."""
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    path, end = log.segments[0].path, log.segments[0].end
    number, segment_id = log.segments[0].next_number, log.segments[0].segment_id
    long_ago = encode_group(
        [sized(900, "ghost"), sized(900, "ghost")],
        segment_id=segment_id, number=number, position=end, durable_before=end, first_offset=1,
    )  # fmt: skip
    behind = encode_group(
        [batch("ghost")],
        segment_id=segment_id, number=number + 1, position=end + long_ago.length,
        durable_before=end, first_offset=3,
    )  # fmt: skip
    await machine.overwrite(path, end, b"".join(map(bytes, [*long_ago.buffers, *behind.buffers])))
    await fill(log, "b")
    machine.kill()
    assert machine.hardware.content(path).count(b"ghost") == 2
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")


@simulated
async def test_whatever_stands_behind_a_rolled_segments_end_does_not_exist() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    old = log.segments[0]
    machine.disk.sync_failures = [old.path]
    await fill(log, "b")  # stands in the old file too, whole
    assert len(groups_of(machine.hardware.content(old.path))) == 2
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")
    machine.kill()
    report = await machine.verify()
    assert report.ok and report.topics[0].messages == 2


# --- damage -----------------------------------------------------------------------------------------


@simulated
async def test_damage_in_the_middle_is_reported_with_file_position_and_offsets() -> None:
    machine = await with_log("a", "b", "c", "d")
    (path,) = machine.segments()
    hit = groups_of(machine.hardware.content(path))[1]
    flip(machine, path, hit.position + GROUP_HEADER_SIZE + 200)
    log = await machine.reopened(epoch=2)
    (damage,) = log.recovered.damage
    assert (damage.path, damage.position, damage.first, damage.end) == (path, hit.position, 1, 2)
    assert f"{path} at position {hit.position}" in str(damage) and "offsets 1 up to 2 are lost" in str(damage)
    assert str(damage).encode() in machine.hardware.content(f"{path}.damage")
    assert log.head == 4 and log.recovered.tail is TailState.CLEAN


@pytest.mark.parametrize("what", ["group header", "batch header", "batch body"])
@pytest.mark.parametrize("rounds", [1, 2])
@simulated
async def test_reading_before_and_behind_damage_works_and_inside_it_raises(what: str, rounds: int) -> None:
    machine = await with_log("a", "b", "c", "d")
    (path,) = machine.segments()
    hit = groups_of(machine.hardware.content(path))[1]
    inside = {"group header": 20, "batch header": GROUP_HEADER_SIZE + 30, "batch body": GROUP_HEADER_SIZE + 200}
    flip(machine, path, hit.position + inside[what])
    for epoch in range(2, 2 + rounds):  # also when the damage is an old story
        log = await machine.reopened(epoch=epoch)
        assert await first_text(log, 0) == "a"
        with pytest.raises(LogDamaged) as damage:
            await log.read(1)
        assert (damage.value.path, damage.value.first, damage.value.end) == (path, 1, 2)
        assert hit.position <= damage.value.position <= hit.position + GROUP_HEADER_SIZE
        assert await contents(log, 2) == numbered("c", "d", first=2)
        machine.kill()


async def first_text(log: TopicLog, offset: int) -> str:
    (text,) = [text for at, text in (await contents_until_error(log, offset)).items() if at == offset]
    return text


async def contents_until_error(log: TopicLog, offset: int) -> dict[int, str]:
    reader = log.reader(offset)
    found: dict[int, str] = {}
    try:
        while got := await reader.read(1):
            for each in got:
                found |= {each.header.base_offset + i: text for i, text in enumerate(texts([each]))}
    except (LogDamaged, OffsetOutOfRange):
        pass
    return found


@simulated
async def test_a_stream_hands_out_what_is_good_and_then_meets_the_damage() -> None:
    machine = await with_log("a", "b", "c")
    (path,) = machine.segments()
    hit = groups_of(machine.hardware.content(path))[1]
    flip(machine, path, hit.position + GROUP_HEADER_SIZE + 200)
    log = await machine.reopened(epoch=2)
    got = []
    with pytest.raises(LogDamaged):
        async for each in log.follow(0):
            got.append(each.header.base_offset)
    assert got == [0]


@simulated
async def test_producers_go_on_behind_damage_that_hid_their_batches() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    producer, quiet = await Producer.open(log, 7), await Producer.open(log, 8)
    await log.append(producer.make("a"))
    await log.append(quiet.make("b"))
    await log.append(producer.make("c"))
    (path,) = machine.segments()
    machine.kill()
    hit = groups_of(machine.hardware.content(path))[3]
    flip(machine, path, hit.position + GROUP_HEADER_SIZE + 200)
    log = await machine.reopened(epoch=2)
    await log.append(producer.make("d"))
    await log.append(quiet.make("e"))  # its first batch is in the damage: sequence 1 would be a hole else
    with pytest.raises(OutOfSequence):
        quiet.next_sequence = 9
        await log.append(quiet.make("f"))


@simulated
async def test_a_missing_middle_segment_costs_only_its_own_offsets() -> None:
    for close in (True, False):
        machine = await with_log("a", "b", "c", "d", "e", close=close, segment_bytes=1024)
        missing = machine.segments()[2]
        await machine.remove(missing)
        for epoch in (2, 3):
            log = await machine.reopened(epoch=epoch)
            assert log.head == 5
            (damage,) = log.recovered.damage
            assert (damage.first, damage.end) == (2, 3) and "missing" in damage.why
            assert await contents_until_error(log, 0) == numbered("a", "b")
            with pytest.raises(LogDamaged) as error:
                await log.read(2)
            assert (error.value.first, error.value.end) == (2, 3)
            assert await contents(log, 3) == numbered("d", "e", first=3)
            machine.kill()


@simulated
async def test_a_segment_whose_header_is_damaged_is_named_and_the_rest_can_be_read() -> None:
    for close in (True, False):
        machine = await with_log("a", "b", "c", "d", close=close, segment_bytes=1024)
        hit = machine.segments()[1]
        flip(machine, hit, 30)
        log = await machine.reopened(epoch=2)
        assert log.head == 4
        assert {damage.path for damage in log.recovered.damage} >= {hit}
        assert await contents_until_error(log, 0) == numbered("a")
        with pytest.raises(LogDamaged):
            await log.read(1)
        assert await contents(log, 2) == numbered("c", "d", first=2)


@simulated
async def test_a_newest_segment_whose_header_is_damaged_leaves_the_end_unproven() -> None:
    machine = await with_log("a", "b", "c", segment_bytes=1024)
    flip(machine, machine.segments()[2], 30)
    wal = await machine.boot()
    with pytest.raises(TailUnproven, match="cannot be read"):
        await wal.topic(TOPIC, epoch=2)
    log = await wal.topic(TOPIC, epoch=2, start_offset=10)
    assert await contents_until_error(log, 0) == numbered("a", "b")
    await fill(log, "d")
    assert (await contents(log, 10)) == {10: "d"}


@simulated
async def test_the_missing_newest_segment_of_a_finished_epoch_is_damage_and_its_offsets_are_not_given_again() -> None:
    machine = await with_log("a", "b", "c", close=True, segment_bytes=1024)
    await machine.remove(machine.segments()[2])
    log = await machine.reopened(epoch=2)
    (damage,) = log.recovered.damage
    assert (damage.first, damage.end) == (2, 3) and "newest segment is missing" in damage.why
    assert log.head == 3
    assert await contents_until_error(log, 0) == numbered("a", "b")
    with pytest.raises(LogDamaged):
        await log.read(2)
    await fill(log, "d")
    assert await contents(log, 3) == {3: "d"}


@simulated
async def test_a_file_that_vanishes_while_the_log_is_open_is_damage_and_not_retention() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024, cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b", "c")
    path = machine.segments()[1]
    await machine.remove(path)
    assert await contents_until_error(log, 0) == numbered("a")
    with pytest.raises(LogDamaged) as damage:
        await log.read(1)
    assert (damage.value.path, damage.value.first, damage.value.end) == (path, 1, 2)


@simulated
async def test_a_damaged_checkpoint_is_reported_and_the_log_says_that_its_end_is_unproven() -> None:
    machine = await with_log("a", "b", close=True)
    flip(machine, f"{EPOCH_1}/wal.ckpt", 40)
    wal = await machine.boot()
    with pytest.raises(TailUnproven, match=r"wal\.ckpt"):
        await wal.topic(TOPIC, epoch=2)
    log = await wal.topic(TOPIC, epoch=2, start_offset=2)
    assert await contents(log) == numbered("a", "b")
    assert f"{EPOCH_1}/wal.ckpt.damage" in machine.files()


@simulated
async def test_a_stray_file_in_an_epochs_directory_disturbs_nobody() -> None:
    machine = await with_log("a", "b")
    await machine.create(f"{EPOCH_1}/copy of a segment.wal", b"whatever")
    await machine.create(f"{EPOCH_1}/notes.txt", b"whatever")
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")
    assert f"{EPOCH_1}/copy of a segment.wal" in machine.files()


@simulated
async def test_a_segment_of_another_topic_is_named_and_not_read() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    for topic in (TOPIC, OTHER_TOPIC):
        await fill(await wal.topic(topic, epoch=1), "mine")
    await wal.close()
    (source,) = machine.segments(OTHER_TOPIC)
    name = source.rpartition("/")[2].replace("00000000000000000000-", "00000000000000000001-")
    await machine.create(f"{EPOCH_1}/{name}", machine.hardware.content(source))
    log = await machine.reopened(epoch=2, start_offset=5)
    assert any("another topic" in damage.why and name in damage.path for damage in log.recovered.damage)
    assert (await contents_until_error(log, 0)) == numbered("mine")


# --- what cannot be proven --------------------------------------------------------------------------


@simulated
async def test_a_log_that_cannot_prove_its_end_refuses_to_open_without_a_start_offset_and_says_so() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1, durability="os")
    await fill(log, "a", "b", "c")
    machine.kill()
    wal = await machine.boot()
    with pytest.raises(TailUnproven) as refusal:
        await wal.topic(TOPIC, epoch=2)
    assert "cannot prove that it ends at offset 3 (its durability is os and it was not closed)" in str(refusal.value)
    assert "open it with a start offset that was certainly never used" in str(refusal.value)
    with pytest.raises(TailUnproven):
        await wal.topic(TOPIC, epoch=2)  # asking again proves nothing
    log = await wal.topic(TOPIC, epoch=2, start_offset=100)
    await fill(log, "d")
    assert await contents(log, 100) == {100: "d"}
    assert log.held() == [(0, 3), (100, 101)]


@simulated
async def test_an_end_below_what_is_known_to_exist_is_not_believed() -> None:
    machine = await with_log("a", "b")
    wal = await machine.boot()
    with pytest.raises(TailUnproven, match="offsets up to 3 are known to exist"):
        await wal.topic(TOPIC, epoch=2, known_end=3)
    log = await wal.topic(TOPIC, epoch=2, known_end=2)
    assert log.head == 2


@simulated
async def test_durability_os_may_lose_its_end_in_a_power_cut_but_never_invents_or_reorders() -> None:
    for seed in range(30):
        machine = LogFixture(seed)
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=1, durability="os")
        await fill(log, *"abcdef")
        machine.cut_power(seed)
        log = await machine.reopened(epoch=2, start_offset=100)
        found = await contents_until_error(log, 0) if log.held() and log.first_offset == 0 else {}
        assert found == numbered(*"abcdef"[: len(found)])


# --- journals ---------------------------------------------------------------------------------------


async def reopened_topics(wal: Wal, count: int = 3, epoch: int = 2) -> list[TopicLog]:
    return [await wal.topic(f"/default/t{n}", epoch=epoch) for n in range(count)]


@simulated
async def test_what_only_the_journal_has_is_copied_into_the_segments() -> None:
    machine = await journaled("a", "b")
    wal = await machine.boot()
    assert wal.problems == []
    assert machine.files(".journal") == []
    machine.cut_power()
    wal = await machine.boot()
    for log in await reopened_topics(wal):
        assert await contents(log) == numbered("a", "b")


@simulated
async def test_a_torn_last_record_is_no_damage_and_is_kept_aside() -> None:
    machine = await journaled("a", "b")
    (path,) = machine.files(".journal")
    content = machine.hardware.content(path)
    last = content.rindex(b"DNJ1")
    flip(machine, path, last + 300)
    wal = await machine.boot()
    assert wal.problems == []
    assert machine.files(f"{path}.torn")
    for log in await reopened_topics(wal):
        assert await contents(log) == numbered("a")
        assert log.recovered.damage == []


@simulated
async def test_a_damaged_journal_is_kept_and_every_open_epoch_says_that_its_end_is_unproven() -> None:
    machine = await journaled("a", "b", "c")
    (path,) = machine.files(".journal")
    content = machine.hardware.content(path)
    flip(machine, path, content.index(b"DNJ1") + 300)
    wal = await machine.boot()
    (problem,) = wal.problems
    assert path in problem and "is damaged at position 64" in problem
    assert machine.files(f"{path}.damage")
    for n in range(3):
        with pytest.raises(TailUnproven, match="a commit journal is damaged"):
            await wal.topic(f"/default/t{n}", epoch=2)
        log = await wal.topic(f"/default/t{n}", epoch=2, start_offset=50)
        await fill(log, "d")


@simulated
async def test_a_journal_with_a_damaged_header_is_kept_and_leaves_the_ends_unproven() -> None:
    machine = await journaled("a")
    (path,) = machine.files(".journal")
    flip(machine, path, 10)
    wal = await machine.boot()
    assert wal.problems == [f"{path} has a damaged header"]
    assert machine.files(f"{path}.damage")
    with pytest.raises(TailUnproven):
        await wal.topic("/default/t0", epoch=2)


@simulated
async def test_a_log_that_was_closed_stays_proven_when_a_journal_is_damaged() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=1), "a")
    await wal.close()
    await machine.create("journal/00000000000000000000.journal", b"not a journal")
    wal = await machine.boot()
    assert wal.problems
    log = await wal.topic(TOPIC, epoch=2)
    assert await contents(log) == numbered("a")


@simulated
async def test_a_damaged_journal_is_remembered_wherever_recovery_from_it_is_cut_short() -> None:
    step = 0
    crashed = True
    while crashed:
        step += 1
        machine = await journaled("a", "b", "c")
        (path,) = machine.files(".journal")
        flip(machine, path, machine.hardware.content(path).index(b"DNJ1") + 300)
        machine.new_process()
        crashed = await machine.crash_during(machine.open, step)
        if not crashed:
            machine.kill()
        wal = await machine.boot()
        for n in range(3):
            with pytest.raises(TailUnproven):
                await wal.topic(f"/default/t{n}", epoch=2)
    assert step > 20


# --- recovery itself can be cut short ---------------------------------------------------------------


async def _torn() -> LogFixture:
    machine = await with_log("a", "b", "c", segment_bytes=2000)
    path = machine.segments()[-1]
    end = groups_of(machine.hardware.content(path))[-1]
    await machine.overwrite(path, end.position + GROUP_HEADER_SIZE + end.length, b"unfinished")
    return machine


async def _damaged() -> LogFixture:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    for payload in "abc":
        await log.append(producer.make(payload))
    machine.kill()
    (path,) = machine.segments()
    flip(machine, path, groups_of(machine.hardware.content(path))[1].position + GROUP_HEADER_SIZE + 20)
    return machine


async def _with_tail_in_the_page_cache() -> LogFixture:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    machine.disk.hold_syncs()
    log.submit(batch("c"))
    await settle()
    machine.cut_power(3)
    return machine


async def _with_journal() -> LogFixture:
    machine = LogFixture()
    wal = await machine.boot(copy_bytes=1 << 20)
    logs = [await wal.topic(topic, epoch=1) for topic in (TOPIC, OTHER_TOPIC)]
    for payload in "abc":
        await asyncio.gather(*(log.submit(batch(payload, topic=log.topic)) for log in logs))
    machine.cut_power(1)
    return machine


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "kill"])
@pytest.mark.parametrize("broken", [_torn, _damaged, _with_tail_in_the_page_cache, _with_journal])
@simulated
async def test_recovery_that_is_cut_short_at_any_disk_call_ends_in_the_same_log(
    broken: Callable[[], object], power: bool
) -> None:
    async def recover(machine: LogFixture) -> TopicLog:
        wal = await machine.open()
        return await wal.topic(TOPIC, epoch=2)

    async def state(log: TopicLog) -> object:
        readable = await contents_until_error(log, 0)
        return readable, log.head, log.held(), list(log.sessions)

    untouched: LogFixture = await broken()  # type: ignore[misc]
    untouched.new_process()
    expected = await state(await recover(untouched))
    reports = [path for path in untouched.files() if path.endswith((".damage", ".torn"))]
    step, crashed = 0, True
    while crashed:
        step += 1
        machine: LogFixture = await broken()  # type: ignore[misc]
        machine.new_process()
        disk = machine.disk
        crashed = await machine.crash_during(lambda machine=machine: recover(machine), step, power=power)  # type: ignore[misc]
        if not crashed:
            machine.kill()
        log = await machine.reopened(epoch=3)
        assert await state(log) == expected, f"crash before step {step}: {disk.steps[step - 1 :]}"
        assert [path for path in machine.files() if path.endswith((".damage", ".torn"))] == reports, f"step {step}"
        assert machine.files(".tmp") in ([], [SPARE_JOURNAL])
        assert (await contents(log, log.head)) == {}
        await fill(log, "later")
        machine.kill()
    assert step > 8


@simulated
async def test_leftover_temporary_files_vanish() -> None:
    machine = await with_log("a")
    await machine.create(f"{EPOCH_1}/00000000000000000001-00000000000000aa.wal.tmp", b"half a segment")
    await machine.create(f"{EPOCH_1}/wal.ckpt.tmp", b"half a checkpoint")
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=2)
    assert await contents(log) == numbered("a")
    assert machine.files(".tmp") == []


@simulated
async def test_a_second_recovery_scans_nothing_again() -> None:
    machine = await with_log("a", "b", "c")
    await machine.reopened(epoch=2)
    machine.kill()
    log = await machine.reopened(epoch=3)
    reads = [step for step in machine.disk.steps if step.startswith("read wal")]
    assert len(reads) <= 2 * len(machine.segments()) + 2
    assert not [step for step in machine.disk.steps if step.startswith("create wal")]
    assert await contents(log) == numbered("a", "b", "c")


@simulated
async def test_reading_beyond_everything_names_what_is_held() -> None:
    machine = await with_log("a", "b")
    log = await machine.reopened(epoch=2, start_offset=10)
    with pytest.raises(OffsetOutOfRange) as refusal:
        await log.read(5)
    assert (refusal.value.first, refusal.value.end) == (10, 10)
    assert await log.read(10) == []
