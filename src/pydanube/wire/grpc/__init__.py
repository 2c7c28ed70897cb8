"""gRPC for a server, sans-I/O, on top of wire/http2: calls, metadata, deadlines, statuses, framing of messages."""
