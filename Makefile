# Everything runs in .venv, which the first target that needs it creates. PYTHON: the Python to create it with (3.11 or newer).
PYTHON ?= python3
CRAM := .venv/bin/cram

.PHONY: demo test check faults up down install

demo: install ## raw text to scores in a few minutes, offline, without a server
	$(CRAM) run demo

test: install ## all tests, on two cores; a file stays together, since its tests share a server or a trained model
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: install ## format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

faults: install ## kill -9, full disks, lost servers and more, on small runs: an hour; OPTIONS=--quick takes four minutes
	.venv/bin/python benchmarks/faults.py $(OPTIONS)

up: install ## Prefect server, worker and the deployments cram/full and cram/study
	flows/prefect.sh up

down: ## stop what `make up` started
	flows/prefect.sh down

install: .venv/installed

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"cram needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --use-pep517 --editable '.[test]'
	@touch $@
