"""Who is let in at a gRPC port when connections are few."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pydanube.api.connections import Admission, peers_at
from pydanube.errors import TooManyConnections


class ServerCluster:
    """Peers by port, as `peers_at` would find them."""

    def __init__(self) -> None:
        self.ports: set[int] | None = set()
        self.looks = 0

    def __call__(self, port: int) -> set[int] | None:
        self.looks += 1
        return self.ports and set(self.ports)

    def call(self, admission: Admission, port: int) -> bool:
        """Whether a call of the peer with this port is let in."""
        assert self.ports is not None
        self.ports.add(port)
        admission._look_after = 0.0  # enough time has passed for another look
        try:
            admission.check(f"ipv4:10.0.0.1:{port}")
        except TooManyConnections:
            return False
        return True


def test_so_many_are_served_and_the_next_are_told_why_until_others_leave() -> None:
    cluster = ServerCluster()
    admission = Admission(3, 256, cluster)
    assert [cluster.call(admission, port) for port in (1, 2, 3, 4, 5)] == [True, True, True, False, False]
    assert all(cluster.call(admission, port) for port in (1, 2, 3)), "who is in stays in"
    assert cluster.ports is not None
    cluster.ports.discard(2)
    assert cluster.call(admission, 5)
    assert not cluster.call(admission, 4)
    assert all(cluster.call(admission, port) for port in (1, 3, 5))


def test_nobody_looks_while_the_last_look_still_holds() -> None:
    cluster = ServerCluster()
    admission = Admission(100, 256, cluster)
    for port in range(100):
        assert cluster.call(admission, port)
    assert cluster.looks == 0
    assert cluster.ports is not None
    cluster.ports -= set(range(90))
    for port in range(100, 190):
        assert cluster.call(admission, port)
    assert cluster.looks == 1


def test_a_look_is_not_repeated_at_once() -> None:
    cluster = ServerCluster()
    admission = Admission(1, 256, cluster)
    assert cluster.call(admission, 1) and not cluster.call(admission, 2)
    looks = cluster.looks
    for _ in range(100):
        with pytest.raises(TooManyConnections, match=r"at most 1 connections here.*open files is 256.*ulimit"):
            admission.check("ipv4:10.0.0.1:3")
    assert cluster.looks <= looks + 1


def test_where_the_system_does_not_say_who_is_there_the_servers_own_bound_has_to_do() -> None:
    cluster = ServerCluster()
    admission = Admission(2, 256, cluster)
    assert cluster.call(admission, 1) and cluster.call(admission, 2)
    cluster.ports = None
    admission.check("unix:somewhere")
    assert admission.option == ("grpc.max_allowed_incoming_connections", 10)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_the_peers_of_a_port_are_found_and_left_alone(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        accepted = [opened.enter_context(listener.accept()[0]) for _ in range(3)]
        assert peers_at(port) == {client.getsockname()[1] for client in clients}
        for one, other in zip(clients, sorted(accepted, key=lambda one: one.getpeername()[1]), strict=True):
            del other
            one.sendall(b"x")
        assert [one.recv(1) for one in accepted] == [b"x"] * 3, "they are still open"
        clients[0].close()
        accepted_ports = {one.getpeername()[1] for one in accepted}
        assert peers_at(port) == accepted_ports
