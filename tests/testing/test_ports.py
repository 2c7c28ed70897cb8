import socket
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET
from pydanube.testing import ports
from pydanube.testing.ports import free_block, free_ports, member_ports

REALLY_FREE = ports._free


@pytest.fixture(autouse=True)
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of three ports that are ours, as the rows are. No other port is tried out: somebody may need it now."""
    first = free_block(3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_free", lambda *_: True)
    return first


def test_calls_that_are_made_one_after_the_other_give_no_port_twice() -> None:
    given = [port for _ in range(50) for port in free_ports(4)]
    assert len(set(given)) == len(given)


def test_processes_that_ask_at_once_get_different_ports(tmp_path: Path) -> None:
    program = (
        "from pydanube.testing import ports; ports._free = lambda *_: True;"
        "[print(port) for _ in range(25) for port in ports.free_ports(4)]"
    )

    def ask(_: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program], env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    with ThreadPoolExecutor() as pool:
        given = Counter(port for printed in pool.map(ask, range(3)) for port in printed)
    assert len(given) == 300
    assert set(given.values()) == {1}


def test_a_port_that_somebody_has_is_left_out(ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_free", REALLY_FREE)
    monkeypatch.setattr(ports, "SINGLES", range(ours, ours + 3))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ours + 1))
        assert free_ports(2) == [ours, ours + 2]


def test_a_port_comes_again_only_after_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "SINGLES", range(10_000, 10_016))
    assert free_ports(16) == list(range(10_000, 10_016))
    assert free_ports(2) == [10_000, 10_001]


def test_when_every_port_is_taken_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_free", lambda *_: False)
    with pytest.raises(OSError, match="nearly every port from 10000 to 19999 is taken"):
        free_ports(1)


def test_members_get_ports_whose_client_ports_nobody_else_gets() -> None:
    first, second = member_ports(3), [free_block(60, members=3) + each for each in range(3)]
    both = [*first, *second]
    assert len({*both, *(port + CLIENT_PORT_OFFSET for port in both)}) == 12
    for _ in range(200):  # as many as one row of a thousand has, and more
        block = free_block(60)
        assert not {port + CLIENT_PORT_OFFSET for port in both} & set(range(block, block + 60))


def test_a_file_that_somebody_wrote_into_is_begun_anew(tmp_path: Path) -> None:
    free_ports(1)
    [file] = tmp_path.glob("danube-ports-*")
    file.write_text("rubbish")
    assert len(set(free_ports(2))) == 2


@pytest.mark.parametrize("count", [0, 1001])
def test_a_block_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"a block has 1 to 1000 ports, not {count}"):
        free_block(count)
