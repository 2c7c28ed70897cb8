"""One random life of a log, from a seed: producers, readers, retention, and every way a disk can fail them.

    outcome = run_history(seed)

A history is several boots of one process on one FaultyDisk. In each boot the log is recovered and every promise is
checked against a model (log_model.py); then producers and readers work until the boot ends by a clean close, a
kill or a power cut, at any moment, also in the middle of recovery. At the end the disk is well again: everything
that is still unacknowledged must get through, and the log must hold exactly what it promised.

Producers are clients in other processes. They survive, remember what was not acknowledged, and send it again,
unchanged and in order. Everything that happens is drawn from the seed and goes into `digest`, so two runs of one
seed can be compared.

What is wrong with the disk differs. In some histories calls fail at random; in others the disk is well but for one or
two calls that were chosen (`Aim`), or has too few descriptors, or one file is slow. Limits are small
(`log_pressure.py`), what happens concurrently with the producers is in `log_troubles.py`, and checks that need no crash
are in `log_checks.py`.

A share of the histories flips bits in what is durable. Then nothing has to be there any more, but what is read must
be right, and what is missing must have been named.
"""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

from pydanube.errors import (
    DataDamaged,
    DiskFailed,
    DiskFull,
    LogDamaged,
    LogStopped,
    OffsetOutOfRange,
    OffsetTaken,
    TailUnproven,
)
from pydanube.formats.batch import Batch, topic_hash
from pydanube.log import zero_fill
from pydanube.log.committer import Committer
from pydanube.log.layout import LOCK
from pydanube.log.log_reading import LogReading
from pydanube.log.verify import verify
from pydanube.log.wal import ClosedLog, TopicLog, Wal
from pydanube.ports import Disk
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.loop import Deadlock, Livelock, Process, ProcessDied, SimClock, SimLoop, SimWork
from pydanube.testing.process_disk import ProcessDisk
from tools.sim.coverage import counting
from tools.sim.log_checks import check_ended, stop_is_justified
from tools.sim.log_clients import IdempotentProducer, PlainProducer
from tools.sim.log_model import Audit, Broken, TopicModel
from tools.sim.log_pressure import Pressure, draw_aim, limits_met
from tools.sim.log_troubles import Troubles

# How long the last producers may take on a disk that is well again.
DRAIN_SECONDS_MAX: Final = 60.0
STEPS_MAX: Final = 600_000
FLIP_SHARE: Final = 0.1
CROWDED_SHARE: Final = 0.02  # histories with dozens of topics
# A process that does not answer for so long is killed by its supervisor.
HANG_SECONDS: Final = 30.0
# The public operations of the log: see coverage.py.
OPERATIONS: Final = (Wal, TopicLog, LogReading, ClosedLog, Committer)


@dataclass(slots=True)
class Outcome:
    """What one history did. `failure` is None if every promise held."""

    seed: int
    failure: str | None = None
    digest: str = ""
    acknowledged: int = 0
    checked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)  # operations of the log, and how often they were called
    events: list[str] = field(default_factory=list)


def run_history(seed: int, *, wrap_disk: Callable[[Disk], Disk] | None = None, keep_events: bool = False) -> Outcome:
    """Lives one history. `wrap_disk` stands between the log and its disk, to plant defects."""
    outcome = Outcome(seed)
    rng = Random(seed)
    loop = SimLoop(  # type: ignore[abstract]
        Random(rng.randrange(2**62)), shuffled=rng.random() < 0.8, steps_max=STEPS_MAX
    )
    history = History(rng, outcome, wrap_disk, keep_events)
    try:
        with history.pressure.applied(), counting(outcome.met, *OPERATIONS):
            loop.run_until_complete(history.live())
        for problem in loop.problems:
            error = problem.get("exception")
            raise Broken(f"an error that nobody took: {problem['message']}: {error!r}") from error
    except (Broken, Deadlock, Livelock) as broken:
        outcome.failure = f"{type(broken).__name__}: {broken}"
    except BaseExceptionGroup as group:
        outcome.failure = "\n".join(_describe(error) for error in _leaves(group))
    except asyncio.CancelledError as cancelled:
        outcome.failure = str(cancelled)
    except Exception as error:
        outcome.failure = _describe(error)
    finally:
        loop.close()
    history.finish()
    return outcome


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _describe(error: BaseException) -> str:
    if isinstance(error, Broken | Deadlock | Livelock):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).strip()


