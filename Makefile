# Commands for a new machine: `make demo`, `make test` (lint, types, fast tests) and `make test-all` (the long tests
# too: what CI runs). Each sets everything up by itself.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Two processes of tests share the cores: threads that wait must not spin, and Ray's workers are not put last.
SHARED := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE RAY_worker_niceness=0
# The longest files first (tests/conftest.py), so that no process is left alone with one at the end.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder
# A folder for everything the demo leaves behind; BISHOP_RAY_HOME moves it.
export PYTHONWARNINGS ?= ignore

.PHONY: demo venv test test-all lint types fast all postgres browser audit lock clean

venv: $(VENV)/.ready

demo: $(VENV)/.ready
	$(BIN)/python jobs/tune.py --dataset breast_cancer --trials 8 --max-epochs 30

test: lint types fast

test-all: lint types all

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready
	$(BIN)/mypy

fast: $(VENV)/.ready
	$(SHARED) $(BIN)/python -m pytest $(SPREAD) -m "not slow and not faults and not gpu"

all: $(VENV)/.ready postgres browser
	$(SHARED) $(BIN)/python -m pytest $(SPREAD) -m "not gpu"

# The server's tests need PostgreSQL: installed where this is root's machine, skipped with that reason otherwise.
postgres:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq postgresql >/dev/null; } \
	  || echo "note: no PostgreSQL, its tests are skipped: apt-get install postgresql"

# The report is looked at in a browser, in the same way.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "note: no browser, the report's pages are not looked at: apt-get install chromium"

# Known holes in what is pinned; needs the network.
audit: $(VENV)/.ready
	$(BIN)/python -m pip_audit --strict --disable-pip --no-deps -r requirements.lock

# Debian ships venv apart from python: installed when this is root's machine, named otherwise.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq python3.11-venv && $(PYTHON) -m venv $(VENV); \
	  else echo "error: no venv module: apt-get install python3.11-venv"; exit 2; fi; }

$(VENV)/.ready: requirements.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@touch $@

# Versions only: no hashes and no "+cpu", so that a GPU machine takes its CUDA build of torch from the same file. Triton is
# the release which that build of torch asks for, so that the file fits both; tests without a GPU use its interpreter.
lock:
	rm -rf .lock && $(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet "torch==2.13.0" "triton==3.7.1" -e ".[dev,all]"
	.lock/bin/python -m pip freeze --exclude-editable | grep -v -i '^nvidia-\|^cuda-' \
	  | sed -e 's/+cpu$$//' -e 's/^triton==.*/& ; sys_platform == "linux"/' > requirements.lock
	rm -rf .lock

clean:
	rm -rf $(VENV) .lock
