# PyDanube's one-word commands. Every target sets up what it needs in .venv first.
.DEFAULT_GOAL := help
SHELL := /bin/sh
# Some machines forbid bytecode: then each of the hundreds of processes that the tests start compiles the product anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON_IN_VENV := .venv/bin/python
PYTEST := $(PYTHON_IN_VENV) -m pytest
# Two more than the cores of a small machine: many tests wait for processes.
PYTEST_ARGS ?= -n 4 --dist worksteal
# What runs in one process, on memory ports and virtual time; the rest starts processes, Spark or simulations.
SLOW_TESTS = tests/e2e tests/spark tests/sim tests/fuzz tests/fixtures tests/scenarios tests/harness
FAST_TESTS = $(filter-out $(SLOW_TESTS) %__pycache__, $(patsubst %/,%,$(wildcard tests/*/))) tests/test_tidy.py
# Of these, what runs the product's lines in the processes that are measured.
COVERING_TESTS = $(filter-out tests/docs tests/stubs tests/test_tidy.py,$(FAST_TESTS))

# One random seed per make, printed by the simulator so that a failure can be repeated. Clusters below 1,000,000,000 run
# for as long as they did when their seeds were written down; new ones vary, and are shorter.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | awk '{ printf "%.0f", $$1 + 1000000000 }')
COUNT ?= 10000
ROUNDS ?= 20
MINUTES ?= 60
TOPICS ?= 1000

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Install the product into .venv; quick when nothing changed
	@scripts/setup core

.PHONY: setup-test
setup-test: ## Install what tests and checks need as well
	@scripts/setup test

.PHONY: setup-spark
setup-spark: ## Install Spark and what the data pipeline needs as well
	@scripts/setup spark

.PHONY: run
run: setup ## Start a broker on this machine, with its data in ./danube-data
	@echo 'Web admin: http://127.0.0.1:8080. Try next, in other terminals:'
	@echo '  .venv/bin/danube produce -t /default/hello -c 1000 -i 100 -m "hello, world"'
	@echo '  .venv/bin/danube consume -t /default/hello -m me'
	@echo '  .venv/bin/danube top'
	@echo
	@exec .venv/bin/danube broker --mode standalone --data-dir ./danube-data

.PHONY: brokers
brokers: setup ## Start a cluster of three brokers on this machine, with its data in ./danube-data/cluster
	@scripts/brokers start

.PHONY: brokers-clean
brokers-clean: ## Stop the brokers of `make brokers`; their data stays
	@scripts/brokers stop

.PHONY: data-clean
data-clean: ## Stop them and remove their data
	@scripts/brokers clean

.PHONY: example-cluster
example-cluster: setup ## Start three brokers, move a topic under load, show that nothing was lost
	@examples/cluster.sh

.PHONY: demo
demo: setup-spark ## Three brokers, a move, a kill -9, Spark, and the proof that nothing was lost (DEMO_ARGS=--keep)
	@scripts/demo $(DEMO_ARGS)

.PHONY: screenshots
screenshots: setup-test ## Take the pictures of docs/pictures while the demo runs
	@scripts/demo --no-spark --pictures docs/pictures

.PHONY: demo-log
demo-log: setup ## Show the log: append, kill -9, recover, verify
	@.venv/bin/danube log demo

.PHONY: test
test: setup-spark ## Run the tests, ten slowest last (four at a time; PYTEST_ARGS= for one)
	@$(PYTEST) $(PYTEST_ARGS)

.PHONY: test-long
test-long: setup-spark ## Run every test, the long ones too
	@$(PYTEST) -m "" --timeout=3600 $(PYTEST_ARGS)

.PHONY: lint
lint: setup-spark ## Check format, lint and types
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m mypy

.PHONY: check
check: lint ## Check format, lint and types, run the fast tests
	$(PYTEST) -q -m "not long and not slow" $(FAST_TESTS) $(PYTEST_ARGS)

.PHONY: coverage
coverage: setup-spark ## Run the fast tests, say which lines they run and fail below tests/coverage.floor
	@rm -rf build/coverage && mkdir -p build/coverage
	@# A test that fails is judged by `make test`: here, where each line is counted, some may miss a deadline.
	$(PYTHON_IN_VENV) -m coverage run -m pytest -q -m "not long and not slow" $(COVERING_TESTS) $(PYTEST_ARGS) || [ $$? -eq 1 ]
	@$(PYTHON_IN_VENV) -m coverage combine --quiet && $(PYTHON_IN_VENV) -m coverage json --quiet -o build/coverage/lines.json
	@scripts/coverage build/coverage/lines.json

.PHONY: house
house: ## Count what ARCHITECTURE.md promises about the code
	@scripts/house

.PHONY: release
release: setup-test ## Build the wheel and check it in an empty environment; publishes nothing
	@scripts/release

.PHONY: format
format: setup-test ## Format the code, sort imports, apply safe fixes
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

.PHONY: fuzz-batch
fuzz-batch: setup-test ## Decode 200,000 damaged batches
	@$(PYTHON_IN_VENV) -m tests.fuzz.batch --count 200000

.PHONY: fuzz-rpc
fuzz-rpc: setup-test ## Send 500,000 random requests to a broker (SEED=42 repeats a run)
	@$(PYTHON_IN_VENV) -m tests.e2e.rpc_random --seed $(SEED) --count 500000

.PHONY: fuzz-frames
fuzz-frames: setup-test ## Decode 500,000 damaged streams of frames
	@$(PYTHON_IN_VENV) -m tests.fuzz.frames --count 500000

.PHONY: fuzz-http2
fuzz-http2: setup-test ## Damage a frame inside 1,000,000 connections of the gRPC server
	@$(PYTHON_IN_VENV) -m tests.fuzz.http2 --count 1000000

.PHONY: sim
sim: setup-test ## Break simulated logs and clusters, seeds SEED to SEED+COUNT-1 (random, 10000)
	@$(PYTHON_IN_VENV) -m tools.sim --seed $(SEED) --count $(COUNT)

.PHONY: chaos
chaos: setup-test ## Break a cluster of real processes, every fault ROUNDS times (20), and judge what became of it
	@$(PYTHON_IN_VENV) -m tools.chaos --rounds $(ROUNDS)

.PHONY: soak
soak: setup-test ## The same for MINUTES (60), with random faults from SEED
	@$(PYTHON_IN_VENV) -m tools.chaos --minutes $(MINUTES) --seed $(SEED)

.PHONY: bench-log
bench-log: setup ## Measure the log beside the raw disk, in one table
	@$(PYTHON_IN_VENV) bench/log.py

.PHONY: bench-cold
bench-cold: setup ## Measure what a busy topic notices of 300 topics that get their first message
	@$(PYTHON_IN_VENV) bench/cold_topics.py

.PHONY: bench-lag
bench-lag: setup ## Measure delivery by notification and by heartbeat, and idle subscriptions
	@$(PYTHON_IN_VENV) bench/lag.py

.PHONY: bench-scrape
bench-scrape: setup ## Measure a scrape of the metrics of a broker with 1,000 topics
	@$(PYTHON_IN_VENV) bench/scrape.py

.PHONY: bench-grpc
bench-grpc: setup-test ## Measure both gRPC servers, empty and of a broker, in alternating rounds
	@$(PYTHON_IN_VENV) bench/grpc_servers.py

.PHONY: bench-schemas
bench-schemas: setup ## Measure what a schema costs a message, and what checking its payload does
	@$(PYTHON_IN_VENV) bench/schemas.py

# The peers' packages are none of ours, so they have a place of their own.
build/peers/.made: requirements/bench.lock
	@python3 -m venv build/peers
	@build/peers/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.lock
	@touch $@

.PHONY: bench
bench: setup build/peers/.made ## Measure the native protocol beside NATS and (where redis-server is) Redis
	@$(PYTHON_IN_VENV) bench/native.py

.PHONY: bench-windows
bench-windows: setup ## Measure windows that adapt beside a fixed one
	@$(PYTHON_IN_VENV) bench/windows.py

.PHONY: bench-tier
bench-tier: setup-test ## Measure uploads and reading history, on a real S3-compatible server
	@$(PYTHON_IN_VENV) bench/tier.py

.PHONY: bench-tables
bench-tables: setup-test ## Measure topics as Iceberg tables: a load of 10,000 objects, DuckDB through the catalog
	@$(PYTHON_IN_VENV) bench/tables.py

.PHONY: bench-move
bench-move: setup-test ## Measure moves and a crash of a real cluster under load
	@$(PYTHON_IN_VENV) bench/move.py

.PHONY: bench-takeover
bench-takeover: setup ## Measure a crash, a stop and new topics of a broker with 1,000 topics (TOPICS=3000)
	@$(PYTHON_IN_VENV) bench/takeover.py --topics $(TOPICS)

.PHONY: bench-cursors
bench-cursors: setup ## Measure what 5,000 subscriptions that acknowledge cost the metadata store
	@$(PYTHON_IN_VENV) bench/cursors.py

.PHONY: bench-spark
bench-spark: setup-spark ## Measure the data pipeline beside what Spark could do at best
	@$(PYTHON_IN_VENV) bench/spark.py

.PHONY: example-orders
example-orders: setup-spark ## Produce orders, move the topic, make tables of them with Spark, ask DuckDB
	@$(PYTHON_IN_VENV) examples/orders_pipeline.py

.PHONY: lock
lock: ## Recompile requirements/*.lock (LOCK_ARGS=--upgrade for newer versions)
	@scripts/lock $(LOCK_ARGS)

.PHONY: proto
proto: setup-test ## Regenerate src/pydanube/wire/_pb and tests/stubs from proto/
	@scripts/proto

.PHONY: clean
clean: ## Remove .venv, caches and build output
	rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
