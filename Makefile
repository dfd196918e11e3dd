# fastattn: everything that a clone needs. `make help` lists the commands.

PYTHON ?= python3

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles the modules that it imports. pip would compile all modules, which takes half a minute.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
# Stamp files. The modification time of each file is when its step last ran.
BASE   := $(VENV)/.base-installed
DEMO   := $(VENV)/.demo-installed
TOOLS  := $(VENV)/.tools-installed
BUILT  := $(VENV)/.fastattn-built
# What the build reads. Folders are in the list too: they change when a file is added or removed.
NATIVE := $(shell find csrc -name __pycache__ -prune -o -print)

# The GPUs to build for: by default this machine's. Without a GPU the installed package has no CUDA C++ kernels, because
# nothing could run them. The tests' emulator builds a separate library, with PTX.
ARCHS = $(or $(FASTATTN_ARCHS),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | grep -E '^([89]|1[0-9])\.' >/dev/null && echo native || echo none))

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install library emulated test test-all test-cuda demo bench gpu-check hub-kernel docs lint clean clean-cache

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@echo "PYTHON=python3.12 chooses the Python of a new $(VENV); a torch that is installed in $(VENV) stays as it is."
	@echo "FASTATTN_ARCHS, CUDA_HOME, CXX and MAX_JOBS steer the build: see docs/environment.md."

# Later installs must not change torch: the versions of torch and of its CUDA libraries become constraints.
$(BASE): pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -c "import sys; sys.version_info >= (3, 10) or sys.exit('PYTHON: 3.10 or later, please')"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install torch==2.13.0
	$(PIP) list --format freeze | grep -E '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z-]+)==' > $(VENV)/constraints.txt
	$(PIP) install --quiet -c $(VENV)/constraints.txt --group build --group emulator
	@touch $@

$(DEMO): $(BASE) | $(BUILT)
	$(PIP) install --quiet -c $(VENV)/constraints.txt --group demo
	@touch $@

$(TOOLS): $(BASE)
	$(PIP) install --quiet -c $(VENV)/constraints.txt --group test --group bench --group dev
	@touch $@

define build
PYTHONPATH=csrc $(BIN)/python -c "from native_build.cuda import find_nvcc; raise SystemExit(find_nvcc() is None)" \
  || $(PIP) install --quiet -c $(VENV)/constraints.txt --group nvcc \
  || echo "No nvcc here and none to be had as a package: going on without CUDA C++ kernels."
FASTATTN_ARCHS="$(ARCHS)" PYTHONWARNINGS="ignore:Editable installation" $(PIP) install --quiet --no-build-isolation -c $(VENV)/constraints.txt --editable .
touch $(BUILT)
$(BIN)/python -m fastattn --short
endef

$(BUILT): $(BASE) setup.py pyproject.toml $(NATIVE)
	@echo "Building fastattn ..."
	@$(build)

install: $(TOOLS) ## make .venv with everything in it and build fastattn there; safe to repeat
	@echo "Building fastattn ..."
	@$(build)

library: $(BUILT) ## the native library with all machine code in build/native, as a wheel has it
	MAKEFLAGS= PYTHONPATH=csrc $(BIN)/python -m native_build.library

# Builds what the tests need, and shows its progress, which pytest would hide.
EMULATOR := PYTHONPATH=csrc:tests $(BIN)/python -m emulator build

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup

emulated: $(BUILT)
	MAKEFLAGS= $(EMULATOR)

# pip mostly waits for the network: it installs what the tests need while the kernels compile.
test: $(BUILT) ## the core: every kernel and option against the oracle; PYTEST_ARGS="tests/int8 -k swiglu" narrows it
	@$(MAKE) --silent --jobs 2 $(TOOLS) emulated
	$(PYTEST) --core $(PYTEST_ARGS)

test-all: $(BUILT) ## every test, few cases of each; PYTEST_ARGS="--rest 1/8" runs an eighth of the other cases
	@$(MAKE) --silent --jobs 2 $(TOOLS) library
	$(EMULATOR)
	$(PYTEST) --few $(PYTEST_ARGS)

