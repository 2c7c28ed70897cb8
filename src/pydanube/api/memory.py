"""How the broker's process treats its memory. A broker inside another program leaves that to the program."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

import pyarrow as pa

GARBAGE_THRESHOLDS: Final = (100_000, 50, 100)  # objects, young collections, middle collections
LARGE_BYTES: Final = 1024 * 1024
_M_MMAP_THRESHOLD: Final = -3  # of mallopt(3)


def give_back_large_blocks() -> None:
    """Row groups of megabytes come and go: what is free again goes back to the system, at once.

    Otherwise Arrow's usual pool and the C library keep some 50 MB for a reader that needs 50 MB. Where there is
    another pool or another C library, nothing is lost but that.
    """
    if "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_collections_short() -> None:
    """What is there now stays, so the collector need not look at it again; what a batch leaves behind goes without it.

    With Python's own thresholds it stops the event loop for 30 to 50 ms every few seconds at 10,000 messages/s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
