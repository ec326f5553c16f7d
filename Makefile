# Everything a person runs. `make demo` and `make test` install what they need: all that has to be
# there is Python 3.11 or 3.12 (and, for the cluster tests, root on Linux with Go).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
CACHE  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dflash
UV     := $(or $(shell command -v uv),$(CACHE)/uv-0.13.9/bin/uv)
RUN    := .venv/bin/python

export UV_PYTHON := $(PYTHON)
export UV_PYTHON_DOWNLOADS := never
# One file in the cache, one link in each checkout: a second clone installs in seconds.
export UV_LINK_MODE ?= hardlink

.PHONY: help demo test test-cluster test-sglang lint format bench soak serve-env cluster cluster-down references

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@echo "installing uv into $(CACHE)"
	@mkdir -p $(CACHE)
	@$(PYTHON) -m venv $(CACHE)/uv-0.13.9 || { echo "Python's venv module is missing: install python3-venv, then run again"; exit 1; }
	@$(CACHE)/uv-0.13.9/bin/pip install --quiet --disable-pip-version-check uv==0.13.9

.venv/.synced: pyproject.toml uv.lock | $(UV)
	@echo "installing the locked packages into .venv (the first time this fetches about 3 GB)"
	@$(UV) sync --frozen --quiet
	@touch $@

.venv-serve/.synced: pyproject.toml uv.lock | $(UV)
	@echo "installing the serving engine into .venv-serve (the first time this fetches about 5 GB)"
	@UV_PROJECT_ENVIRONMENT=.venv-serve $(UV) sync --frozen --quiet --extra sglang
	@touch $@

demo: .venv/.synced $(if $(filter sglang,$(ENGINE)),.venv-serve/.synced)  ## Train and measure a drafter for a small real model, here, in about ten minutes
	@$(RUN) -m jobs.demo

test: lint  ## Lint, type-check and run all tests but the longest and the serving engine's
	@$(RUN) -m pytest -n 2 --dist loadgroup || \
		{ echo "running what failed once more, alone"; $(RUN) -m pytest --last-failed --last-failed-no-failures none; }
	@$(MAKE) --no-print-directory test-cluster

test-cluster: .venv/.synced  ## Its part on a real Kubernetes (skipped with a reason without root, Linux or Go)
	@$(RUN) -m pytest -m cluster -rs tests/cluster || \
		{ echo "running what failed once more, alone"; \
		$(RUN) -m pytest -m cluster --last-failed --last-failed-no-failures none tests/cluster; }

test-sglang: .venv/.synced .venv-serve/.synced  ## The tests against the real serving engine, on the CPU
	@$(RUN) -m pytest -m "sglang and not soak" tests/integration

lint: .venv/.synced  ## Style, types and import rules
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check --quiet
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo 2>/dev/null || .venv/bin/lint-imports

format: .venv/.synced  ## Rewrite the code in the project's style
	@.venv/bin/ruff check --fix --quiet || true
	@.venv/bin/ruff format

bench: .venv/.synced  ## List the benchmarks, or run one: make bench NAME=pipeline
	@$(RUN) -m tests.bench.run $(NAME)

soak: .venv/.synced  ## The tests that are too long for every change
	@$(RUN) -m pytest -m soak --timeout 7200

references: .venv/.synced  ## Renew the generated parts of the READMEs
	@$(RUN) -m dflash.resource.reference
	@$(RUN) -m jobs.reference
	@$(RUN) charts/docs.py

serve-env: .venv-serve/.synced  ## The serving engine's environment, for the tests that use the real one

include tests/cluster/cluster.mk