# Runs tests with torch's CUDA build on two emulated GPUs at the same time. In KERNEL_TESTS each tensor is a separate
# allocation, so that accesses out of its bounds fail. The other tests need torch's caching allocator, for CUDA graphs.
TORCH ?= 2.11.0
CUDA_PYTEST := .venv-cuda/bin/python -m pytest -q -p cuda_torch.plugin
KERNEL_TESTS := tests/all_kernels/test_each_kernel.py

test-cuda: $(TOOLS) $(BUILT) ## the kernels under torch's CUDA build, on emulated GPUs; TORCH=2.12.0 chooses the release
	$(BIN)/python tests/cuda_torch/environment.py --torch $(TORCH)
	@export PYTORCH_NO_CUDA_MEMORY_CACHING=1; \
	for device in 0 1; do $(CUDA_PYTEST) -m "not slow" --cuda-device $$device $(KERNEL_TESTS) & jobs="$${jobs:-} $$!"; done; \
	for job in $$jobs; do wait $$job || failed=1; done; exit $${failed:-0}
	$(CUDA_PYTEST) -n auto --dist loadgroup tests/cuda_torch tests/packages/test_private_names.py $(PYTEST_ARGS)

demo: $(DEMO) $(BUILT) ## a sentence model and a small decoder, plain and with fastattn
	$(BIN)/python examples/demo.py

BENCHMARKS := attention_forward attention_backward decode int8_matmul

bench: $(TOOLS) $(BUILT) ## the quick benchmarks; BENCH_ARGS="--full --save" for more. Without a GPU, only those that need none
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks emulator
	@if ! $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  echo; $(BIN)/python -m benchmarks.machine_code.kernels $(filter --full,$(BENCH_ARGS)); fi
	@for name in $(BENCHMARKS); do echo; $(BIN)/python -m benchmarks $$name $(BENCH_ARGS); done

# gpu-check needs only this Python: on a GPU that is available for a few minutes, there may be no $(VENV), and no
# package registry to fill it from.
GPU_CHECK_PYTHON := $(if $(filter default file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
OUT ?= build/gpu_check/out

gpu-check: ## all evidence from a GPU into OUT=dir in under 8 minutes; GPU_CHECK_ARGS="--stages tests,benchmarks"
	$(GPU_CHECK_PYTHON) -m benchmarks gpu-check --out "$(OUT)" $(GPU_CHECK_ARGS)

hub-kernel: $(TOOLS) $(BUILT) ## a kernel repository for the Hugging Face Hub in build/hub-kernel
	PYTHONPATH=csrc $(BIN)/python -m native_build.hub_kernel

docs: $(TOOLS) $(BUILT) ## the site in build/docs; warnings are errors
	$(PIP) install --quiet -c $(VENV)/constraints.txt --group docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "fastattn: build/docs/index.html"

# mypy needs the package as it is installed: triton_kernels inside fastattn. The tests are left out, because they pass
# wrong types on purpose.
TYPED := build/typed/fastattn

lint: $(TOOLS) ## ruff, mypy and clang-format; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/typed && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/python/fastattn/* $(CURDIR)/triton_kernels $(TYPED)/
	MYPYPATH=build/typed:csrc:examples $(BIN)/mypy setup.py csrc/native_build $(TYPED) $(wildcard benchmarks/*.py benchmarks/*/*.py benchmarks/*/*/*.py examples/*.py)
	find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | xargs -r $(BIN)/clang-format --dry-run -Werror

clean-cache: ## remove compiled results from the cache in ~/.cache/fastattn, or FASTATTN_CACHE
	rm -rf "$(or $(FASTATTN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fastattn)"/{objects,triton}

clean: ## remove what was built; .venv and the cache stay
	rm -rf .venv-cuda build dist *.egg-info python/fastattn/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis $(BUILT)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
