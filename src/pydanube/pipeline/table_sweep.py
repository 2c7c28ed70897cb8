"""What of an Iceberg table may go: snapshots that its properties let expire, and files that nothing names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pydanube.core.declared import says
from pydanube.errors import DataDamaged, Refused


@says("{location} has metadata of another table ({file}), so what nothing names here may be that table's")
class SharedPlace(Refused):
    location: str
    file: str


class StoredFile(NamedTuple):
    path: str  # as the file system calls it
    size: int
    seconds: float  # since 1970, when it was last written


def newest_place(table: Any) -> str | None:
    """Where the newest batch of a lake job is; it is read from there if it comes again."""
    from pydanube.pipeline.iceberg import PROGRESS

    text = table.properties.get(PROGRESS)
    try:
        return None if text is None else str(json.loads(text)["place"]).rstrip("/") + "/"
    except (ValueError, KeyError, TypeError) as error:
        raise DataDamaged(f"the property {PROGRESS} of {'.'.join(table.name())} cannot be understood") from error


# --- snapshots ------------------------------------------------------------------------------------------------


def expired(name: str, metadata: Any) -> list[int]:
    """Snapshots that the table's properties let go, but for what a tag names or a branch comes from."""
    from pydanube.pipeline.iceberg import MAINTENANCE, SNAPSHOT_AGE, SNAPSHOTS_MIN, _line

    properties = {**MAINTENANCE, **metadata.properties}
    try:
        age_ms, least = int(properties[SNAPSHOT_AGE]), max(1, int(properties[SNAPSHOTS_MIN]))
    except ValueError as error:
        raise DataDamaged(f"a property of {name} that says when snapshots expire is no number: {error}") from error
    kept = {
        snapshot.snapshot_id
        for branch, ref in metadata.refs.items()
        if branch != "main"
        for snapshot in _line(metadata, ref.snapshot_id)[-1 if ref.snapshot_ref_type == "tag" else 0 :]
    }
    line = _line(metadata, metadata.current_snapshot_id)
    kept |= {each.snapshot_id for each in line[-least:]}
    newest_ms = time() * 1000 - age_ms
    return [
        each.snapshot_id
        for each in metadata.snapshots
        if each.snapshot_id not in kept and each.timestamp_ms <= newest_ms
    ]


# --- files ----------------------------------------------------------------------------------------------------


def sweep(table: Any, orphan_seconds: float) -> tuple[int, int]:
    """Removes files below the table's place that nothing names, and that are so old. How many, and their bytes.

    Raises SharedPlace, and OSError if the place cannot be listed.
    """
    location = table.location().rstrip("/")
    system, root = _system(table, location)
    oldest = time() - orphan_seconds
    found = [each for part in ("data", "metadata") for each in _listed(system, f"{root}/{part}")]
    old = [each for each in found if each.seconds < oldest]
    doomed = _unnamed(table, old)
    for each in doomed:
        if each.path.endswith(".metadata.json"):
            _check_ours(table, system, each.path)
    # What was named meanwhile stays. What is named by nothing now, and is so old, is nobody's work in progress.
    doomed = _unnamed(table, doomed)
    for each in doomed:
        system.delete_file(each.path)
    return len(doomed), sum(each.size for each in doomed)


def _unnamed(table: Any, files: list[StoredFile]) -> list[StoredFile]:
    named = {_plain(path) for path in _named(table.refresh())}
    newest = newest_place(table)
    protected = () if newest is None else (_plain(newest),)
    directories = {path.rpartition("/")[0] for path in named}
    return [
        each
        for each in files
        if each.path not in named
        and not each.path.startswith(protected)
        and not each.path.endswith("/version-hint.text")
        # How `lake` lists a batch's files: as long as one of them is named.
        and not (each.path.endswith("/_files.json") and any(_is_below(d, each.path) for d in directories))
    ]


def _is_below(directory: str, listing: str) -> bool:
    place = listing.removesuffix("/_files.json")
    return directory == place or directory.startswith(f"{place}/")


def _named(table: Any) -> Iterator[str]:
    """Every file that the table names, or that one of its snapshots has."""
    metadata, io = table.metadata, table.io
    yield table.metadata_location
    yield from (each.metadata_file for each in metadata.metadata_log)
    for statistics in (*metadata.statistics, *metadata.partition_statistics):
        yield statistics.statistics_path
    seen: set[str] = set()
    for snapshot in metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest.manifest_path
                yield from (
                    each.data_file.file_path for each in manifest.fetch_manifest_entry(io, discard_deleted=True)
                )


def _plain(path: str) -> str:
    """As the file system calls it: without scheme, and for a store with the bucket in front."""
    parts = urlsplit(path)
    if parts.scheme in ("", "file"):
        return unquote(parts.path) if parts.scheme else path
    return f"{parts.netloc}{parts.path}"


def _system(table: Any, location: str) -> tuple[Any, str]:
    """The file system, and the place as it calls it. Raises OSError if PyIceberg has none that can list."""
    by_scheme = getattr(table.io, "fs_by_scheme", None)
    if by_scheme is None:
        raise OSError(f"{type(table.io).__name__} cannot list {location}; only PyIceberg's PyArrowFileIO can")
    parts = urlsplit(location)
    return by_scheme(parts.scheme or "file", parts.netloc or None), _plain(location)


def _listed(system: Any, place: str) -> list[StoredFile]:
    from pyarrow.fs import FileSelector, FileType

    found = system.get_file_info(FileSelector(place, recursive=True, allow_not_found=True))
    return [
        StoredFile(each.path, each.size, (each.mtime or datetime.now(UTC)).timestamp())
        for each in found
        if each.type == FileType.File
    ]


def _check_ours(table: Any, system: Any, path: str) -> None:
    with system.open_input_stream(path) as stream:
        data = stream.read()
    try:
        uuid = str(json.loads(data)["table-uuid"])
    except (ValueError, KeyError, TypeError):
        uuid = ""  # no metadata of any table that could be read
    if uuid and uuid != str(table.metadata.table_uuid):
        raise SharedPlace(table.location(), Path(path).name)
