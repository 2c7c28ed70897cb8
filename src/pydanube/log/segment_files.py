"""Segment files are made and opened here: written under another name, synced, and only then given theirs."""

from __future__ import annotations

import contextlib
import logging

from pydanube.errors import DiskFailed, DiskFull
from pydanube.formats.segment import (
    SEGMENT_HEADER_SIZE,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    file_name,
    segment_header_length,
)
from pydanube.log.catalog import SegmentFile
from pydanube.log.layout import (
    TEMPORARY_SUFFIX,
    write_and_sync,
)
from pydanube.ports import Disk

log = logging.getLogger(__name__)


async def read_segment_header(disk: Disk, path: str) -> tuple[SegmentHeader, int] | None:
    """The header and its length, or None if the file is not there or its header does not check."""
    try:
        start = await disk.read(path, 0, SEGMENT_HEADER_SIZE)
        length = segment_header_length(start)
        if length is None:
            return None
        header = decode_segment_header(await disk.read(path, 0, length))
    except FileNotFoundError:
        return None
    return None if header is None else (header, length)


async def write_segment(disk: Disk, directory: str, header: SegmentHeader, *content: bytes) -> SegmentFile:
    """Makes a new segment that survives from the moment its name appears. For recovery, which begins anew."""
    segment = await place_segment(disk, directory, header, *content)
    await disk.sync_directory(directory)
    return segment


async def place_segment(disk: Disk, directory: str, header: SegmentHeader, *content: bytes) -> SegmentFile:
    """A new segment under its name, which the caller syncs.

    Before the rename nothing mentions the file: one that cannot be written or synced is given up for another, once.
    From the rename on it is not known whether the name is there after a crash, so the caller must not go on in any
    other segment. Raises DiskFull if nothing was made, else DiskFailed.
    """
    path = f"{directory}/{file_name(header.first_offset, header.segment_id)}"
    encoded = encode_segment_header(header)
    temporary = path + TEMPORARY_SUFFIX
    try:
        await _write_temporary(disk, temporary, encoded, *content)
    except DiskFailed as failure:
        log.error("segment not written, trying another file", extra={"path": temporary, "why": failure.why})
        temporary = f"{path}.again{TEMPORARY_SUFFIX}"
        await _write_temporary(disk, temporary, encoded, *content)
    try:
        await disk.rename(temporary, path)
    except DiskFull:
        await disk.remove(temporary)
        raise
    start = len(encoded)
    return SegmentFile(path, header, start, start, header.first_offset, 0, start, start, start)


async def _write_temporary(disk: Disk, path: str, *content: bytes) -> None:
    await disk.create(path)
    try:
        await write_and_sync(disk, path, 0, *content)
    except (DiskFull, DiskFailed):
        with contextlib.suppress(DiskFailed):  # then the next recovery removes it
            await disk.remove(path)
        raise