@contextmanager
def small_constants() -> Iterator[None]:
    """Zeros ahead are for speed on real disks; here a few sectors of them do what half a mebibyte would."""
    saved = zero_fill.FILL_BYTES, zero_fill._ZEROS
    zero_fill.FILL_BYTES, zero_fill._ZEROS = 2048, bytes(2048)  # type: ignore[misc]
    try:
        yield
    finally:
        zero_fill.FILL_BYTES, zero_fill._ZEROS = saved  # type: ignore[misc]


# --- one boot ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Boot:
    """One process's life with the log open."""

    number: int
    process: Process
    disk: ProcessDisk
    wal: Wal | None = None
    logs: dict[str, TopicLog] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    told: str = ""  # why the log has stopped
    opening: asyncio.Task[TopicLog] | None = None  # a topic, while the others are used


class History:
    """The world around one log."""

    def __init__(
        self,
        rng: Random,
        outcome: Outcome,
        wrap_disk: Callable[[Disk], Disk] | None,
        keep_events: bool,
    ) -> None:
        self.rng = rng
        self.outcome = outcome
        self.flips = rng.random() < FLIP_SHARE
        self.quiet = False  # the disk is well and producers only finish what they have
        self.boot: Boot | None = None
        self._wrap_disk = wrap_disk
        self._keep_events = keep_events
        self._digest = hashlib.blake2b(digest_size=16)
        self._booted: list[asyncio.Future[None]] = []
        self._numbers = 0
        self._epoch = 0
        self._boots = 0
        self._newest: Boot | None = None
        self.leased = True  # else no receipt may be given
        # What is wrong with the disk: calls fail at random, or those that are aimed at, or descriptors are few.
        self._trouble = rng.choice(("rates", "rates", "rates", "aims", "aims", "aims", "aims", "descriptors"))
        self.disk = FaultyDisk(
            Random(rng.randrange(2**62)),
            faults=Faults(delays=0.01, delay_seconds_max=0.02),
            sparse=rng.random() < 0.25,
        )
        self.disk.strike = self._struck
        self._work = SimWork(Random(rng.randrange(2**62)))
        self.pressure = Pressure.draw(rng)
        self._config = self.pressure.config
        self.sessions_end = self._config.session_seconds < 1  # who waits a moment may be forgotten
        # A clock that jumps between two processes may end a session early, but not before this one has watched it.
        self.session_seconds = min(self._config.session_seconds, self._config.watched_seconds)
        self.crowded = rng.random() < CROWDED_SHARE
        self.models: list[TopicModel] = []
        for number in range(rng.randint(20, 60) if self.crowded else rng.choice((1, 2, 2, 3, 4))):
            topic = f"/default/t{number}"
            durability = "os" if rng.random() < 0.15 else "fsync"
            self.models.append(TopicModel(topic, topic_hash(topic), durability))
            self.models[-1].reserves = rng.random() < 0.2
        # How long a boot lasts, and what producers wait between two batches: some histories are crowded, in
        # others there is time for what happens in the background.
        self.boot_seconds = rng.choice((0.005, 0.02, 0.05, 0.05, 0.5, 2.0))
        self.pace_seconds = self.boot_seconds / rng.choice((4, 10, 20))
        self.together = rng.random() < 0.5
        self.tick_seconds = min(0.1, max(0.003, self.pace_seconds))
        self._troubles = Troubles(self)

    def say(self, event: str) -> None:
        """One line of the history."""
        line = f"{asyncio.get_running_loop().time():.6f} {event}"
        self._digest.update(line.encode())
        if self._keep_events:
            self.outcome.events.append(line)

    def finish(self) -> None:
        outcome = self.outcome
        outcome.digest = self._digest.hexdigest()
        outcome.counts.update(self.disk.counts)
        outcome.counts["aims: " + self._trouble] += 1
        outcome.acknowledged = outcome.counts.pop("acknowledged", 0)
        outcome.checked = sum(model.checked for model in self.models)

    def fail(self, error: BaseException | str) -> None:
        """Ends the history: an error outside of any awaited call."""
        assert self._main is not None
        self._main.cancel(error if isinstance(error, str) else _describe(error))

    def excuse(self, boot: Boot, error: Exception) -> None:
        """A call of the log has failed: then one of the disk has, or another task had closed or stopped it."""
        if isinstance(error, DiskFull | DiskFailed) and not boot.disk.told:
            raise Broken(f"a disk that is well was said to have failed: {error!r}") from error

    async def rest(self, rng: Random) -> None:
        """What a producer waits between two batches. If all wait for the same moment, groups have many topics."""
        if self.together:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self.tick_seconds - now % self.tick_seconds)
        else:
            await asyncio.sleep(rng.random() * self.pace_seconds)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- the story ---

    async def live(self) -> None:
        self._clock = SimClock()
        self._main = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(client.run()) for client in self._clients()]
                boots = self.rng.choice((1, 2)) if self.crowded else self.rng.choice((1, 2, 2, 3, 4))
                for left in reversed(range(boots)):
                    # The last one may go on, on a disk that is well again.
                    await self._one_boot(goes_on=left == 0 and not self.flips and self.rng.random() < 0.4)
                if self.flips:
                    await self._flip_and_check()
                else:
                    await self._last_boot(clients)
                for client in clients:
                    client.cancel()
        except BaseExceptionGroup as group_error:
            # The first error is the one that matters; the rest follows from it.
            raise next(_leaves(group_error)) from None

    def _clients(self) -> list[IdempotentProducer | PlainProducer]:
        rng = self.rng
        clients: list[IdempotentProducer | PlainProducer] = []
        for model in self.models:
            if self.crowded:
                clients.append(IdempotentProducer(self, model, 1, Random(rng.randrange(2**62))))
                continue
            for producer_id in range(1, 1 + rng.choice((0, 1, 1, 1, 2))):
                clients.append(IdempotentProducer(self, model, producer_id, Random(rng.randrange(2**62))))
            for _ in range(rng.choice((0, 1, 1)) if clients else 1):
                clients.append(PlainProducer(self, model, Random(rng.randrange(2**62))))
        return clients

    async def _one_boot(self, *, goes_on: bool) -> None:
        """Recovers, works for a while, and ends in one of the ways a process ends, if it does not go on."""
        rng = self.rng
        self._set_faults()
        boot = await self._start(may_crash=True)
        worker = asyncio.create_task(self._troubles.disturb(boot))
        waiters = [asyncio.create_task(boot.ended.wait()), worker]
        # Some boots end while their first files and directories are being made.
        lasts = self.boot_seconds if rng.random() < 0.8 else rng.random() * 0.003
        await asyncio.wait(waiters, timeout=lasts, return_when="FIRST_COMPLETED")
        for task in waiters:
            task.cancel()
        for result in await asyncio.gather(*waiters, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        assert boot.wal is not None
        if goes_on and not boot.ended.is_set() and not any(log.closed for log in boot.logs.values()):
            return
        self.say(f"boot {boot.number} is over")
        ending = rng.choice(("close", "kill", "power", "power", "closing"))
        if ending in ("close", "closing"):
            await self._close(boot, crash_after=rng.random() * 0.01 if ending == "closing" else None)
        # A close may have failed half-way, or left nothing to do.
        self._end(boot, power=ending == "power" or (ending != "kill" and rng.random() < 0.5))
        if rng.random() < 0.2:
            self._clock.jump(rng.uniform(-1e5, 1e5))
            self.outcome.counts["clock jumps"] += 1

    def _set_faults(self) -> None:
        """What is wrong with the disk in this boot."""
        rng = self.rng
        faults = self.disk.faults
        self._heal()
        if self.flips:
            return
        if self._trouble == "rates":
            faults.sync_fails = rng.choice((0.0, 0.0, 0.0, 0.02, 0.1))
            faults.directory_sync_fails = rng.choice((0.0, 0.0, 0.05)) if faults.sync_fails else 0.0
            faults.write_fails = faults.sync_fails * rng.choice((0.0, 0.0, 0.3))
            faults.read_fails = faults.sync_fails * rng.choice((0.0, 0.0, 0.1))
        elif self._trouble == "aims":
            self.disk.aims += [draw_aim(rng, self.boot_seconds) for _ in range(rng.choice((1, 1, 1, 2)))]
        elif rng.random() < 0.7:
            faults.open_files_max = rng.choice((None, 1, 2, 5))
            faults.no_descriptor = rng.choice((0.01, 0.05, 0.2))
        faults.delays = rng.choice((0.0, 0.01, 0.1))
        if rng.random() < 0.1:
            faults.slow = rng.choice((".wal", "journal/", self.models[0].topic))
            faults.slow_seconds_max = rng.choice((0.005, 0.05))
        if rng.random() < 0.2:
            self.disk.capacity_bytes = self.disk.used_bytes + rng.randrange(rng.choice((9_000, 60_000)))
            faults.names_need_space = rng.random() < 0.3
            faults.overwrites_need_space = rng.random() < 0.2

    def _heal(self) -> None:
        faults = self.disk.faults
        faults.sync_fails = faults.directory_sync_fails = faults.write_fails = faults.read_fails = 0.0
        faults.slow, faults.open_files_max, faults.no_descriptor = "", None, 0.0
        faults.names_need_space = faults.overwrites_need_space = False
        self.disk.capacity_bytes = None
        self.disk.aims.clear()

    async def _last_boot(self, clients: list[asyncio.Task[None]]) -> None:
        """The disk is well: what is unacknowledged gets through, and a clean close keeps it all."""
        self.quiet = True
        self._heal()
        boot = self.boot
        if boot is not None:
            self.outcome.counts["boots that went on"] += 1
            self.say(f"boot {boot.number} goes on")
            for model in self.models:
                if model.reserves:
                    boot.process.run(self.reserve, boot.logs[model.topic], model)
            if not await self._drained(boot, clients):
                self._end(boot, power=self.rng.random() < 0.5)
                boot = None
        if boot is None:
            boot = await self._start(may_crash=False)
            if not await self._drained(boot, clients):
                raise Broken("the log stops on a disk that is well")
        await self._close(boot, crash_after=None)
        self._end(boot, power=self.rng.random() < 0.5)
        boot = await self._start(may_crash=False)
        await self._close(boot, crash_after=None)

    async def _drained(self, boot: Boot, clients: list[asyncio.Task[None]]) -> bool:
        """Waits until the clients have got everything through. False if the process has to be started again."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop) and boot.wal is not None
        until = loop.time() + DRAIN_SECONDS_MAX
        ended = asyncio.create_task(boot.ended.wait())
        try:
            while not all(client.done() for client in clients):
                if ended.done():
                    return False
                if loop.time() > until:
                    if boot.disk.hangs:
                        return False  # a call that never answers: the process is restarted
                    raise Broken("producers are stuck on a disk that is well:\n" + "\n".join(loop.waiting()))
                late = [client for client in clients if not client.done()]
                await asyncio.wait([*late, ended], timeout=0.05, return_when="FIRST_COMPLETED")
                if boot.wal.full is not None:
                    with suppress(TimeoutError):  # of a call that hangs
                        async with asyncio.timeout(5.0):
                            await self._troubles.make_room(boot)
        except ProcessDied:
            return False
        finally:
            ended.cancel()
        return not boot.ended.is_set()

    # --- starting, checking, ending ---

    async def _start(self, *, may_crash: bool) -> Boot:
        """A process with the log open and every promise checked. A crash on the way starts over."""
        rng = self.rng
        for attempt in range(1000):
            if attempt == 8:
                self._heal()
            assert attempt < 30, "the log cannot be opened on a disk that is well"
            self._boots += 1
            disk = self.disk.process(pid=self._boots)
            boot = self._newest = Boot(self._boots, Process(f"boot {self._boots}"), disk)
            self.leased = True
            self.say(f"boot {boot.number}")
            if rng.random() < 0.1 and self.disk.capacity_bytes is None:
                await self._verify_first(boot)
            crash: asyncio.TimerHandle | None = None
            if may_crash and attempt < 3 and rng.random() < 0.3:
                delay = rng.random() * rng.choice((0.001, 0.01, 0.05))
                power = rng.random() < 0.6
                crash = asyncio.get_running_loop().call_later(delay, self._end, boot, power)
            patience = asyncio.get_running_loop().call_later(HANG_SECONDS, self._end, boot, False)
            try:
                await boot.process.call(self._open(boot))
            except ProcessDied:
                continue
            except (DiskFull, DiskFailed, LogStopped) as error:
                self.excuse(boot, error)
                self.say(f"not opened: {error!r}")
                self._end(boot, power=rng.random() < 0.3)
                if self.disk.capacity_bytes is not None:
                    self.disk.capacity_bytes += rng.randrange(20_000)
                continue
            finally:
                patience.cancel()
                if crash is not None:
                    crash.cancel()
            self.boot = boot
            waiting, self._booted = self._booted, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
            return boot
        raise AssertionError("unreachable")

    async def _open(self, boot: Boot) -> None:
        disk: Disk = boot.disk if self._wrap_disk is None else self._wrap_disk(boot.disk)
        wal = boot.wal = await Wal.open(
            disk,
            self._clock,
            self._work,
            self._config,
            may_answer=lambda: self.leased,
            on_stopped=lambda error: self._judge_stop(boot, error),
            why_not_freed=lambda: "nobody dropped anything",
        )
        assert wal._task is not None
        wal._task.add_done_callback(self._committer_ended)
        if wal.problems and not self.flips:
            raise Broken(f"journals said to be damaged: {wal.problems}")
        for model in self.models:
            log = boot.logs[model.topic] = await self.open_topic(wal, model)
            if self.rng.random() < 0.5:  # a producer waits to publish
                self._troubles.prepare_soon(boot, log)

    def _judge_stop(self, boot: Boot, error: LogStopped) -> None:
        boot.told = str(error)
        synced = [model for model in self.models if model.durability == "fsync"]
        one = len(synced) == len(self.models) == 1
        if not stop_is_justified(boot.disk.told, one_synced_topic=one):
            self.fail(f"Broken: the log stopped without need ({error}); it was told of {boot.disk.told}")

    async def _verify_first(self, boot: Boot) -> None:
        faults = self.disk.faults
        read_fails, faults.read_fails = faults.read_fails, 0.0
        aims, self.disk.aims = self.disk.aims, []
        no_descriptor, faults.no_descriptor = faults.no_descriptor, 0.0
        await boot.process.call(self._verify(boot.disk))
        faults.read_fails, self.disk.aims, faults.no_descriptor = read_fails, aims, no_descriptor

    async def _verify(self, disk: ProcessDisk) -> bool:
        """`danube log verify` says that all is well and changes nothing. Returns whether it had nothing to say."""
        before = {path: self.disk.content(path) for path in self.disk.paths() if path != LOCK}
        report = await verify(disk, self._clock, self._work)
        after = {path: self.disk.content(path) for path in self.disk.paths() if path != LOCK}
        if before != after:
            raise Broken("verify changed the directory")
        self.outcome.counts["verifications"] += 1
        if not self.flips:
            safe = {model.topic for model in self.models if model.durability == "fsync"}
            problems = [*report.problems]
            for topic in report.topics:
                if topic.topic in safe:
                    problems += topic.problems
            if problems:
                raise Broken(f"verify found {problems}")
        return not report.notes and report.ok and not any(topic.notes for topic in report.topics)

    def _committer_ended(self, task: asyncio.Task[None]) -> None:
        """It ends when it is cancelled, or when it has stopped; an error would leave every producer waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(f"the committer died: {_describe(error)}")

    async def open_topic(self, wal: Wal, model: TopicModel) -> TopicLog:
        rng = self.rng
        self._epoch += 1
        start: int | None = None
        if rng.random() < 0.03:  # another broker had the topic in between
            start = model.end + rng.randrange(1, 50)
        try:
            try:
                log = await self._topic(wal, model, start)
            except OffsetTaken:  # by a batch that was never acknowledged
                log = await self._topic(wal, model, None)
        except TailUnproven as error:
            if model.durability == "fsync":
                raise Broken(f"an end that nothing vouches for: {error}") from error
            start = max(model.end, error.head) + rng.randrange(50)
            log = await self._topic(wal, model, start)
        if model.durability == "fsync" and log.recovered.damage:
            raise Broken(f"damage where none was done: {log.recovered.damage}")
        await self._audit(log, model)
        if model.reserves:
            self.reserve(log, model)
        model.may_lose = False
        model.end = max(model.end, log.head)
        self.say(f"open {model.topic} epoch {log.epoch} [{log.first_offset}, {log.head})")
        return log

    def reserve(self, log: TopicLog, model: TopicModel) -> None:
        """Offsets are given out only below a reservation, which must be extended in time."""
        model.reservations.append(1 << 40 if self.quiet else log.head + self.rng.randrange(200))
        log.reserve(model.reservations[-1])

    async def _topic(self, wal: Wal, model: TopicModel, start: int | None) -> TopicLog:
        log = await wal.topic(model.topic, epoch=self._epoch, start_offset=start, durability=model.durability)
        if start is not None:
            model.starts.add(start)
        return log

    async def _audit(self, log: TopicLog, model: TopicModel) -> None:
        """Reads everything and compares it."""
        audit = Audit(model, log.first_offset, log.head)
        reader = log.reader(log.first_offset)
        bytes_max = self.rng.choice((1, 1000, 1 << 20))
        while audit.next < log.head:
            try:
                audit.take(await reader.read(bytes_max))
            except OffsetOutOfRange as error:
                audit.hole(min(error.first, log.head))
                reader = log.reader(audit.next)
            except LogDamaged as error:
                excused = model.may_lose or model.is_damaged or self.disk.counts["failed syncs"]
                if model.durability != "os" or not excused:
                    raise Broken(f"damage where none was done ({model.durability}): {error}") from error
                model.is_damaged = True
                self.outcome.counts["os topics with damage after a power cut"] += 1
                audit.unreadable(max(audit.next + 1, min(error.end or log.head, log.head)))
                reader = log.reader(audit.next)
        audit.done()

    def _end(self, boot: Boot, power: bool) -> None:
        """The process is gone. Its ports are dead first, so that nothing of it can tidy up."""
        if not boot.process.alive:
            return
        self.say(f"end {boot.number} {'power' if power else 'kill'}")
        if boot.wal is not None:
            limits_met(boot.wal, self.outcome.counts)
        if power:
            self.disk.crash()
        else:
            self.disk.kill(boot.disk)
        boot.process.kill()
        boot.ended.set()
        if self.boot is boot:
            self.boot = None
        for model in self.models:
            if model.durability == "os" and (power or self.disk.faults.sync_fails):
                model.may_lose = True

    def _struck(self, process: ProcessDisk, power: bool) -> None:
        boot = self._newest
        assert boot is not None and boot.disk is process
        self._end(boot, power)

    async def _close(self, boot: Boot, *, crash_after: float | None) -> None:
        """Closes cleanly, unless the process dies on the way."""
        self.say(f"close {boot.number}")
        assert boot.wal is not None
        for model in self.models:
            # A sync that fails may drop pages that were never promised to be safe, however the process ends.
            if model.durability == "os" and self.disk.faults.sync_fails:
                model.may_lose = True
        if crash_after is not None:
            power = self.rng.random() < 0.6
            asyncio.get_running_loop().call_later(crash_after, self._end, boot, power)
        if self.boot is boot:
            self.boot = None
        patience = asyncio.get_running_loop().call_later(HANG_SECONDS, self._end, boot, False)
        try:
            if boot.opening is not None and not boot.opening.done():
                await asyncio.wait([boot.opening], timeout=HANG_SECONDS)  # not opened while it is being closed
            await boot.process.call(boot.wal.close())
            if boot.wal.committer.stopped is None:
                logs = list(boot.logs.values())
                open_files, hangs = self._open_files(boot), boot.disk.hangs
                full = any(told.why in ("ENOSPC", "EMFILE") for told in boot.disk.told)
                await boot.process.call(
                    check_ended(boot.wal, logs, boot.process, open_files=open_files, hangs=hangs, full=full)
                )
        except ProcessDied:
            return
        except (DataDamaged, DiskFull) as error:
            self.say(f"not closed: {error!r}")
            self.excuse(boot, error)
            if self.quiet and boot.number == self._boots and not boot.disk.told:
                raise Broken(f"a clean close fails on a disk that is well: {error!r}") from error
            return
        finally:
            patience.cancel()
        limits_met(boot.wal, self.outcome.counts)
        boot.process.kill()
        self.disk.kill(boot.disk)
        self.disk.counts["kills"] -= 1
        self.outcome.counts["clean closes"] += 1
        boot.ended.set()

    def _open_files(self, boot: Boot) -> list[str]:
        """Files that still keep a descriptor, though nothing failed. Durability os leaves the syncing to the kernel."""
        synced = all(model.durability == "fsync" for model in self.models)
        return boot.disk.open_files if synced and not boot.disk.told else []

    async def running(self) -> Boot:
        """The boot that is up, once there is one."""
        while self.boot is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._booted.append(waiter)
            await waiter
        return self.boot

    def stopped(self, boot: Boot) -> None:
        """A client got LogStopped: the process is restarted."""
        if not boot.ended.is_set():
            self.outcome.counts["logs stopped"] += 1
            self.say(f"stopped {boot.number}")
            boot.ended.set()

    # --- flipped bits ---

    async def _flip_and_check(self) -> None:
        """Flips bits of what is durable; then nothing wrong may be served, and nothing may be missing unnamed."""
        rng = self.rng
        self._heal()
        paths = [path for path in self.disk.paths() if path.startswith(("wal/", "journal/"))]
        flipped: set[str] = set()
        for path in rng.sample(paths, min(len(paths), rng.choice((1, 1, 2, 3)))):
            durable = self.disk.durable(path)
            if durable:
                self.disk.flip(path, rng.randrange(len(durable)), rng.randrange(8))
                self.say(f"flip {path}")
                flipped.add(path)
        self._boots += 1
        boot = Boot(self._boots, Process("flipped"), self.disk.process(pid=self._boots))
        await boot.process.call(self._open_flipped(boot, flipped))
        self._end(boot, power=False)

    async def _open_flipped(self, boot: Boot, flipped: set[str]) -> None:
        clean = await self._verify(boot.disk)
        wal = await Wal.open(boot.disk, self._clock, self._work, self._config)
        kept = [path for path in self.disk.paths() if path.startswith("journal/") and path.endswith(".torn")]
        journal_named = bool(wal.problems or kept)
        for model in self.models:
            self._epoch += 1
            unproven = False
            try:
                log = await wal.topic(model.topic, epoch=self._epoch, durability=model.durability)
            except TailUnproven as error:
                unproven = True
                log = await self._open_unproven(wal, model, error.head)
            except LogDamaged as error:
                self.say(f"refused: {error}")
                self.outcome.counts["flips found"] += 1
                continue
            report = log.recovered
            named = journal_named or unproven or bool(report.damage or report.torn)
            lost = await self._audit_flipped(log, model, named)
            if lost and clean and not model.may_lose:
                raise Broken(f"{lost} is gone after a bit flip and verify had nothing to say")
        await wal.close()

    async def _open_unproven(self, wal: Wal, model: TopicModel, head: int) -> TopicLog:
        """Opens with a start offset from outside; without one, a second try must be refused like the first."""
        try:
            await wal.topic(model.topic, epoch=self._epoch, durability=model.durability)
        except TailUnproven:
            start = max(model.end, head)
            return await wal.topic(model.topic, epoch=self._epoch, durability=model.durability, start_offset=start)
        raise Broken(f"the end of {model.topic} was unproven and is believed at the second try")

    async def _audit_flipped(self, log: TopicLog, model: TopicModel, named: bool) -> str | None:
        """Reads what can be read. What cannot be must be named: by the report, or by the read.

        Returns the name of a batch that was lost.
        """
        found: set[int] = set()
        offset = min([log.first_offset, *model.stored])
        while offset < log.head:
            try:
                batches: list[Batch] = await log.read(offset)
                for batch in batches:
                    found.add(model.read(batch))
                offset = batches[-1].header.end_offset
            except OffsetOutOfRange as error:
                offset = max(offset + 1, error.first)
            except LogDamaged as error:
                named = True
                offset = max(offset, error.first) + 1
        missing = [
            number
            for number, first in model.acknowledged.items()
            if number not in found
            and first + model.sent[number].rows > model.truncated_before
            and not model.is_dropped(first)
        ]
        if missing and not named and not model.may_lose:
            raise Broken(f"{model._name(missing[0])} is gone after a bit flip and no report says so")
        self.outcome.counts["flips found" if named else "flips that hit nothing"] += 1
        return model._name(missing[0]) if missing else None
