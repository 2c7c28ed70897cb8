"""The log on a real directory, in a process that may open few files and may not raise that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOPICS = 100
LIMIT = 48

# Lowers both limits, then publishes to every topic, through the journal and beside readers; or recovers and reads.
SCRIPT = """
import asyncio, json, os, resource, sys

directory, limit, epoch, topics = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
from pydanube.formats.batch import Envelope, encode, messages, rows_of
from pydanube.log.wal import Wal, WalConfig
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork

resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
most = 0

def batch(topic, text):
    return encode(rows_of([Envelope(text.encode(), 0)]), topic=topic)

async def texts(log):
    found, offset = [], 0
    while offset < log.head:
        for one in await log.read(offset):
            found += [bytes(message.payload).decode() for message in messages(one)]
            offset = one.header.base_offset + one.header.rows
    return found

async def main():
    global most
    disk = FileDisk(directory)
    await disk.make_directory("")
    config = WalConfig(journal_bytes=256 * 1024, copy_bytes=16 * 1024, cache_bytes=0, ballast_bytes=0)
    wal = await Wal.open(disk, SystemClock(), SystemWork(), config)
    logs = [await wal.topic(f"/default/t{number}", epoch=epoch) for number in range(topics)]
    before = [await texts(log) for log in logs]
    for turn in range(2):
        await asyncio.gather(*(log.submit(batch(log.topic, f"{epoch}.{turn}")) for log in logs))
        await asyncio.sleep(0.12)  # copies go to the segments
        most = max(most, len(os.listdir("/proc/self/fd")))
    assert wal.committer.stopped is None and wal.committer.journaled_groups > 0
    print(json.dumps({"before": before, "most": most}), flush=True)
    os._exit(0)  # as if killed: the journal is left for the next

asyncio.run(main())
"""


@pytest.mark.slow
def test_more_topics_than_files_may_be_open_are_published_to_and_recovered(tmp_path: Path) -> None:
    found = []
    for epoch in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(LIMIT), str(epoch), str(TOPICS)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["before"] == [[]] * TOPICS
    assert found[1]["before"] == [["1.0", "1.1"]] * TOPICS
    assert max(each["most"] for each in found) < LIMIT
