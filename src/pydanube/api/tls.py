"""TLS of the native and the gRPC server: certificate and key from files, and certificates that clients must have."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydanube.config.grpc import GrpcConfig
from pydanube.config.stream import StreamConfig
from pydanube.errors import ConfigError

KEYS = "stream.tls."
GRPC_KEYS = "broker.grpc_tls."


def server_context(config: StreamConfig | GrpcConfig) -> ssl.SSLContext | None:
    """None: without TLS. Raises ConfigError, which names the file that cannot be used."""
    keys = KEYS if isinstance(config, StreamConfig) else GRPC_KEYS
    if config.cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert config.key_file is not None, "the configuration has both or none"
    for name, file in (("cert_file", config.cert_file), ("key_file", config.key_file)):
        _check_readable(keys, name, file)
    try:
        # An empty password, or OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.cert_file, config.key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{keys}key_file", str(config.key_file), "the key of the certificate in cert_file"
            ) from error
        allowed = f"a certificate in PEM with a key in PEM and without a password ({error.reason or error})"
        raise ConfigError(f"{keys}cert_file", str(config.cert_file), allowed) from error
    if config.ca_file is not None:
        _check_readable(keys, "ca_file", config.ca_file)
        try:
            context.load_verify_locations(config.ca_file)
        except ssl.SSLError as error:
            raise ConfigError(f"{keys}ca_file", str(config.ca_file), f"certificates in PEM ({error.reason})") from error
        is_optional = isinstance(config, GrpcConfig) and config.clients == "optional"
        context.verify_mode = ssl.CERT_OPTIONAL if is_optional else ssl.CERT_REQUIRED
    if isinstance(config, GrpcConfig):
        context.set_alpn_protocols(["h2"])
    return context


def _check_readable(keys: str, name: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{keys}{name}", str(file), f"a file that can be read ({error.strerror})") from error
