"""A fixture per port, once for every adapter in the tables, and tests that may be coroutines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import adapters
from tests.support import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def each(makers: Mapping[str, adapters.Maker[Any]]) -> Callable[..., Any]:
    """A fixture that gives the case of every maker in turn."""

    @pytest.fixture(params=list(makers))
    def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
        with makers[request.param](tmp_path) as made:
            yield made

    return case


clock_case = each(adapters.CLOCKS)
disk_case = each(adapters.DISKS)
objects = each(adapters.OBJECT_STORES)
metadata_case = each(adapters.METADATA_STORES)
network_case = each(adapters.NETWORKS)
work = each(adapters.WORKS)


@pytest.fixture
def disk(disk_case: adapters.DiskCase) -> Any:
    return disk_case.disk


@pytest.fixture
def metadata(metadata_case: adapters.MetadataCase) -> Any:
    return metadata_case.store
