"""The log and its adapter on a real directory, with every power cut that the recorded calls would have allowed.

The simulator's disk is a model. Here the calls that FileDisk makes to the operating system are recorded, cut off
anywhere, and whatever of them was not synced survives in part; then the real log must recover on real files, and hold
all that it had acknowledged. The same defects that the simulator finds must be found here, and those of the adapter,
which the simulator cannot see.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from pydanube.errors import ConfigError, DiskFailed, LogDamaged, LogStopped, OffsetOutOfRange, Refused, TailUnproven
from pydanube.formats.batch import topic_hash
from pydanube.log.wal import TopicLog, Wal, WalConfig
from pydanube.ports import Write
from pydanube.stores.disk import descriptors, file_writer
from pydanube.stores.disk.file_names import FileNames
from pydanube.stores.disk.file_writer import FileWriter
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.sim.planted_log import PLANTED, Plant, exchange
from tests.sim.recorded_disk import Recorder, Replay, Step
from tools.sim.log_model import Audit, Broken, Sent, TopicModel
from tools.sim.log_pressure import Pressure

TOPICS = ("/default/a", "/default/b", "/default/c")
LIVES = 4  # of one directory, each ended by a kill or a power cut
KILLED = 0.4  # of the lives: what was written is still there, and is not safe

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# --- a log, recorded ---


class Known:
    """One topic, as its clients know it: what was promised, and what an idempotent producer has no answer for."""

    def __init__(self, topic: str) -> None:
        self.model = TopicModel(topic, topic_hash(topic), "fsync")
        self.session: int | None = None
        self.next_sequence = 0
        self.unacked: dict[int, Sent] = {}  # by number, in order

    def learn(self, kind: str, *rest: Any) -> None:
        if kind == "asks for a session":  # from here on the old one may be fenced
            self.session = None
            self.unacked.clear()
        elif kind == "has a session":
            self.session, self.next_sequence = rest[0], 0
        elif kind == "sent":
            sent: Sent = rest[0]
            self.model.sent[sent.number] = sent
            if sent.batch.header.producer_id:
                self.unacked[sent.number] = sent
                self.next_sequence += sent.rows
        elif kind == "acknowledged":
            self.model.receipt(*rest)
            self.unacked.pop(rest[0].number, None)
        elif kind == "seen":
            self.model.read(rest[0])
        elif kind == "truncates":
            self.model.truncated_before = max(self.model.truncated_before, rest[0])


LEARNT = ("asks for a session", "has a session", "sent", "acknowledged", "seen", "truncates")


class World:
    """One directory over several lives, and what its log has promised."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.past: list[Step] = []  # what clients learnt in earlier lives
        self.number = 0
        self.epoch = 0

    def known(self) -> dict[str, Known]:
        """What must be true now."""
        known = {topic: Known(topic) for topic in TOPICS}
        for kind, topic, *rest in self.past:
            known[topic].learn(kind, *rest)
        return known


