# make quickstart [ARGS="a.b=c ..."]   trains a tiny model on this machine's CPU
# make test [ARGS="tests/config -k name"]
# make test-newest [ARGS=...]          the layouts and families on Python 3.12 with the newest Megatron-Core
# PYTHON=python3.12 chooses the interpreter, PIP_FLAGS="..." goes to every `pip install`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart test test-newest install clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := $(wildcard requirements/*.txt) setup.py
PYTHON ?=
PIP_FLAGS ?=
ARGS ?=
PIP_ARGS = --disable-pip-version-check install --quiet $(PIP_FLAGS)
PIP = $(BIN)/python -m pip $(PIP_ARGS)

NEWEST := .venv-newest
# pyenv's python3.12 may be a shim that does not start; the interpreter itself lies behind it.
PYTHON_NEWEST ?= python3.12 $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12*/bin/python3.12)
NEWEST_TESTS := tests/distributed tests/weights tests/backend

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart/quickstart.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# Only the trainer: no server, so that the second environment stays as small as torch lets it.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest --without-server $(or $(ARGS),$(NEWEST_TESTS))

install: $(STAMP)

# The stamp is written last: an interrupted install goes on where pip left off.
$(STAMP): $(REQUIREMENTS)
	@bash requirements/make_venv.sh "$(VENV)" "$(PYTHON)"
	@echo "installing into $(VENV): about 3 GB, from two minutes up"
	$(PIP) -r requirements/cpu.txt -r requirements/sglang-cpu.txt
	$(PIP) --no-deps -r requirements/sglang-cpu-nodeps.txt
	$(PIP) --no-deps -e .
	@touch $@

$(NEWEST)/.installed: $(REQUIREMENTS)
	@bash requirements/make_venv.sh "$(NEWEST)" "$(PYTHON_NEWEST)"
	@echo "installing the trainer into $(NEWEST): about 5 GB, from two minutes up"
	$(NEWEST)/bin/python -m pip $(PIP_ARGS) -r requirements/cpu.txt
	$(NEWEST)/bin/python -m pip $(PIP_ARGS) --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info
