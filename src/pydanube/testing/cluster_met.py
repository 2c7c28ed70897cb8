"""The public operations of brokers and of the cluster, which simulated clusters are to meet: see coverage.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydanube.broker.cursors import Cursors
from pydanube.broker.hosting import Hosting
from pydanube.broker.ownership import Ownership
from pydanube.broker.rescue import Rescuer
from pydanube.broker.reservation import Reservation
from pydanube.broker.retention import RetentionDesk
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.take_over import Opener
from pydanube.broker.tiering import Tiering
from pydanube.broker.topic import Topic
from pydanube.broker.topics import Topics
from pydanube.broker.volatile_topic import VolatileSubscription, VolatileTopic
from pydanube.cluster.cluster import Cluster
from pydanube.cluster.duties import Duties
from pydanube.cluster.leadership import Leadership
from pydanube.cluster.lease import Lease
from pydanube.cluster.load_manager import LoadManager
from pydanube.cluster.membership import Membership
from pydanube.cluster.requests import Requests
from pydanube.cluster.view import View
from pydanube.core.leading import Leading
from pydanube.log.tier import TopicTier
from pydanube.log.tier_tidy import Tidy

OPERATIONS: Final = (
    *(Broker, Topics, Topic, Subscription, VolatileTopic, VolatileSubscription, Opener, Ownership, Reservation),
    *(Rescuer, Tiering, Cursors, Hosting, RetentionDesk, TopicTier, Tidy),
    *(Cluster, Membership, Lease, Duties, Requests, View, Leadership, LoadManager, Leading),
)
# What no simulated cluster does, and why.
NEVER: Final[Mapping[str, str]] = {
    "Broker.start": "it opens real stores and doors; simulated brokers are given theirs",
    "Broker.check_directory": "the lock of a real directory, looked at before a process starts",
    "Broker.run": "threads, for who serves requests",
    "Topic.discard_orphan": "an operator gives up acknowledged messages: nothing is promised of them",
    "Subscription.withhold": "nobody calls it but a test",
    "Topic.swap_objects": "compaction by Spark, which writes objects itself",
    "TopicTier.damaged": "objects that the store has changed: it never does here",
}
