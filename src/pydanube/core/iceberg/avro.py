"""Avro's object container file, written by hand: the same rows are the same bytes, wherever they are made.

    "Obj" 1 · map {avro.schema, avro.codec, …} · 16 bytes sync · count · length · deflated rows · sync

Sync is the digest of what it separates, not random as Avro's own libraries have it: files are named by their content.
Only what Iceberg's manifests need is here.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

MAGIC: Final = b"Obj\x01"
NULL: Final = b"\x00"  # of ["null", T]
GIVEN: Final = b"\x02"


def number(value: int) -> bytes:
    """int and long: zigzag, seven bits a byte, the lowest first."""
    rest = (value << 1) ^ (value >> 63)
    encoded = bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def data(value: bytes) -> bytes:
    return number(len(value)) + value


def text(value: str) -> bytes:
    return data(value.encode())


def array(items: Sequence[bytes]) -> bytes:
    """Of items that are encoded already."""
    return number(len(items)) + b"".join(items) + NULL if items else NULL


def container(schema: str, keys: Mapping[str, str], rows: Sequence[bytes]) -> bytes:
    """A whole file of rows that are encoded as `schema`, a JSON text, says."""
    header = {"avro.schema": schema, "avro.codec": "deflate", **keys}
    body = b"".join(rows)
    packer = zlib.compressobj(level=6, wbits=-15)
    packed = packer.compress(body) + packer.flush()
    parts = [MAGIC, array([text(name) + text(value) for name, value in header.items()])]
    sync = hashlib.sha256(b"".join(parts) + body).digest()[:16]
    parts.append(sync)
    if rows:
        parts += [number(len(rows)), data(packed), sync]
    return b"".join(parts)