class Life:
    """One process with the log open."""

    def __init__(self, world: World, root: Path, recorder: Recorder, pressure: Pressure, rounds: int) -> None:
        self._world = world
        self._root = root
        self._recorder = recorder
        self._rounds = rounds
        self._known = world.known()
        self._wal: Wal | None = None
        self._stopped: LogStopped | None = None
        # Groups that hold many topics, and sessions that nothing ends.
        self._config = replace(
            pressure.config,
            bytes_max=0,
            group_bytes=1 << 16,
            segment_bytes=world.rng.choice((4096, 1 << 16)),
            sessions_max=WalConfig().sessions_max,
            session_seconds=WalConfig().session_seconds,
            watched_seconds=WalConfig().watched_seconds,
        )

    async def run(self) -> None:
        """Recovers, compares everything with what was promised, then works for a while."""
        disk = FileDisk(self._root, threads_max=2)
        working = asyncio.create_task(self._work(disk))
        self._end = working.cancel
        try:
            await working
        except (LogDamaged, TailUnproven, ConfigError) as error:
            raise Broken(f"damage where none was done: {error}") from error
        except (DiskFailed, LogStopped, asyncio.CancelledError) as error:
            if not self._recorder.failed_syncs:
                raise Broken(f"a disk that is well was said to have failed: {self._stopped or error}") from error
        finally:
            if self._wal is not None and self._wal._task is not None:
                self._wal._task.cancel()
                await asyncio.gather(self._wal._task, return_exceptions=True)
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            disk.close()

    async def _work(self, disk: FileDisk) -> None:
        rng = self._world.rng
        clock, work = SystemClock(), SystemWork(threads_max=1)
        self._wal = wal = await Wal.open(disk, clock, work, self._config, on_stopped=self._when_stopped)
        if wal.problems:
            raise Broken(f"journals said to be damaged: {wal.problems}")
        logs = {topic: await self._open(topic) for topic in TOPICS}
        for topic in TOPICS:
            await self._compare(logs[topic])
        for topic in TOPICS:
            for sent in list(self._known[topic].unacked.values()):
                await self._send(logs[topic], [sent])
        together = rng.random() < 0.5  # groups of many topics, which go through the journal
        for _ in range(self._rounds):
            chosen = [topic for topic in TOPICS if rng.random() < 0.8]
            if together:
                await asyncio.gather(*(self._produce(logs[topic]) for topic in chosen))
            else:
                for topic in chosen:
                    await self._produce(logs[topic])
            topic = rng.choice(TOPICS)
            if rng.random() < 0.5:
                before = rng.randint(logs[topic].first_offset, logs[topic].head)
                self._say("truncates", topic, before)
                await logs[topic].truncate(before)
            if rng.random() < 0.1:
                await logs[topic].close()
                logs[topic] = await self._open(topic)
        if rng.random() < 0.3:
            await wal.close()
            self._wal = None

    def _when_stopped(self, why: LogStopped) -> None:
        self._stopped = why
        self._end()

    def _say(self, kind: str, topic: str, *rest: Any) -> None:
        assert kind in LEARNT
        self._recorder.say(kind, topic, *rest)
        self._known[topic].learn(kind, *rest)

    async def _open(self, topic: str) -> TopicLog:
        assert self._wal is not None
        self._world.epoch += 1
        return await self._wal.topic(topic, epoch=self._world.epoch)

    async def _compare(self, log: TopicLog) -> None:
        if log.recovered.damage:
            raise Broken(f"damage where none was done: {log.recovered.damage}")
        audit = Audit(self._known[log.topic].model, log.first_offset, log.head)
        reader = log.reader(log.first_offset)
        while audit.next < log.head:
            try:
                batches = await reader.read(1 << 20)
            except OffsetOutOfRange as error:
                audit.hole(min(error.first, log.head))
                reader = log.reader(audit.next)
                continue
            audit.take(batches)
            for batch in batches:
                self._say("seen", log.topic, batch)
        audit.done()

    async def _produce(self, log: TopicLog) -> None:
        rng, known = self._world.rng, self._known[log.topic]
        producer_id = rng.choice((0, 1, 1))
        if producer_id and known.session is None:
            self._say("asks for a session", log.topic)
            self._say("has a session", log.topic, await log.open_session(producer_id))
        sent: list[Sent] = []
        for _ in range(rng.choice((1, 1, 2))):
            self._world.number += 1
            session, sequence = (known.session or 0, known.next_sequence) if producer_id else (0, 0)
            sent.append(known.model.make(rng, self._world.number, producer_id, session, sequence))
            self._say("sent", log.topic, sent[-1])
        await self._send(log, sent)
        if rng.random() < 0.5:
            await self._look(log, rng.randint(log.first_offset, log.head))

    async def _send(self, log: TopicLog, batches: list[Sent]) -> None:
        for sent, answer in [(sent, log.submit(sent.batch)) for sent in batches]:
            try:
                receipt = await answer
            except Refused as refusal:
                raise Broken(f"batch {sent.number} is next and is refused: {refusal}") from refusal
            if receipt.offset + sent.rows > log.head:
                raise Broken(
                    f"batch {sent.number} is acknowledged at offset {receipt.offset}, "
                    f"and {log.topic} is committed up to {log.head}"
                )
            self._say("acknowledged", log.topic, sent, receipt.offset, receipt.epoch)

    async def _look(self, log: TopicLog, offset: int) -> None:
        """Somebody reads what is committed, while others write."""
        reader, head = log.reader(offset), log.head
        while offset < head:
            for batch in await reader.read(1 << 20):
                if not batch.header.base_offset <= offset < batch.header.end_offset:
                    raise Broken(f"{log.topic}: offset {batch.header.base_offset} is read for {offset}")
                offset = batch.header.end_offset
                self._say("seen", log.topic, batch)


