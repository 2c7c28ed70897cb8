"""The process beside a broker: what becomes of it, and of what it was doing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pydanube.errors import ProcessEnded
from pydanube.stores.work import worker_process
from pydanube.stores.work.pickle_pipe import dumped, loaded
from pydanube.stores.work.worker_process import WorkerProcesses, _lacked_cores, _Process

pytestmark = pytest.mark.timeout(60)

HERE = os.getpid()


@pytest.fixture(autouse=True)
def ours_are_known_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is given functions of this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def die_unless_in(pid: int) -> int:
    """Where it was called; what calls it elsewhere dies at once."""
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()  # nobody may be there to ask how it ended
    except FileNotFoundError:
        return True


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + 20
    while not ended(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_has_a_low_priority_and_one_process_serves_all_calls() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        first = await beside.call(os.getpid)
        assert first not in (HERE, await asyncio.to_thread(os.getpid))
        assert await beside.call(partial(os.getpriority, os.PRIO_PROCESS, 0)) == min(
            19, os.nice(0) + worker_process.NICE
        )
        assert await beside.call(os.getpid) == first
        beside.close()
        assert ended(first)

    asyncio.run(run())


def environment_there() -> dict[str, str]:
    return dict(os.environ)


def test_it_knows_nothing_of_secrets_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("DANUBE_ADMIN_TOKEN", "hunter2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "for the object store")
    monkeypatch.setenv("https_proxy", "http://proxy:1")

    async def run() -> dict[str, str]:
        beside = WorkerProcesses(1)
        found = await beside.call(environment_there)
        beside.close()
        return found

    found = asyncio.run(run())
    assert "hunter2" not in str(found)
    assert found["AWS_ACCESS_KEY_ID"] == "for the object store" and found["https_proxy"] and found["PATH"]


def paths_there() -> list[str]:
    return sys.path


def test_it_runs_the_code_of_the_broker_that_started_it() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        paths = await beside.call(paths_there)
        beside.close()
        package = Path(worker_process.__file__).parents[2]
        assert paths[0] == str(package.parent)
        assert str(package) not in paths  # whose `log` or `errors` would hide other modules

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_large_things_go_there_and_come_back_as_they_are(size: int, caplog: pytest.LogCaptureFixture) -> None:
    given = os.urandom(size)
    pieces = [memoryview(given)[: size // 3], b"and", memoryview(bytearray(given))[size // 3 :]]

    async def run() -> None:
        beside = WorkerProcesses(1)
        for _ in range(2):
            assert await beside.call(partial(memoryview, memoryview(given))) == given
            assert await beside.call(partial(b"".join, pieces)) == b"".join(pieces)
        beside.close()

    asyncio.run(run())
    assert not caplog.records  # it was not done here


def test_more_pieces_than_one_call_of_the_system_takes_arrive_too(caplog: pytest.LogCaptureFixture) -> None:
    pieces = [memoryview(bytes([number % 251]) * (number % 7)) for number in range(5_000)]

    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(partial(b"".join, pieces)) == b"".join(pieces)
        beside.close()

    asyncio.run(run())
    assert not caplog.records


def test_a_view_is_sent_without_a_copy_of_it() -> None:
    data = bytearray(1_000_000)
    pickled, view = dumped(("name", memoryview(data)))
    assert len(pickled) < 200
    data[0] = 7
    assert view[0] == 7
    name, received = loaded([bytes(pickled), view])
    assert (name, received[0], received.nbytes) == ("name", 7, 1_000_000)


def test_if_something_else_comes_out_of_it_its_work_is_done_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a profiler says good morning')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(os.getpid) == HERE
        beside.close()

    asyncio.run(run())
    assert [record.message for record in caplog.records] == ["the process for large objects ended"]


def test_if_it_dies_its_work_is_done_here_and_the_next_has_a_process_again(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        first = await beside.call(os.getpid)
        assert await beside.call(partial(die_unless_in, HERE)) == HERE
        assert await beside.call(os.getpid) not in (HERE, first)
        beside.close()

    asyncio.run(run())
    assert [record.message for record in caplog.records] == ["the process for large objects ended"]


def test_if_it_cannot_be_started_its_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(os.getpid) == HERE
        beside.close()

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    asyncio.run(run())


def test_a_function_that_cannot_be_sent_harms_nobody() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        with pytest.raises(Exception, match=r"pickle|local object"):
            await beside.call(lambda: 1)
        assert await beside.call(os.getpid) != HERE
        beside.close()

    asyncio.run(run())


def test_what_it_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(partial(print, "hello", flush=True)) is None
        assert await beside.call(partial(divmod, 7, 2)) == (3, 1)
        beside.close()

    asyncio.run(run())
    assert capfd.readouterr() == ("", "hello\n")


OWNER = """
import asyncio, os, time
from pydanube.stores.work.worker_process import WorkerProcesses
async def main():
    print(await WorkerProcesses(1).call(os.getpid), flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def test_it_ends_with_a_broker_that_is_killed_and_not_with_a_signal_for_the_broker(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        for meant_for_the_broker in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, meant_for_the_broker)
        assert not ended(pid)
        owner.kill()
        wait_for_end(pid)


def test_a_call_that_is_cancelled_ends_also_if_its_process_is_stopped() -> None:
    """Whoever closes a topic, moves it or stops the broker cancels the upload and waits for it."""

    async def run() -> None:
        beside = WorkerProcesses(1)
        pid = await beside.call(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        try:
            task = asyncio.create_task(beside.call(os.getpid))
            await asyncio.sleep(0.1)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=5.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await asyncio.wait({task})
        beside.close()
        assert done

    asyncio.run(run())


class Shared(list[_Process]):
    """Another thread takes the last one right after we looked."""

    def __len__(self) -> int:
        found = super().__len__()
        if found == 1:
            super().pop().end()
        return found


def test_a_process_that_does_not_answer_is_killed_in_the_end_and_its_work_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        pid = await beside.call(os.getpid)
        assert pid != HERE
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(worker_process, "SECONDS_MAX", 0.1)
        assert await beside.call(os.getpid) == HERE
        beside.close()

    asyncio.run(run())


def test_two_threads_may_want_the_one_idle_process() -> None:
    async def run() -> None:
        beside = WorkerProcesses(2)
        await beside.call(os.getpid)
        beside._pool._free = Shared(beside._pool._free)
        assert await beside.call(os.getpid) != os.getpid()
        beside.close()

    asyncio.run(run())


def policy() -> int:
    return os.sched_getscheduler(0)


def test_it_runs_when_nobody_else_wants_to() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(policy) == os.SCHED_IDLE
        beside.close()

    asyncio.run(run())


def test_where_nobody_can_see_that_it_waits_it_is_only_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_can_see_waiting", lambda: False)

    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(policy) == os.SCHED_BATCH
        beside.close()

    asyncio.run(run())


def test_one_that_others_keep_from_running_is_ended_and_the_next_is_only_nice_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited = 0.0

    def ran_and_waited(process: _Process) -> dict[str, tuple[float, float]]:
        """Each look finds that it has waited for longer, and has run for a quarter of that."""
        nonlocal waited
        waited += 8.0
        return {"1": (waited / 4 if runs else 0.0, waited)}

    runs = True
    monkeypatch.setattr(_Process, "ran_and_waited", ran_and_waited)
    monkeypatch.setattr(worker_process, "STARVATION_CHECK_SECONDS", 0.01)

    async def run() -> None:
        nonlocal runs
        beside = WorkerProcesses(1)
        first = await beside.call(os.getpid)
        await beside.call(partial(time.sleep, 0.2))
        assert await beside.call(os.getpid) == first  # it had its turns
        runs = False
        os.kill(first, signal.SIGSTOP)
        assert await beside.call(os.getpid) == HERE
        assert ended(first)
        assert "others kept it from running" in str([vars(each) for each in caplog.records])
        assert await beside.call(policy) == os.SCHED_BATCH
        second = await beside.call(os.getpid)
        await beside.call(partial(time.sleep, 0.2))  # a nice one is left alone
        assert await beside.call(os.getpid) == second
        runs = True
        monkeypatch.setattr(beside._pool, "_nice_until", 0.0)
        assert await beside.call(policy) == os.SCHED_IDLE
        assert ended(second)
        beside.close()

    asyncio.run(run())


def test_it_is_seen_how_long_a_process_ran_and_waited() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        await beside.call(partial(sum, range(3_000_000)))
        [process] = beside._pool._free
        ran, waited = process.ran_and_waited()[str(process._process.pid)]
        assert 0.0 < ran < 60.0 and 0.0 <= waited < 60.0
        beside.close()
        assert process.ran_and_waited() == {}

    asyncio.run(run())


def test_each_thread_of_it_is_compared_with_itself() -> None:
    before = {"main": (30.0, 5.0), "other": (0.1, 0.2)}
    assert not _lacked_cores(before, {"main": (30.1, 5.2), "other": (0.2, 9.0)})
    assert not _lacked_cores(before, {"main": (32.0, 30.0), "new": (1.0, 12.0)})
    assert _lacked_cores(before, {"main": (30.1, 20.0)})
    assert _lacked_cores(before, {**before, "new": (0.0, 11.0)})


def test_a_call_that_is_cancelled_before_its_turn_does_not_wait_for_those_before_it() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        first = asyncio.create_task(beside.call(partial(time.sleep, 30.0)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(beside.call(os.getpid))
        await asyncio.sleep(0.05)
        second.cancel()
        done, _ = await asyncio.wait({second}, timeout=10.0)
        assert done
        first.cancel()
        await asyncio.wait({first})
        beside.close()

    asyncio.run(run())


def test_one_that_died_while_it_had_nothing_to_do_is_not_given_work(tmp_path: Path) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        first = await beside.call(os.getpid)
        os.kill(first, signal.SIGKILL)
        [process] = beside._pool._free
        await asyncio.to_thread(process._process.wait)
        assert await beside.call_once(partial(leave, str(tmp_path / "calls"), 0)) not in (first, HERE)
        beside.close()

    asyncio.run(run())


class Particular(Exception):
    """Can be pickled, and not be made of what was pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def complain() -> None:
    raise Particular("this", "that")


def test_an_error_that_would_not_arrive_is_told_in_words() -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        with pytest.raises(RuntimeError, match="Particular: this and that"):
            await beside.call(complain)
        beside.close()

    asyncio.run(run())


WORKING = """
import asyncio, os, time
from functools import partial
from pydanube.stores.work.worker_process import WorkerProcesses
async def main():
    beside = WorkerProcesses(1)
    pid = await beside.call(os.getpid)
    working = asyncio.create_task(beside.call(partial(time.sleep, 50.0)))
    await asyncio.sleep(0.2)
    print(pid, flush=True)
    await working
asyncio.run(main())
"""


def test_it_ends_with_a_broker_that_is_killed_also_if_it_is_at_work(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKING], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not ended(pid)
        owner.kill()
        wait_for_end(pid)


def note(path: str) -> None:
    with open(path, "a") as file:
        file.write("x")


async def leave(path: str, pid: int) -> int:
    """Says where it was called, and how often."""
    await asyncio.to_thread(note, path)
    if pid:
        die_unless_in(pid)
    return os.getpid()


def test_what_waits_there_is_called_on_a_loop_of_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        for _ in range(2):
            assert await beside.call_once(partial(leave, str(tmp_path / "calls"), 0)) != HERE
        beside.close()

    asyncio.run(run())
    assert (tmp_path / "calls").read_text() == "xx"


def test_what_may_change_something_is_not_called_again_if_its_process_dies(tmp_path: Path) -> None:
    async def run() -> None:
        beside = WorkerProcesses(1)
        with pytest.raises(ProcessEnded, match="the process for large objects"):
            await beside.call_once(partial(leave, str(tmp_path / "calls"), HERE))
        assert await beside.call(os.getpid) != HERE
        beside.close()

    asyncio.run(run())
    assert (tmp_path / "calls").read_text() == "x"


def test_what_stores_something_has_more_time_than_what_only_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "STARVATION_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(worker_process, "SECONDS_MAX", 0.1)

    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call_once(partial(asyncio.sleep, 0.3, "stored")) == "stored"
        monkeypatch.setattr(worker_process, "STORING_SECONDS_MAX", 0.1)
        with pytest.raises(ProcessEnded, match="it took longer than 0 s"):
            await beside.call_once(partial(asyncio.sleep, 30.0))
        beside.close()

    asyncio.run(run())


def test_a_file_in_the_working_directory_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pickle.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        beside = WorkerProcesses(1)
        assert await beside.call(os.getpid) != os.getpid()
        beside.close()

    asyncio.run(run())
