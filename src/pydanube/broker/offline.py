"""A data directory that no broker uses: what it holds, read as a broker would read it. For `danube log`.

Nothing here changes a directory, except `append_forever`, which is made to be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

from pydanube.broker.stores import directory_ports
from pydanube.formats import batch as batches
from pydanube.formats.batch import Batch
from pydanube.formats.batch import Envelope as Envelope
from pydanube.log.layout import FORMAT
from pydanube.log.verify import LogReport as LogReport
from pydanube.log.verify import verify, walk
from pydanube.log.wal import TopicLog, Wal, WalConfig


def is_data_directory(directory: Path) -> bool:
    return (directory / FORMAT).is_file()


async def verify_directory(
    directory: Path, progress: Callable[[str, int], None] = lambda topic, size_bytes: None
) -> LogReport:
    """Checks every checksum and every offset. `progress` gets the topic and the bytes read since the last call."""
    return await verify(*directory_ports(directory), progress=progress)


def batches_of(
    directory: Path, topic: str, start: int, problem: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Batch]:
    """The batches of a topic from an offset on. `problem` gets a sentence for each place that cannot be read."""
    return walk(*directory_ports(directory), topic, start, problem=problem)


def messages_of(batch: Batch) -> list[Envelope]:
    return list(batches.messages(batch))


async def append_forever(
    directory: Path, epoch: int, topics: int, rows: int, width: int, acknowledged: Callable[[str], None]
) -> None:
    """Appends until the process ends. `acknowledged` gets `topic offset rows crc` of every batch that is on disk."""
    config = WalConfig(segment_bytes=256 * 1024, journal_bytes=1024 * 1024)
    wal = await Wal.open(*directory_ports(directory), config)
    logs = [await wal.topic(f"/demo/log{number or ''}", epoch=epoch) for number in range(topics)]
    acknowledged(" ".join(("opened", *(str(log.head) for log in logs))))

    async def produce(log: TopicLog, lane: int) -> None:
        for number in count():
            text = f"epoch {epoch} lane {lane} batch {number}".encode().ljust(width, b".")
            batch = batches.encode(batches.rows_of([Envelope(text)] * rows), topic=log.topic)
            receipt = await log.append(batch)
            acknowledged(f"{log.topic} {receipt.offset} {rows} {batch.header.body_crc}")

    await asyncio.gather(*(produce(log, lane) for log in logs for lane in range(3)))