def lives(seed: int, place: Path, patch: pytest.MonkeyPatch) -> str | None:
    """Several lives of one directory; what was wrong, or None."""
    rng = Random(seed)
    world = World(rng.randrange(2**62))
    replay = Replay(Random(rng.randrange(2**62)))
    replay.disk.faults.stale_sectors = 0.1
    for number in range(LIVES):
        root = place / f"{seed}-{number}"
        root.mkdir()
        replay.write_to(root)
        recorder = Recorder(root)
        recorder.fail_sync = rng.choice((0, rng.randint(1, 30)))
        pressure = Pressure.draw(rng)
        rounds = rng.choice((3, 10, 20)) if number < LIVES - 1 else 0  # the last only looks
        with patch.context() as inside, pressure.applied():
            recorder.install(inside)
            try:
                asyncio.run(Life(world, root, recorder, pressure, rounds).run())
            except Broken as broken:
                return str(broken)
        steps = recorder.steps
        killed = rng.random() < KILLED
        end = rng.choice(rng.choice([moments for moments in ends(steps, killed=killed) if moments])) + 1
        replay.take(steps[:end])
        world.past += [step for step in steps[:end] if step[0] in LEARNT]
        if killed:
            replay.kill()
        else:
            replay.cut()
    return None


def ends(steps: list[Step], *, killed: bool) -> list[Sequence[int]]:
    """Moments at which a life may end: any, and those that matter. If it is killed, those at which something is written
    and not synced. Else those at which something must be safe, or a new file takes the place of one whose sync failed.
    """
    if killed:
        written = [place for place, step in enumerate(steps) if step[0] in ("write", "sync fails")]
        return [*[written] * 3, range(len(steps))]
    told = [place for place, step in enumerate(steps) if step[0] == "acknowledged"]
    failed = [place for place, step in enumerate(steps) if step[0] == "sync fails"]
    named = [place for place, step in enumerate(steps) if step[0] == "names synced" and failed and place > failed[0]]
    mended = [place for first in named[:1] for place in range(first, min(first + 3, len(steps)))]
    return [told, removed(steps, ".wal"), removed(steps, ".journal"), *[mended] * 4, range(len(steps))]


def removed(steps: list[Step], suffix: str) -> list[int]:
    """Where files of this kind were removed: the moments at which everything else must be safe."""
    return [place for place, step in enumerate(steps) if step[0] == "remove" and step[1].endswith(suffix)]


def found_after(count: int, place: Path, patch: pytest.MonkeyPatch) -> tuple[int, str] | None:
    """How many directories it took, and what was found."""
    for seed in range(count):
        found = lives(seed, place, patch)
        for root in place.iterdir():
            shutil.rmtree(root)
        if found is not None:
            return seed + 1, found
    return None


def test_the_log_keeps_its_promises_on_real_files_whatever_a_power_cut_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_after(8, tmp_path, monkeypatch) is None


@pytest.mark.long
def test_the_log_keeps_its_promises_on_real_files_in_three_hundred_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_after(300, tmp_path, monkeypatch) is None


# --- defects ---


def a_new_directory_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, FileNames, "make_directory", ("self._sync_names_in(os.path.dirname(each), path)", "pass"))


def names_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileNames, "sync_directory", lambda self, path: None)


def small_writes_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    exchange(patch, FileWriter, "_write_one", ("failure = _sync_failure(descriptor, path)", "failure = None"))


def a_failed_sync_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forgetful(descriptor: Any) -> str:
        descriptor.failed = ""
        return str(sync_data(descriptor))

    sync_data = descriptors.sync_data
    for module in (file_writer, descriptors):
        patch.setattr(module, "sync_data", forgetful)


OF_THE_ADAPTER: dict[str, Plant] = {
    "new directory not synced": a_new_directory_is_not_synced,
    "names not synced": names_are_not_synced,
    "small writes not synced": small_writes_are_not_synced,
}
OF_THE_LOG = (
    "name of a new segment not synced",
    "journal removed before the segments are synced",
    "redo without a sync",
    "retention removes before it says so",
    "name of a replaced file not synced",
    "last group trusted without a copy",
    "snapshot of a new file knows what is not stored",
    "cache drops what only the journal has",
)


# A tenth of the time of all simulations, together: these two show only after hundreds of lives.
RARE: Final = ("journal removed before the segments are synced", "redo without a sync")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in (*OF_THE_ADAPTER, *OF_THE_LOG)],
)
def test_a_planted_defect_is_found_on_real_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = OF_THE_ADAPTER.get(name) or PLANTED[name]
    assert not isinstance(defect, type)
    defect(monkeypatch)
    found = found_after(400, tmp_path, monkeypatch)
    assert found is not None, f"{name} was not found"
    print(f"{name}: found after {found[0]} directories: {found[1][:150]}")


