# `make demo` and `make test` set up whatever is missing; see scripts/setup.sh.
SHELL := /bin/sh
PYTHON_BIN := .venv/bin/python
# One thread per test process, and idle threads sleep: bits and durations then don't depend on what else runs.
# Bytecode is kept even where others forbid it, or each of a few hundred child processes compiles all it imports.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=
# Tests that start processes run two at a time, beside the rest: tests/conftest.py. One worker for all: make test WORKERS=0
WORKERS ?= auto
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-carla fleet tables reproduce driving driving-boxes test test-slow test-console test-faults fuzz test-portable test-board test-pythons mutants check fix size reference docs bench load crowd dist lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

setup: ## Create .venv and install everything, the broker and the demo's data included
	@scripts/setup.sh

demo: setup ## A fleet of three clients learns from a stream over MQTT; ends with runs/demo/report.html
	@$(PYTHON_BIN) -m replayfleet.scripts.demo $(ARGS)

demo-carla: setup ## Two vehicles drive through towns and learn objects, then boxes; ends with runs/demo-carla/report.html
	@$(PYTHON_BIN) -m replayfleet.scripts.carla $(ARGS)

fleet: setup ## A simulated fleet, with faults if asked for: ARGS="--clients 5 --fault kill-client"; see docs/deploy.md
	@$(PYTHON_BIN) -m replayfleet.scripts.fleet $(ARGS)

tables: setup ## Tables 1, 6 and 10 of the paper at the smallest size, to runs/tables; see docs/experiments.md
	@.venv/bin/fleet-sim table 6 --out runs/tables
	@for number in 1 10; do \
		.venv/bin/fleet-sim table $$number --out runs/tables --settings tiny --dataset fashion-mnist --scenario gradual $(ARGS) || exit 1; \
	done

reproduce: setup ## The experiments behind docs/results.md: what is left, and goes on; ARGS="--minutes 60", ARGS=--dry-run
	@$(PYTHON_BIN) -m replayfleet.scripts.experiments.reproduce $(ARGS)

driving: setup ## pFedGRP beside FedAvg and Centralized on recorded driving, to runs/driving; see docs/experiments.md
	@.venv/bin/fleet-sim table driving-crops --out runs/driving $(ARGS)

driving-boxes: setup ## FedGP beside FedAvg, DER, A-GEM and Ideal: detectors on recorded driving, to runs/driving-boxes
	@.venv/bin/fleet-sim table driving-boxes --out runs/driving-boxes $(ARGS)

test: setup ## All tests but the slow ones
	@$(TEST_ENV) $(PYTHON_BIN) -m pytest -m "not slow" -n $(WORKERS) --maxprocesses 4 $(ARGS)

test-slow: setup ## End-to-end runs of minutes
	@$(TEST_ENV) $(PYTHON_BIN) -m pytest -m slow $(ARGS)

test-console: setup ## Console, label studio, a demo's report and alerts with all that this machine has: Chromium, axe (npm), Prometheus
	@npm install --silent --no-audit --no-fund --no-save --prefix runs/npm axe-core@4 || echo "no npm: accessibility isn't checked"
	@$(TEST_ENV) $(PYTHON_BIN) -m pytest tests/unit/aggregator/console tests/integration/test_console*.py tests/integration/test_studio*.py tests/integration/test_report_in_a_browser.py tests/integration/test_alerts.py $(ARGS)

test-faults: setup ## A fleet that is lied to, starved, cut off and killed: everything in tests/faults, the long part included
	@$(TEST_ENV) $(PYTHON_BIN) -m pytest tests/faults $(ARGS)

fuzz: setup ## A million inputs for every decoder; ARGS="frames graphs --inputs 50000 --seed 1" feeds some. A second call goes on
	@$(PYTHON_BIN) -m tests.fuzz $(ARGS)

test-portable: setup ## Learning tests under other processors' arithmetic, 2 threads, oldest and newest PyTorch; ARGS="--turn 3"
	@$(PYTHON_BIN) -m tests.environments portable $(ARGS)

test-board: setup ## What needs no PyTorch, with a board's releases of NumPy, OpenCV and ONNX Runtime
	@$(PYTHON_BIN) -m tests.environments board $(ARGS)

test-pythons: setup ## Unit tests with every Python of the range that this machine has: python3.10 to python3.14
	@$(PYTHON_BIN) -m tests.environments pythons $(ARGS)

mutants: setup ## Break the code in known ways, one at a time, and see that tests fail; ARGS="codec --jobs 4" tries some, four at a time
	@$(PYTHON_BIN) -m tests.mutants $(ARGS)

check: setup ## Lint, format, types, layers, and whether the lock files are as old as pyproject.toml
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo
	@$(PYTHON_BIN) scripts/lock.py check

fix: setup ## Let ruff correct and format what it can
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

size: ## Lines of the product by room: everything but tests
	@git ls-files '*.py' | grep -v '^tests/' | xargs wc -l | grep -v ' total$$' | awk '{ \
		n = split($$2, p, "/"); room = p[1] == "federation" ? p[1] "/" p[2] : p[1]; \
		lines[room] += $$1; files[room]++; all += $$1 } \
		END { for (r in lines) printf "%6d %5.1f %% %4d files  %s\n", lines[r], 100 * lines[r] / all, files[r], r | "sort -rn"; \
		close("sort -rn"); printf "%6d in all\n", all }'

reference: setup ## The pages of docs/reference that list every option, made from the code
	@$(PYTHON_BIN) -m replayfleet.scripts.reference

docs: setup ## The documentation as a site, strict, to runs/site
	@.venv/bin/sphinx-build -q -W --keep-going -c docs -b html . runs/site
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' > runs/site/index.html
	@echo "docs: runs/site/index.html"

bench: setup ## All benchmarks side by side, with raw results under runs/bench
	@$(PYTHON_BIN) -m benchmarks.run $(ARGS)

load: setup ## What an aggregator spends on each of 10, 100 and 1,000 members
	@$(PYTHON_BIN) -m benchmarks.load $(ARGS)

crowd: setup ## 1,000 light members at a real broker for half an hour; ARGS="--members 100 --minutes 2" asks for less
	@$(PYTHON_BIN) -m benchmarks.crowd $(ARGS)

lock: setup ## Make scripts/locks anew from pyproject.toml; ARGS=--upgrade takes the newest versions
	@$(PYTHON_BIN) -m pip install -q uv
	@$(PYTHON_BIN) scripts/lock.py make $(ARGS)

dist: setup ## Wheel and sdist, to dist/: the wheel is made from the sdist, as others will
	@rm -rf dist
	@$(PYTHON_BIN) -m build --no-isolation --outdir dist . >/dev/null
	@ls -l dist

clean: ## Remove caches, builds and runs; .venv stays
	@rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
