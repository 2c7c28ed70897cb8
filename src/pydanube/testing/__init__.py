"""For tests of applications and of PyDanube itself. `broker` is a broker in this process; see `brokers.py`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydanube.testing.brokers import broker as broker

__all__ = ["broker"]


def __getattr__(name: str) -> Any:
    # Loaded when it is used: the simulator needs no gRPC.
    if name == "broker":
        from pydanube.testing.brokers import broker

        globals()["broker"] = broker
        return broker
    raise AttributeError(f"module 'pydanube.testing' has no attribute {name!r}")
