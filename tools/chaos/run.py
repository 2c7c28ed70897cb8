"""Rounds of a chaos run: clients work, something breaks, topics move, all comes to rest, the history is judged."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import Final

import pydanube
from pydanube.errors import DanubeError
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from pydanube.testing.checkers import Violation, check, shortened
from pydanube.testing.history import History, Quiet, to_line
from tools.chaos.clients import Clients, plan
from tools.chaos.cluster import ChaosCluster
from tools.chaos.faults import FAULTS, FaultContext, strike
from tools.chaos.net import Network
from tools.chaos.recorder import Recorder

LEAD_SECONDS: Final = 1.5  # of work before a fault
PATIENCE_SECONDS: Final = 60.0  # between deliveries, once all is well: a heartbeat, and a busy machine
IDLE_POLL_SECONDS: Final = 0.15  # between looks whether all has come to rest
CHAPTER_ROUNDS: Final = 13
STATUS_SECONDS: Final = 1.0
LOG_SECONDS: Final = 15.0  # between status lines that are not on a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    kinds: Sequence[str]
    rounds: int  # of every kind; 0: until the time is over
    minutes: float
    seed: int
    ttl: int
    rejoin: str  # the setting of every broker
    rate: float
    moves: int
    settle_seconds: float
    official: bool
    small: bool
    keep: bool
    directory: Path


@dataclass(slots=True)
class Row:
    """What became of the rounds of one kind."""

    rounds: int = 0
    messages: int = 0
    worst_pause: float = 0.0
    violations: int = 0
    settling: list[float] = field(default_factory=list)


class Run:
    def __init__(self, options: Options, network: Network) -> None:
        self.options = options
        self.cluster = ChaosCluster(options.directory, network, options.ttl, options.rejoin)
        self.table: dict[str, Row] = {kind: Row() for kind in options.kinds}
        self.violations: list[Violation] = []
        self.restarts = self.reopened = 0
        self._network = network
        self._rng = Random(options.seed)
        self._chapters = count(1)
        self._now = "starting"
        self._spent: dict[str, float] = {}  # seconds by what a round does
        self._since = 0.0
        self._rounds = 0
        self._clients: Clients | None = None
        self._recorder: Recorder | None = None

    async def all(self) -> None:
        """Raises ChaosFailed when the harness cannot go on."""
        telling = asyncio.create_task(self._tell())
        try:
            await self.cluster.start()
            schedule = self._schedule()
            for first in schedule:
                await self._chapter(chain([first], islice(schedule, CHAPTER_ROUNDS - 1)))
                if self.violations:
                    break
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            if self.violations:
                self.cluster.keep_data()
            self.cluster.kill()

    def _schedule(self) -> Iterator[str]:
        """Every kind in every pass, in another order each time; or whatever comes until the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 60 * self.options.minutes
        kinds = list(self.options.kinds)
        if self.options.rounds:
            for _ in range(self.options.rounds):
                self._rng.shuffle(kinds)
                yield from kinds
        else:
            while loop.time() < deadline:
                yield self._rng.choice(kinds)

    # --- a chapter ----------------------------------------------------------------------------------------------

    async def _chapter(self, kinds: Iterable[str]) -> None:
        """Some rounds with the same topics and the same clients."""
        async with self._applications() as (client, recorder, clients):
            for kind in kinds:
                history = await self._round(kind, client, recorder, clients)
                if self.violations:
                    self._write(history)
                    return
            await self._verify(recorder)
            if self.violations or self.options.keep:
                self._write(history)
            if self.violations:
                return
            await clients.stop()
            for topic in recorder.topics:
                await client.delete_topic(topic)

    @contextlib.asynccontextmanager
    async def _applications(self) -> AsyncIterator[tuple[pydanube.Client, Recorder, Clients]]:
        number, options = next(self._chapters), self.options
        wanted = plan(number, official=options.official, small=options.small)
        store = EtcdMetadataStore([member.client for member in self.cluster.etcd])
        recorder = self._recorder = Recorder(store, wanted.topics)
        recorder.brokers = self.cluster.numbers()
        watching = asyncio.create_task(recorder.watch())
        urls = [broker.url for broker in self.cluster.brokers]
        numbers = {broker.stream_url: broker.number + 1 for broker in self.cluster.brokers}
        try:
            async with pydanube.connect(self.cluster.url) as client:
                clients = self._clients = Clients(
                    *(client, recorder, wanted, self._network, options.directory, urls, numbers),
                    rate=options.rate,
                    seed=self._rng.randrange(1 << 32),
                )
                try:
                    await clients.start()
                    yield client, recorder, clients
                finally:
                    await clients.stop()
                    self.restarts += sum(max(0, each.starts - 1) for each in clients.applications)
                    self.reopened += clients.reopened
                    self._clients = None
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()

    async def _round(self, kind: str, client: pydanube.Client, recorder: Recorder, clients: Clients) -> History:
        self._rounds += 1
        self._now = kind
        rng = Random(self._rng.randrange(1 << 32))
        row, sent = self.table[kind], recorder.sent
        self._since = recorder.now()
        recorder.worst_pause = 0.0
        recorder.clean = FAULTS[kind].clean
        clients.publish(True)
        await asyncio.sleep(LEAD_SECONDS)
        self._spend("working", recorder)
        victim = self.cluster.host(recorder, rng.choice(recorder.topics)) or rng.choice(self.cluster.brokers)
        async with asyncio.TaskGroup() as group:
            group.create_task(strike(kind, FaultContext(self.cluster, recorder, rng, victim)))
            for _ in range(self.options.moves):
                group.create_task(self._move(rng.choice(recorder.topics), rng.uniform(0.0, 4.0), rng))
        self._spend("breaking", recorder)
        await asyncio.sleep(LEAD_SECONDS)
        clients.publish(False)
        self._spend("working", recorder)
        history = await self._settle(kind, client, recorder, clients)
        row.rounds += 1
        row.messages += recorder.sent - sent
        row.worst_pause = max(row.worst_pause, recorder.worst_pause)
        row.violations += len(self.violations)
        return history

    async def _verify(self, recorder: Recorder) -> None:
        """History in the object store is what its descriptors say."""
        self._now = "verifying"
        for topic in recorder.topics:
            asked = self.cluster.host(recorder, topic) or self.cluster.brokers[0]
            try:
                problems = await self.cluster.problems(topic, asked)
            except (DanubeError, TimeoutError) as error:
                problems = [f"cannot be verified: {str(error) or 'it takes too long'}"]
            self.violations += [Violation("stored_wrong", topic, problem) for problem in problems]

    async def _move(self, topic: str, after_seconds: float, rng: Random) -> None:
        await asyncio.sleep(after_seconds)
        living = self.cluster.living
        if living:
            await self.cluster.move(topic, rng.choice(living))

    async def _settle(self, kind: str, client: pydanube.Client, recorder: Recorder, clients: Clients) -> History:
        """Nothing fails any more: everything must come to rest within the deadline, and then be as promised."""
        self._now = f"{kind}: settling"
        began = recorder.now()
        patience = self.options.settle_seconds
        deadline = began + patience
        unwell = await self._until_well(recorder, deadline)
        quiet_at = recorder.now()
        self._spend("getting well", recorder)
        while not unwell and (behind := await self._behind(clients)):
            self._now = f"{kind}: {behind[:60]}"
            if recorder.now() > deadline:
                unwell = behind
            await asyncio.sleep(IDLE_POLL_SECONDS)
        self._spend("catching up", recorder)
        self._now = f"{kind}: reading"
        try:
            history = await recorder.judged(client, Quiet(PATIENCE_SECONDS, quiet_at))
        except DanubeError as error:
            history = History(sorted(recorder.events, key=lambda event: event.at))
            unwell = unwell or f"the topics cannot be read: {error}"
        self._spend("reading", recorder)
        self._now = f"{kind}: judging"
        self.violations = check(history)
        self._spend("judging", recorder)
        if unwell:
            self.violations.insert(0, Violation("not_settled", "", f"{unwell}, {patience:.0f} s after the fault"))
        self.table[kind].settling.append(recorder.now() - began)
        return history

    def _spend(self, what: str, recorder: Recorder) -> None:
        """The time since the last one was spent so."""
        self._spent[what] = self._spent.get(what, 0.0) + recorder.now() - self._since
        self._since = recorder.now()

    async def _until_well(self, recorder: Recorder, deadline: float) -> str:
        while True:
            unwell = await self.cluster.tend() or await recorder.settled()
            recorder.brokers |= self.cluster.numbers()
            if not unwell or recorder.now() > deadline:
                return unwell
            self._now = f"{self._now.partition(':')[0]}: {unwell[:60]}"
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def _behind(self, clients: Clients) -> str:
        try:
            return clients.waiting() or await clients.behind()
        except DanubeError as error:
            return str(error)

    # --- telling ------------------------------------------------------------------------------------------------

    def _write(self, history: History) -> None:
        history.write(self.options.directory / "history.jsonl")
        if self.violations:
            lines = "".join(to_line(event) + "\n" for event in shortened(history, self.violations))
            (self.options.directory / "shortened.jsonl").write_text(lines)

    async def _tell(self) -> None:
        """One line, all the time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        on_terminal = sys.stdout.isatty()
        planned = len(self.options.kinds) * self.options.rounds
        while True:
            await asyncio.sleep(STATUS_SECONDS if on_terminal else LOG_SECONDS)
            minutes, seconds = divmod(int(loop.time() - began), 60)
            recorder, lag = self._recorder, self._clients.lag if self._clients else 0
            numbers = f"sent {recorder.sent}  received {recorder.received}  lag {lag}" if recorder else ""
            text = f"{minutes:3}:{seconds:02}  round {self._rounds}{f'/{planned}' if planned else ''}  {self._now}"
            line = f"{text}  {numbers}  moved {self.cluster.moved}, not {self.cluster.not_moved}"
            print(f"\r{line[:150]:150}" if on_terminal else line, end="" if on_terminal else "\n", flush=True)

    def report(self) -> list[str]:
        titles = ("fault", "rounds", "messages", "worst pause", "settled in", "violations")
        lines = ["", "{:<16}{:>8}{:>10}{:>13}{:>12}{:>12}".format(*titles)]
        for kind, row in self.table.items():
            settled = f"{max(row.settling, default=0):.1f} s"
            numbers = (row.rounds, row.messages, f"{row.worst_pause:.1f} s", settled, row.violations)
            lines.append("{:<16}{:>8}{:>10}{:>13}{:>12}{:>12}".format(kind, *numbers))
        rounds, messages = (sum(getattr(row, name) for row in self.table.values()) for name in ("rounds", "messages"))
        lines.append(f"{rounds} rounds, {messages} messages checked, topics moved {self.cluster.moved} times")
        if rounds:
            spent = ", ".join(f"{seconds / rounds:.1f} s {what}" for what, seconds in self._spent.items())
            lines.append(f"a round took {sum(self._spent.values()) / rounds:.1f} s: {spent}")
        exits = ", ".join(self.cluster.exits) or "none"
        lines.append(f"moves that could not be: {self.cluster.not_moved}; servers that ended by themselves: {exits}")
        lines.append(f"official clients started again: {self.restarts}; consumers opened again: {self.reopened}")
        return lines
