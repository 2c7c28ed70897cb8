"""What a crash left in journals is copied to the segments it belongs to, before any topic is looked at."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

from pydanube.errors import DiskFull
from pydanube.formats.journal import JournalEntry, decode_journal_header, read_journal
from pydanube.log.layout import (
    BALLAST,
    DAMAGE_SUFFIX,
    JOURNALS,
    TEMPORARY_SUFFIX,
    TORN_SUFFIX,
    read_file,
    replace_file,
)
from pydanube.log.segment_files import read_segment_header
from pydanube.ports import Disk, Write

log = logging.getLogger(__name__)

_REDO_BYTES: Final = 8 * 1024 * 1024


async def redo_journals(disk: Disk) -> dict[str, str]:
    """Copies what the journals hold into the segments and syncs those.

    Returns a sentence for every journal that is damaged, by path. Doing it again after a crash is the same as doing it
    once, so the journals stay until `clear_journals`: till then a restart finds the same damage.
    """
    names = [entry.name for entry in await disk.list(JOURNALS)]
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            await disk.remove(f"{JOURNALS}/{name}")
    paths = [f"{JOURNALS}/{name}" for name in names if name.endswith(".journal")]
    links: dict[int, int] = {}
    for path in paths:
        header = decode_journal_header(await disk.read(path, 0, 64))
        if header is not None:
            links[header.previous_id] = header.previous_end
    problems: dict[str, str] = {}
    touched: set[str] = set()
    known: dict[str, int | None] = {}
    for path in paths:
        content = await read_file(disk, path)
        assert content is not None
        header = decode_journal_header(content)
        redo = read_journal(content, end=links.get(header.journal_id) if header else None)
        if redo is None:
            problems[path] = f"{path} has a damaged header"
            continue
        touched |= await _apply(disk, redo.entries, known)
        if redo.torn_at is not None and (rest := content[redo.torn_at :].rstrip(b"\0")):
            # It was never acknowledged, unless the disk has rotted since: kept for an operator to look at.
            await replace_file(disk, path + TORN_SUFFIX, rest)
            log.warning("unfinished journal record cut off", extra={"path": path, "position": redo.torn_at})
        if redo.damaged_at:
            problems[path] = f"{path} is damaged at position {redo.damaged_at[0]}"
    for failure in await disk.sync(sorted(touched)):
        if failure is not None:
            raise failure
    return problems


async def clear_journals(disk: Disk, damaged: Collection[str]) -> None:
    """Removes the journals that were redone; damaged ones are kept under another name."""
    names = [entry.name for entry in await disk.list(JOURNALS)]
    for path in damaged:
        await disk.rename(path, path + DAMAGE_SUFFIX)
    for path in [f"{JOURNALS}/{name}" for name in names if name.endswith(".journal")]:
        await disk.remove(path)
    if names:
        await disk.sync_directory(JOURNALS)


async def _apply(disk: Disk, entries: Sequence[JournalEntry], known: dict[str, int | None]) -> set[str]:
    """Writes the entries whose segment exists with that id; returns the paths written to."""
    touched: set[str] = set()
    writes: list[Write] = []
    size = 0
    for entry in entries:
        if entry.path not in known:
            header = await read_segment_header(disk, entry.path)
            known[entry.path] = header[0].segment_id if header else None
        if known[entry.path] != entry.segment_id:
            continue  # removed by retention, or with its topic
        writes.append(Write(entry.path, entry.position, entry.data))
        touched.add(entry.path)
        size += entry.length
        if size >= _REDO_BYTES:
            await _write_redo(disk, writes)
            writes, size = [], 0
    await _write_redo(disk, writes)
    return touched


async def _write_redo(disk: Disk, writes: Sequence[Write]) -> None:
    failures = [failure for failure in await disk.write(writes, sync=False) if failure is not None]
    if failures and all(isinstance(failure, DiskFull) for failure in failures):
        # The ballast is there for this: what is acknowledged must come back even when there is no room.
        await disk.remove(BALLAST)
        failures = [failure for failure in await disk.write(writes, sync=False) if failure is not None]
    if failures:
        raise failures[0]
