"""What every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.e2e.etcd import EtcdServer, etcd_in
from tests.e2e.objectstores import S3Server, running_s3_server

# No test is timed: on a busy machine an example takes as long as it takes.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

# Commands use none of the contexts that the developer has.
os.environ["DANUBE_CONFIG_DIR"] = os.path.join(os.devnull, "danube")
os.environ.pop("DANUBE_CONTEXT", None)

# `make coverage` measures processes that run tests, not those that tests start: these live by deadlines, and what they
# run is run in a test process, too.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in [name for name in os.environ if name.startswith("COVERAGE_PROCESS_")]:
        del os.environ[variable]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3-compatible server, started by the first test of this process that asks for it."""
    with running_s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd of one member. Whoever uses it leaves no keys behind."""
    with etcd_in(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["here", "apart"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are made and stored in this process, or in another."""
    if request.param == "apart":
        from tests.harness.tiers import store_in_workers  # here: most tests never need it

        store_in_workers(monkeypatch)
