"""What else may answer on a port that was taken for a broker's native one, by the first bytes that it sends.

Wrong ports are the most common mistake in a URL: a broker has four (gRPC, native, admin, metrics), and each would call
the others' bytes a violation of its protocol. The user wants to know which port that is.
"""

from __future__ import annotations

from typing import Final

NATIVE: Final = "the native port is usually 6651"

_SETTINGS: Final = 4  # the type of the frame that every HTTP/2 server sends first
_HTTP2_HEADER_BYTES: Final = 9
_ALERT: Final = b"\x15\x03"
# Servers that speak first, or that answer our greeting with a complaint.
_BEGINNINGS: Final = (
    (b"HTTP/", "an HTTP port (a web admin's or a metrics port, perhaps)"),
    (b"<", "a port that answers with HTML or XML"),
    (b"SSH-", "an SSH port"),
    (b"-ERR", "a Redis port"),
    (b"INFO {", "a NATS port"),
    (b"AMQP", "an AMQP port (RabbitMQ, perhaps)"),
    (b"220 ", "a mail or FTP port"),
)


def advice(first: bytes) -> str | None:
    """What is wrong with a URL whose port answers like this, and what to use instead. None: nothing that we know of.

    A broker's first frame is never mistaken for one of these: it would be longer than a greeting may be.
    """
    if first[:2] == _ALERT:
        return "that port speaks TLS: use danube+tls://"
    if _is_http2(first):
        return f"that is a gRPC port (for official clients, or for danube admin); {NATIVE}"
    for beginning, what in _BEGINNINGS:
        if first.startswith(beginning):
            return f"that is {what}; {NATIVE}"
    return None


def _is_http2(first: bytes) -> bool:
    """A SETTINGS frame of stream 0: 24 bits of length, the type, flags, the stream."""
    return len(first) >= _HTTP2_HEADER_BYTES and first[0] == 0 and first[3] == _SETTINGS and first[4:9] == bytes(5)
