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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pydanube.errors import ConfigError, DiskFailed, LogDamaged, OffsetOutOfRange, TailUnproven
from pydanube.formats.batch import topic_hash
from pydanube.log.wal import TopicLog, Wal
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
LIVES = 4  # of one directory, each ended by a power cut

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# --- a log, recorded ---


class World:
    """One directory over several lives, and what its log has promised."""

    def __init__(self, seed: int, place: Path) -> None:
        self.dice = Random(seed)
        self.place = place
        self.past: list[Step] = []  # what was sent, acknowledged, seen and dropped in earlier lives
        self.number = 0
        self.epoch = 0

    def models(self, steps: list[Step]) -> dict[str, TopicModel]:
        """What must be true after these steps."""
        models = {topic: TopicModel(topic, topic_hash(topic), "fsync") for topic in TOPICS}
        for kind, *rest in [*self.past, *steps]:
            if kind == "sent":
                models[rest[0]].sent[rest[1].number] = rest[1]
            elif kind == "acknowledged":
                models[rest[0]].receipt(*rest[1:])
            elif kind == "seen":
                models[rest[0]].read(rest[1])
            elif kind == "truncates":
                models[rest[0]].truncated_before = max(models[rest[0]].truncated_before, rest[1])
        return models


async def live(world: World, root: Path, recorder: Recorder, pressure: Pressure) -> None:
    """Recovers, compares everything with what was promised, then works for a while."""
    dice = world.dice
    disk = FileDisk(root, threads_max=2)
    models = world.models([])
    wal: Wal | None = None
    # Groups of many topics, which go through the journal.
    config = replace(pressure.config, bytes_max=0, group_bytes=1 << 16, segment_bytes=dice.choice((4096, 1 << 16)))
    try:
        wal = await Wal.open(disk, SystemClock(), SystemWork(threads_max=1), config)
        if wal.problems:
            raise Broken(f"journals said to be damaged: {wal.problems}")
        logs = {}
        for topic in TOPICS:
            world.epoch += 1
            logs[topic] = await wal.topic(topic, epoch=world.epoch)
            await compare(logs[topic], models[topic], recorder)
        for _ in range(dice.choice((3, 10, 20))):
            chosen = [topic for topic in TOPICS if dice.random() < 0.8]
            await asyncio.gather(*(produce(world, logs[topic], models[topic], recorder) for topic in chosen))
            topic = dice.choice(TOPICS)
            if dice.random() < 0.5:
                before = dice.randint(logs[topic].first_offset, logs[topic].head)
                recorder.say("truncates", topic, before)
                await logs[topic].truncate(before)
            if dice.random() < 0.1:
                await logs[topic].close()
                world.epoch += 1
                logs[topic] = await wal.topic(topic, epoch=world.epoch)
        if dice.random() < 0.3:
            await wal.close()
            wal = None
    except (LogDamaged, TailUnproven, ConfigError) as error:
        raise Broken(f"damage where none was done: {error}") from error
    finally:
        if wal is not None and wal._task is not None:
            wal._task.cancel()
            await asyncio.gather(wal._task, return_exceptions=True)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        disk.close()


async def compare(log: TopicLog, model: TopicModel, recorder: Recorder) -> None:
    if log.recovered.damage:
        raise Broken(f"damage where none was done: {log.recovered.damage}")
    audit = Audit(model, log.first_offset, log.head)
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
            recorder.say("seen", model.topic, batch)
    audit.done()


async def produce(world: World, log: TopicLog, model: TopicModel, recorder: Recorder) -> None:
    sent: list[Sent] = []
    for _ in range(world.dice.choice((1, 1, 2))):
        world.number += 1
        sent.append(model.make(world.dice, world.number, 0, 0, 0))
        recorder.say("sent", model.topic, sent[-1])
    for each, answer in [(each, log.submit(each.batch)) for each in sent]:
        receipt = await answer
        recorder.say("acknowledged", model.topic, each, receipt.offset, receipt.epoch)


def lives(seed: int, place: Path, patch: pytest.MonkeyPatch) -> str | None:
    """Several lives of one directory; what was wrong, or None."""
    dice = Random(seed)
    world = World(dice.randrange(2**62), place)
    replay = Replay(Random(dice.randrange(2**62)))
    replay.disk.faults.stale_sectors = 0.1
    for number in range(LIVES):
        root = place / f"{seed}-{number}"
        root.mkdir()
        replay.write_to(root)
        recorder = Recorder(root)
        pressure = Pressure.draw(dice)
        with patch.context() as inside, pressure.applied():
            recorder.install(inside)
            try:
                asyncio.run(live(world, root, recorder, pressure))
            except Broken as broken:
                return str(broken)
        steps = recorder.steps
        told = [place for place, step in enumerate(steps) if step[0] == "acknowledged"]
        segments = removed(steps, ".wal")
        journals = removed(steps, ".journal")
        end = dice.choice(dice.choice((told or [-1], segments or [-1], journals or [-1], range(len(steps))))) + 1
        replay.take(steps[:end])
        world.past += [step for step in steps[:end] if step[0] in ("sent", "acknowledged", "seen", "truncates")]
        replay.cut()
    return None


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
)


@pytest.mark.parametrize("name", [*OF_THE_ADAPTER, *OF_THE_LOG])
def test_a_planted_defect_is_found_on_real_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect = OF_THE_ADAPTER.get(name) or PLANTED[name]
    assert not isinstance(defect, type)
    defect(monkeypatch)
    found = found_after(400, tmp_path, monkeypatch)
    assert found is not None, f"{name} was not found"
    print(f"{name}: found after {found[0]} directories: {found[1][:150]}")


# --- the adapter alone ---


async def use(disk: FileDisk, dice: Random, recorder: Recorder) -> None:
    """Writes, syncs and names in any order; says what it was promised."""
    await disk.make_directory("")
    content: dict[str, bytes] = {}
    named: set[str] = set()  # whose names are safe
    directories = [""]
    recorder.fail_sync = dice.randint(3, 30)
    for number in range(dice.randint(10, 60)):
        kind = dice.choice(("make", "create", "write", "write", "write", "sync", "names", "rename"))
        path = dice.choice([*content, ""])
        if kind == "make" and len(directories) < 6:
            directories.append(f"{dice.choice(directories)}/d{number}".lstrip("/"))
            await disk.make_directory(directories[-1])
            recorder.say("promised directory", directories[-1])
        elif kind == "create":
            path = f"{dice.choice(directories)}/f{number}".lstrip("/")
            await disk.create(path)
            content[path] = b""
        elif kind == "write" and path:
            position = dice.randint(0, len(content[path]))
            data = dice.randbytes(dice.choice((1, 700, 9000)))
            sync = dice.random() < 0.6
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
            directory = dice.choice(directories)
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
    dice = Random(seed)
    root = place / str(seed)
    root.mkdir()
    recorder = Recorder(root)

    async def main() -> None:
        disk = FileDisk(root, threads_max=2, descriptors_max=dice.choice((4, 64)))
        try:
            await use(disk, dice, recorder)
        except DiskFailed:
            pass  # it was told, and promises nothing
        finally:
            disk.close()

    with patch.context() as inside:
        recorder.install(inside)
        asyncio.run(main())
    promises = [place for place, step in enumerate(recorder.steps) if step[0].startswith("promised")]
    for end in dice.sample(promises, min(4, len(promises))):
        replay = Replay(Random(dice.randrange(2**62)))
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
