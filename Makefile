# Two commands: `make serve` and `make test`. Both set up a virtual environment first, and again only when needed.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
ARGS ?=
BIN := $(VENV)/bin
NATIVE := $(wildcard src/draftwing/ops/cpu/csrc/*)

.PHONY: serve test lint setup clean

serve: $(VENV)/.installed
	$(BIN)/draftwing serve --port $(PORT) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "draftwing needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml setup.py $(NATIVE) | $(BIN)/python
	@echo "installing draftwing into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml setup.py $(NATIVE) | $(BIN)/python
	@echo "installing draftwing and its test tools into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
