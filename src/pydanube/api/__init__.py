"""The broker's servers: gRPC for clients and administrators, HTTP for metrics and health."""
