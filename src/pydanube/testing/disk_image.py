"""What a simulated disk holds: files, what was written and not synced, and what a power cut may leave of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

SECTOR_BYTES: Final = 512


class WriteChange(NamedTuple):
    """`data` at `position`; with data None, a cut or extension. `length` is the file's length afterwards."""

    number: int
    position: int
    data: bytes | None
    length: int


@dataclass(slots=True, eq=False)
class DiskFile:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[WriteChange] = field(default_factory=list)
    dropped: list[WriteChange] = field(default_factory=list)  # by a failed sync: in content, never to be durable
    blocks: set[int] = field(default_factory=set)  # that take room, on a sparse disk


# A directory's names. None is a directory.
DiskNames = dict[str, DiskFile | None]


@dataclass(slots=True, eq=False)
class NameChange:
    """`name` in `directory` becomes `file`, a directory (None), or nothing (`gone`).

    A rename is two of these; `old` is the place it takes away, in the same step. When that is in another
    directory it is a change of its own, which cannot be kept without the one it `needs`.
    """

    number: int
    directory: str
    name: str
    file: DiskFile | None = None
    gone: bool = False
    old: str | None = None
    needs: NameChange | None = None
    kept: bool = False


def last_part(path: str) -> str:
    return path.rpartition("/")[2]


def apply_write(image: bytearray, change: WriteChange) -> None:
    if change.data is None:
        image.extend(bytes(max(0, change.length - len(image))))
        del image[change.length :]
        return
    end = change.position + len(change.data)
    if end > len(image):
        image.extend(bytes(end - len(image)))
    image[change.position : end] = change.data


def apply_name(tree: dict[str, DiskNames], change: NameChange) -> None:
    names = tree.setdefault(change.directory, {})
    if change.gone:
        names.pop(change.name, None)
        path = f"{change.directory}/{change.name}" if change.directory else change.name
        tree.pop(path, None)
        return
    if change.old is not None:
        names.pop(change.old, None)
    names[change.name] = change.file
    if change.file is None:
        path = f"{change.directory}/{change.name}" if change.directory else change.name
        tree.setdefault(path, {})


def survivor(file: DiskFile, rng: Random, stale: Sequence[bytes]) -> bytearray:
    """A durable image that a power cut may leave: any part of the unsynced changes, sector by sector."""
    changes = file.unsynced
    mode = rng.choice(("all", "none", "prefix", "any", "any", "any"))
    image = bytearray(file.durable)
    if mode == "all" or mode == "prefix":
        for change in changes[: None if mode == "all" else rng.randint(0, len(changes))]:
            apply_write(image, change)
        return image
    if mode == "none":
        return image
    lengths = [len(image), *(change.length for change in changes)]
    # The length is metadata: it may run ahead of the bytes or stay behind them.
    length = rng.choice((*lengths, rng.randint(min(lengths), max(lengths))))
    keeps = rng.choice((0.1, 0.5, 0.9))
    image.extend(bytes(max(0, max(lengths) - len(image))))
    versions = _versions(changes, len(image))
    for sector, pieces in versions.items():
        kept = len(pieces) if rng.random() < keeps else rng.randrange(len(pieces))
        if kept == 0 and stale and sector >= len(file.durable) and rng.random() < 0.5:
            pieces = [(sector, rng.choice(stale))]
            kept = 1
        for position, piece in pieces[:kept]:
            image[position : position + len(piece)] = piece
    del image[length:]
    return image


def _versions(changes: Sequence[WriteChange], length: int) -> dict[int, list[tuple[int, bytes]]]:
    """By sector, the pieces written to it one after the other. A cut file reads as zeros behind the cut."""
    versions: dict[int, list[tuple[int, bytes]]] = {}
    for change in changes:
        data = bytes(length - change.length) if change.data is None else change.data
        position, end = change.position, change.position + len(data)
        start = position
        while start < end:
            sector = start - start % SECTOR_BYTES
            stop = min(end, sector + SECTOR_BYTES)
            versions.setdefault(sector, []).append((start, data[start - position : stop - position]))
            start = stop
    return versions
