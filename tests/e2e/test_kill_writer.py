"""A real process that appends to a real disk is killed again and again; what it acknowledged must be there."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from pydanube.log.verify import verify, walk
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.e2e.forked import log_writer
from tests.e2e.processes import FORKED
from tests.support import run

KILLS = 12  # of a log of one topic and of six, in turn


def write_until_killed(directory: Path, epoch: int, topics: int, seconds: float) -> list[tuple[str, int, int, int]]:
    """What the writer acknowledged: topic, offset, rows, checksum."""
    heard, spoken = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=log_writer, args=(spoken, directory, epoch, topics))
    process.start()
    spoken.close()
    acknowledged = []
    try:
        with heard, open(heard.fileno(), closefd=False) as lines:
            assert lines.readline().startswith("opened"), "the writer did not start"
            deadline = time.monotonic() + seconds
            killed = False
            for line in lines:
                if not line.endswith("\n"):
                    break  # cut by the kill: nobody was told
                topic, offset, rows, crc = line.split()
                acknowledged.append((topic, int(offset), int(rows), int(crc)))
                if not killed and time.monotonic() > deadline:
                    process.kill()
                    killed = True
    finally:
        process.kill()
        process.join()
    assert killed and process.exitcode == -signal.SIGKILL, "the writer ended by itself"
    return acknowledged


async def found_at(directory: Path, topic: str, first: int) -> dict[int, tuple[int, int]]:
    ports = FileDisk(directory), SystemClock(), SystemWork()
    return {
        batch.header.base_offset: (batch.header.rows, batch.header.body_crc)
        async for batch in walk(*ports, topic, first)
        if batch.header.rows
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_acknowledged_message_is_there_after_a_dozen_kills(tmp_path: Path) -> None:
    moments = random.Random(50)
    heads: dict[str, int] = {}
    acknowledged_total = 0
    for epoch in range(1, KILLS + 1):
        # Many topics go through the commit journal, one goes straight to its segment.
        topics = 1 if epoch % 2 else 6
        acknowledged = write_until_killed(tmp_path, epoch, topics, moments.uniform(0.0, 0.3))
        assert acknowledged
        acknowledged_total += len(acknowledged)
        for topic in {line[0] for line in acknowledged}:
            mine = {offset: (rows, crc) for name, offset, rows, crc in acknowledged if name == topic}
            assert min(mine) >= heads.get(topic, 0), "an offset was given twice"
            found = run(found_at(tmp_path, topic, min(mine)))
            lost = {offset for offset in mine if found.get(offset) != mine[offset]}
            assert not lost, f"kill {epoch}: {topic} lost acknowledged batches at {sorted(lost)[:5]}"
            heads[topic] = max(offset + rows for offset, (rows, _) in found.items())
    report = run(verify(FileDisk(tmp_path), SystemClock(), SystemWork()))
    assert report.ok, report
    assert all(not topic.holes and topic.first_offset == 0 for topic in report.topics)
    assert {topic.topic: topic.head for topic in report.topics} == heads
    assert acknowledged_total > KILLS
