# The house's commands; CI runs .ci/run, which is `make ci` in a fresh environment.
PY ?= .venv/bin/python
K ?=

.PHONY: check test bench format ci

check:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2

test:
	$(PY) -m pytest $(if $(K),-k $(K))

bench:
	$(PY) -m bench

format:
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

ci:
	.ci/run
