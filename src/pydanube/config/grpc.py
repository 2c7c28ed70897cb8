"""Settings of the client port: which server listens there, and TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """`server` is own or grpcio (docs/grpc.md). Without `cert_file` the port is plain TCP.

    With `ca_file` clients show a certificate that it has signed: all, or those that have one (`clients`: optional).
    """

    server: str = "own"
    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    clients: str = "required"

    @property
    def scheme(self) -> str:
        """Of the URLs that are advertised to clients."""
        return "http" if self.cert_file is None else "https"
