#!/bin/sh
# A cluster of three brokers on this machine; a topic that moves while it is written and read; and the proof that
# nothing was lost, stored twice or renumbered. Takes half a minute, and leaves nothing behind.
#
#   examples/cluster.sh
set -eu
cd "$(dirname "$0")/.."

DANUBE_CLUSTER_DIR=$(mktemp -d "${TMPDIR:-/tmp}/danube-cluster.XXXXXX")
: "${CLIENT:=16650}" "${STREAM:=16651}" "${ADMIN:=15051}" "${METRICS:=19040}" "${RAFT:=17650}"
export DANUBE_CLUSTER_DIR CLIENT STREAM ADMIN METRICS RAFT
trap 'scripts/brokers clean' EXIT
trap 'exit 130' INT TERM

topic=/default/orders
admin() { .venv/bin/danube admin --endpoint "http://127.0.0.1:$ADMIN" "$@"; }

echo '--- three broker commands are a cluster'
scripts/brokers start --registration-ttl 5 --upload-interval 2
admin cluster status
admin brokers list

echo "--- 2,000 messages to $topic, 200 a second, and a consumer that acknowledges them"
admin topics create "$topic" --dispatch-strategy reliable
.venv/bin/python examples/cluster_load.py "danube://127.0.0.1:$STREAM" "$topic" 2000 200 &
load=$!

for move in 1 2 3; do
    sleep 2
    echo "--- move $move"
    admin topics unload "$topic" --wait
done

wait "$load"

echo '--- where it is now, how it got there, and that its history is whole'
admin topics describe "$topic"
admin topics moves "$topic"
admin storage verify "$topic"
