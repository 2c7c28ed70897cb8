"""A topic, or a subscription, of either kind. `reliable` tells them apart, to readers and to the type checker."""

from __future__ import annotations

from typing import TypeAlias

from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileSubscription, VolatileTopic

AnyTopic: TypeAlias = Topic | VolatileTopic
AnySubscription: TypeAlias = Subscription | VolatileSubscription
