"""How large the database of an etcd may become, where its status does not say so: before 3.6 its metrics do."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

QUOTA_BYTES: Final = 2 * 1024**3  # etcd's default
SECONDS: Final = 2.0
ANSWER_BYTES_MAX: Final = 4 * 1024**2
NAME: Final = b"etcd_server_quota_backend_bytes "


async def quota_in_metrics(address: str) -> int:
    """0 if that cannot be read: the metrics may be elsewhere, or behind TLS."""
    host, _, port = address.rpartition(":")
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                while len(answer) < ANSWER_BYTES_MAX and (piece := await reader.read(64 * 1024)):
                    answer += piece
            finally:
                writer.close()
    return quota_of(answer)


def quota_of(metrics: bytes) -> int:
    for line in metrics.splitlines():
        if line.startswith(NAME):
            with contextlib.suppress(ValueError):
                return max(0, int(float(line.removeprefix(NAME))))
    return 0
