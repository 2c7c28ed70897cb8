"""The broker's doors: gRPC for clients and administrators, HTTP for metrics and health."""
