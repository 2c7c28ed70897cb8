"""What gRPC says in headers: method, deadline, encoding and metadata of a call; status and sentence of an answer."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from pydanube.wire.http2.headers import HeaderBlock, literal
from pydanube.wire.status import Code

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

ENCODINGS: Final = ("identity", "gzip", "deflate")
UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
OF_THE_PROTOCOL: Final = frozenset({b"te", b"content-type", b"content-length", b"host"})
_STATUS_200: Final = b"\x88"
_CONTENT_TYPE: Final = b"\x0f\x10" + bytes((len(b"application/grpc"),)) + b"application/grpc"
FIRST: Final = _STATUS_200 + _CONTENT_TYPE
OK_TRAILERS: Final = literal(b"grpc-status", b"0")
NOT_GRPC: Final = literal(b":status", b"415") + literal(b"content-type", b"text/plain")
NOT_GRPC_SENTENCE: Final = b"This is a gRPC server: it answers POST with content-type application/grpc.\n"
_PLAIN: Final = frozenset(range(0x20, 0x7F)) - {0x25}


class CallHeaders(NamedTuple):
    """`wrong` is why there is no such call, and `code` what the client is told; `path` is empty if it is not gRPC."""

    path: str
    metadata: Metadata
    timeout: float | None
    encoding: str
    code: Code
    wrong: str


def call_headers(block: HeaderBlock) -> CallHeaders:
    """Parsed once per block: it stays with the block."""
    known: CallHeaders | None = block.meaning
    if known is None:
        known = block.meaning = _parse(block)
    return known


def _parse(block: HeaderBlock) -> CallHeaders:
    content_type = timeout_text = b""
    encoding = "identity"
    metadata: list[tuple[str, str | bytes]] = []
    wrong = ""
    for name, value in block.fields:
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout_text = value
        elif name == b"grpc-encoding":
            encoding = value.decode("ascii", "replace")
        elif name in OF_THE_PROTOCOL or name.startswith(b"grpc-"):
            continue
        elif name.endswith(b"-bin"):
            try:
                metadata.extend((name.decode(), _binary(each)) for each in value.split(b","))
            except ValueError:
                wrong = f"metadata {name.decode()[:100]} is not in base64"
        else:
            metadata.append((name.decode(), value.decode("latin-1")))
    is_grpc = content_type == b"application/grpc" or content_type.startswith(
        (b"application/grpc+", b"application/grpc;")
    )
    if not is_grpc or block.pseudo.get(b":method") != b"POST":
        return CallHeaders("", (), None, "", Code.UNKNOWN, "")
    timeout = None
    if timeout_text:
        timeout = seconds_of(timeout_text.decode("ascii", "replace"))
        if timeout is None:
            wrong = "grpc-timeout is no number with a unit"
    code = Code.INVALID_ARGUMENT
    if encoding not in ENCODINGS:
        code, wrong = Code.UNIMPLEMENTED, f"grpc-encoding {encoding[:50]} is not known: {', '.join(ENCODINGS)} are"
    path = block.pseudo[b":path"].decode("latin-1")
    return CallHeaders(path, tuple(metadata), timeout, encoding, code, wrong)


def seconds_of(timeout: str) -> float | None:
    """Of 100m, 5S, …; None if it is none."""
    number, unit = timeout[:-1], timeout[-1:]
    if unit not in UNITS or not number.isascii() or not number.isdigit() or len(number) > 8:
        return None
    return int(number) * UNITS[unit]


def first_headers(metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    return FIRST + _fields(metadata)


def trailers(code: Code, sentence: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    fields = literal(b"grpc-status", b"%d" % code)
    if sentence:
        fields += literal(b"grpc-message", percent(sentence))
    if code is Code.UNIMPLEMENTED:
        fields += literal(b"grpc-accept-encoding", ",".join(ENCODINGS).encode())
    return fields + _fields(metadata)


def percent(sentence: str) -> bytes:
    data = sentence.encode("utf-8", "replace")
    if _PLAIN.issuperset(data):
        return data
    return b"".join(bytes((each,)) if each in _PLAIN else b"%%%02X" % each for each in data)


def _fields(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    found = []
    for key, value in metadata:
        name = key.lower().encode("ascii")
        if name.endswith(b"-bin"):
            raw = value if isinstance(value, bytes) else value.encode()
            found.append(literal(name, b64encode(raw).rstrip(b"=")))
        else:
            found.append(literal(name, value if isinstance(value, bytes) else value.encode("latin-1", "replace")))
    return b"".join(found)


def _binary(value: bytes) -> bytes:
    value = value.strip()
    return b64decode(value + b"=" * (-len(value) % 4), validate=True)
