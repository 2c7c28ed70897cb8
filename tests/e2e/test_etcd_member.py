"""Members that live beside brokers, as real processes: started, killed, replaced, and refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pydanube.errors import ConfigError, Refused, Unavailable, Unreachable
from pydanube.ports import Put
from pydanube.stores.metadata.etcd import EtcdCluster, EtcdMember, EtcdMetadataStore, Member, MemberConfig, follow
from pydanube.stores.metadata.etcd.calls import Calls
from pydanube.stores.metadata.etcd.process import LOG_BYTES_MAX, log_path, pid_path, shorten_log, take_over
from tests.e2e.etcd import certificates, etcd_program, member_addresses
from tests.e2e.processes import Program
from tests.e2e.processes import until as until_here
from tests.support import run

pytestmark = pytest.mark.slow


def configs(directory: Path, count: int) -> list[MemberConfig]:
    addresses = tuple(member_addresses(count))
    return [
        MemberConfig(directory=directory / f"m{i}", raft_addr=address, seed_nodes=addresses, program=etcd_program())
        for i, address in enumerate(addresses)
    ]


@contextlib.asynccontextmanager
async def running(members: Sequence[EtcdMember]) -> AsyncIterator[Sequence[EtcdMember]]:
    """All of them ready; stopped at the end, whoever is still running."""
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.start())
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@contextlib.asynccontextmanager
async def store_on(member: EtcdMember) -> AsyncIterator[EtcdMetadataStore]:
    store = EtcdMetadataStore(member.endpoints, tls=member.config.tls)
    try:
        yield store
    finally:
        await store.close()


async def put(member: EtcdMember, key: str, value: bytes) -> None:
    async with store_on(member) as store:
        assert await store.transact([], [Put(key, value)]) is not None


async def value(member: EtcdMember, key: str) -> bytes | None:
    async with store_on(member) as store:
        item = await store.get(key)
        return None if item is None else item.value


async def until(condition: Callable[[], bool]) -> None:
    """Asked often, as the condition is in another process."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- one cluster, several brokers -------------------------------------------------------------------


def test_three_members_come_up_in_any_order_and_say_for_whom_they_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def waiting_for(address: str) -> bool:
        lines = [each for each in caplog.records if each.message == "waiting for the metadata store"]
        return any(address in vars(line)["waiting_for"] for line in lines)

    async def story() -> None:
        first, second, third = (EtcdMember(config) for config in configs(tmp_path, 3))
        try:
            starting = asyncio.ensure_future(third.start())
            await until(lambda: waiting_for(first.config.raft_addr) and waiting_for(second.config.raft_addr))
            assert not starting.done()
            await first.start()
            await starting  # two of three are a majority
            await second.start()
            await put(first, "/a", b"1")
            assert await value(second, "/a") == await value(third, "/a") == b"1"
            assert second.endpoints[0] == second.config.client_addr(second.config.raft_addr)
            assert {*second.endpoints} == {*(await third.refresh())} and len(second.endpoints) == 3
        finally:
            await asyncio.gather(*(member.stop() for member in (first, second, third)))

    run(story())
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_a_member_that_is_killed_is_started_again_and_has_no_secret_of_the_brokers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("ETCD_NAME", "hunter2")

    async def story() -> None:
        async with running([EtcdMember(config) for config in configs(tmp_path, 3)]) as members:
            await put(members[0], "/a", b"1")
            for _ in range(2):
                pid = members[0].pid
                assert pid is not None
                assert b"hunter2" not in await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: members[0].pid not in (None, pid))  # type: ignore[misc]
            assert members[0].restarts == 2
            alone = EtcdMetadataStore(members[0].endpoints[:1], timeout_seconds=30)
            item = await alone.get("/a")
            await alone.close()
            assert item is not None and item.value == b"1"

    run(story())
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == ["etcd member ended"] * 2


def test_restarting_everything_keeps_the_data_and_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        settings = configs(tmp_path, 3)
        async with running([EtcdMember(config) for config in settings]) as members:
            await put(members[0], "/a", b"1")
            pids = [member.pid for member in members]
        assert not any(is_alive(pid) for pid in pids if pid is not None)
        # etcd would take this from the environment, and every member would go on alone.
        monkeypatch.setenv("ETCD_FORCE_NEW_CLUSTER", "true")
        async with running([EtcdMember(config) for config in reversed(settings)]) as members:
            assert await value(members[0], "/a") == b"1"
            assert len(members[0].endpoints) == 3
            assert [member.restarts for member in members] == [0, 0, 0]

    run(story())


