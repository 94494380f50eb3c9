# What runs here runs in CI too: `.ci/run` calls check, test and guard.
PYTHON ?= python3
BIN := .venv/bin
# compat: a path, so that scripts beside the clone's directory find the package and not the directory
PIP := -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat
# All packages have the versions of constraints.txt, those that build redrb too.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python $(PIP)
PYTEST := -m pytest -n 4 --dist worksteal -m "not slow"

.PHONY: help setup demo example test test-newest test-oldest lock test-slow test-engines test-ray test-peers test-agents chaos sanitize fuzz check format guard bench pictures docs docs-serve wheel clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

setup: .venv/.dev  ## make .venv with everything that development needs

demo: .venv/.demo  ## train a small policy with two makers and a trainer, in under two minutes
	@$(BIN)/redrb demo $(ARGS)

example: .venv/.dev  ## train examples/gsm8k on a CPU with a real vLLM, and draw its curve: VLLM=folder with bin/vllm and model
	@$(BIN)/python examples/gsm8k/on_cpu.py $(abspath $(VLLM)) $(ARGS)

test: .venv/.dev  ## run the tests, four at a time: they wait as much as they compute
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python $(PYTEST) -W error $(ARGS)

test-newest:  ## run the tests with the newest packages that pyproject.toml allows, in .venv-newest, made anew
	@rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python $(PIP) --upgrade -e '.[test]'
	@PYTHONDONTWRITEBYTECODE= .venv-newest/bin/python $(PYTEST) $(ARGS)

test-oldest: .venv/bin/python  ## run unit and contract tests with the oldest packages that pyproject.toml allows, in .venv-oldest
	@rm -rf .venv-oldest && $(PYTHON) -m venv .venv-oldest
	@$(INSTALL) uv
	@mkdir -p build && rm -f build/oldest.txt
	@echo "pyarrow<22" >build/oldest.in  # it comes with datasets; newer ones need numpy 2
	@$(BIN)/uv pip compile --quiet --python .venv-oldest/bin/python --extra test -c build/oldest.in \
	  --resolution lowest-direct --only-binary :all: --no-config pyproject.toml -o build/oldest.txt
	@.venv-oldest/bin/python $(PIP) -r build/oldest.txt && .venv-oldest/bin/python $(PIP) --no-deps -e .
	@PYTHONDONTWRITEBYTECODE= .venv-oldest/bin/python $(PYTEST) tests/unit tests/contract $(ARGS)

lock: .venv/bin/python  ## write constraints.txt anew: the newest versions that pyproject.toml allows
	@$(INSTALL) uv
	@$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 --all-extras --no-annotate \
	  --custom-compile-command "make lock" pyproject.toml -o constraints.txt

test-slow: .venv/.dev  ## run the tests that take longer
	@$(BIN)/python -m pytest -m slow -W error $(ARGS)

test-engines: .venv/.dev  ## run makers on a real vLLM: VLLM=folder with bin/vllm and model
	@VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest -m slow tests/real_engines $(ARGS)

test-ray: .venv/.dev  ## run jobs on four virtual nodes of Ray, some of which are lost (installs ray)
	@$(BIN)/python -c "import ray" 2>/dev/null || $(INSTALL) 'ray[client]'
	@$(BIN)/python -m pytest -m slow tests/faults/test_ray.py $(ARGS)

test-peers: .venv/.dev  ## run tests of other projects on redrb: PEERS=folder of checkouts, PYTHON=with their packages
	@$(BIN)/python -m tests.peers $(abspath $(PEERS)) $(PYTHON)
	@PEERS=$(abspath $(PEERS)) $(BIN)/python -m pytest tests/peers/test_slime.py $(ARGS)

test-agents:  ## run agents of verifiers, the OpenAI Agents SDK and OpenEnv at a gateway, in .venv-agents, made anew
	@$(PYTHON) -m venv --clear .venv-agents && .venv-agents/bin/python $(PIP) -e '.[test]'
	@set -e; for framework in verifiers openai-agents openenv-core; do \
	  .venv-agents/bin/python $(PIP) --upgrade $$framework; \
	  .venv-agents/bin/python -m pytest tests/integration/test_gateway_environments.py $(ARGS); \
	  .venv-agents/bin/python -m pip uninstall --quiet --yes $$framework; \
	done

chaos: .venv/.dev  ## run makers, a stage, trainers and weights under faults: MINUTES=10 SEED=1 SERVER=path
	@$(BIN)/python -m tests.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(SERVER),--server $(SERVER)) $(ARGS)

sanitize: .venv/.dev  ## run the codec's tests under AddressSanitizer and UndefinedBehaviorSanitizer (gcc)
	@tests/sanitize.sh $(BIN)/python $(ARGS)

FUZZED := decoder manifests saved_tasks queries urls records tables gateway

fuzz: .venv/.dev  ## fuzz each reader of foreign input for MINUTES=10 (installs atheris)
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(INSTALL) atheris
	@for target in $(FUZZED); do echo "== $$target"; mkdir -p build/fuzz/$$target; \
	  $(BIN)/python -m tests.fuzz $$target build/fuzz/$$target -max_total_time=$$(($(or $(MINUTES),10) * 60)) \
	    -rss_limit_mb=4096 -artifact_prefix=build/fuzz/ -verbosity=0 || exit 1; done

check: .venv/.dev  ## lint, format, types, import rules, Lua and the manifests for Kubernetes (kubectl)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.lua_check
	$(BIN)/python -m pytest -q tests/unit/test_manifests.py

format: .venv/.dev  ## mend what the tools can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

guard: .venv/.dev  ## fail where redrb has lost a fifth of its lead over raw redis-py
	$(BIN)/python -m benchmarks.guard

bench: .venv/.dev  ## everything that docs/reference/performance.md shows: shapes, orders, scale, codec, weights
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.runtime
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.tables

pictures: .venv/.dev  ## make the pictures of the README from a real run (two minutes, needs chromium)
	$(BIN)/python docs/pictures/make_pictures.py

docs: .venv/.docs  ## build the site in build/site: a dead link or a faulty docstring is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: .venv/.docs  ## show the site at http://127.0.0.1:8000, built anew at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

wheel:  ## build sdist and wheel in dist, and try the wheel in a new environment: PYTHON=python3.12
	@$(PYTHON) tests/wheels.py $(ARGS)

clean:  ## remove what was built
	rm -rf .venv .venv-newest .venv-oldest .venv-agents build dist *.egg-info demo-run runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "redrb needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "no virtual environment could be made; on Debian or Ubuntu: apt install python3-venv"; \
	  exit 1; }

# The demo needs less than development does, so a first `make demo` is quicker.
CODEC := $(wildcard redrb/codec/*.[ch]) setup.py

.venv/.demo: .venv/bin/python pyproject.toml constraints.txt $(CODEC)
	@echo "installing redrb (the first time this takes a minute or two)"
	@$(INSTALL) -e .
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt $(CODEC)
	@echo "installing redrb and its development tools"
	@$(INSTALL) -e '.[dev]'
	@touch $@ .venv/.demo

.venv/.docs: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing redrb and the generator of its site"
	@$(INSTALL) -e '.[docs]'
	@touch $@ .venv/.demo
