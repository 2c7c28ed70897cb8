"""Looking for groups behind damage in pieces: what is found does not depend on where one piece ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pydanube.formats.segment import GROUP_HEADER_SIZE
from pydanube.log import group_scan, layout, recovery, searching
from pydanube.log.recovered import TailState
from pydanube.log.searching import GroupSearch, content_end
from tests.harness.logs import TOPIC, LogFixture, contents, fill, groups_of, numbered, simulated, sized

PIECES = [GROUP_HEADER_SIZE, GROUP_HEADER_SIZE + 1, 100, 333, 1000, 4096, 1 << 20]


@pytest.fixture(params=PIECES)
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(searching, "PIECE_BYTES", request.param)
    yield request.param


async def killed(*payloads: str) -> tuple[LogFixture, str]:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=1), *payloads)
    machine.kill()
    (path,) = machine.segments()
    return machine, path


@simulated
async def test_every_group_is_found_wherever_pieces_end(piece_bytes: int) -> None:
    machine, path = await killed(*"abcdefgh")
    content = machine.hardware.content(path)
    groups = groups_of(content)
    disk = machine.hardware.process(97)
    for first in (0, groups[2].position, groups[2].position + 1):
        search = GroupSearch(disk, path, first, len(content), groups[0].segment_id)
        found = []
        while (group := await search.next()) is not None:
            found.append(group)
        assert found == [group for group in groups if group.position >= first]
        assert await search.next() is None
    last = groups[-1]
    search = GroupSearch(disk, path, last.position, last.position + GROUP_HEADER_SIZE - 1, last.segment_id)
    assert await search.next() is None, "half of it stands behind the end"


@simulated
async def test_the_end_of_what_is_not_zero_is_found_wherever_pieces_end(piece_bytes: int) -> None:
    machine = LogFixture()
    content = b"a" + bytes(700) + b"b" + bytes(900)
    await machine.create("f", content)
    disk = machine.hardware.process(97)
    assert [await content_end(disk, "f", start, len(content)) for start in (0, 1, 701, 702, 1602)] == [
        702, 702, 702, 702, 1602,
    ]  # fmt: skip
    assert await content_end(disk, "f", 0, 500) == 1


@simulated
async def test_recovery_of_a_large_segment_never_reads_more_than_a_piece_or_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in ((searching, "PIECE_BYTES"), (layout, "_PIECE_BYTES"), (group_scan, "SCAN_READ_BYTES")):
        monkeypatch.setattr(module, name, 4096)
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    for n in range(100):
        await log.append(sized(5000, f"{n}"))
    machine.kill()
    (path,) = machine.segments()
    groups = groups_of(machine.hardware.content(path))
    machine.hardware.flip(path, groups[10].position + GROUP_HEADER_SIZE + 50)  # damage
    end = groups[-1].position + GROUP_HEADER_SIZE + groups[-1].length
    await machine.overwrite(path, end, b"torn" * 5000)
    await machine.boot()
    disk, asked = machine.disk, []
    read = disk.read

    async def watched(path: str, position: int, length: int) -> bytes:
        asked.append(length)
        return await read(path, position, length)

    disk.read = watched  # type: ignore[method-assign]
    recovered = await recovery.recover_topic(disk, machine.clock, machine.work, TOPIC)
    assert max(asked) <= max(group.length for group in groups)
    assert (recovered.head, recovered.tail) == (100, TailState.TORN)
    assert [(damage.first, damage.end) for damage in recovered.damage] == [(10, 11)]
    (torn,) = recovered.torn
    assert machine.hardware.content(torn.kept_as) == b"torn" * 5000


@simulated
async def test_damage_without_anything_that_proves_it_is_looked_through_once() -> None:
    """With durability os no group says that those before it were safe, so all of them are looked at."""
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1, durability="os")
    await fill(log, *(f"{n}" for n in range(200)))
    machine.kill()
    (path,) = machine.segments()
    size = len(machine.hardware.content(path))
    await machine.overwrite(path, groups_of(machine.hardware.content(path))[0].position, b"?")
    await machine.boot()
    disk, asked = machine.disk, []
    read = disk.read

    async def watched(path: str, position: int, length: int) -> bytes:
        data = await read(path, position, length)
        asked.append(len(data))
        return data

    disk.read = watched  # type: ignore[method-assign]
    recovered = await recovery.recover_topic(disk, machine.clock, machine.work, TOPIC)
    assert recovered.tail is TailState.UNPROVEN and recovered.head == 0
    assert sum(asked) < 8 * size


@simulated
async def test_readers_go_on_behind_damage_wherever_pieces_end(piece_bytes: int) -> None:
    machine, path = await killed(*"abcdefgh")
    groups = groups_of(machine.hardware.content(path))
    machine.hardware.flip(path, groups[3].position + 20)
    log = await machine.reopened(epoch=2)
    assert [(damage.first, damage.end) for damage in log.recovered.damage] == [(3, 4)]
    assert await contents(log, 4) == numbered(*"efgh", first=4)
