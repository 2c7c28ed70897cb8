"""A broker whose metadata store takes no cursor of a subscription that is called `unlucky…`, and everything else.

It also gives up a move sooner than others when the object store is away.

python unwilling_broker.py broker --mode cluster …        as `danube` itself
"""

from __future__ import annotations

from collections.abc import Sequence

from pydanube.broker import hand_over
from pydanube.cli.main import main
from pydanube.errors import Unreachable
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.stores.metadata.etcd import EtcdMetadataStore

_transact = EtcdMetadataStore.transact


def is_unlucky(operation: Put | Delete) -> bool:
    """A new subscription's first cursor is stored: it belongs to its making."""
    return (
        isinstance(operation, Put)
        and "/subscriptions/unlucky" in operation.key
        and operation.key.endswith("/cursor")
        and operation.value != b"-1"
    )


async def transact(
    self: EtcdMetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete]
) -> Revision | None:
    if any(map(is_unlucky, operations)):
        raise Unreachable("metadata store", "it does not take this one")
    return await _transact(self, compares, operations)


EtcdMetadataStore.transact = transact  # type: ignore[method-assign]
hand_over.REST_SECONDS = 8.0  # type: ignore[misc]

if __name__ == "__main__":
    main()
