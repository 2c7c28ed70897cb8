"""Fuzzers: programs that try to break a decoder. Each runs alone as `python -m tests.fuzz.<name>`."""
