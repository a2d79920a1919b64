# `make install test` needs nothing but a Python of 3.11 or later: `make install test PYTHON=python3.12 VENV=.venv-312`
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
PY := $(VENV)/bin/python
WORKERS ?= 2
TESTS ?= tests

.PHONY: install check test test-slow

install:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'

check:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

test:
	$(PY) -m pytest -n $(WORKERS) -m 'not slow' $(TESTS)

test-slow:
	$(PY) -m pytest -n $(WORKERS) -m slow $(TESTS)
