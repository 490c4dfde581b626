# `make help` lists the targets. Everything runs from .venv, which tools/ci/setup_env.sh makes; PYTHON=... picks the interpreter.
VENV := .venv
PY := $(VENV)/bin/python
OUT ?= runs/demo
DEMO_ARGS ?=
WHEEL_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal
PADDLE_PYTEST_ARGS ?= -n 1
# Suites that run a second time through Paddle's torch proxy: everything below the PyTorch face.
PADDLE_TESTS := $(wildcard tests/paddle tests/autograd tests/routing tests/quant tests/engine tests/weights tests/gradients tests/node tests/oracle tests/refusals tests/fleet tests/kernels/test_triton_launches.py tests/diagnostics/test_nonfinite.py tests/diagnostics/test_who_is_named.py)
PADDLE_PYTEST = $(PY) -m pytest -m "not kernels" $(PADDLE_PYTEST_ARGS) $(PADDLE_TESTS)
KERNELS_ARGS ?= -n 2 --dist worksteal --every-variant
# What `test` runs beside its own stages: .ci/run asks for `doors`.
ALSO ?=
FAST_TESTS := tests/test_config.py tests/test_import_hygiene.py tests/cli/test_main.py

# Some images set it. Then every worker of both test stages would rewrite the assertions of every test
# file anew, and every process that a test starts would compile this package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test kernels doors lint docs docs-check pytest pytest-torch pytest-paddle core quick wheel clean clean-tests
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.installed-demo ## train a small ERNIE-style MoE in FP8 beside full precision (OUT=runs/demo, DEMO_ARGS=...)
	$(PY) -m sonicmoe train --framework $$(cat $(VENV)/.framework) --precision fp8 --compare --out $(OUT) $(DEMO_ARGS)

# Many tests wait for the processes that they start, and the last ones of a stage leave a worker idle.
# So both stages of tests run at once, and linters and core figures beside them. The tests through
# Paddle print when they end, or the progress of the two would mix. The last lines say how the tests of
# all stages ended, and which command runs what was left out.
test: $(VENV)/.installed-dev $(VENV)/.installed-tests ## everything that gates a change: lint, types, generated docs, tests, core figures against baselines.json
	+@export SONICMOE_TEST_RESULTS=$${SONICMOE_TEST_RESULTS:-$$(mktemp -d)}; \
	$(MAKE) --no-print-directory -j 3 pytest-torch pytest-paddle lint docs-check core $(ALSO); \
	code=$$?; $(PY) tests/results.py $$SONICMOE_TEST_RESULTS; exit $$code

lint: $(VENV)/.installed-dev ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(VENV)/.installed-dev ## regenerate docs/env.md from the flag registry
	$(PY) tools/ci/generate_env_docs.py

docs-check: $(VENV)/.installed-dev ## fail when docs/env.md is out of date
	$(PY) tools/ci/generate_env_docs.py --check

pytest: pytest-torch pytest-paddle ## the tests alone, under PyTorch and again through Paddle's torch proxy (PYTEST_ARGS="-n 2 --dist worksteal")

pytest-torch: $(VENV)/.installed-tests
	SONICMOE_TEST_STAGE="tests under PyTorch" $(PY) -m pytest -m "not kernels" $(PYTEST_ARGS)

pytest-paddle: $(VENV)/.installed-tests
	@if $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("paddle") is None)'; then \
	    echo "the tests through Paddle's torch proxy, which print when they end: $(PADDLE_PYTEST)"; \
	    found=$$(mktemp); SONICMOE_TEST_STAGE="tests through Paddle" SONICMOE_TEST_FRAMEWORK=paddle $(PADDLE_PYTEST) > $$found 2>&1; code=$$?; \
	    cat $$found; rm $$found; exit $$code; \
	else echo "NOT RUN on this machine: the tests through Paddle's torch proxy, paddle is not installed"; fi

doors: $(VENV)/.installed-tests ## the tests against torchtitan and Megatron-Core, in an environment on top of .venv
	@if tools/ci/setup_env.sh doors; then SONICMOE_TEST_STAGE="tests of doors" $(VENV)/doors/bin/python -m pytest -n 1 tests/doors; \
	else echo "NOT RUN on this machine: tests/doors, torchtitan and Megatron-Core cannot be installed"; fi

kernels: $(VENV)/.installed-tests ## compile every variant of the kernels, and refuse spills, lost loads and serialised WGMMA (KERNELS_ARGS="-n 8")
	SONICMOE_TEST_STAGE="kernels" $(PY) -m pytest -m kernels $(KERNELS_ARGS)
	@$(if $(findstring --every-variant,$(KERNELS_ARGS)),$(PY) tools/ci/kernels_due.py --passed)

core: $(VENV)/.installed-tests ## core figures against tools/ci/baselines.json; compile cache and processes have their tests in pytest
	PYTHON=$(PY) tools/ci/run_core_tests.sh --fast $(addprefix --phase ,precision determinism layers quantisers memory calls)

quick: $(VENV)/.installed-dev ## what the pre-commit hook runs: ruff, generated docs, the fastest tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/ci/generate_env_docs.py --check
	$(PY) -m pytest $(FAST_TESTS)

wheel: $(VENV)/.installed-dev ## a wheel in dist/ that carries compiled kernels for Hopper; needs nvcc, takes hours of CPU time (WHEEL_ARGS="--part fp8")
	$(PY) tools/build_wheel.py $(WHEEL_ARGS)

clean: ## remove .venv, caches and build products (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-tests: ## remove what tests compiled and keep among the user's caches
	$(PY) tests/kept.py

# One stamp per set of extras: demo, tests, dev.
$(VENV)/.installed-%: pyproject.toml setup.py tools/ci/setup_env.sh
	tools/ci/setup_env.sh $*
