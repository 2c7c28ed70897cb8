"""Real processes, broken on purpose, judged by the rules of the simulator: `make chaos`, `make soak`.

    python -m tools.chaos --rounds 20                  every kind of fault 20 times
    python -m tools.chaos --rounds 3 --only broker_kill
    python -m tools.chaos --minutes 60 --seed 7        random faults for an hour

Three brokers, three etcd members, an object store; native and official clients that write down what they send, what is
acknowledged, what they receive. A round: clients work, one fault, topics that move during it; then the fault ends, the
clients stop sending, everything must be served, brought back and delivered within a deadline; then every topic is read,
and the whole history judged (checkers.py). Topics live for a chapter of several rounds.

Exit code 1: a promise was broken. History and logs stay then, and the last lines say where.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module


def main() -> int:
    # Children are started while channels are open, and use none of them. gRPC asks for it when it is loaded.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    code: int = import_module("tools.chaos.command").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
