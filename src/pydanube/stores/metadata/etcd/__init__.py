"""etcd: the metadata store of a cluster, its members, and a member that a broker runs itself.

store.py           MetadataStore: keys, watches, leases
cluster.py         members: status, add, promote, remove
following.py       where members are, while they come and go
renewals.py        leases, renewed by a thread of their own
member.py          runs a member for the broker, as member_config.py says
process.py         its process, and guard.py, which makes it end with ours
calls.py           which member is asked, for how long, and what a failure means
endpoint.py        one member: channel, methods, TLS
"""

from pydanube.stores.metadata.etcd.cluster import EtcdCluster, Member, MemberStatus
from pydanube.stores.metadata.etcd.endpoint import Tls
from pydanube.stores.metadata.etcd.following import follow
from pydanube.stores.metadata.etcd.member import EtcdMember
from pydanube.stores.metadata.etcd.member_config import CLIENT_PORT_OFFSET, MemberConfig
from pydanube.stores.metadata.etcd.store import EtcdMetadataStore

__all__ = [
    "CLIENT_PORT_OFFSET",
    "EtcdCluster",
    "EtcdMember",
    "EtcdMetadataStore",
    "Member",
    "MemberConfig",
    "MemberStatus",
    "Tls",
    "follow",
]
