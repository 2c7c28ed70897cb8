"""Header blocks: decoding by `hpack` with a memory, the rules of RFC 9113 section 8, and encoding without state.

A block that leaves HPACK's table alone means the same until the table changes, so the decoder remembers it by its
bytes: a client that sends the same call again costs one look-up instead of 20 to 40 µs. What is sent uses no table:
answers are constants.
"""

from __future__ import annotations

from typing import Any, Final

from hpack.exceptions import HPACKError
from hpack.hpack import Decoder

from pydanube.wire.http2.frames import ErrorCode

FORBIDDEN: Final = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
NEEDED: Final = (b":method", b":scheme", b":path")
NAME_BYTES: Final = frozenset(range(0x21, 0x7F)) - frozenset(range(0x41, 0x5B)) - {0x3A}
REMEMBERED_BLOCK_BYTES: Final = 4096  # a block and what it became; those of clients have some 300
REMEMBERED_MEAN_BYTES: Final = 512  # times the number of blocks: what a connection remembers at most


class HeaderBlock:
    """A decoded block. `malformed` says what is wrong with it as a request, `pseudo` has its fields with a colon."""

    __slots__ = ("content_length", "fields", "malformed", "meaning", "pseudo")

    def __init__(self, fields: list[tuple[bytes, bytes]]) -> None:
        self.fields: list[tuple[bytes, bytes]] = []  # the others
        self.pseudo: dict[bytes, bytes] = {}
        self.content_length: int | None = None
        self.meaning: Any = None  # of the layer above: remembered with the block
        self.malformed = self._look(fields)

    def _look(self, fields: list[tuple[bytes, bytes]]) -> str:
        for name, value in fields:
            if name[:1] == b":":
                if name not in PSEUDO or name in self.pseudo or self.fields:
                    return "a pseudo-header that is unknown, repeated or late"
                self.pseudo[name] = value
                continue
            if not name or not NAME_BYTES.issuperset(name):
                return "a header name with a character that is not allowed"
            if name in FORBIDDEN or (name == b"te" and value != b"trailers"):
                return "a header of HTTP/1 connections"
            if b"\0" in value or b"\n" in value or b"\r" in value:
                return "a header value with a character that is not allowed"
            if name == b"content-length":
                if not value.isdigit() or len(value) > 18:
                    return "a content-length that is no number"
                length = int(value)
                if self.content_length not in (None, length):
                    return "two content-lengths"
                self.content_length = length
            self.fields.append((name, value))
        if self.pseudo and not all(self.pseudo.get(name) for name in NEEDED):
            return "without :method, :scheme or :path"
        return ""


class HeaderDecoder:
    """Of one connection. Every block must come here, in order, whatever becomes of its stream."""

    __slots__ = ("_decoder", "_remembered", "_remembered_max", "remembered_bytes")

    def __init__(self, list_bytes_max: int, remembered_max: int) -> None:
        self._decoder = Decoder(list_bytes_max)
        self._remembered: dict[bytes, HeaderBlock] = {}
        self._remembered_max = remembered_max
        self.remembered_bytes = 0  # of the blocks and of what they became

    def decode(self, block: bytes) -> HeaderBlock:
        """Raises ValueError: the table is not what the peer thinks any more, so the connection has to end."""
        known = self._remembered.get(block)
        if known is not None:
            return known
        table = self._decoder.header_table
        entries = table.dynamic_entries
        length, first = len(entries), entries[0] if entries else None
        try:
            decoded = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError, UnicodeError) as error:  # IndexError: a block that ends inside a number
            raise ValueError(str(error) or type(error).__name__) from error
        headers = HeaderBlock([(bytes(name), bytes(value)) for name, value in decoded])
        entries = table.dynamic_entries
        # A change of the table's size counts though it moves nothing: a field that did not fit may fit from now on.
        if len(entries) != length or (entries and entries[0] is not first) or (block[:1] and block[0] >> 5 == 1):
            self._forget()
        else:
            size = len(block) + sum(len(name) + len(value) for name, value in decoded)
            if size <= REMEMBERED_BLOCK_BYTES:
                most = self._remembered_max
                if len(self._remembered) >= most or self.remembered_bytes + size > most * REMEMBERED_MEAN_BYTES:
                    self._forget()
                self._remembered[block] = headers
                self.remembered_bytes += size
        return headers

    def _forget(self) -> None:
        self._remembered.clear()
        self.remembered_bytes = 0

    @property
    def remembered(self) -> int:
        return len(self._remembered)


HEADER_ERROR: Final = ErrorCode.COMPRESSION_ERROR


def literal(name: bytes, value: bytes) -> bytes:
    """One field, without index and without Huffman code: the peer's table stays as it is."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    if number < 127:
        return bytes((number,))
    number -= 127
    digits = bytearray((127,))
    while number >= 128:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)
