"""HTTP/2 for a server, sans-I/O: bytes in, events and bytes out. Knows no gRPC, no clock, no event loop."""
