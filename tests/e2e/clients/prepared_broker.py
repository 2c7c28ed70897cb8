"""A broker that has everything loaded, and starts when it is told to: a restart is then as quick as it can be.

python prepared_broker.py broker --mode cluster …        as `danube` itself, after a line on standard input
"""

from __future__ import annotations

import sys

import pydanube.api.process  # noqa: F401  # what takes long to load
from pydanube.cli.main import main

if __name__ == "__main__":
    print("prepared", flush=True)
    sys.stdin.readline()
    main()
