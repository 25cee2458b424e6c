# `make demo` installs Legato into .venv and generates text from the checkpoint that ships with it.
# `make check` runs everything that CI runs. Both are idempotent, and quick once .venv is up to date.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV   := .venv
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported, and kept: pip would compile 17,000 files, of which few are ever imported.
export PYTHONDONTWRITEBYTECODE :=
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
QUICK   = -m "not gpu and not full and not clients"
JOBS   ?= 3
MINUTES  ?= 30
SOAK_OUT ?= soak.jsonl
CLIENTS  := .venv-clients
CLIENT_VENVS := $(patsubst tests/clients/%/requirements.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/*/requirements.txt))

.PHONY: help demo check check-full check-gpu check-clients lint types imports test soak soak-http docs clean
help:
	@echo "make demo         install into .venv and generate text from the checkpoint that ships with Legato"
	@echo "make check        what CI runs: lint, types, import rules, CPU tests"
	@echo "make check-full   the same and the long tests"
	@echo "make check-gpu    what only a GPU can show: parity of every kernel, tokens, nothing that waits (JOBS=8 on many cores)"
	@echo "make check-clients  other projects' clients and testers against the server"
	@echo "make soak         the engine under a generated load for 30 minutes (MINUTES=...): does everything come back?"
	@echo "make soak-http    the server under 32 clients (MINUTES=15 suits): the same question, and do both sides count the same?"
	@echo "make docs         write docs/cli.md anew"
	@echo "make clean        remove .venv and caches"

demo: $(VENV)/.installed
	printf 'def fibonacci(n):\n' | $(BIN)/legato generate --max-tokens 256 --temperature 0 -
	printf 'def binary_search(items, value):\n    """Returns the index of value in items, or -1."""\n' \
	  | $(BIN)/legato generate --max-tokens 256 --temperature 0 -

check: lint types imports test

check-full: lint types imports $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu and not clients" --hypothesis-profile anew

check-gpu: $(VENV)/.installed-dev
	$(PYTEST) -m "gpu and not full" -n $(JOBS) --durations 10 --durations-min 5

check-clients: $(VENV)/.installed-dev $(CLIENT_VENVS) $(CLIENTS)/npm/.installed
	@$(PIP) --editable '.[dev,clients]'
	$(PYTEST) -m clients tests/clients

# Each client has an environment of its own: their pins clash.
$(CLIENTS)/%/.installed: tests/clients/%/requirements.txt | $(BIN)/python
	@echo "installing the client $*"
	@$(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(CLIENTS)/npm/.installed: tests/clients/npm/package.json tests/clients/npm/package-lock.json
	@echo "installing the clients of npm"
	@mkdir -p $(@D) && cp $^ $(@D)
	@npm ci --prefix $(@D) --no-audit --no-fund --loglevel error
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check legato tests

types: $(VENV)/.installed-dev
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-logo

test: $(VENV)/.installed-dev
	-@$(PYTEST) $(QUICK) --collect-only -qq >/dev/null  # what one process compiles, the workers need not
	$(PYTEST) $(QUICK) -n $(JOBS) --dist loadfile --durations 10 --durations-min 5

soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m legato.bench.soak --minutes $(MINUTES) --out $(SOAK_OUT)

soak-http: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m legato.bench.soak_http --minutes $(MINUTES) --out $(SOAK_OUT)

docs: $(VENV)/.installed
	$(BIN)/python -m typer legato.__main__ utils docs --name legato --output docs/cli.md

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Legato needs Python 3.11 or newer: none found on PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Legato needs Python 3.11 or newer; $(PYTHON) is older (set PYTHON=...)" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { echo "is the venv module installed? (Debian: python3-venv)" >&2; exit 1; }
	@# The pip that a Python brings may be years old, and then takes three times as long to find out what to install.
	@$(PIP) --upgrade pip || echo "pip stays as it is: installing takes longer"

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Legato and what it needs (the first time this downloads PyTorch)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Legato, what it needs, and the tools of the tests (the first time this downloads PyTorch)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
