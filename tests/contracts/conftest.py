"""A fixture per port, once for every adapter in the tables, and tests that may be coroutines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pydanube.ports import ObjectStore
from tests.contracts import adapters
from tests.support import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    case = pyfuncitem.funcargs.get("metadata_case")
    run(test if case is None else closed_after(test, case))
    return True


async def closed_after(test: Coroutine[Any, Any, None], case: adapters.MetadataCase) -> None:
    try:
        await test
    finally:
        await case.close()


def each(makers: Mapping[str, adapters.Maker[Any]]) -> Callable[..., Any]:
    """A fixture that gives the case of every maker in turn."""

    @pytest.fixture(params=list(makers))
    def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
        with makers[request.param](tmp_path) as made:
            yield made

    return case


clock_case = each(adapters.CLOCKS)
disk_case = each(adapters.DISKS)
work = each(adapters.WORKS)


@pytest.fixture(
    params=[
        *adapters.OBJECT_STORES,
        *(pytest.param(name, marks=pytest.mark.slow) for name in adapters.SERVED_OBJECT_STORES),
    ]
)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param in adapters.OBJECT_STORES:
        made = adapters.OBJECT_STORES[request.param](tmp_path)
    else:
        made = adapters.SERVED_OBJECT_STORES[request.param](request.getfixturevalue("s3_server"))
    with made as store:
        yield store


@pytest.fixture
def disk(disk_case: adapters.DiskCase) -> Any:
    return disk_case.disk


@pytest.fixture(params=[*adapters.METADATA_STORES, pytest.param("etcd", marks=pytest.mark.slow)])
def metadata_case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[adapters.MetadataCase]:
    if request.param == "etcd":
        made = adapters.etcd_metadata(request.getfixturevalue("etcd_server"), f"/{request.node.name}")
    else:
        made = adapters.METADATA_STORES[request.param](tmp_path)  # type: ignore[assignment]
    with made as case:
        yield case


@pytest.fixture
def metadata(metadata_case: adapters.MetadataCase) -> Any:
    return metadata_case.store
