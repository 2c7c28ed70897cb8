"""How the broker's process treats its memory. A broker inside another program leaves that to the program."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

import pyarrow as pa

GARBAGE_THRESHOLDS: Final = (100_000, 50, 100)  # objects, young collections, middle collections
MMAP_FROM_BYTES: Final = 2 * 1024 * 1024
ARENAS_MAX: Final = 2
# Of mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def give_back_large_blocks() -> None:
    """Row groups of megabytes come and go: what is free again goes back to the system immediately.

    Otherwise Arrow's usual pool and the C library keep some 50 MB for a reader that needs 40 MB. Less than that is
    kept, because to ask the system for it again costs more than all that is done with it: with the C library's own
    threshold of 128 KiB half of a reader's time. Where there is another pool or another C library, nothing is lost
    but that.
    """
    if "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MMAP_FROM_BYTES)  # else it stays at 128 KiB, now that the other one is set
        mallopt(_M_ARENA_MAX, ARENAS_MAX)  # each keeps what is free in it


def keep_collections_short() -> None:
    """What is there now stays, so the collector need not look at it again; what a batch leaves behind goes without it.

    With Python's own thresholds it stops the event loop for 30 to 50 ms every few seconds at 10,000 messages/s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
