"""The servers of a broker: opened last, closed first.

    client port     ProducerService, ConsumerService, Discovery, HealthCheck, StorageService, SchemaRegistry
    admin port      BrokerAdmin, ClusterAdmin, NamespaceAdmin, TopicAdmin, SecurityAdmin, SchemaRegistry, and ours:
                    Admin, Status, Pipelines, and Peers between brokers
    stream port     the native protocol
    metrics port    HTTP: /metrics, /health/live, /health/ready, /iceberg/v1/ (tables)

A port that is in use is a ConfigError, never shared: two brokers on one port would each get some of the calls.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from pydanube.api.connections import Admission
from pydanube.api.grpc import admin as grpc_admin
from pydanube.api.grpc import cluster as grpc_cluster
from pydanube.api.grpc import data, extensions, status, storage
from pydanube.api.grpc.adapter import handler_of
from pydanube.api.grpc.forward import Forwarder
from pydanube.api.grpc.peers import Peers, PeerService
from pydanube.api.grpc.pipelines import PipelineCalls
from pydanube.api.grpc.schemas import SchemaCalls
from pydanube.api.grpc.server import GrpcServer
from pydanube.api.http.metrics import STARTING, MetricsServer
from pydanube.api.native.server import NativeServer
from pydanube.api.orders import Orders
from pydanube.api.tls import server_context
from pydanube.broker.observing import Observer
from pydanube.broker.service import Broker
from pydanube.broker.sources import program_version
from pydanube.broker.stores import readers_keys
from pydanube.broker.tables import TableDesk
from pydanube.config import BrokerConfig, open_files
from pydanube.config.grpc import GrpcConfig
from pydanube.config.stream import StreamLimits
from pydanube.core.cluster.lifecycle import BrokerMode
from pydanube.core.units import MIB
from pydanube.errors import ConfigError
from pydanube.wire._pb.danube import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2
from pydanube.wire._pb.pydanube import admin_pb2, peers_pb2, pipelines_pb2, status_pb2
from pydanube.wire.status import ADMIN, RECEIVE, SEND

log = logging.getLogger(__name__)

# Above what we accept, so that a message that is too large is refused with our sentence and never with
# RESOURCE_EXHAUSTED, which clients retry without end.
REQUEST_SIZE_MAX_BYTES: Final = 64 * MIB
# gRPC receives this much of every call before the broker has looked at it, however many there are. By itself it lets
# that grow to megabytes (a bandwidth-delay probe), and a thousand calls of 1 MiB on a busy loop took a gigabyte. Of
# a request that is being read all of it still comes in one go: only one beyond this takes a round trip more.
UNREAD_MAX_BYTES: Final = 32 * 1024
OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", UNREAD_MAX_BYTES),
    ("grpc.max_receive_message_length", REQUEST_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    # A client whose machine vanished is noticed, and its messages go to others.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as often as every 5 s.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
GRACE_SECONDS: Final = 5.0
REFUSING_SECONDS: Final = 0.2


class BrokerServers:
    """Addresses are host:port as bound, so port 0 has become a real one."""

    def __init__(self, broker: Broker, metrics: MetricsServer | None = None) -> None:
        self._broker = broker
        share = open_files.current()
        self._is_own = broker.config.grpc.server == "own"
        self._clients = Admission(share.grpc, share.limit, self._client_ports if self._is_own else None)
        self._admins = Admission(share.admin, share.limit)
        self._client: Any = (
            GrpcServer(self._clients) if self._is_own else grpc.aio.server(options=(*OPTIONS, self._clients.option))
        )
        self._admin = grpc.aio.server(options=(*OPTIONS, self._admins.option))
        self._metrics = metrics or MetricsServer(broker.telemetry)
        self._stream = NativeServer(broker)
        self._peers = Peers(broker)
        self._tables = TableDesk(broker.topics, broker.config.objects_url, readers_keys(broker.config))
        self._observer = Observer(broker, broker.telemetry.disk_space)
        self._observing: asyncio.Task[None] | None = None
        self._why_not_ready: str | None = STARTING
        self.client_addr = self.admin_addr = self.metrics_addr = self.stream_addr = ""

    @classmethod
    async def open(cls, broker: Broker, metrics: MetricsServer | None = None) -> BrokerServers:
        """Raises ConfigError for an address that cannot be had; then nothing stays open.

        `metrics` is one that is open already.
        """
        servers = cls(broker, metrics)
        try:
            await servers._open()
        except BaseException:
            await servers.close(grace_seconds=0)
            raise
        return servers

    async def close(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Refuses new work, lets what is under way finish. Streams end as their topics close, so they close here.

        Topics first: for a moment every call is answered UNAVAILABLE, which clients try again. A gRPC server that stops
        cancels calls it has not looked at yet, and CANCELLED is final to a producer.
        """
        self.stop_being_ready()
        if self._observing is not None:
            self._observing.cancel()
            await asyncio.gather(self._observing, return_exceptions=True)
        await self._broker.topics.close_all("the broker is shutting down")
        if grace_seconds:
            await self._broker.clock.sleep(REFUSING_SECONDS)
        await asyncio.gather(
            self._client.stop(grace_seconds), self._admin.stop(grace_seconds), self._stream.close(grace_seconds)
        )
        await self._metrics.close()
        await self._tables.close()
        await self._peers.close()

    def stop_being_ready(self) -> None:
        """For load balancers. Everything is answered as before."""
        self._why_not_ready = "the broker is shutting down"

    async def _open(self) -> None:
        addresses = self._broker.config.broker
        self._register()
        if not self._metrics.address:
            await open_metrics(self._metrics, addresses)
        self.metrics_addr = self._metrics.address
        self._metrics.follow(self, self._tables)
        self.admin_addr = _listen("--admin-addr", self._admin, addresses.admin_addr)
        self.client_addr = await self._listen_clients("--broker-addr", addresses.client_addr)
        for admission, address in ((self._admins, self.admin_addr), (self._clients, self.client_addr)):
            admission.listens(int(address.rpartition(":")[2]))
        self.stream_addr = await self._listen_stream("--stream-addr", addresses.stream_addr)
        self._broker.listens(
            client_addr=self.client_addr,
            admin_addr=self.admin_addr,
            metrics_addr=self.metrics_addr,
            stream_addr=self.stream_addr,
        )
        await self._admin.start()
        await self._client.start()
        self._observing = asyncio.create_task(self._observer.run(), name="observer")
        self._why_not_ready = None
        log.info(
            "servers opened", extra={"client": self.client_addr, "admin": self.admin_addr, "metrics": self.metrics_addr}
        )

    def _register(self) -> None:
        broker, telemetry = self._broker, self._broker.telemetry
        api, admin = _services(DanubeApi_pb2.DESCRIPTOR), _services(DanubeAdmin_pb2.DESCRIPTOR)
        registry = _services(SchemaRegistry_pb2.DESCRIPTOR)["SchemaRegistry"]
        producers = handler_of(
            api["ProducerService"],
            data.ProducerService(broker),
            telemetry,
            tables={"SendMessage": SEND},
            admission=self._clients,
            size_max_bytes={"SendMessage": data.MESSAGE_SIZE_MAX_BYTES},
            pressure={"SendMessage": broker.wal.committer.pressure},
        )
        consumers = handler_of(
            api["ConsumerService"],
            data.ConsumerService(broker),
            telemetry,
            tables={"ReceiveMessages": RECEIVE},
            admission=self._clients,
        )
        ours = extensions.AdminExtensions(broker, self._peers, self._observer, self._tables)
        ours_service = _services(admin_pb2.DESCRIPTOR)["Admin"]
        peers, orders = self._peers, Orders(broker)
        forwarder = Forwarder(peers, broker.cluster.view.refresh) if broker.cluster is not None else None
        calls = SchemaCalls(broker)
        for_clients, for_operators = (
            handler_of(registry, calls, telemetry, table=ADMIN, forwarder=forwarder, admission=admission, orders=orders)
            for admission in (self._clients, self._admins)
        )
        self._client.add_generic_rpc_handlers(
            (
                producers,
                consumers,
                handler_of(api["Discovery"], data.Discovery(broker), telemetry, admission=self._clients),
                handler_of(api["HealthCheck"], data.HealthCheck(broker), telemetry, admission=self._clients),
                handler_of(api["StorageService"], storage.StorageService(broker), telemetry, admission=self._clients),
                handler_of(ours_service, extensions.ForClients(ours), telemetry, table=ADMIN, admission=self._clients),
                for_clients,
            )
        )
        implementations: dict[ServiceDescriptor, object] = {
            admin["BrokerAdmin"]: grpc_cluster.BrokerAdmin(broker),
            admin["ClusterAdmin"]: grpc_cluster.ClusterAdmin(broker),
            admin["NamespaceAdmin"]: grpc_admin.NamespaceAdmin(broker),
            admin["TopicAdmin"]: grpc_admin.TopicAdmin(broker, peers),
            admin["SecurityAdmin"]: grpc_admin.SecurityAdmin(),
            ours_service: ours,
            _services(status_pb2.DESCRIPTOR)["Status"]: status.StatusService(
                broker, peers, self._observer, program_version()
            ),
            _services(pipelines_pb2.DESCRIPTOR)["Pipelines"]: PipelineCalls(broker.pipelines, broker.clock),
            _services(peers_pb2.DESCRIPTOR)["Peers"]: PeerService(broker, self._tables.flushes),
        }
        handlers = [
            handler_of(
                service,
                implementation,
                telemetry,
                table=ADMIN,
                forwarder=forwarder,
                admission=self._admins,
                orders=orders,
            )
            for service, implementation in implementations.items()
        ]
        self._admin.add_generic_rpc_handlers((*handlers, for_operators))

    def change_stream_limits(self, limits: StreamLimits) -> None:
        """For native connections from now on: existing ones got theirs when they were opened."""
        self._stream.change_limits(limits)

    def _client_ports(self, port: int) -> set[int]:
        return set(self._client.peer_ports())

    async def _listen_clients(self, key: str, address: str) -> str:
        config = self._broker.config.grpc
        if not self._is_own:
            return _listen(key, self._client, address, _credentials(config))
        host, _, port = address.rpartition(":")
        try:
            bound = await self._client.listen(host.strip("[]"), int(port), server_context(config))
        except OSError as error:
            raise _unusable(key, address, error) from error
        return f"{host}:{bound}"

    async def _listen_stream(self, key: str, address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            bound = await self._stream.open(host.strip("[]"), int(port), server_context(self._broker.config.stream))
        except OSError as error:
            raise _unusable(key, address, error) from error
        return f"{host}:{bound}"

    def not_ready(self) -> str | None:
        """For load balancers: a broker that drains serves what it has, and should get no new clients."""
        cluster = self._broker.cluster
        if self._why_not_ready is not None or cluster is None:
            return self._why_not_ready
        if not cluster.may_serve():
            return "the broker is fenced: its lease was not renewed in time"
        state = cluster.state_of(self._broker.broker_id)
        if state is None or state.mode is BrokerMode.ACTIVE or state.is_away:
            return None
        return f"the broker is {state.mode.value}: {state.reason}"

    def ready_as(self) -> str:
        """A broker that was away, and is drained for nothing else, is well: it answers lookups, it may lead, and it
        brings what it has. A rolling restart may go on to the next broker.
        """
        cluster = self._broker.cluster
        state = cluster.state_of(self._broker.broker_id) if cluster is not None else None
        if state is None or not state.is_away:
            return "ready"
        return f"ready, and drained: {state.reason}"


async def open_metrics(server: MetricsServer, addresses: BrokerConfig) -> None:
    """Raises ConfigError for an address that cannot be had: for the clients' one, if that is taken as well."""
    try:
        await server.open(addresses.metrics_addr)
    except OSError as error:
        host, _, port = addresses.client_addr.rpartition(":")
        try:
            _try(host.strip("[]"), int(port))
        except OSError as other:
            raise _unusable("--broker-addr", addresses.client_addr, other) from other
        raise _unusable("--prom-exporter", addresses.metrics_addr, error) from error


def _listen(key: str, server: grpc.aio.Server, address: str, credentials: Any = None) -> str:
    host, _, port = address.rpartition(":")
    try:
        _try(host.strip("[]"), int(port))
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
        raise _unusable(key, address, error) from error
    return f"{host}:{bound}"


def _credentials(config: GrpcConfig) -> Any:
    """grpcio's form of the same files. None: without TLS."""
    if server_context(config) is None:  # it also checks the files, and says what is wrong with one
        return None
    assert config.cert_file is not None and config.key_file is not None
    chain = config.key_file.read_bytes(), config.cert_file.read_bytes()
    authorities = None if config.ca_file is None else config.ca_file.read_bytes()
    is_required = authorities is not None and config.clients == "required"
    return grpc.ssl_server_credentials((chain,), authorities, is_required)


def _try(host: str, port: int) -> None:
    """Binds and releases it: the system says what is wrong with an address, gRPC only prints it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _unusable(key: str, address: str, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
        return ConfigError(key, address, f"the broker cannot listen there ({error.strerror or error})")
    return ConfigError(key, address, "the port is taken; choose another, or stop the process that has it")


def _services(file: FileDescriptor) -> dict[str, ServiceDescriptor]:
    return dict(file.services_by_name)