def test_a_member_dies_with_its_process_and_the_next_one_goes_on(tmp_path: Path) -> None:
    [config] = configs(tmp_path, 1)
    arguments = (config.directory, config.raft_addr, config.raft_addr, config.program)
    with Program(tmp_path, "etcd_member", *arguments) as first:
        [ready] = first.until("ready")
        pid = ready["pid"]
        assert is_alive(pid)
        run(put(EtcdMember(config), "/a", b"1"))
        first.kill()
        until_here(lambda: not is_alive(pid), "etcd ends with its parent")
    with Program(tmp_path, "etcd_member", *arguments) as second:
        [ready] = second.until("ready")
        assert run(value(EtcdMember(config), "/a")) == b"1"
        assert second.stop() == 0
        assert second.events("stopped") and not is_alive(ready["pid"])


def test_a_leader_that_stops_lets_another_lead_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with running([EtcdMember(config) for config in configs(tmp_path, 3)]) as members:
            cluster = EtcdCluster(members[0].endpoints)
            await until_all_are_healthy(cluster, 3)
            [before] = [each.member.name for each in await cluster.status() if each.is_leader]
            leader = next(member for member in members if member.config.raft_addr == before)
            await leader._hand_over()
            await until_all_are_healthy(cluster, 3)
            [after] = [each.member.name for each in await cluster.status() if each.is_leader]
            assert after != before and leader.pid is not None
            await cluster.close()

    run(story())


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    async def story() -> None:
        member = EtcdMember(configs(tmp_path, 3)[0])  # alone it waits for ever
        starting = asyncio.ensure_future(member.start())
        await until(lambda: pid_path(member.config.directory).exists())
        pid = int(pid_path(member.config.directory).read_text())
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() and not is_alive(pid)

    run(story())


def test_members_and_clients_may_speak_tls(tmp_path: Path) -> None:
    tls, _ = certificates(tmp_path)

    async def story() -> None:
        settings = [replace(config, tls=tls) for config in configs(tmp_path, 2)]
        async with running([EtcdMember(config) for config in settings]) as members:
            await put(members[0], "/a", b"1")
            assert await value(members[1], "/a") == b"1"
            stranger = EtcdMetadataStore(members[0].endpoints, timeout_seconds=0.5, attempt_seconds=0.5)
            with pytest.raises(Unreachable):
                await stranger.get("/a")
            await stranger.close()

    run(story())


# --- members come and go ----------------------------------------------------------------------------


def test_a_member_joins_is_promoted_and_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        settings = configs(tmp_path, 4)
        seeds = settings[0].seed_nodes[:3]
        settings = [replace(config, seed_nodes=seeds, join=config.raft_addr not in seeds) for config in settings]
        async with running([EtcdMember(config) for config in settings[:3]]) as members:
            await put(members[0], "/a", b"1")
            joined = EtcdMember(settings[3])
            await joined.start()
            cluster = EtcdCluster(members[0].endpoints)
            try:
                await until_all_are_healthy(cluster, 4)
                found = {each.member.name: each for each in await cluster.status()}
                assert {*found} == {config.raft_addr for config in settings}
                assert sum(each.is_leader for each in found.values()) == 1
                assert not any(each.member.is_learner for each in found.values())
                assert len({each.raft_term for each in found.values()}) == 1
                new = found[joined.config.raft_addr]
                assert new.raft_index > 0 and new.db_size_bytes > 0 and new.version.startswith("3.")
                assert new.member.peer_urls == (f"http://{joined.config.raft_addr}",)
                assert new.member.client_urls == (f"http://{joined.endpoints[0]}",)
                assert "etcd member promoted" in [each.message for each in caplog.records]
                assert len(joined.endpoints) == 4

                # It was told to join, and is a member: a restart asks nobody.
                await joined.stop()
                joined = EtcdMember(settings[3])
                await joined.start()
                assert await value(joined, "/a") == b"1"

                with pytest.raises(Refused, match="voter already"):
                    await cluster.promote(new.member.id)
                with pytest.raises(Refused, match="no such member"):
                    await cluster.remove(12345)
                await until_all_are_healthy(cluster, 4)
                assert len(await cluster.remove(new.member.id)) == 3
                await until(lambda: joined.failure is not None)
                assert "removed from the cluster" in str(joined.failure)
                await joined.stop()
                with pytest.raises(ConfigError, match="removed from the cluster"):
                    await EtcdMember(settings[3]).start()

                # With an empty directory it may come back.
                shutil.rmtree(settings[3].directory)
                joined = EtcdMember(settings[3])
                await joined.start()
                assert await value(joined, "/a") == b"1"
            finally:
                await joined.stop()
                await cluster.close()

    run(story())


