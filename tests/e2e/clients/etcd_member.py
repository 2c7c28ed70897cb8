"""A process with an etcd member, as a broker is one. Ends on SIGTERM.

etcd_member.py DIRECTORY RAFT_ADDR SEED_NODES PROGRAM
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from pydanube.stores.metadata.etcd import EtcdMember, MemberConfig


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    directory, raft_addr, seed_nodes, program = sys.argv[1:]
    config = MemberConfig(
        directory=Path(directory), raft_addr=raft_addr, seed_nodes=tuple(seed_nodes.split(",")), program=program
    )
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    member = EtcdMember(config)
    await member.start()
    say("ready", pid=member.pid, endpoints=member.endpoints)
    await stopping.wait()
    await member.stop()
    say("stopped")


uvloop.run(main())  # as a broker does
