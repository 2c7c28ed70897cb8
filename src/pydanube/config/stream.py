"""Settings of the native port: what one peer may cost, and TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydanube.core.units import MIB

FRAME_BYTES_MIN: Final = 64 * 1024  # what a greeting may have
FRAME_BYTES_MAX: Final = 64 * MIB + 128 * 1024  # the largest batch, and a command


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """What a peer may cost, and for how long. `stream.limits` in the configuration file."""

    handshake_seconds: float = 10  # from connecting to the end of the greeting
    keepalive_seconds: int = 15  # peers say something this often; one that is silent for twice as long is gone
    frame_seconds: float = 60  # a frame that has begun is complete by then
    stuck_seconds: float = 60  # a peer that takes nothing of what it is sent for so long is gone
    frame_bytes: int = FRAME_BYTES_MAX  # of a frame that it sends
    unwritten_bytes: int = 32 * MIB  # that it produced and are not on disk: then its socket is not read
    unsent_bytes: int = 16 * MIB  # that wait to be sent to one consumer, whatever it has granted
    requests: int = 256  # under way: then its socket is not read
    handles: int = 10_000  # producers and consumers that it has opened
    connections: int = 10_000  # of all peers together


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Without `cert_file` the port is plain TCP. With `ca_file` clients need a certificate that it has signed."""

    limits: StreamLimits = StreamLimits()
    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    @property
    def scheme(self) -> str:
        """Of the URLs that are advertised to clients."""
        return "danube" if self.cert_file is None else "danube+tls"