def test_a_store_goes_on_when_the_members_it_was_told_of_are_all_gone(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = configs(tmp_path, 2)
        first = replace(first, seed_nodes=(first.raft_addr,))
        second = replace(second, seed_nodes=(first.raft_addr,), join=True)
        async with running([EtcdMember(first)]) as (old,):
            store, cluster = EtcdMetadataStore(old.endpoints), EtcdCluster(old.endpoints)
            joined = EtcdMember(second)
            following = asyncio.create_task(follow(cluster, old.endpoints, [store], seconds=0.1))
            try:
                revision = await store.transact([], [Put("/a", b"1")])
                assert revision is not None
                await joined.start()
                await until_all_are_healthy(cluster, 2)
                await until(lambda: joined.endpoints[0] in str(store.peers))
                leaving = next(each for each in await cluster.members() if each.name == first.raft_addr)
                await until_removed(cluster, leaving.id)
                await old.stop()
                async with asyncio.timeout(30):
                    while True:
                        with contextlib.suppress(Unreachable):
                            assert (await store.transact([], [Put("/b", b"2")])) is not None
                            break
                assert [item.value for item in await store.list("/")] == [b"1", b"2"]
                assert [each.name for each in await cluster.members()] == [second.raft_addr]
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await store.close()
                await cluster.close()
                await joined.stop()

    run(story())


async def until_all_are_healthy(cluster: EtcdCluster, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Unreachable):
                if [each.healthy for each in await cluster.status()] == [True] * count:
                    return
            await asyncio.sleep(0.1)


async def until_added(cluster: EtcdCluster, peer_url: str) -> list[Member]:
    """etcd wants all members to have been up for some seconds."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await cluster.add_learner(peer_url)
            except Unavailable as error:
                assert "try again when all are up" in str(error)
                await asyncio.sleep(0.1)


async def until_removed(cluster: EtcdCluster, member_id: int) -> None:
    """etcd wants all members to have been up for some seconds. An attempt of which nobody knows may have done it."""
    unknown = False
    async with asyncio.timeout(30):
        while True:
            try:
                await cluster.remove(member_id)
                return
            except Unavailable as error:
                unknown |= isinstance(error, Unreachable)
            except Refused as refused:
                assert unknown and "no such member" in str(refused)
                return
            await asyncio.sleep(0.1)


def test_a_removal_whose_answer_is_lost_is_known_from_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_ask = Calls.once
    answers: list[str] = []

    async def ask_and_lose_the_answer(calls: Calls, method: Any, request: Any) -> Any:
        answers.append(str(await really_ask(calls, method, request)))
        raise Unreachable("etcd", "the connection was closed")

    async def ask_nobody(calls: Calls, method: Any, request: Any) -> Any:
        raise Unreachable("etcd", "nobody is there")

    async def story() -> None:
        first, second = configs(tmp_path, 2)
        first = replace(first, seed_nodes=(first.raft_addr,))
        second = replace(second, seed_nodes=(first.raft_addr,), join=True)
        async with running([EtcdMember(first)]) as (old,):
            cluster, joined = EtcdCluster(old.endpoints), EtcdMember(second)
            try:
                await joined.start()
                await until_all_are_healthy(cluster, 2)
                leaving = next(each for each in await cluster.members() if each.name == second.raft_addr)
                monkeypatch.setattr(Calls, "once", ask_nobody)
                with pytest.raises(Unreachable, match="nobody is there"):
                    await cluster.remove(leaving.id)
                monkeypatch.setattr(Calls, "once", ask_and_lose_the_answer)
                async with asyncio.timeout(30):
                    while not answers:
                        with contextlib.suppress(Unavailable):
                            left = await cluster.remove(leaving.id)
                assert [each.name for each in left] == [first.raft_addr], "known, though nobody answered"
            finally:
                await cluster.close()
                await joined.stop()

    run(story())


def test_status_tells_of_a_member_that_is_down_and_of_one_that_never_started(tmp_path: Path) -> None:
    async def story() -> None:
        settings = configs(tmp_path, 4)
        seeds = settings[0].seed_nodes[:3]
        settings = [replace(config, seed_nodes=seeds, join=config.raft_addr not in seeds) for config in settings]
        async with running([EtcdMember(config) for config in settings[:3]]) as members:
            cluster = EtcdCluster(members[0].endpoints)
            await until_all_are_healthy(cluster, 3)
            listed = await until_added(cluster, settings[3].url(settings[3].raft_addr))
            assert [member.is_learner for member in listed].count(True) == 1
            assert await cluster.add_learner(settings[3].url(settings[3].raft_addr)) == listed
            [learner] = [member for member in listed if member.is_learner]
            with pytest.raises(Unavailable, match="not caught up"):
                await cluster.promote(learner.id)
            with pytest.raises(Unavailable, match="promote or remove it first"):
                await cluster.add_learner("http://127.0.0.1:1")
            await members[2].stop()
            async with asyncio.timeout(30):
                while sum(each.healthy for each in await cluster.status()) != 2:  # an election, perhaps  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            found = {each.member.peer_urls: each for each in await cluster.status()}
            unstarted, down = found[learner.peer_urls], found[(members[2].config.url(members[2].config.raft_addr),)]
            assert not unstarted.healthy and unstarted.problems == ("it has not started yet",)
            assert not down.healthy and down.problems and down.raft_index == 0
            assert sum(each.healthy for each in found.values()) == 2
            # It was added before, by whoever: it takes its place.
            await members[2].start()
            async with running([EtcdMember(settings[3])]):
                await until_all_are_healthy(cluster, 4)
            await cluster.close()

    run(story())


# --- what is refused, and why -----------------------------------------------------------------------


def refused(config: MemberConfig) -> str:
    """The sentence with which a start is refused."""

    async def story() -> str:
        member = EtcdMember(config)
        with pytest.raises(ConfigError) as caught:
            async with asyncio.timeout(60):
                await member.start()
        assert member.pid is None
        return str(caught.value)

    return run(story())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"raft_addr": "c:7650"}, "must be one of --seed-nodes"),
        ({"raft_addr": "a"}, "host:port"),
        ({"raft_addr": "a:65000", "seed_nodes": ("a:65000",)}, "for clients"),
        ({"seed_nodes": ()}, "--seed-nodes"),
        ({"seed_nodes": ("a:7650", "a:7650")}, "once"),
        ({"seed_nodes": ("a:7650", "b")}, "host:port"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    settings = {"raft_addr": "a:7650", "seed_nodes": ("a:7650", "b:7650"), **changes}
    with pytest.raises(ConfigError, match=sentence):
        MemberConfig(directory=tmp_path, **settings)  # type: ignore[arg-type]


def test_a_missing_program_is_named_with_what_to_install(tmp_path: Path) -> None:
    [config] = configs(tmp_path, 1)
    assert "apt-get install etcd-server" in refused(replace(config, program="etcd-that-is-not-there"))


def test_a_program_that_is_no_etcd_or_an_old_one_is_refused(tmp_path: Path) -> None:
    [config] = configs(tmp_path, 1)
    assert "does not say that it is etcd" in refused(replace(config, program="true"))
    assert "3.3.25 is too old" in refused(replace(config, program=pretending(tmp_path, "3.3.25")))


@pytest.mark.parametrize(
    ("version", "warned"),
    [("3.4.31", True), ("3.4.32", False), ("3.5.13", True), ("3.5.14", False), ("3.6.0", False)],
)
def test_an_etcd_with_known_errors_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, warned: bool
) -> None:
    [config] = configs(tmp_path, 1)

    async def story() -> None:
        async with running([EtcdMember(replace(config, program=pretending(tmp_path, version)))]):
            pass

    run(story())
    assert ("etcd has known errors" in [each.message for each in caplog.records]) == warned


def pretending(directory: Path, version: str) -> str:
    """The program, which says of itself that it is of this version."""
    script = directory / f"etcd-{version}"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "etcd Version: {version}" && exit\nexec {etcd_program()} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.mark.parametrize("which", ["raft", "client"])
def test_an_address_in_use_is_named(tmp_path: Path, which: str) -> None:
    [config] = configs(tmp_path, 1)
    address = config.raft_addr if which == "raft" else config.client_addr(config.raft_addr)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        taken.listen()
        sentence = refused(config)
    assert f"cannot listen on {address}: address already in use" in sentence


def test_a_second_member_with_the_same_address_is_refused_though_the_first_answers(tmp_path: Path) -> None:
    [config] = configs(tmp_path, 1)

    async def story() -> None:
        async with running([EtcdMember(config)]):
            with pytest.raises(ConfigError, match="address already in use"):
                await EtcdMember(replace(config, directory=tmp_path / "second")).start()

    run(story())


def test_a_host_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    address = "no-such-host.invalid:7650"
    config = MemberConfig(directory=tmp_path, raft_addr=address, seed_nodes=(address,), program=etcd_program())
    assert "no-such-host.invalid is not known" in refused(config)


def test_a_directory_of_another_member_or_cluster_is_refused(tmp_path: Path) -> None:
    [config] = configs(tmp_path, 1)
    [other] = member_addresses(1)

    async def story() -> None:
        async with running([EtcdMember(config)]):
            pass

    run(story())
    sentence = refused(replace(config, raft_addr=other, seed_nodes=(other,)))
    assert f"belongs to member {config.raft_addr} of cluster 'danube'" in sentence
    assert "cluster 'danube'" in refused(replace(config, cluster_name="other"))
    (config.directory / "member.json").write_text("{")
    assert "damaged" in refused(config)


def test_a_member_whose_data_is_gone_is_told_how_to_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        settings = configs(tmp_path, 3)
        async with running([EtcdMember(config) for config in settings]) as members:
            await members[2].stop()
            shutil.rmtree(settings[2].directory)
            with pytest.raises(ConfigError, match=r"remove the member .* --join"):
                await EtcdMember(settings[2]).start()
            with pytest.raises(ConfigError, match="member already"):
                await EtcdMember(replace(settings[2], join=True)).start()
            cluster = EtcdCluster(members[0].endpoints)
            [lost] = [each.member for each in await cluster.status() if not each.healthy]
            await cluster.remove(lost.id)
            async with running([EtcdMember(replace(settings[2], join=True))]):
                await until_all_are_healthy(cluster, 3)
            await cluster.close()

    run(story())


# --- processes --------------------------------------------------------------------------------------


def test_a_stray_member_is_stopped_and_its_data_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [config] = configs(tmp_path, 1)
    command = [
        config.program,
        *config.arguments("127.0.0.1", {config.raft_addr: f"http://{config.raft_addr}"}, state="new"),
    ]
    config.directory.mkdir()

    async def story() -> None:
        await put(EtcdMember(config), "/a", b"1")
        async with running([EtcdMember(config)]) as [member]:
            assert await value(member, "/a") == b"1"

    with log_path(config.directory).open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as stray:
        pid_path(config.directory).write_text(f"{stray.pid}\n")
        try:
            run(story())
            assert stray.poll() is not None
        finally:
            stray.kill()
    assert "stray etcd member stopped" in [each.message for each in caplog.records]


@pytest.mark.parametrize("text", ["{pid}\n", "no number", "", "999999999\n"])
def test_a_pid_file_that_names_no_member_of_ours_harms_nobody(tmp_path: Path, text: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            pid_path(tmp_path).write_text(text.format(pid=bystander.pid))
            assert take_over(tmp_path, "--data-dir=elsewhere") is None
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert take_over(tmp_path / "no such directory", "--data-dir=elsewhere") is None


def test_a_stray_member_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pydanube.stores.metadata.etcd.process.STOP_SECONDS", 0.2)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    command = ["python3", "-c", script, "--data-dir=here"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None and deaf.stdout.readline() == b"deaf\n"
        pid_path(tmp_path).write_text(f"{deaf.pid}\n")
        assert take_over(tmp_path, "--data-dir=here") == deaf.pid
        assert deaf.wait(10) == -signal.SIGKILL


def test_the_log_is_kept_short_while_etcd_writes_to_it(tmp_path: Path) -> None:
    with log_path(tmp_path).open("ab", buffering=0) as log:
        log.write(b"x" * LOG_BYTES_MAX)
        assert not shorten_log(tmp_path)
        log.write(b"y")
        assert shorten_log(tmp_path)
        log.write(b"z")
    assert log_path(tmp_path).read_bytes() == b"z"
    assert (tmp_path / "etcd.log.1").stat().st_size == LOG_BYTES_MAX + 1
