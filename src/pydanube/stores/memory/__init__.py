"""All five ports in memory: the reference implementation, and what tests and simulation run on.

Single-threaded and deterministic. Nothing here reads the time or draws a random number by itself, no call
waits longer than its contract says, and what has an order is kept in lists and dicts, so two runs are equal.
The adapters keep the contract of `ports.py` and nothing worse: faults are injected by wrappers in `testing/`.
"""

from pydanube.stores.memory.clock import LoopClock, MemoryClock
from pydanube.stores.memory.disk import MemoryDisk
from pydanube.stores.memory.metadata import MemoryMetadataStore
from pydanube.stores.memory.objects import MemoryObjectStore
from pydanube.stores.memory.work import MemoryWork

__all__ = [
    "LoopClock",
    "MemoryClock",
    "MemoryDisk",
    "MemoryMetadataStore",
    "MemoryObjectStore",
    "MemoryWork",
]
