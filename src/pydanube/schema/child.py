"""The process that parses schemas from the wire: questions on stdin, answers on stdout, and nothing else.

    | length of JSON u32 | length of payloads u32 | JSON | payloads |        both ways, little endian

It starts with an empty environment. Before the first question it gives up what it does not need: memory beyond
MEMORY_MAX, CPU beyond CPU_SECONDS per question, descriptors beyond those it has (so neither a file nor a socket can be
opened, whichever library tries), new processes, the network where the system lets it, and, for Python's own code, files
and sockets once more by name. protoc opens what goes with it and two files in memory: for it descriptors are allowed.

It ends with its stdin, with a question that costs too much, and with a broker that kills it. It never answers twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO, Final

from pydanube.core.units import MIB
from pydanube.schema.answering import Answering

FRAME: Final = struct.Struct("<II")
MEMORY_MAX: Final = 768 * MIB  # of addresses, most of which are libraries
CPU_SECONDS: Final = 1  # and what is left of another: the system counts whole ones
DESCRIPTORS_MAX: Final = 64
FORBIDDEN: Final = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "ctypes.",
)
# A definition and a payload of each type that has a parser.
EXAMPLES: Final = (
    (
        "avro",
        '{"type": "record", "name": "A", "fields": [{"name": "a", "type": ["null", "int"], "default": null}]}',
        b"\0",
    ),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}', b"{}"),
    ("protobuf", 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message A { int32 a = 1; }', b""),
)
CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUSER: Final = 0x10000000


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the broker
        signal.signal(each, signal.SIG_IGN)
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _leave_network()
    _warm_up()
    _give_up()
    answering = Answering()
    while (question := _receive(questions)) is not None:
        _allow_cpu()
        _send(answers, _guarded(answering, *question))


def _guarded(answering: Answering, question: dict[str, Any], payloads: bytes) -> dict[str, Any]:
    try:
        return answering.answer(question, payloads)
    except Exception as error:  # a library's bug: said, and the process goes on
        return {"invalid": f"it cannot be understood ({type(error).__name__}: {str(error)[:200]})"}


def _warm_up() -> None:
    """Libraries load parts of themselves when they are first used, and afterwards no file can be opened."""
    answering = Answering()
    for kind, good, payload in EXAMPLES:
        for definition in (good, "{", '{"type": 1}', "{}"):
            question = {"do": "judge", "type": kind, "definition": definition, "message": "", "asked": "full:strict"}
            _guarded(answering, {**question, "history": [[1, kind, good, ""]]}, b"")
        check = {"do": "check", "key": kind, "type": kind, "definition": good, "message": ""}
        for each in (payload, b"\xff" * 9):
            _guarded(answering, {**check, "sizes": [len(each)]}, each)


def _leave_network() -> None:
    """Where the system lets us: not in every container."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            libc.unshare(CLONE_NEWNET)


def _give_up() -> None:
    free = os.dup(0)
    os.close(free)
    for limit, soft, hard in (
        (resource.RLIMIT_AS, MEMORY_MAX, MEMORY_MAX),
        (resource.RLIMIT_CORE, 0, 0),
        # No number below the lowest free one is free: nothing can be opened. protoc gets some: see `descriptors`.
        (resource.RLIMIT_NOFILE, free, max(free, DESCRIPTORS_MAX)),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (soft, hard))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and not isinstance(arguments[0], int):
        raise PermissionError(f"the process for schemas opens no file: {arguments[0]!r}")
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"the process for schemas does not do this: {event}")


def _allow_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(OSError, ValueError):
        limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _receive(source: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    head = source.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    text, size = FRAME.unpack(head)
    return json.loads(source.read(text)), source.read(size)


def _send(target: BinaryIO, found: dict[str, Any]) -> None:
    text = json.dumps(found).encode()
    target.write(FRAME.pack(len(text), 0) + text)
    target.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
