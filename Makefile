# `make serve` and `make test`, which set up a virtual environment first, and again only when needed. While working on it:
# `make check`, the same without what is slow or measures time (two minutes on two cores), and `make lint`, which
# mends format.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
JOBS ?=
ARGS ?=
BIN := $(VENV)/bin
NATIVE := $(wildcard src/draftwing/ops/cpu/csrc/*) src/draftwing/ops/cpu/isa.py

.PHONY: serve check test test-all test-cluster test-clients style lint sanitize neon soak build setup clean

serve: $(VENV)/.installed
	$(BIN)/draftwing serve --port $(PORT) $(ARGS)

# torch and OpenMP with one thread each. Three processes are for two cores, since tests wait for servers now and then:
# `JOBS` for more. They begin files in the order of tests/conftest.py. Bytecode is kept even where the environment is not
# for it: to compile the tests takes a process 8 s.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# `--changed` leaves out tests of training that have passed since anything that training imports was changed, see
# tests/changed.py; `make test-all`, and files that `ARGS` names, run in any case.
# Types are checked during the tests, for the first time takes half a minute; tests that measure time come afterwards,
# with nothing else running. pytest ends with 5 where there is no test to run: `ARGS` may choose none of one kind.
define TESTS
@$(BIN)/mypy & mypy=$$!; timing=0; \
$(PYTEST) --numprocesses $(or $(JOBS),$(if $(2),3,2)) -m "not timing and $(1)" $(3) $(ARGS); tests=$$?; \
wait $$mypy; types=$$?; \
$(if $(2),echo "tests that measure time:"; $(PYTEST) --numprocesses 0 -m "timing and $(1)" $(3) $(ARGS); timing=$$?;) \
echo "exit codes: types $$types, tests $$tests, tests that measure time $$timing"; \
case "$$types $$tests $$timing" in "0 0 0" | "0 0 5" | "0 5 0") ;; *) exit 1 ;; esac
endef

test: style
	$(call TESTS,not cluster and not exhaustive,timing,--changed)

# The whole of each grid of cases, of which `make test` has representatives.
test-all: style
	$(call TESTS,not cluster,timing)

# Several servers behind Ray Serve and behind smg, on this machine: some minutes, and 600 MB of packages the first time.
test-cluster: $(VENV)/.installed-cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 0 tests/cluster tests/test_kubernetes.py $(ARGS)

# Other people's client programs against a server here, see docs/integrations.md: a gigabyte of packages the first time.
# `ARGS=--newest`, `ARGS="--model smollm2"`, `ARGS="codex opencode"`.
test-clients: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/clients/run.py $(ARGS)

check: style
	$(call TESTS,not slow and not exhaustive,,--changed)
	@$(BIN)/python tools/count_code.py

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The C extension with AddressSanitizer and UBSan, apart from the installed one, under the tests of what it computes.
# For the instruction set that is used here, and the plain one, which is asked what the CPU has. Templates of chats run
# under a limit of memory that is less than the sanitizer takes, so tests with a tokenizer are left out.
SANITIZE := -fsanitize=address,undefined
sanitize: $(VENV)/.installed-dev
	DRAFTWING_BUILD_ISA="plain,$$($(BIN)/python -c 'from draftwing.ops.cpu import extension; print(extension.chosen_isa().name)')" \
	  CFLAGS="$(SANITIZE) -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g" LDFLAGS="$(SANITIZE)" \
	  $(BIN)/python setup.py --quiet build --build-base build/sanitize-objects --build-lib build/sanitize
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do $(CC) -print-file-name=lib$$name.so; done | tr '\n' ' ')" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitize OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest tests/ops tests/engine/test_graphs.py tests/engine/test_graphs_cpu.py tests/engine/test_target.py -m "not exhaustive and not timing" -k "not triton and not cuda and not foreign_code" $(ARGS)

# The C extension for aarch64, in an emulator: the same bits as here, or with ARGS=--text the same text. The first time
# it downloads a Python and a torch.
neon: $(VENV)/.installed-dev
	$(BIN)/python tools/neon.py $(ARGS)

# Random mixed traffic and faults, see tools/soak.py. `make soak ARGS="--minutes 60"` takes an hour.
soak: $(VENV)/.installed-dev
	$(BIN)/python tools/soak.py $(ARGS)

# For other machines too, where a cross compiler is: make build ARGS="--machines x86_64 aarch64"
build: $(VENV)/.installed-release
	$(BIN)/python tools/build_wheels.py $(ARGS)

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

$(VENV)/.installed-cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev,cluster]'
	@touch $@

$(VENV)/.installed-release: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev,release]'
	@touch $@

clean:
	rm -rf $(VENV)
