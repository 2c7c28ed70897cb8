"""Tables under everything at once, on a real S3 server: uploads, merges, retention, moves and kill -9."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.e2e.clusters import ClusterProcesses, cluster_in
from tests.e2e.objectstores import S3Server
from tests.e2e.processes import until
from tests.e2e.watched_tables import WatchedTable
from tests.harness.engines import ask

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TOPIC = "/default/orders"
ROUNDS = 3


def test_engines_with_vended_keys_read_what_was_acknowledged_whatever_happens(
    tmp_path: Path, s3_server: S3Server
) -> None:
    config = tmp_path / "config.yaml"
    readers = {"access_key": s3_server.reader_access_key, "secret_key": s3_server.reader_secret_key}
    config.write_text(yaml.safe_dump({"storage": {"durable": s3_server.options, "readers": readers}}))
    with cluster_in(tmp_path, "--config-file", str(config), storage=s3_server.url()) as cluster:
        with WatchedTable(cluster, TOPIC, pause_seconds=0.1, padding=2000) as table:
            for _ in range(ROUNDS):
                until(partial(_has_merged, cluster), "small objects were merged", seconds=180)
                for _ in range(2):
                    until(partial(_has_acked, table, len(table.acked) + 300), "it goes on", seconds=120)
                    cluster.admin("topics", "unload", TOPIC, "--wait")
                table.forgotten = max(table.acked)  # for a moment nobody knows what is forgotten
                cluster.admin("topics", "retention", TOPIC, "--mb", "1", "--minutes", "0")
                cluster.admin("storage", "retain", TOPIC)
                cluster.admin("topics", "retention", TOPIC, "--reset")
                told = ask(f"{table.catalogs()[0]}/v1/danube/namespaces/default/tables/orders")[1]["metadata"]
                table.forgotten = int(json.loads(told["properties"]["danube.first-offset"]))
                victim = cluster.hosted(TOPIC)
                victim.kill()
                cluster.hosted(TOPIC, other_than=victim)
                victim.start()
                until(partial(_is_back, cluster, victim.broker_id), "it is back", seconds=60)
                cluster.admin("brokers", "activate", victim.broker_id)
        assert table.forgotten > 0, "retention was part of it"
        table.judge()


def _has_acked(table: WatchedTable, count: int) -> bool:
    return len(table.acked) >= count


def _has_merged(cluster: ClusterProcesses) -> bool:
    return any("-m" in each["key"].rpartition("/")[2] for each in cluster.json("storage", "list", TOPIC)["objects"])


def _is_back(cluster: ClusterProcesses, broker_id: str) -> bool:
    return any(str(each["broker_id"]) == broker_id for each in cluster.json("brokers", "list"))
