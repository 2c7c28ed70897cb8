"""For tests of applications and of PyDanube itself.

broker                  a broker in this process: brokers.py
Cluster                 whole brokers on a virtual clock, from a seed: cluster.py
Wires                   the network between real clients and real brokers, bytes on a virtual clock: wires.py
History, check          what happened to any cluster, and whether it was right: history.py, checkers.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydanube.testing.brokers import broker as broker
    from pydanube.testing.checkers import check as check
    from pydanube.testing.cluster import Cluster as Cluster
    from pydanube.testing.history import History as History
    from pydanube.testing.wires import Wires as Wires

__all__ = ["Cluster", "History", "Wires", "broker", "check"]

_PLACES = {"broker": "brokers", "check": "checkers", "Cluster": "cluster", "History": "history", "Wires": "wires"}


def __getattr__(name: str) -> Any:
    # Loaded when it is used: the simulator needs no gRPC.
    if name in _PLACES:
        found = getattr(import_module(f"pydanube.testing.{_PLACES[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'pydanube.testing' has no attribute {name!r}")
