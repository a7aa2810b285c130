# make quickstart [ARGS="a.b=c ..."]   trains a tiny model on this machine's CPU
# make test [ARGS="tests/config -k name"]
# PYTHON=python3.12 chooses the interpreter, PIP_FLAGS="..." goes to every `pip install`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart test install clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REQUIREMENTS := $(wildcard requirements/*.txt) setup.py
PYTHON ?=
PIP_FLAGS ?=
ARGS ?=
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart/quickstart.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

install: $(STAMP)

# The stamp is written last: an interrupted install goes on where pip left off.
$(STAMP): $(REQUIREMENTS)
	@bash requirements/make_venv.sh "$(VENV)" "$(PYTHON)"
	@echo "installing into $(VENV): about 3 GB, from two minutes up"
	$(PIP) -r requirements/cpu.txt -r requirements/sglang-cpu.txt
	$(PIP) --no-deps -r requirements/sglang-cpu-nodeps.txt
	$(PIP) --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
