"""What several rooms' tests are run with."""

from __future__ import annotations

import pytest

from tests.rooms.tiers import store_apart


@pytest.fixture(params=["here", "apart"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are made and stored in this process, or in another."""
    if request.param == "apart":
        store_apart(monkeypatch)
