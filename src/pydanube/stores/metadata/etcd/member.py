"""An etcd member that a broker runs itself, so that brokers with the same seed nodes are a cluster by themselves.

    --seed-nodes a:7650,b:7650,c:7650 --raft-addr a:7650

    peers talk on     the raft address
    clients ask on    the same host, the raft port + 1000: known for every seed node without a request
    name              the raft address

The first start makes the cluster, each member from the same list, in any order. Afterwards the list only says whom to
ask: etcd itself knows its members. A broker that joins later (`join`) is added as a learner through the seed nodes and
promoted when it has caught up.

    start ─► stray member stopped ─► (added as learner) ─► etcd runs ─► majority confirms ─► start returns
                                                            ▲    │ ends
                                                            └────┘ started again, after a growing pause
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydanube.errors import ConfigError, Refused, Unavailable, Unreachable
from pydanube.stores.metadata.etcd import endpoint as etcd
from pydanube.stores.metadata.etcd.calls import CONFIRM
from pydanube.stores.metadata.etcd.cluster import EtcdCluster, Member
from pydanube.stores.metadata.etcd.endpoint import CallFailed, Closed, Endpoint, target
from pydanube.stores.metadata.etcd.member_config import MemberConfig, found_program, split_address
from pydanube.stores.metadata.etcd.process import MemberProcess, last_complaint, take_over
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

log = logging.getLogger(__name__)

RESTART_SECONDS: Final = 0.5  # before the first restart; doubled up to the next
RESTART_SECONDS_MAX: Final = 10.0
STEADY_SECONDS: Final = 60.0  # after which a member that ends is restarted without a pause again
POLL_SECONDS: Final = 0.1
ASK_SECONDS: Final = 1.0
SAY_SECONDS: Final = 10.0  # between two lines about what is waited for
IDENTITY: Final = "member.json"


class EtcdMember:
    """Runs a member from `start` to `stop`. Belongs to one event loop, on a thread that lives as long as the member."""

    def __init__(self, config: MemberConfig) -> None:
        self.config = config
        self.restarts = 0
        self.failure: ConfigError | None = None  # why it ended last, if an operator has to act
        self._members: list[Member] = []
        self._process: MemberProcess | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._ready = False
        self._endpoint = Endpoint(
            config.client_addr(config.raft_addr), None if config.tls is None else config.tls.credentials()
        )

    @property
    def pid(self) -> int | None:
        """Of etcd, while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def endpoints(self) -> list[str]:
        """host:port for clients: this member first, then the others as known at the start or the last `refresh`."""
        urls = [url for member in self._members if not member.is_learner for url in member.client_urls]
        known = [target(url) for url in urls] or [self.config.client_addr(each) for each in self.config.seed_nodes]
        return list(dict.fromkeys([self._endpoint.address, *known]))

    async def start(self) -> None:
        """Returns when the member is a voter and a majority answers, which may take until the others are started.

        Raises ConfigError for what waiting cannot cure. When it is cancelled, the member is stopped.
        """
        program = await asyncio.to_thread(found_program, self.config.program)
        await asyncio.to_thread(self._prepare_directory)
        stray = await asyncio.to_thread(take_over, self.config.directory, self.config.data_argument)
        if stray is not None:
            log.warning("stray etcd member stopped", extra={"pid": stray})
        listen_host = await self._listen_host()
        command = [program, *await self._arguments(listen_host)]
        self._supervision = asyncio.create_task(self._supervise(command), name="etcd member")
        try:
            await self._until_majority()
            await self.refresh()
        except BaseException:
            await self.stop()
            raise
        self._ready = True
        log.info("etcd member ready", extra={"member": self.config.raft_addr, "members": len(self._members)})

    async def stop(self) -> None:
        """Ends etcd, after it has handed over what it leads. Stopping twice is no error."""
        if self._supervision is not None:
            if self._ready:
                await self._hand_over()
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
            self._supervision = None
        await self._endpoint.close()

    async def refresh(self) -> list[str]:
        """Asks who the members are now, and returns `endpoints`."""
        cluster = EtcdCluster(self.endpoints, tls=self.config.tls)
        try:
            self._members = await cluster.members()
        finally:
            await cluster.close()
        return self.endpoints

    async def _hand_over(self) -> None:
        """Lets another lead, if this one does: without a leader the others would wait for an election."""
        cluster = EtcdCluster(self.endpoints, tls=self.config.tls, timeout_seconds=ASK_SECONDS)
        try:
            statuses = await cluster.status()
            if not any(each.is_leader and each.member.name == self.config.raft_addr for each in statuses):
                return
            able = [each for each in statuses if each.healthy and not each.is_leader and not each.member.is_learner]
            if able:
                newest = max(able, key=lambda each: each.raft_applied)
                await self._endpoint.ask(
                    etcd.MOVE_LEADER, pb.MoveLeaderRequest(target_id=newest.member.id), ASK_SECONDS
                )
        except (CallFailed, Closed, Unreachable):
            pass  # the others may be stopping too
        finally:
            await cluster.close()

    # --- before etcd runs ---

    def _has_data(self) -> bool:
        """Whether etcd has begun to vote here. A start that failed leaves other files."""
        return any((self.config.data_directory / "member" / "wal").glob("*.wal"))

    def _prepare_directory(self) -> None:
        """Blocks. Raises ConfigError if the directory is another member's, or another cluster's."""
        config = self.config
        config.directory.mkdir(parents=True, exist_ok=True)
        config.directory.chmod(0o700)
        path = config.directory / IDENTITY
        mine = {"cluster": config.cluster_name, "raft_addr": config.raft_addr}
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            _replace(path, json.dumps(mine))
            return
        except ValueError:
            raise ConfigError("--data-dir", str(path), "it is damaged; bring it back from a backup") from None
        if not self._has_data():
            _replace(path, json.dumps(mine))
            return
        if found != mine:
            raise ConfigError(
                "--data-dir",
                str(config.directory),
                f"it belongs to member {found.get('raft_addr')} of cluster {found.get('cluster')!r}; "
                f"this is {config.raft_addr} of {config.cluster_name!r}",
            )

    async def _arguments(self, listen_host: str) -> list[str]:
        config = self.config
        # etcd that has data does not read how it all began.
        if not config.join or self._has_data():
            seeds = {each: config.url(each) for each in config.seed_nodes}
            return config.arguments(listen_host, seeds, state="new")
        peer_url = config.url(config.raft_addr)
        members = {url: member.name for member in await self._join(peer_url) for url in member.peer_urls}
        named = {config.raft_addr if url == peer_url else name or url: url for url, name in members.items()}
        return config.arguments(listen_host, named, state="existing")

    async def _listen_host(self) -> str:
        """An address, as etcd wants it, where the ports are free.

        The process that has them may be an etcd as well, and answer in place of ours.
        """
        host, port = split_address(self.config.raft_addr)
        host = self.config.listen_host or host
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError("--raft-addr", self.config.raft_addr, f"{host} is not known: {error}") from None
        family, _, _, _, (address, *_) = found[0]
        for name in (self.config.raft_addr, self._endpoint.address):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, split_address(name)[1]))
                except OSError as error:
                    raise self._cannot_listen(name, error.strerror or str(error)) from None
        return f"[{address}]" if family == socket.AF_INET6 else str(address)

    async def _join(self, peer_url: str) -> list[Member]:
        """All members, this one among them, as a learner that has never been started."""
        saying = Saying()
        cluster = EtcdCluster(self._seeds_to_ask(), tls=self.config.tls)
        try:
            while True:
                try:
                    members = await cluster.add_learner(peer_url)
                    break
                except Unavailable as error:
                    saying.say("waiting to join the cluster", why=str(error))
                    await asyncio.sleep(POLL_SECONDS)
                except Refused as error:
                    raise ConfigError("--join", self.config.raft_addr, str(error)) from None
        finally:
            await cluster.close()
        if any(member.name for member in members if peer_url in member.peer_urls):
            raise ConfigError(
                "--join",
                self.config.raft_addr,
                f"it is a member already, and its data is not in {self.config.directory}; bring the data back, or "
                "remove the member (danube admin cluster remove-node) and start again",
            )
        return members

    def _seeds_to_ask(self) -> list[str]:
        others = [each for each in self.config.seed_nodes if each != self.config.raft_addr]
        return [self.config.client_addr(each) for each in others or self.config.seed_nodes]

    # --- while etcd runs ---

    async def _supervise(self, command: Sequence[str]) -> None:
        """Runs etcd until cancelled. Before the first majority, raises ConfigError if another start would end alike."""
        loop = asyncio.get_running_loop()
        pause = RESTART_SECONDS
        while True:
            began = loop.time()
            code, said = await self._run(command)
            failure = self.failure = self._explained(said)
            if failure is not None and not self._ready:
                raise failure
            if loop.time() - began > STEADY_SECONDS:
                pause = RESTART_SECONDS
            why = last_complaint(said) if failure is None else str(failure)
            log.error("etcd member ended", extra={"exit_code": code, "why": why, "restart_seconds": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_SECONDS_MAX)
            self.restarts += 1

    async def _run(self, command: Sequence[str]) -> tuple[int | None, str]:
        """The exit code and the last words of an etcd that was not told to end."""
        try:
            process = self._process = MemberProcess(self.config.directory, command)
        except OSError as error:  # no memory, no handles: time may help
            return None, str(error)
        try:
            code = await process.ended()
        finally:
            await process.stop()
            self._process = None
        return code, await asyncio.to_thread(process.said)

    def _explained(self, said: str) -> ConfigError | None:
        """Why etcd ended, if an operator has to act."""
        config = self.config
        taken = re.search(r"listen tcp (\S+): bind: ([a-z ]+)", said)
        if taken is not None:
            return self._cannot_listen(taken[1], taken[2])
        if "has already been bootstrapped" in said:
            return ConfigError(
                "--data-dir",
                str(config.directory),
                f"it is empty, and {config.raft_addr} is a member of a cluster that runs; bring the data back, or "
                "remove the member (danube admin cluster remove-node) and start with --join",
            )
        if "permanently removed" in said:
            return ConfigError(
                "--data-dir",
                str(config.directory),
                "its member was removed from the cluster; empty the directory, and to come back start with --join",
            )
        return None

    def _cannot_listen(self, address: str, why: str) -> ConfigError:
        return ConfigError("--raft-addr", self.config.raft_addr, f"etcd cannot listen on {address}: {why.lower()}")

    # --- until a majority answers ---

    async def _until_majority(self) -> None:
        saying = Saying(first_after=2.0)
        while not await self._is_voter_with_majority():
            assert self._supervision is not None
            if self._supervision.done():
                self._supervision.result()  # raises
            if saying.due():
                saying.say("waiting for the metadata store", **await self._whom_we_wait_for())
            await asyncio.wait([self._supervision], timeout=POLL_SECONDS)

    async def _is_voter_with_majority(self) -> bool:
        with contextlib.suppress(CallFailed, Closed, Unavailable):
            status = await self._endpoint.ask(etcd.STATUS, pb.StatusRequest(), ASK_SECONDS, require_leader=False)
            if status.is_learner:
                await self._promote(status.header.member_id)
            await self._endpoint.ask(etcd.RANGE, CONFIRM, ASK_SECONDS)
            return True
        return False

    async def _promote(self, member_id: int) -> None:
        """Raises Unavailable until the member has caught up."""
        cluster = EtcdCluster(self._seeds_to_ask(), tls=self.config.tls)
        try:
            await cluster.promote(member_id)
        except Refused:
            return  # another broker did it, and this member has yet to learn of it
        finally:
            await cluster.close()
        log.info("etcd member promoted", extra={"member": self.config.raft_addr})

    async def _whom_we_wait_for(self) -> dict[str, str]:
        others = [each for each in self.config.seed_nodes if each != self.config.raft_addr]
        answers = await asyncio.gather(*(_listens(each) for each in others))
        absent = [each for each, answered in zip(others, answers, strict=True) if not answered]
        facts = {"waiting_for": ",".join(absent) or "an election"}
        if self._process is not None and "cluster ID mismatch" in await asyncio.to_thread(self._process.said):
            facts["why"] = "a peer belongs to another cluster: are --seed-nodes and cluster_name the same everywhere?"
        return facts


class Saying:
    """One line now and then about something that takes long."""

    def __init__(self, first_after: float = 0.0) -> None:
        self._next = asyncio.get_running_loop().time() + first_after

    def due(self) -> bool:
        return asyncio.get_running_loop().time() >= self._next

    def say(self, phrase: str, **facts: str) -> None:
        if self.due():
            log.info(phrase, extra=facts)
            self._next = asyncio.get_running_loop().time() + SAY_SECONDS


async def _listens(address: str) -> bool:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            _, writer = await asyncio.open_connection(*split_address(address))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)
