"""The public operations of brokers and of the cluster, which simulated clusters are to meet: see coverage.py.

All but what only tells people how things are (Observer, Overview, StorageDesk): no client and no broker waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydanube.broker.base_subscription import BaseSubscription
from pydanube.broker.base_topic import BaseTopic
from pydanube.broker.catalog import Catalog
from pydanube.broker.cursors import Cursors
from pydanube.broker.dispatcher import Dispatcher
from pydanube.broker.events import Events
from pydanube.broker.gather import Gatherer
from pydanube.broker.hand_over import LastSnapshots
from pydanube.broker.load_meter import LoadMeter
from pydanube.broker.move_log import MoveLog
from pydanube.broker.namespace_limits import NamespaceLimits
from pydanube.broker.ownership import Ownership
from pydanube.broker.reservation import Reservation
from pydanube.broker.service import Broker
from pydanube.broker.shipper import Shipper
from pydanube.broker.subscription import Subscription
from pydanube.broker.take_over import Opener
from pydanube.broker.topic import Topic
from pydanube.broker.topic_directory import TopicDirectory
from pydanube.broker.topic_reader import TopicReader
from pydanube.broker.topic_table import TopicTable
from pydanube.broker.volatile_topic import VolatileSubscription, VolatileTopic
from pydanube.cluster.assignment_reconciler import AssignmentReconciler
from pydanube.cluster.cluster import ClusterNode
from pydanube.cluster.leadership import Leadership
from pydanube.cluster.lease import BrokerLease
from pydanube.cluster.load_manager import LoadManager
from pydanube.cluster.membership import Membership
from pydanube.cluster.operations import ClusterOperations
from pydanube.cluster.reports import Reports
from pydanube.cluster.returning import Returning
from pydanube.cluster.upkeep import Upkeep
from pydanube.cluster.view import View
from pydanube.core.cluster.leader import Leading
from pydanube.history.maintenance import Maintenance
from pydanube.history.object_maker import ObjectMaker
from pydanube.history.rescue import Rescuer
from pydanube.history.retention import RetentionDesk
from pydanube.history.tier import TopicTier
from pydanube.history.uploader import Uploader
from pydanube.history.uploads import TopicUploads

OPERATIONS: Final = (
    *(Broker, Catalog, TopicTable, TopicDirectory, MoveLog, Opener, Ownership, Reservation),
    *(Events, Gatherer, LastSnapshots, LoadMeter, NamespaceLimits),
    *(BaseTopic, TopicReader, Topic, VolatileTopic),
    *(BaseSubscription, Dispatcher, Shipper, Subscription, VolatileSubscription),
    *(Rescuer, Uploader, Cursors, RetentionDesk, TopicTier, TopicUploads, ObjectMaker, Maintenance),
    *(
        ClusterNode,
        Membership,
        BrokerLease,
        AssignmentReconciler,
        ClusterOperations,
        View,
        Leadership,
        LoadManager,
        Leading,
    ),
    *(Reports, Returning, Upkeep),
)
# What no simulated cluster does, and why.
NEVER: Final[Mapping[str, str]] = {
    "Broker.start": "it opens real stores and servers; simulated brokers are given theirs",
    "Broker.check_directory": "the lock of a real directory, looked at before a process starts",
    "Broker.run": "threads, for who serves requests",
    "Broker.listens": "simulated brokers have no servers with addresses",
    "Events.newest": "people ask for what happened; nothing depends on it",
    "BaseSubscription.is_wanted": "only the gRPC server asks a volatile subscription, and it wants everything",
    "BaseTopic.bind": "simulated clients have no schemas",
    "BaseTopic.set_schema": "simulated clients have no schemas",
    "BaseTopic.set_schema_policy": "simulated clients have no schemas",
    "Topic.set_aside": "only erasure by a job asks for it, which is not simulated; it lists files and changes nothing",
    "Topic.discard_orphan": "an operator gives up acknowledged messages: nothing is promised of them",
    "Topic.swap_objects": "compaction by Spark, which writes objects itself",
    "Uploader.flush": "begun by loads of tables, whose catalog is not simulated: steps as the interval's, sooner",
    "TopicTier.damaged": "objects that the store has changed: it never does here",
}
