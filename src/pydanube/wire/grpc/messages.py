"""Messages of a call's request: from pieces of data to whole messages, decompressed, each within its bound.

| compressed u8 | length u32 | message ... |
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size
ZLIB_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class MessageRefused(Exception):
    """No message that this server takes. `size_bytes` is given if it is only too large."""

    def __init__(self, sentence: str, size_bytes: int = 0) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.size_bytes = size_bytes


class Incoming:
    """What has come of one call's messages. `missing` says how much the present one still needs, its prefix known."""

    __slots__ = ("_encoding", "_partial", "size_max_bytes")

    def __init__(self, size_max_bytes: int, encoding: str) -> None:
        self.size_max_bytes = size_max_bytes
        self._encoding = encoding
        self._partial: bytearray | None = None

    @property
    def is_between(self) -> bool:
        return not self._partial

    @property
    def missing(self) -> int:
        partial = self._partial
        if partial is None or len(partial) < PREFIX_BYTES:
            return 0
        return PREFIX_BYTES + int(PREFIX.unpack_from(partial)[1]) - len(partial)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete. Raises MessageRefused as soon as a prefix says that it cannot be."""
        partial = self._partial
        if partial is None:
            size = len(data)
            if size >= PREFIX_BYTES:
                compressed, length = PREFIX.unpack_from(data)
                if length + PREFIX_BYTES == size:
                    self._check(compressed, length)
                    return [data[PREFIX_BYTES:] if not compressed else self._decompressed(data[PREFIX_BYTES:])]
            partial = self._partial = bytearray()
        partial += data
        messages: list[bytes] = []
        start = 0
        while len(partial) - start >= PREFIX_BYTES:
            compressed, length = PREFIX.unpack_from(partial, start)
            self._check(compressed, length)
            end = start + PREFIX_BYTES + length
            if end > len(partial):
                break
            message = bytes(memoryview(partial)[start + PREFIX_BYTES : end])
            messages.append(self._decompressed(message) if compressed else message)
            start = end
        if start:
            del partial[:start]
        if not partial:
            self._partial = None
        return messages

    def close(self) -> None:
        self._partial = None

    def _check(self, compressed: int, length: int) -> None:
        if compressed > 1 or (compressed and self._encoding not in ZLIB_BITS):
            raise MessageRefused("a message is marked as compressed, and grpc-encoding does not say how")
        if length > self.size_max_bytes:
            raise MessageRefused("", length)

    def _decompressed(self, data: bytes) -> bytes:
        decompressor = zlib.decompressobj(ZLIB_BITS[self._encoding])
        try:
            message = decompressor.decompress(data, self.size_max_bytes + 1)
        except zlib.error as error:
            raise MessageRefused(f"a message cannot be decompressed: {error}") from error
        if len(message) > self.size_max_bytes:
            raise MessageRefused("", len(message))
        if not decompressor.eof:
            raise MessageRefused("a message cannot be decompressed: it is cut off")
        return message


def framed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message
