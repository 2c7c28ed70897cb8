"""PyDanube: a reliable pub/sub and streaming platform.

    import pydanube

    async with pydanube.connect("danube://127.0.0.1:6651") as client:
        async with client.producer("/default/orders", reliable=True) as orders:
            receipt = await orders.send(b"2 coffees", key="user-7", attributes={"v": "1"})
        async with client.consumer("/default/orders", subscription="billing") as consumer:
            async for message in consumer:
                await message.ack()

`pydanube.blocking.connect` is the same without async, for scripts and notebooks. `pydanube.errors` has every error;
`pydanube.testing.broker()` is a broker for tests.

Importing the package is cheap: it loads nothing but this file, so that every part of it, the pure core included, can be
used without paying for the others. The names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

# The same number as in pyproject.toml; tests/test_tidy.py keeps the two alike. A constant,
# because reading the installed metadata takes longer than importing all of core.
__version__: Final = "0.1.0"

if TYPE_CHECKING:
    from pydanube import blocking as blocking
    from pydanube import errors as errors
    from pydanube.client.client import Client as Client
    from pydanube.client.client import connect as connect
    from pydanube.client.consumer import Consumer as Consumer
    from pydanube.client.failures import FailurePolicy as FailurePolicy
    from pydanube.client.messages import Lag as Lag
    from pydanube.client.messages import Located as Located
    from pydanube.client.messages import Message as Message
    from pydanube.client.messages import MessageBatch as MessageBatch
    from pydanube.client.messages import Receipt as Receipt
    from pydanube.client.messages import Statistics as Statistics
    from pydanube.client.messages import TopicInfo as TopicInfo
    from pydanube.client.producer import Producer as Producer
    from pydanube.client.requests import Requests as Requests
    from pydanube.client.tail import Tail as Tail
    from pydanube.client.tail import TailedBatch as TailedBatch
    from pydanube.client.tail import TailedMessage as TailedMessage
    from pydanube.client.working import Handled as Handled
    from pydanube.errors import DanubeError as DanubeError

_HOMES: Final = {
    **dict.fromkeys(("Client", "connect"), "pydanube.client.client"),
    **dict.fromkeys(
        ("Lag", "Located", "Message", "MessageBatch", "Receipt", "Statistics", "TopicInfo"), "pydanube.client.messages"
    ),
    **dict.fromkeys(("Tail", "TailedBatch", "TailedMessage"), "pydanube.client.tail"),
    "Consumer": "pydanube.client.consumer",
    "FailurePolicy": "pydanube.client.failures",
    "Producer": "pydanube.client.producer",
    "DanubeError": "pydanube.errors",
    "Handled": "pydanube.client.working",
    "Requests": "pydanube.client.requests",
}
_MODULES: Final = {"blocking": "pydanube.blocking", "errors": "pydanube.errors"}

__all__ = [
    "Client",
    "Consumer",
    "DanubeError",
    "FailurePolicy",
    "Handled",
    "Lag",
    "Located",
    "Message",
    "MessageBatch",
    "Producer",
    "Receipt",
    "Requests",
    "Statistics",
    "Tail",
    "TailedBatch",
    "TailedMessage",
    "TopicInfo",
    "__version__",
    "blocking",
    "connect",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'pydanube' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
