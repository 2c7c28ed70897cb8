"""One broker: builds everything, starts it in order, stops it in reverse.

    lock and log ─► stores ─► the object graph ─► timer, cursors, … ─► registered ─► topics claimed ─► (servers: api/)

Here alone adapters are chosen. A broker without servers is complete: tests and the servers use the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from pydanube.broker.base_subscription import Services
from pydanube.broker.catalog import Catalog, Remote
from pydanube.broker.client_index import ClientIndex
from pydanube.broker.cursors import Cursors
from pydanube.broker.dead_letters import send_dead_letter
from pydanube.broker.events import Events
from pydanube.broker.kept import KeptBytes
from pydanube.broker.namespace_limits import NamespaceLimits
from pydanube.broker.outbox import Budget
from pydanube.broker.pipelines import PipelineDesk
from pydanube.broker.quorum import Members
from pydanube.broker.schemas import SchemaRegistry
from pydanube.broker.sources import cluster_now, program_version
from pydanube.broker.starts import Starts
from pydanube.broker.stores import Stores
from pydanube.broker.take_over import BrokerContext
from pydanube.broker.timer import Timer
from pydanube.broker.topic import Defaults
from pydanube.broker.topic_upkeep import reap_consumers, rest_idle_topics
from pydanube.cluster.cluster import ClusterNode
from pydanube.cluster.membership import Identity
from pydanube.config import Config, reachable
from pydanube.core.cluster.load import ResourceUsage
from pydanube.core.names import BrokerId, NamespaceName, TopicName, parse_broker_id
from pydanube.core.policies import TopicPolicy
from pydanube.errors import DanubeError, LogStopped, Unavailable
from pydanube.formats.batch import Envelope
from pydanube.history.reader import CloudReader
from pydanube.history.rescue import Rescuer
from pydanube.history.served import Cloud
from pydanube.history.uploader import Uploader
from pydanube.log.layout import LOCK, read_file, replace_file
from pydanube.log.wal import NOTHING_UPLOADS, Wal, WalConfig
from pydanube.ports import Clock, Disk, MetadataStore, ObjectStore, SchemaParsers, Work
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.disk.usage import MachineUsage
from pydanube.stores.schemas.memory import NoSchemaParsers
from pydanube.stores.schemas.process import SchemaProcesses
from pydanube.stores.work.system import SystemClock, SystemWork
from pydanube.telemetry import ClusterNow, DiskSpace, DispatchNow, Sources, Telemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

NODE_ID: Final = "node_id"
# Making objects is the only long work of a broker that serves: it leaves the other cores to messages and to clients.
UPLOAD_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
# Opens row groups faster than any store sends them. Arrow's pool keeps what is free again for every thread by itself.
READING_THREADS: Final = 1


class Ports(NamedTuple):
    """What a broker stands on: its adapters, opened by the caller or when the broker starts."""

    disk: Disk
    clock: Clock
    work: Work
    open_metadata: Callable[[], Awaitable[MetadataStore]]
    open_objects: Callable[[MetadataStore], Awaitable[ObjectStore | None]]
    home: str = ""  # what tells this data directory from a copy of it elsewhere
    upload_work: Work | None = None  # for making objects; None: `work`
    reading_work: Work | None = None  # for opening them; None: `work`
    set_upload_rate: Callable[[float], None] = lambda rate: None
    parsers: SchemaParsers | None = None  # of schemas; None: no definition can be parsed
    usage: Callable[[float], ResourceUsage] = lambda now: ResourceUsage()
    disk_space: Callable[[], DiskSpace] | None = None  # of the disk
    members: Callable[[], Members | None] = lambda: None  # of the metadata store, if this broker runs one of them
    close: Callable[[], Awaitable[None]] | None = None


class Broker:
    """Serves topics until it is stopped."""

    def __init__(
        self,
        config: Config,
        ports: Ports,
        telemetry: Telemetry | None = None,
        reach: Callable[[Broker], Remote] | None = None,
    ) -> None:
        """`reach` makes the way to other brokers of a cluster. Use `start` or `start_on`."""
        self.config = config
        self.telemetry = telemetry or Telemetry()
        self.clock = ports.clock
        self._ports = ports
        self._disk = ports.disk
        self._work = ports.work
        self._reach = reach
        self._tasks: list[asyncio.Task[None]] = []
        self._not_handed_over: int | None = None  # how many topics; None: not tried yet
        self._set_urls()
        # Set by `_start`, before the broker is handed out.
        self.cloud: Cloud | None = None
        self.cluster: ClusterNode | None = None
        self.broker_id: BrokerId
        self.topics: Catalog
        self.namespace_limits: NamespaceLimits
        self.wal: Wal
        self.cursors: Cursors
        self.events: Events
        self.pipelines: PipelineDesk
        self.schemas: SchemaRegistry
        self.starts: Starts | None = None  # of a broker that is alone

    @property
    def proxy(self) -> bool:
        return self.broker_url != self.connect_url

    @property
    def members(self) -> Members | None:
        """Of the metadata store, if this broker runs one of them."""
        return self._ports.members()

    @classmethod
    async def start(
        cls,
        config: Config,
        telemetry: Telemetry | None = None,
        reach: Callable[[Broker], Remote] | None = None,
    ) -> Broker:
        """A broker on a real directory. Raises DirectoryInUse, FormatTooNew, DiskFull, ConfigError.

        `telemetry` is one that is served already while the broker starts.
        """
        disk, clock = FileDisk(Path(config.data_dir)), SystemClock()
        work, upload_work, reading_work = SystemWork(), SystemWork(UPLOAD_THREADS), SystemWork(READING_THREADS)
        stores, parsers = Stores(config, disk, clock, work), SchemaProcesses()

        async def close() -> None:
            await stores.close()
            await parsers.close()
            for each in (work, upload_work, reading_work):
                each.close()

        ports = Ports(
            disk,
            clock,
            work,
            stores.open_metadata,
            stores.open_objects,
            stores.home(),
            upload_work,
            reading_work,
            stores.upload_rate.set_target_rate,
            parsers,
            MachineUsage(Path(config.data_dir)).read,
            functools.partial(_disk_space, Path(config.data_dir)),
            lambda: stores.members,
            close,
        )
        broker = cls(config, ports, telemetry, reach)
        try:
            await broker._start()
        except BaseException:
            await broker._abandon()
            raise
        return broker

    @staticmethod
    async def check_directory(config: Config) -> None:
        """Raises DirectoryInUse if a live process has it: to be said before anything else."""
        directory = Path(config.data_dir)
        if not (directory / LOCK).is_file():
            return
        disk = FileDisk(directory)
        try:
            await disk.lock(LOCK)
            await disk.unlock(LOCK)
        finally:
            disk.close()

    @classmethod
    async def start_on(
        cls,
        config: Config,
        *,
        disk: Disk,
        metadata: MetadataStore,
        clock: Clock,
        work: Work,
        objects: ObjectStore | None = None,
        home: str = "",
        wal: WalConfig | None = None,
        reach: Callable[[Broker], Remote] | None = None,
        parsers: SchemaParsers | None = None,
    ) -> Broker:
        """The same broker on ports that the caller owns: for simulation and for tests, with a small log (`wal`)."""

        async def given_metadata() -> MetadataStore:
            return metadata

        async def given_objects(_: MetadataStore) -> ObjectStore | None:
            return objects

        broker = cls(
            config, Ports(disk, clock, work, given_metadata, given_objects, home, parsers=parsers), reach=reach
        )
        await broker._start(wal)
        return broker

    async def _start(self, wal: WalConfig | None = None) -> None:
        """Makes everything, leaves first, and starts it."""
        ports = self._ports
        await self._disk.make_directory("")
        # The log takes the directory's lock, so it comes before anything else that is in there.
        self.wal = await self._open_log(wal)
        self.broker_id = await self._node_id()
        known = Sources(
            broker=str(self.broker_id),
            about={"version": program_version(), "mode": self.config.mode},
            disk_space=ports.disk_space,
        )
        self.telemetry.set_sources(known)  # the rest follows: a metadata store may be away for long
        store = await ports.open_metadata()
        objects = await ports.open_objects(store)
        self._run_beside(self._build(store, objects, known))
        if self.cluster is not None:
            await self.cluster.register(self.topics)  # from here on topics are claimed only as a member
        if self.starts is not None:
            await self.starts.begin(self.broker_url.rpartition("://")[2])
        await self._open_topics()
        log.info("broker started", extra={"broker_id": self.broker_id, "topics": len(self.topics.loaded)})

    async def _open_log(self, wal: WalConfig | None) -> Wal:
        storage = self.config.storage
        return await Wal.open(
            self._disk,
            self.clock,
            self._work,
            wal
            or WalConfig(
                segment_bytes=storage.segment_bytes,
                segment_seconds=storage.segment_seconds,
                bytes_max=storage.wal_bytes_max,
                pending_bytes=storage.pending_bytes,
                sessions_max=storage.sessions_max,
                session_seconds=storage.session_seconds,
            ),
            observe=self._observe_group,
            metrics=self.telemetry.wal,
            may_answer=self._may_serve,
            on_stopped=self._log_stopped,
            why_not_freed=self._why_not_freed,
        )

    def _build(self, store: MetadataStore, objects: ObjectStore | None, known: Sources) -> Timer:
        """The object graph: everything gets what it needs when it is made, and nothing is set afterwards."""
        config, ports = self.config, self._ports
        session = self._work.random_u64()
        metadata = store
        if config.mode == "cluster":
            self.cluster = self._cluster(store)
            metadata = self.cluster.store
        self.events = Events(metadata, self.clock, self.broker_id)
        self.pipelines = pipelines = PipelineDesk(metadata, self.clock)
        if self.cluster is None:
            self.starts = Starts(metadata, self.clock, self.broker_id, self.events)
        timer = Timer(self.clock)
        self.cursors = Cursors(metadata, self.clock, self.telemetry.moves.acks_cut)
        kept = KeptBytes(config.dispatch.decoded_bytes, self.clock, timer)
        outboxes = Budget(config.dispatch.outbox_bytes)
        self.schemas = SchemaRegistry(metadata, self.clock, ports.parsers or NoSchemaParsers())
        services = Services(
            self.clock,
            timer,
            self.cursors,
            self._dead_letter,
            lambda: self.broker_url,
            kept,
            outboxes,
            self.schemas,
            ClientIndex(),
            self._may_serve,
        )
        defaults = Defaults(config.dispatch.heartbeat, config.dispatch.max_unacked_messages)
        self.topics = Catalog(
            BrokerContext(
                self.broker_id,
                session,
                metadata,
                self._disk,
                self.wal,
                self._work,
                services,
                self.telemetry,
                defaults,
                self._cloud(objects),
            ),
            self.cluster,
            ports.usage,
            self._reach(self) if self._reach is not None and self.cluster is not None else None,
        )
        self.namespace_limits = NamespaceLimits(self.topics, self.clock, self.configured_policy)
        self.telemetry.set_sources(
            replace(
                known,
                cluster=self._cluster_now if self.cluster is not None else None,
                dispatch=lambda: DispatchNow(
                    kept.size_bytes, kept.limit_bytes, outboxes.size_bytes, outboxes.limit_bytes
                ),
                unopened=self.topics.unopened.__len__,
                crashes=self.starts.crashes if self.starts is not None else None,
                waiting=self.cloud.uploader.standing if self.cloud is not None else None,
                pipelines=lambda: pipelines.watch.rows,
            )
        )
        return timer

    def _run_beside(self, timer: Timer) -> None:
        """What runs as long as the broker does."""
        self._spawn(timer.run(), "timer")
        self._spawn(self.cursors.run(), "cursors")
        self._spawn(self.events.run(), "events")
        self._spawn(reap_consumers(self.topics), "reap")
        self._spawn(rest_idle_topics(self.topics), "rest")
        self._spawn(self.topics.sweep(), "sweep")
        if self.cloud is not None:
            self._spawn(self.cloud.uploader.run(), "tiering")

    async def _open_topics(self) -> None:
        """Those that exist, of a broker that is alone; in a cluster those that it had, and from then on others."""
        config = self.config.broker
        await self.topics.bootstrap_namespaces(config.bootstrap_namespaces, self.config.policies)
        if self.cluster is None:
            await self.topics.load_all(await self.topics.names())
            return
        self._spawn(self.namespace_limits.follow(), "limits of namespaces")
        self._spawn(self.schemas.follow(), "schemas")
        session = self.cluster.session  # before the list: what is listed for another is not claimed
        await self.topics.load_all(await self.cluster.own_topics(), session)
        if self.cloud is not None:
            metadata = self.topics.context.metadata
            rescuer = Rescuer(self.broker_id, self.topics, metadata, self.cloud.store, self.clock, self._work)
            self._spawn(rescuer.run(), "rescue")
            for topic in self.topics.loaded:
                log.info("reconciled topic on startup", extra={"topic": topic.name})
            for name, why in self.topics.unopened.items():
                log.warning("failed to reconcile topic", extra={"topic": name, "error": why})
            log.info("startup reconciliation complete", extra={"count": len(self.topics.loaded)})
            self.cluster.start(self.topics)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._finish)
        self._tasks.append(task)

    def _finish(self, task: asyncio.Task[None]) -> None:
        """None of these ends by itself. One that does is a bug: a broker without it must not go on as if it had it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("broker lost a part of itself", extra={"part": task.get_name()}, exc_info=error)
            if self.cluster is not None and isinstance(error, Exception):
                self.cluster.fail(error)

    def _cluster(self, store: MetadataStore) -> ClusterNode:
        config, addresses = self.config.cluster, self.config.broker
        identity = Identity(
            broker=self.broker_id,
            home=self._ports.home,
            broker_url=self.broker_url,
            connect_url=self.connect_url,
            admin_addr=f"http://{reachable(addresses.admin_addr, self.broker_url)}",
            prom_exporter=reachable(addresses.metrics_addr, self.broker_url),
            stream_url=self.stream_url,
        )
        return ClusterNode(
            identity,
            store=store,
            clock=self.clock,
            work=self._work,
            config=self.config.load_manager,
            ttl_seconds=config.ttl_seconds,
            join=config.join,
            rejoins=config.rejoin == "active",
            compacts=config.compaction == "auto",
            metrics=self.telemetry.members,
            on_change=lambda kind, sentence: self.events.record(
                kind, sentence, by=f"broker {self.broker_id}, the leader"
            ),
        )

    def listens(self, *, client_addr: str, admin_addr: str, metrics_addr: str, stream_addr: str) -> None:
        """The servers are open: the broker advertises its addresses as bound, or those of the configuration."""
        bound = replace(
            self.config.broker,
            client_addr=client_addr,
            admin_addr=admin_addr,
            metrics_addr=metrics_addr,
            stream_addr=stream_addr,
        )
        self.config = replace(self.config, broker=bound)
        self._set_urls()

    def _set_urls(self) -> None:
        addresses = self.config.broker
        self.broker_url = addresses.broker_url or f"{self.config.grpc.scheme}://{addresses.client_addr}"
        self.connect_url = addresses.connect_url or self.broker_url
        self.stream_url = f"{self.config.stream.scheme}://{reachable(addresses.stream_addr, self.broker_url)}"

    def _cluster_now(self) -> ClusterNow:
        assert self.cluster is not None
        return cluster_now(self.cluster, self.clock, len(self.topics.moves.moving))

    async def reload(self, config: Config) -> None:
        """Takes over what may change while it runs: the limits of namespaces. Others take their part of it themselves.

        Raises Unavailable if they cannot be stored; then nothing has changed.
        """
        if config.policies != self.config.policies:
            await self.topics.bootstrap_namespaces(config.broker.bootstrap_namespaces, config.policies)
        self.config = config
        await self.namespace_limits.look()

    def configured_policy(self, namespace: NamespaceName) -> TopicPolicy | None:
        """What the configuration says of a namespace; None if it does not name it."""
        return self.config.policies if namespace in self.config.broker.bootstrap_namespaces else None

    def _may_serve(self) -> bool:
        return self.cluster is None or self.cluster.may_serve()

    def _log_stopped(self, error: LogStopped) -> None:
        """Without its log this broker is of no use to its topics: others must get them."""
        if self.cluster is not None:
            self.cluster.fail(error)

    def _why_not_freed(self) -> str:
        return NOTHING_UPLOADS if self.cloud is None else self.cloud.uploader.why_not_freed()

    def _cloud(self, objects: ObjectStore | None) -> Cloud | None:
        if objects is None:
            return None
        config = self.config.storage.tier
        metrics = self.telemetry.cloud
        reader = CloudReader(objects, self.clock, self._ports.reading_work or self._work, metrics)
        uploader = Uploader(
            self.clock, config, metrics, excess_bytes=self.wal.excess_bytes, set_target_rate=self._ports.set_upload_rate
        )
        self.cloud = Cloud(objects, config, reader, uploader, self._ports.upload_work or self._work)
        return self.cloud

    async def stop(self) -> None:
        """Refuses new work, finishes commits, saves cursors, releases everything."""
        if self.cluster is not None:
            await self.hand_over()
        await self.topics.close_all("the broker is shutting down")
        if self.cluster is not None:
            await self.cluster.stop()
        if self.starts is not None:
            with contextlib.suppress(Unavailable):  # then the next start counts as one after a crash
                await self.starts.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.cloud is not None:
            await self.cloud.reader.close()
        await self.wal.close()
        if self.topics.remote is not None:
            await self.topics.remote.close()
        if self._ports.close is not None:
            await self._ports.close()
        elif self._ports.parsers is not None:
            await self._ports.parsers.close()
        if self._not_handed_over:
            log.error(
                "broker stopped, and topics were not handed over: others take them when its lease has run out",
                extra={"broker_id": self.broker_id, "topics": self._not_handed_over},
            )
        else:
            log.info("broker stopped", extra={"broker_id": self.broker_id})

    async def hand_over(self) -> None:
        """Seals every topic that can be, in the time there is, so that others continue without a gap. Once: what could
        not be sealed then stays as it is.
        """
        if self.cluster is not None and self._not_handed_over is None:
            await self.cluster.retire()  # the leader assigns it no more topics
            seconds = self.config.cluster.shutdown_seconds_for(len(self.topics.loaded))
            self._not_handed_over = left = await self.topics.hand_over_all(seconds)
            if left:
                log.error("topics not handed over", extra={"topics": left, "seconds": seconds})

    async def _abandon(self) -> None:
        """The start failed half-way: what is open is closed, quietly."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.cluster is not None:
            await self.cluster.stop()
        with contextlib.suppress(DanubeError, AttributeError):
            await self.wal.close()
        if self._ports.close is not None:
            await self._ports.close()

    def _observe_group(self, batches: int, size_bytes: int, seconds: float) -> None:
        wal = self.telemetry.wal
        wal.groups.inc()
        wal.appends.inc(batches)
        wal.append_bytes.inc(size_bytes)
        wal.group_latency.observe(seconds)

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a CPU-bound function away from the event loop."""
        return await self._work.run(function)

    async def _dead_letter(self, topic: TopicName, message: Envelope) -> None:
        await send_dead_letter(self.topics, topic, message)

    async def _node_id(self) -> BrokerId:
        """This broker's id: chosen once, kept in the data directory."""
        stored = await read_file(self._disk, NODE_ID)
        if stored is not None:
            return parse_broker_id(stored.decode(errors="replace").strip())
        chosen = self._work.random_u64()
        await replace_file(self._disk, NODE_ID, f"{chosen}\n".encode())
        return BrokerId(chosen)


def _disk_space(directory: Path) -> DiskSpace:
    usage = shutil.disk_usage(directory)
    return DiskSpace(usage.used, usage.free)
