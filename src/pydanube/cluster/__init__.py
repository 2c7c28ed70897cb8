"""The cluster as one broker sees it: who is alive, who leads, which topics go where.

    ClusterNode (cluster.py)  what broker/ and api/ hold: starts and stops the rest, answers questions, takes requests
      Membership              registration under a lease, self-fencing, coming back
      View                    `/cluster/` mirrored: watched, and listed again every 30 s
      Leadership              one leader at a time
      LoadManager             only while leading: declares brokers dead, gives topics to brokers, rebalances, drains
      AssignmentReconciler    what markers ask of this broker: take a topic over, hand one over
    TopicHost (host.py)       what the broker does when the cluster asks for it

How it is wired, in this order:

    cluster = ClusterNode(identity, store=..., clock=..., work=...)
    host = ...                             the broker's topics, which ask `cluster` whose a topic is
    await cluster.register(host)           raises NodeIdInUse for a copy of a living broker's directory
    session = cluster.session
    for topic in await cluster.own_topics(): ...          claim those whose owner key names this broker, and only while
                                           `cluster.session` is that one: compare `cluster.registered` too
    cluster.start(host)                    from here on `host` is called
    (open the servers)
    ...
    await cluster.retire()                 the leader gives this broker no more topics; now seal those it has
    await cluster.stop()                   after the topics are sealed: gives leadership and registration back

`cluster.requests` has what operators ask for; `cluster.ended` is a future that fails when this broker must stop.

Every transaction that claims a topic compares, with the owner key, `cluster.registered`: it holds only as long as
this process is registered, so a broker that was declared dead claims nothing. `cluster.may_serve()` is asked before
every acknowledgement and every dispatch: it turns false a quarter of the TTL before the lease can run out.

The life of a marker, `/cluster/unassigned/<ns>/<topic>`:

    new topic        null ──────────────► {to: B} ─────────────────────────────────► B claims (which deletes it)
    move             {reason, from_broker: A} ─► {.., to: B} ─► A seals ─► {.., ready} ─► B claims
                                                                └─► {.., error}: undone, A serves on; removed later
    crash            {reason: "broker_lost", from_broker: A} ─► {.., to: B} ───────► B claims
    orderly stop     {reason: "shutdown", from_broker: A, ready} ─► {.., to: B} ───► B claims

The broker that creates the topic writes null with it. The owner's seal writes `marker.as_ready()` in the transaction
that releases the topic. All other changes are made here.
"""

from pydanube.cluster.cluster import ClusterNode
from pydanube.cluster.host import TopicHost
from pydanube.cluster.membership import Identity

__all__ = ["ClusterNode", "Identity", "TopicHost"]
