"""The command line of a chaos run, and what it prints in the end."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.chaos.cluster import BROKER_COUNT
from tools.chaos.faults import FAULTS
from tools.chaos.net import Network
from tools.chaos.processes import ChaosFailed
from tools.chaos.run import Options, Run

SHOWN_VIOLATIONS: Final = 10
EXIT_VIOLATION: Final = 1
EXIT_FAILED: Final = 2
EXIT_INTERRUPTED: Final = 130


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos",
        description="Breaks a cluster of real processes and judges what became of it.",
    )
    parser.add_argument("--rounds", type=int, default=0, help="of every kind of fault")
    parser.add_argument("--minutes", type=float, default=0.0, help="random faults for so long, instead of --rounds")
    parser.add_argument("--only", action="append", choices=list(FAULTS), help="this kind; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="of faults, victims and moments; 0: another every time")
    parser.add_argument("--ttl", type=int, default=3, help="seconds after which a silent broker is replaced")
    parser.add_argument(
        "--rejoin",
        choices=["drained", "active"],
        default="drained",
        help="whether a broker that was away for longer takes topics again by itself",
    )
    parser.add_argument("--rate", type=float, default=25.0, help="messages per second of every producer")
    parser.add_argument("--moves", type=int, default=2, help="topics that are moved during every fault")
    parser.add_argument("--settle-seconds", type=float, default=180.0, help="how long everything may take to recover")
    parser.add_argument("--native-only", action="store_true", help="no official clients")
    parser.add_argument("--small", action="store_true", help="two topics, native clients only: a quick look")
    parser.add_argument("--no-namespaces", action="store_true", help="on 127.0.0.1, even where more is permitted")
    parser.add_argument("--directory", type=Path, help="for logs and history, made if missing; kept in any case")
    parser.add_argument("--keep", action="store_true", help="history and logs, also if all was well")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    given = parsed(words)
    if bool(given.rounds) == bool(given.minutes):
        print("chaos: say either --rounds or --minutes", file=sys.stderr)
        return EXIT_FAILED
    least = {"rounds": 0, "minutes": 0, "seed": 0, "ttl": 1, "moves": 0, "rate": 0.01, "settle_seconds": 1}
    for name, bound in least.items():
        if not getattr(given, name) >= bound:
            print(f"chaos: --{name.replace('_', '-')} must be {bound} at least", file=sys.stderr)
            return EXIT_FAILED
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    network = Network(BROKER_COUNT, private=not given.no_namespaces)
    kinds = given.only or list(FAULTS)
    skipped = [kind for kind in kinds if FAULTS[kind].private and not network.private]
    if skipped:
        print(f"skipped: {', '.join(skipped)}: {network.why_not}")
    official = not (given.native_only or given.small)
    if official and importlib.util.find_spec("danube") is None:
        print("skipped: the official client is not installed (`make setup-test` installs it)")
        official = False
    kinds = [kind for kind in kinds if kind not in skipped]
    if not kinds:
        return 0
    directory = given.directory or Path(tempfile.mkdtemp(prefix="danube-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        print(f"chaos: {directory} is not empty: name a directory for this run alone", file=sys.stderr)
        return EXIT_FAILED
    options = Options(
        kinds=kinds,
        rounds=given.rounds,
        minutes=given.minutes,
        seed=given.seed or os.getpid(),
        ttl=given.ttl,
        rejoin=given.rejoin,
        rate=given.rate,
        moves=given.moves,
        settle_seconds=given.settle_seconds,
        official=official,
        small=given.small,
        keep=given.keep or given.directory is not None,
        directory=directory.absolute(),
    )
    try:
        code = asyncio.run(_main(options, network))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code in (0, EXIT_INTERRUPTED) and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return code


async def _main(options: Options, network: Network) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    print(f"seed {options.seed}, logs in {options.directory}", flush=True)
    try:
        run = Run(options, network)
    except ChaosFailed as error:
        print(f"chaos: {error}", file=sys.stderr)
        return EXIT_FAILED
    try:
        await run.all()
    except ChaosFailed as error:
        print(f"\nchaos: {error}\nlogs: {options.directory}", file=sys.stderr)
        return EXIT_FAILED
    except asyncio.CancelledError:
        print("\n".join(run.report()))
        print("interrupted", flush=True)
        return EXIT_INTERRUPTED
    print("\n".join(run.report()))
    if not run.violations:
        print("no promise was broken")
        return 0
    for violation in run.violations[:SHOWN_VIOLATIONS]:
        print(violation)
    if len(run.violations) > SHOWN_VIOLATIONS:
        print(f"… and {len(run.violations) - SHOWN_VIOLATIONS} more")
    print(f"history: {options.directory / 'history.jsonl'}\nlogs: {options.directory}")
    return EXIT_VIOLATION
