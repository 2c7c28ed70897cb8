"""What there is, in the words of the metadata store: transactions beside which nothing slips in.

**A namespace that is removed while a topic is made in it.** Its policy is the key that both compare. The removal marks
it, looks for topics, and deletes it as it was marked; the making of a topic compares it, and takes a mark away.

| the topic is made                        | it finds          | the removal finds                          |
|------------------------------------------|-------------------|--------------------------------------------|
| before the mark                          | the policy        | the topic: refused, the mark is taken away |
| after it, before the policy is deleted   | the mark, goes on | the policy changed: it looks again         |
| after the policy was deleted             | no namespace      | –                                          |
| never: the remover died behind its mark  | –                 | the next making, or removal, takes it away |

A broker of an earlier version makes topics without taking the mark away, so beside one the second row can fail.

**How many partitions there are.** Official clients count them by themselves and have them made one by one, under their
names. Only a topic that was made as a whole says how many it has; a name like a partition's beside those would be
written to by all clients of the base.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pydanube.core import keys
from pydanube.core.names import NamespaceName, TopicName
from pydanube.core.policies import REMOVING
from pydanube.errors import NamespaceNotEmpty, NamespaceUnknown
from pydanube.ports import Compare, Delete, Item, MetadataStore, Put


class PartitionCount(NamedTuple):
    partitions: int
    revision: int


async def partitions_asked_for(metadata: MetadataStore, base: TopicName) -> PartitionCount | None:
    """None: it was not made as a whole, or by a broker of an earlier version."""
    item = await metadata.get(keys.partitioned(base))
    return None if item is None else PartitionCount(int(json.loads(item.value)["partitions"]), item.revision)


def stays(policy: Item) -> list[Put | Delete]:
    """What takes the mark of a removal away: a topic is being made."""
    stored = json.loads(policy.value)
    if not stored.pop(REMOVING, False):
        return []
    return [Put(policy.key, json.dumps(stored).encode())]


async def remove_namespace(
    metadata: MetadataStore, name: NamespaceName, topics: Callable[[NamespaceName], Awaitable[Sequence[TopicName]]]
) -> None:
    """Raises NamespaceUnknown, and NamespaceNotEmpty while it has topics."""
    key = keys.namespace_policy(name)
    while True:
        policy = await metadata.get(key)
        if policy is None:
            raise NamespaceUnknown(name)
        stored = {each: value for each, value in json.loads(policy.value).items() if each != REMOVING}
        mark = Put(key, json.dumps({**stored, REMOVING: True}).encode())
        marked = await metadata.transact([Compare(key, policy.revision)], [mark])
        if marked is None:
            continue
        if found := await topics(name):
            await metadata.transact([Compare(key, marked)], [Put(key, json.dumps(stored).encode())])
            raise NamespaceNotEmpty(name, len(found))
        if await metadata.transact([Compare(key, marked)], [Delete(key)]) is not None:
            return
