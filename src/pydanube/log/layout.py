"""Where the log's files stand in a data directory, and the few small files that are replaced whole.

FORMAT                                         format version of the directory
LOCK                                           OS lock with the holder's pid
BALLAST                                        room kept for metadata when the disk is full
journal/{number:020}.journal                   commit journals
wal/{namespace}/{topic}/{epoch:020}/           one directory per epoch
    {first_offset:020}-{segment_id:016x}.wal   segments
    wal.ckpt                                   what retention removed; how a finished epoch ended
    *.torn                                     what recovery cut off
    *.damage                                   what was found damaged, in words
    *.quarantined                              damaged segments that retention would have removed
    *.tmp                                      being written; removed at recovery
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from pydanube.core.plain import fields_of
from pydanube.ports import Buffer, Disk, Write

FORMAT: Final = "FORMAT"
FORMAT_VERSION: Final = 1
LOCK: Final = "LOCK"
BALLAST: Final = "BALLAST"
JOURNALS: Final = "journal"
SPARE_JOURNAL: Final = "journal/spare.tmp"  # an emptied journal, to be used again
WAL: Final = "wal"
CHECKPOINT: Final = "wal.ckpt"
SEGMENT_SUFFIX: Final = ".wal"
TEMPORARY_SUFFIX: Final = ".tmp"
TORN_SUFFIX: Final = ".torn"
DAMAGE_SUFFIX: Final = ".damage"
QUARANTINE_SUFFIX: Final = ".quarantined"
_PIECE_BYTES: Final = 1024 * 1024


def topic_directory(topic: str) -> str:
    """`topic` is /{namespace}/{topic}, checked when it was parsed."""
    assert topic.startswith("/") and topic.count("/") == 2 and ".." not in topic.split("/"), topic
    return f"{WAL}{topic}"


def epoch_directory(topic: str, epoch: int) -> str:
    return f"{topic_directory(topic)}/{epoch:020}"


def journal_path(number: int) -> str:
    return f"{JOURNALS}/{number:020}.journal"


async def replace_file(disk: Disk, path: str, data: Buffer) -> None:
    """Makes `path` hold exactly `data`, also after a power cut: completely or as it was before."""
    temporary = path + TEMPORARY_SUFFIX
    await disk.remove(temporary)
    await disk.create(temporary)
    await write_and_sync(disk, temporary, 0, data)
    await disk.rename(temporary, path)
    await disk.sync_directory(path.rpartition("/")[0])


async def copy_part(disk: Disk, source: str, position: int, end: int, target: str) -> None:
    """Makes `target` hold what stands there in `source`, as `replace_file` does, without having it all in memory."""
    temporary = target + TEMPORARY_SUFFIX
    await disk.remove(temporary)
    await disk.create(temporary)
    copied = 0
    while piece := await disk.read(source, position + copied, min(_PIECE_BYTES, end - position - copied)):
        await write_and_sync(disk, temporary, copied, piece)
        copied += len(piece)
    await disk.rename(temporary, target)
    await disk.sync_directory(target.rpartition("/")[0])


async def write_and_sync(disk: Disk, path: str, position: int, *buffers: Buffer) -> None:
    """Raises what `Disk.write` reports."""
    for failure in await disk.write([Write(path, position, buffers)], sync=True):
        if failure is not None:
            raise failure


async def read_file(disk: Disk, path: str) -> bytes | None:
    """The whole file, or None if it is not there."""
    try:
        return await disk.read(path, 0, await disk.size(path))
    except FileNotFoundError:
        return None


# --- wal.ckpt ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What an epoch's directory says about itself.

    `first_offset`: whatever lies below was removed by retention, or is about to be. With `finished` the epoch is
    over: it ends at `end_position` of `segment_id`, nothing behind that exists, and nothing will be added.
    """

    first_offset: int
    finished: bool = False
    end_offset: int = 0
    segment_id: int = 0
    end_position: int = 0
    append_time: int = 0
    max_publish_time: int = 0
    proven: bool = True
    why: str = ""
    sessions: bytes = b""

    def to_bytes(self) -> bytes:
        fields = {**fields_of(self), "sessions": base64.b64encode(self.sessions).decode()}
        text = json.dumps(fields, sort_keys=True).encode() + b"\n"
        return f"{crc32c(text):08x}\n".encode() + text

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint | None:
        """None if the bytes are not what `to_bytes` made."""
        crc, _, text = data.partition(b"\n")
        if crc != f"{crc32c(text):08x}".encode():
            return None
        fields = json.loads(text)
        return cls(**{**fields, "sessions": base64.b64decode(fields["sessions"])})
