# Everything a person types. `make` alone is `make repro`.
#
#   make repro   environment, then the whole pipeline (`dvc repro`); a second call does nothing
#   make test    environment, then the tests
#   make study   every method at one budget: reports/methods (under an hour; `make repro` does not run it)
#   make bench   what the engine and the orchestration cost on this machine, as ratios
#   make lab     train the shipped lab weights again from their seed (hours), and record them with DVC
#   make ui      Prefect's pages on this machine, with every flow on offer and a worker (Ctrl-C ends all)
#   make lint    ruff
#   make clean   remove the environment and all scratch; results and the round store stay
#
# Plain `python`, `dvc` and `granular` are those of .venv, because it comes first in PATH below; in a shell of your
# own, `source .venv/bin/activate` does the same. Settings are read from .env if there is one (see .env.example).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := repro
.PHONY: repro test study bench lab ui lint clean environment

# Nobody is phoned, and models come from folders; .env may say otherwise.
export DO_NOT_TRACK ?= 1
export DVC_NO_ANALYTICS ?= 1
export HF_HUB_OFFLINE ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false

VENV := .venv
STAMP := $(VENV)/.installed
IN_VENV := set -a; test ! -f .env || . ./.env; PATH="$(CURDIR)/$(VENV)/bin:$$PATH";

# The first interpreter that runs and is new enough (a name on PATH may be a shim of a version that is not there).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed and not on PATH; install it or call make PYTHON=/path/to/python3." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# hpsv2 pins pytest 7.2 and protobuf < 4, which nothing here can live with, and none of its pins is needed:
	@# scoring runs on open_clip, and hpsv2 is the parity oracle beside it.
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps hpsv2==1.2.0
	@touch $(STAMP)

repro: $(STAMP)
	@$(IN_VENV) dvc repro
	@echo
	@echo "Results:      reports/index.html (tables in reports/tables, numbers in reports/metrics.json)"
	@echo "Run outputs:  data/runs/<run>, evaluations in data/evaluations/<policy>"
	@echo "Audit trail:  runs/<run>/rounds/<round>; \`source $(VENV)/bin/activate && granular status\` lists it"

test: $(STAMP)
	@$(IN_VENV) pytest -n auto --dist loadfile

study: $(STAMP)
	@$(IN_VENV) dvc repro reports/methods/dvc.yaml
	@echo "Results:      reports/methods/methods.md, methods.png, methods.csv"

bench: $(STAMP)
	@$(IN_VENV) dvc repro embed && python -m pipeline.bench

lab: $(STAMP)
	@$(IN_VENV) python -m stages.lab
	@$(IN_VENV) dvc commit --force lab

ui: $(STAMP)
	@$(IN_VENV) granular serve

lint: $(STAMP)
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .prefect
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
