"""A cluster on this machine that loses a broker and nothing else. `make demo`, or `python -m examples.demo --help`."""
