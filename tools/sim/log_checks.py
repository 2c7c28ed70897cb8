"""Checks of a log that need no crash: it stops only where it must, and nothing is left over when it has ended.

`stop_is_justified` is the failure table of docs/adr/0001-the-log.md, read from the side of the log that got a failure:
a log that stops because it ran out of room or descriptors, because a file that it had removed is missing, or because
one sync of a journal failed, stops for no reason, and a whole broker with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydanube.log.wal import TopicLog, Wal
from pydanube.testing.disk_faults import Told
from pydanube.testing.loop import Process, SimLoop, SimTask
from tools.sim.log_model import Broken

# Failures of these are raised to the caller; the log itself goes on.
_ASIDE = ("wal.ckpt", ".torn", ".damage", "FORMAT", ".quarantined")
READING_SECONDS = 60
_WAITERS_MAX = 12  # readers that wait at one time, in a history


def stop_is_justified(told: Sequence[Told], *, one_synced_topic: bool) -> bool:
    """Whether a log that got these failures may stop. `one_synced_topic`: no journal is ever used."""
    once = full_journals = full = 0
    for failure in told:
        failed = failure.why in ("EIO", "lost") or (failure.why == "ENOSPC" and failure.operation == "sync")
        bytes_of = failure.operation in ("write", "sync")
        if failure.again or any(name in failure.path for name in _ASIDE) or failure.operation in ("read", "list"):
            continue
        if not failed:
            # A full disk by itself is no reason to stop. Where overwriting needs space, a record may be there.
            is_record = bytes_of and failure.path.endswith(".journal")
            full_journals += failure.why == "ENOSPC" and is_record
            full += failure.why == "ENOSPC" and not is_record
        elif failure.path.endswith((".journal", ".tmp")) and (bytes_of or failure.operation == "create"):
            once += 1  # another file is taken, once
        elif failure.path.endswith(".wal") and bytes_of and one_synced_topic:
            once += 1  # the group goes to a new segment, once
        else:
            return True
    # What may be there after a failure needs another file: without space for that it cannot be called refused.
    return once + full_journals >= 2 or (once + full_journals > 0 and full > 0)


def check_sizes(wal: Wal) -> None:
    """What the log believes to hold is what its topics hold; at every moment."""
    held = sum(each.size_bytes for each in wal._logs.values())
    if wal.size_bytes() != held:
        raise Broken(f"the log counts {wal.size_bytes()} bytes of segments, its topics hold {held}")


def check_waiters(log: TopicLog) -> None:
    """Readers that gave up waiting are forgotten."""
    waiting = len(log._news)
    if waiting > _WAITERS_MAX:
        raise Broken(f"{log.topic} remembers {waiting} waiting readers; there are a few")


async def check_ended(
    wal: Wal, logs: Sequence[TopicLog], process: Process, *, open_files: Sequence[str], hangs: bool, full: bool
) -> None:
    """Everything was closed in good order: nothing that it needed is still there. `hangs`: a call never
    answered; `full`: there was no room for something.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    here = asyncio.current_task()
    tasks: list[SimTask[Any]] = []
    for _ in range(READING_SECONDS):  # callers that waited have their error; a slow file may take a while
        await asyncio.sleep(1.0)
        tasks = [task for task in loop._tasks if task.process is process and not task.done() and task is not here]
        if not tasks:
            break
    inside = wal.committer
    left = {
        "bytes queued": inside.pending_bytes,
        "bytes of segments": inside.space.size_bytes,
        "logs ready": len(inside._machine.ready),
        "logs waiting": len(inside._machine.waiting),
        "waiting for a group": len(inside._decided),
        # Without room they stay in the journal, which stays too.
        "bytes to copy": 0 if full else inside._journal.uncopied_bytes,
        "segments to copy": 0 if full else len(inside._journal.uncopied),
        "topics": len(wal._logs),
        "files open and unsynced": len(open_files),
    }
    for log in logs:
        left[f"batches queued in {log.topic}"] = len(log.pending)
        left[f"readers waiting for {log.topic}"] = len(log._news)
        left[f"sessions being opened in {log.topic}"] = len(log._producers.opening)
    left["tasks"] = 0 if hangs else len(tasks)
    found = {name: count for name, count in left.items() if count}
    if found:
        names = "".join(f"\n  {name}" for name in (*open_files, *(task.get_name() for task in tasks)))
        raise Broken(f"left over behind a clean close: {found}{names}")
