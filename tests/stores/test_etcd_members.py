"""What etcd says about members, as this broker understands it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pydanube.errors import Refused, Unavailable
from pydanube.stores.metadata.etcd.calls import Refusal
from pydanube.stores.metadata.etcd.cluster import EtcdCluster
from tests.support import run


@pytest.mark.parametrize(
    ("details", "error"),
    [
        ("etcdserver: member not found", Unavailable),  # of whoever was just removed; nobody asked for that one
        ("etcdserver: unhealthy cluster", Unavailable),
        ("etcdserver: peerURL exists", Refused),
    ],
)
def test_a_member_joins_later_if_another_is_still_leaving(details: str, error: type[Exception]) -> None:
    async def once(method: Any, request: Any) -> Any:
        raise Refusal("etcd", grpc.StatusCode.NOT_FOUND, details)

    async def members() -> list[Any]:
        return []

    async def inside() -> None:
        cluster = EtcdCluster.__new__(EtcdCluster)
        cluster._calls = SimpleNamespace(once=once)  # type: ignore[assignment]
        cluster.members = members  # type: ignore[method-assign]
        with pytest.raises(error, match="cannot be added"):
            await cluster.add_learner("http://127.0.0.1:1")

    run(inside())
