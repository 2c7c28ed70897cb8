"""Looking for groups in a segment where they do not follow each other any more, a piece of the file at a time."""

from __future__ import annotations

from typing import Final

from pydanube.formats.segment import GROUP_HEADER_SIZE, GroupHeader, find_group_header
from pydanube.ports import Disk

PIECE_BYTES: Final = 1024 * 1024


class GroupSearch:
    """Finds the group headers of one segment between two positions of its file, whatever stands between them."""

    def __init__(self, disk: Disk, path: str, position: int, end: int, segment_id: int) -> None:
        self._disk = disk
        self._path = path
        self._segment_id = segment_id
        self._end = end
        self._piece = b""
        self._piece_start = position
        self._next = 0  # in the piece
        self._is_last = False

    async def next(self) -> GroupHeader | None:
        """The next one; None: there are no more. Whether its body is whole is for the caller to see."""
        while True:
            position = self._piece_start + self._next
            found = find_group_header(self._piece, self._next, position, self._segment_id)
            if found is not None:
                self._next = found[0] + 1
                return found[1]
            if self._is_last:
                return None
            # A header may begin in this piece and end in the next.
            self._piece_start += max(0, len(self._piece) - (GROUP_HEADER_SIZE - 1))
            length = min(PIECE_BYTES, max(0, self._end - self._piece_start))
            self._piece = await self._disk.read(self._path, self._piece_start, length)
            self._is_last = len(self._piece) < PIECE_BYTES
            self._next = 0


async def content_end(disk: Disk, path: str, position: int, end: int) -> int:
    """Where the last byte that is not zero ends; `position` if there is none from there on."""
    found = position
    while position < end:
        piece = await disk.read(path, position, min(PIECE_BYTES, end - position))
        if not piece:
            break
        if content := len(piece.rstrip(b"\0")):
            found = position + content
        position += len(piece)
    return found