# --- the adapter alone ---


async def use(disk: FileDisk, rng: Random, recorder: Recorder) -> None:
    """Writes, syncs and names in any order; says what it was promised."""
    await disk.make_directory("")
    content: dict[str, bytes] = {}
    named: set[str] = set()  # whose names are safe
    directories = [""]
    recorder.fail_sync = rng.randint(3, 30)
    for number in range(rng.randint(10, 60)):
        kind = rng.choice(("make", "create", "write", "write", "write", "sync", "names", "rename"))
        path = rng.choice([*content, ""])
        if kind == "make" and len(directories) < 6:
            directories.append(f"{rng.choice(directories)}/d{number}".lstrip("/"))
            await disk.make_directory(directories[-1])
            recorder.say("promised directory", directories[-1])
        elif kind == "create":
            path = f"{rng.choice(directories)}/f{number}".lstrip("/")
            await disk.create(path)
            content[path] = b""
        elif kind == "write" and path:
            position = rng.randint(0, len(content[path]))
            data = rng.randbytes(rng.choice((1, 700, 9000)))
            sync = rng.random() < 0.6
            old = content[path][:position].ljust(position, b"\0")
            content[path] = old + data + content[path][position + len(data) :]
            [failure] = await disk.write([Write(path, position, [data])], sync=sync)
            if sync and failure is None and path in named:
                recorder.say("promised", path, content[path])
        elif kind == "sync" and path:
            [failure] = await disk.sync([path])
            if failure is None and path in named:
                recorder.say("promised", path, content[path])
        elif kind == "names":
            directory = rng.choice(directories)
            await disk.sync_directory(directory)
            named |= {each for each in content if each.rpartition("/")[0] == directory}
            for each in sorted(each for each in named if each.rpartition("/")[0] == directory):
                recorder.say("promised name", each)
        elif kind == "rename" and path:
            target = f"{path}r"
            await disk.rename(path, target)
            content[target] = content.pop(path)
            named.discard(path)


def broken_promise(seed: int, place: Path, patch: pytest.MonkeyPatch) -> str | None:
    """Cuts the power right behind one promise of the adapter; what was wrong, or None."""
    rng = Random(seed)
    root = place / str(seed)
    root.mkdir()
    recorder = Recorder(root)

    async def main() -> None:
        disk = FileDisk(root, threads_max=2, descriptors_max=rng.choice((4, 64)))
        try:
            await use(disk, rng, recorder)
        except DiskFailed:
            pass  # it was told, and promises nothing
        finally:
            disk.close()

    with patch.context() as inside:
        recorder.install(inside)
        asyncio.run(main())
    promises = [place for place, step in enumerate(recorder.steps) if step[0].startswith("promised")]
    for end in rng.sample(promises, min(4, len(promises))):
        replay = Replay(Random(rng.randrange(2**62)))
        replay.disk.faults.stale_sectors = 0.0
        replay.take(recorder.steps[: end + 1])
        replay.cut()
        kind, path, *content = recorder.steps[end]
        if kind == "promised directory" and path not in replay.disk._current:
            return f"the directory {path} is gone"
        if kind == "promised name" and path not in replay.disk.paths():
            return f"the name {path} is gone"
        if kind == "promised" and (path not in replay.disk.paths() or replay.disk.content(path) != content[0]):
            return f"{path} does not hold what a sync had made safe"
    return None


def broken_after(count: int, place: Path, patch: pytest.MonkeyPatch) -> tuple[int, str] | None:
    for seed in range(count):
        found = broken_promise(seed, place, patch)
        if found is not None:
            return seed + 1, found
    return None


def test_what_the_adapter_calls_safe_survives_every_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_after(60, tmp_path, monkeypatch) is None


@pytest.mark.parametrize("name", [*OF_THE_ADAPTER, "failed sync forgotten"])
def test_a_defect_of_the_adapter_breaks_a_promise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect: Callable[[pytest.MonkeyPatch], None] = OF_THE_ADAPTER.get(name, a_failed_sync_is_forgotten)
    defect(monkeypatch)
    found = broken_after(300, tmp_path, monkeypatch)
    assert found is not None, f"{name} was not found"
    print(f"{name}: found after {found[0]} directories: {found[1]}")
