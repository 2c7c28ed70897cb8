"""Brokers in processes of their own that are one cluster: what tests (tests/e2e) and chaos ask of it alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class BrokerOfCluster(Protocol):
    paused: bool

    @property
    def running(self) -> bool: ...

    @property
    def stream_url(self) -> str: ...

    @property
    def broker_id(self) -> int | str:
        """0 or "" until it has said so."""

    def kill(self) -> None: ...


B = TypeVar("B", bound=BrokerOfCluster)


class ProcessesOf(Generic[B]):
    def __init__(self, brokers: Iterable[B]) -> None:
        self.brokers = list(brokers)

    def __getitem__(self, number: int) -> B:
        return self.brokers[number]

    @property
    def url(self) -> str:
        """For clients: every broker's address."""
        return ",".join(broker.stream_url for broker in self.brokers)

    @property
    def living(self) -> list[B]:
        return [broker for broker in self.brokers if broker.running and not broker.paused]

    def by_id(self, broker_id: int | str) -> B | None:
        return next((each for each in self.brokers if str(each.broker_id) == str(broker_id)), None)

    def kill(self) -> None:
        """All of them, without waiting for what they do."""
        for broker in self.brokers:
            broker.kill()
