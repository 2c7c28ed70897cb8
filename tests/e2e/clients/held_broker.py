"""A broker whose log waits as long as a file `held` stands beside its data directory: a disk that does not answer.

When that begins, the event loop does not turn for STOPPED_SECONDS either, as on a machine with too much to do: gRPC
receives in threads of its own, and so all that it is allowed to before any of it is looked at.

python held_broker.py broker --mode standalone --data-dir …        as `danube` itself
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from pydanube.cli.main import main
from pydanube.log.committer import Committer

_commit_group = Committer._commit_group
_HELD = Path(sys.argv[sys.argv.index("--data-dir") + 1]).parent / "held"
STOPPED_SECONDS = 3.0


async def commit_group(self: Committer) -> None:
    if _HELD.exists():
        time.sleep(STOPPED_SECONDS)  # noqa: ASYNC251, it is to stop the loop
    while _HELD.exists():  # noqa: ASYNC110, the file is another process's
        await asyncio.sleep(0.05)
    await _commit_group(self)


Committer._commit_group = commit_group  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
