"""Counts what one native publish calls, from `producer.send` to the durable receipt, in both processes.

    python -m tools.docs.walk             functions, files, calls, and calls from one layer into another
    python -m tools.docs.walk --calls     and every call, in order

It is the rule by which ARCHITECTURE.md compares versions: PYTHONPATH may name the source of another one. Broker and
client run in one process; of 15 publishes the one with the fewest calls counts, and of that what all 15 have in common.
Constructors, lambdas, settings, errors, metrics and generated code do not count.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pydanube
from pydanube.testing import broker as broker_for_tests

ROOT = f"{Path(pydanube.__file__).parent}/"
UNCOUNTED = ("config/", "errors.py", "telemetry/", "testing/", "wire/_pb/")
PUBLISHES = 15


class Call(NamedTuple):
    file: str
    function: str
    caller: str  # its file; empty: the event loop, or a thread


class Trace:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        file, function = below_root(frame), frame.f_code.co_name
        if file.startswith(UNCOUNTED) or not file or function.startswith(("<", "__")):
            return
        caller = frame.f_back
        while caller is not None and not below_root(caller):
            caller = caller.f_back
        self.calls.append(Call(file, function, below_root(caller) if caller is not None else ""))


def below_root(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name.removeprefix(ROOT) if name.startswith(ROOT) else ""


def layer(file: str) -> str:
    return file.split("/", 1)[0]


async def traced(trace: Trace) -> list[list[Call]]:
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        async with broker_for_tests(directory) as broker, pydanube.connect(broker.url) as client:
            await client.create_topic("/default/orders")
            async with client.producer("/default/orders") as producer:
                for number in range(2 * PUBLISHES):  # the first ones open, roll and fill what later ones find
                    trace.calls, trace.on = [], True
                    await producer.send(b"2 coffees")
                    await asyncio.sleep(0)
                    trace.on = False
                    if number >= PUBLISHES:
                        runs.append(trace.calls)
                    await asyncio.sleep(0.05)
    return runs


def main() -> None:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    runs = asyncio.run(traced(trace))
    sys.setprofile(None)
    common = set.intersection(*(set(run) for run in runs))
    calls = [call for call in min(runs, key=len) if call in common]
    crossings = {call for call in calls if call.caller and layer(call.caller) != layer(call.file)}
    functions, files = {call[:2] for call in calls}, {call.file for call in calls}
    into = Counter(layer(call.file) for call in crossings)
    print(f"{len(functions)} functions in {len(files)} files, {len(calls)} calls; {len(crossings)} cross layers")
    print("into " + ", ".join(f"{name} {count}" for name, count in into.most_common()))
    if "--calls" in sys.argv[1:]:
        for call in calls:
            print(f"  {call.file} {call.function}" + (f"  from {call.caller}" if call in crossings else ""))


if __name__ == "__main__":
    main()
