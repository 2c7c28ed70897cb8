"""What a busy topic notices of topics that get their first message: each needs a segment, with four syncs.

    python bench/cold_topics.py [--topics 300] [--seconds 4] [--directory DIR]

One topic is appended to without a pause, one batch after the other, for so long; in the middle the others get a
message each, all at once. Prints the busy one's commits (p50, p99, longest) and how long the others took. The longest
commit should be at most five times the p99 of the same run; exit code 1 if it is not. Where it fell is printed, too: a
commit that did not overlap the first messages of the others did not wait for them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from pydanube.formats.batch import Batch, Envelope, encode, rows_of
from pydanube.log.wal import TopicLog, Wal, WalConfig
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork

RATIO_MAX = 5.0


def batch(topic: str) -> Batch:
    return encode(rows_of([Envelope(b"x" * 100, 0)]), topic=topic)


class Measured(NamedTuple):
    beside: list[float]  # the busy topic's commits while the cold ones got their first message, in seconds
    alone: list[float]  # all others
    cold_seconds: float


async def measure(directory: Path, topics: int, seconds: float) -> Measured:
    disk = FileDisk(directory)
    await disk.make_directory("")
    wal = await Wal.open(disk, SystemClock(), SystemWork(), WalConfig())
    busy = await wal.topic("/default/busy", epoch=1)
    cold = [await wal.topic(f"/default/cold{number}", epoch=1) for number in range(topics)]
    await busy.append(batch(busy.topic))
    commits: list[tuple[float, float]] = []  # began, ended
    over = False

    async def be_busy() -> None:
        while not over:
            began = perf_counter()
            await busy.append(batch(busy.topic))
            commits.append((began, perf_counter()))

    async def first(log: TopicLog, message: Batch) -> None:
        await log.append(message)

    messages = [batch(log.topic) for log in cold]  # not the log's work, and it takes the loop's time

    running = asyncio.create_task(be_busy())
    await asyncio.sleep(seconds / 2)
    cold_began = perf_counter()
    await asyncio.gather(*map(first, cold, messages))
    cold_ended = perf_counter()
    await asyncio.sleep(seconds / 2)
    over = True
    await running
    await wal.close()
    disk.close()
    measured = Measured([], [], cold_ended - cold_began)
    for began, ended in commits:
        is_beside = ended > cold_began and began < cold_ended
        (measured.beside if is_beside else measured.alone).append(ended - began)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--topics", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measured = asyncio.run(measure(Path(directory), options.topics, options.seconds))
    took = sorted(measured.beside + measured.alone)
    beside, alone = max(measured.beside), max(measured.alone)
    p50, p99, longest = took[len(took) // 2], took[len(took) * 99 // 100], took[-1]
    print(
        f"{len(took)} commits: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, longest {longest * 1e3:.1f} ms = "
        f"{longest / p99:.1f} times the p99; {options.topics} cold topics took {measured.cold_seconds:.2f} s; "
        f"longest beside them {beside * 1e3:.1f} ms, without them {alone * 1e3:.1f} ms"
    )
    return 0 if longest <= RATIO_MAX * p99 else 1


if __name__ == "__main__":
    sys.exit(main())
