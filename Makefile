# Two commands: `make demo` shows it at work, `make test` proves it. Both make .venv first, once.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# Many small processes share the cores; each gets one thread. Tests and demo build their models, and download none.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
# Empty: bytecode is written, also where the environment says otherwise. A test run starts some hundred interpreters, and each
# would compile the library anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit proof gpu fuzz coverage bench gallery site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## train a small decoder on real text, on 8 local processes, check it against one, and find its plan
	$(PY) examples/demo.py

test: lint types unit ## lint, types and tests: what continuous integration runs

lint: $(READY) ## style and likely mistakes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY) ## mypy, strict
	$(PY) -m mypy

# Two at a time: most tests wait for processes that wait for each other, and leave half of two cores idle.
TWO := --numprocesses 2 --dist worksteal

unit: $(READY) ## the tests alone
	$(PY) -m pytest $(TWO)

proof: $(READY) ## every combination of the matrices of parity, of which `make test` runs a part: some hours
	$(PY) -m pytest $(TWO) -m 'proof or not proof'

gpu: $(READY) ## the tests that ask for a GPU; without one they are skipped
	$(PY) -m pytest tests/gpu

fuzz: $(READY) ## random programs in every layout against one device, ten minutes each
	$(PY) bench/fuzz.py --programs 100000 --seconds 600

coverage: $(VENV)/.packages ## docs/coverage.md: 287 models in 5 layouts against one device, about an hour
	$(PY) bench/coverage.py

bench: $(READY) ## what docs/bench.md says of steps and waits, measured anew: on an idle machine
	$(PY) bench/overhead.py --keep
	$(PY) bench/handwritten.py --rounds 30 --keep
	$(PY) bench/handwritten.py --rounds 30 --alone --keep
	$(PY) bench/ratios.py --ranks 1,2,4 --grow --keep
	$(PY) bench/ratios.py --ranks 1,2 --large --rounds 10 --keep
	$(PY) bench/observe.py --keep
	$(PY) bench/guard.py --keep
	$(PY) bench/concurrent_branches.py --keep
	$(PY) bench/pipeline.py --keep
	$(PY) bench/checkpoint.py --rounds 4 --keep
	$(PY) bench/kill_trials.py --trials 72 --keep
	$(PY) bench/startup.py --runs 2 --keep
	$(PY) bench/raw.py

gallery: $(READY) ## the drawings of docs/gallery, from real plans
	$(PY) examples/gallery.py

site: $(READY) ## the documentation site, into build/site; nothing is fetched
	$(PY) -m mkdocs build --strict

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an install that was broken off is done again. torch comes first, so that nothing
# that depends on it can choose another version.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Models of other packages, for `make coverage` alone.
$(VENV)/.packages: bench/packages.txt $(READY)
	$(PY) -m pip install --quiet --no-deps --requirement bench/packages.txt
	touch $@
