# `make` shows what there is. Everything runs from one virtual environment (VENV) that is installed from the lock files in requirements/.
#   PYTHON=python3.12   which Python makes the environment      VENV=/path   where it lies
#   PIP_INDEX_URL, MAVEN_REPOSITORY_URL                         mirrors of the package sources

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := schemas producers scheduler_stream trainer_agent registry compose
INSTALL := $(PYTHON) compose/local/preflight.py install --venv $(VENV)

.DEFAULT_GOAL := help
.PHONY: help venv dev demo up down status test test-quick check format audit lock bench bench-stack bench-main bench-hostile clean

help: ## Show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo up test: STARTS := --starts-stack

venv: ## Install what the stack needs
	@$(INSTALL) --kind local $(STARTS)

dev: ## Install what tests and checks need, too
	@$(INSTALL) --kind dev $(STARTS)

demo: venv ## Start everything and train CartPole to its goal (DOWN=1 stops it all)
	@$(BIN)/python -m opentinker.compose.local.demo $(if $(DOWN),--down)

up: venv ## Start the local stack
	@$(BIN)/python -m opentinker.compose.local up

down: venv ## Stop it; data stays
	@$(BIN)/python -m opentinker.compose.local down

status: venv ## Show what runs
	@$(BIN)/python -m opentinker.compose.local status

# Most tests wait for leases, sessions and processes rather than for the processor: two files at a time, each worker with stacks of its own (about 1.5 GB).
WORKERS ?= 2
test: dev ## Run every test against real Kafka, PostgreSQL and S3 (WORKERS=0: one file at a time)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-quick: dev ## Run the tests that need no stack
	$(BIN)/python -m pytest -m "not stack and not slow" $(ARGS)

check: dev build/typing ## Lint, format, types, architecture, published messages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(foreach package,$(PACKAGES),-p opentinker.$(package))
	$(BIN)/lint-imports
	$(BIN)/python -W error -m opentinker.schemas.compatibility schemas/published

format: dev ## Format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: dev ## Known weaknesses of pinned dependencies (asks the network)
	@$(BIN)/python .ci/audit.py $(AUDIT)

# mypy finds packages by their place: opentinker/schemas is a link to schemas/, and so on.
build/typing: $(MAKEFILE_LIST)
	@mkdir -p build/typing/opentinker
	@$(foreach package,$(PACKAGES),ln -sfn ../../../$(package) build/typing/opentinker/$(package);)
	@touch build/typing

LOCK := $(BIN)/uv pip compile pyproject.toml requirements/build.in --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --quiet
lock: ## Write the lock files anew (UPGRADE=1 takes newer versions)
	$(LOCK) $(if $(UPGRADE),--upgrade) --extra local -o requirements/local.txt
	$(LOCK) $(if $(UPGRADE),--upgrade) --extra dev -c requirements/local.txt -o requirements/dev.txt

bench: bench-stack bench-main ## Run every benchmark; figures go to build/bench/

bench-stack: dev ## Warm start and idle memory of the local stack
	$(BIN)/python tests/benchmarks/stack.py

bench-main: dev ## Submit to placement, CartPole by a gang of four
	$(BIN)/python tests/benchmarks/main.py

bench-hostile: dev ## Random and mutated records on every topic that is read (COUNT=10000 on each)
	$(BIN)/python tests/benchmarks/hostile_records.py $(COUNT)

bench-plane: dev ## Jobs a second, a flood, a restart with 100,000 queued jobs, a day of heartbeats
	$(BIN)/python tests/benchmarks/plane.py

bench-faults: dev ## Kill, stop and starve everything, then prove that nothing was lost (FAULTS_MINUTES=30 bounds each half)
	$(BIN)/python tests/benchmarks/faults.py

clean: ## Remove what builds and checks left (data, keys and the environment stay)
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
