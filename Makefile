# Every target sets itself up: on a fresh machine it needs Linux, python3.11 or newer, and pip.
#
#   make demo     train, kill everything with SIGKILL in the middle of a save, start again, compare bit for bit
#   make test     the promises that matter most, in ten minutes
#   make test-all all tests, in an hour
#   make deep     what of the tests takes hours: 100 kills of real nodes, 100,000 schedules, deeper exhaustive starts
#   make check    lint, format, types, layers
#   make docs     the docs site, into site/; a link that leads nowhere fails it
#   make bench    every benchmark, each against its ceiling in the same run
#   make emulators   Azurite, which the tests of az:// need and skip without; needs node and npm
#   make torchtitan  torchtitan, which its tests need and skip without: 1.1 GB
#
# WORKERS=1: how many tests run at the same time; most of their time is spent waiting for real processes.
# PYTHON=python3.12 chooses the interpreter that .venv is made from; STORE=s3://bucket/demo where the demo saves.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
PIP := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install -qq --constraint constraints.txt
STORE ?=
PYTEST_ARGS ?=
WORKERS ?= 4

# Nothing that is started from here asks the cloud that this machine may be in.
export CKPT_NOTICES ?= off

# Hundreds of processes start from here, each of which would compile all of ckpt again.
unexport PYTHONDONTWRITEBYTECODE

# What it depends on is taken as of that day; its scripts are not run.
AZURITE := azurite@3.35.0
AZURITE_DAY := 2026-01-01

# torchtitan's packages ask for other versions than the other tests do. So they lie in a folder of their own, without
# what they depend on.
TORCHTITAN := torchtitan==0.3.0 spmd_types==0.2.3 triton==3.9.0 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.1 \
	tensorboard==2.21.0 absl-py==2.5.1 protobuf==6.33.0

.PHONY: demo test test-all deep check docs format bench emulators torchtitan clean

demo: .venv/.ready
	$(BIN)/python examples/demo/run.py $(if $(STORE),--store "$(STORE)")

PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 20

test: .venv/.ready-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: .venv/.ready-dev
	$(PYTEST) $(PYTEST_ARGS)

deep: .venv/.ready-dev
	CKPT_NODE_KILLS=100 $(BIN)/python -m pytest tests/agent/nodes/test_kills.py
	CKPT_SIM_DEEP=1 CKPT_SIM_SCHEDULES=100000 $(BIN)/python -m pytest tests/agent/preemption/test_preemption_exhaustive.py \
		tests/agent/preemption/test_preemption_sim.py tests/agent/scheduler/test_scheduler_sim.py tests/agent/state/test_replica_state_sim.py \
		tests/agent/nodes/test_replication_sim.py tests/sim

check: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One at a time: two benchmarks at once measure each other. All run, and then it fails if one did or missed a bar.
bench: .venv/.ready-dev
	@failed=; for file in $$(grep -l __main__ benchmarks/*.py); do \
		name=$$(basename "$$file" .py); echo "== $$name"; \
		$(BIN)/python -m "benchmarks.$$name" || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed, or a bar not met (docs/benchmarks.md):$$failed" >&2; exit 1; }

emulators: .venv/.ready-azurite

torchtitan: .venv/.ready-torchtitan

clean:
	rm -rf .venv site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps make the second run quick; a changed pyproject.toml or constraints.txt installs again.
.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or newer found; install one, or say PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	@echo "installing ckpt into .venv (once)"
	@$(PIP) --editable .
	@touch $@

.venv/.ready-dev: .venv/.ready
	@echo "installing what the tests need into .venv (once)"
	@$(PIP) pip "setuptools>=77" --editable ".[test,test-integrations,check]"
	@touch $@

.venv/.ready-docs: .venv/.ready
	@echo "installing what the docs need into .venv (once)"
	@$(PIP) --editable ".[docs]"
	@touch $@

.venv/.ready-azurite: Makefile | .venv/.ready
	@command -v npm >/dev/null || { echo "error: no npm found; install node and npm" >&2; exit 2; }
	@echo "installing $(AZURITE) into .venv/azurite (once)"
	@npm install --prefix .venv/azurite --before=$(AZURITE_DAY) --ignore-scripts --omit=dev --no-save \
		--no-audit --no-fund --loglevel=error $(AZURITE) >/dev/null
	@touch $@

.venv/.ready-torchtitan: Makefile | .venv/.ready
	@echo "installing torchtitan into .venv/torchtitan (once)"
	@rm -rf .venv/torchtitan
	@$(PIP) --no-deps --target $(CURDIR)/.venv/torchtitan $(TORCHTITAN)
	@touch $@
