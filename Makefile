# Two commands set everything up on a machine with Python 3.11 to 3.15 and a C++ compiler:
#
#   make demo    train a small GPT with eager, torch.compile and Dovetail side by side
#   make test    run the default test suite
#
# Both make their own environment in .venv. PYTHON=python3.12 picks another interpreter.

PYTHON       ?= python3
VENV         ?= .venv
TORCH        ?= 2.13.0
# Worker processes of pytest.
JOBS         ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
TESTS        ?= tests
DEMO         ?= --small
BIN          := $(VENV)/bin
# PyPI's Linux wheel of torch carries CUDA (gigabytes). The CPU wheel comes from torch's own index, where that can be
# reached; elsewhere pip uses whatever indexes it is configured for. TORCH_INDEX=... names another one.
CPU_INDEX    := https://download.pytorch.org/whl/cpu
PROBE        := import urllib.request as u; u.urlopen("$(CPU_INDEX)/torch/", timeout=4)
TORCH_INDEX  ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-ecosystem test-triton site lint format fuzz bench-capture bench-memory bench-overhead conformance conformance-opinfo conformance-calls conformance-modules conformance-models conformance-switches conformance-memory conformance-stress conformance-cache conformance-science conformance-cuda conformance-faults backend-tables test-matrix torch-names bench-second-order bench-growth bench-step bench-start bench-simulator bench-gpu clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "also: make test-ecosystem, test-triton, site, lint, format, fuzz, bench-capture, bench-memory, bench-overhead, conformance, conformance-opinfo, conformance-calls, conformance-modules, conformance-models, conformance-switches, conformance-memory, conformance-stress, conformance-cache, conformance-science, conformance-cuda, conformance-faults, backend-tables, test-matrix, torch-names, bench-second-order, bench-growth, bench-step, bench-start, bench-simulator, bench-gpu, clean"

# The pin of torch is in every pip call, so that no extra can ever pull in another version.
define install
	index="$(TORCH_INDEX)"; \
	if [ -z "$$index" ] && $(BIN)/python -c '$(PROBE)' >/dev/null 2>&1; then index="$(CPU_INDEX)"; fi; \
	$(BIN)/python -m pip install --quiet $${index:+--extra-index-url "$$index"} "torch==$(TORCH)" -e '.[$(1)]'
	@touch $@
endef

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 16) else \
	    "Dovetail needs Python 3.11 to 3.15; pick one with make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing torch $(TORCH) and the demo's packages into $(VENV) ..."
	@$(call install,demo)

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing torch $(TORCH) and the test packages into $(VENV) ..."
	@$(call install,demo$(comma)test$(comma)dev)

comma := ,

demo: $(VENV)/.demo
	$(BIN)/dovetail demo $(DEMO)

# One thread per worker: more would only make the workers wait for each other. Bytecode is kept, for the processes that tests start.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS) $(PYTEST_ARGS)

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "installing torch $(TORCH) and the packages of the documentation into $(VENV) ..."
	@$(call install,docs)

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-overhead: $(VENV)/.test
	$(BIN)/python benchmarks/bench_overhead.py $(BENCH_ARGS)

bench-memory: $(VENV)/.test
	$(BIN)/python benchmarks/memory_budget.py $(BENCH_ARGS)

bench-capture: $(VENV)/.test
	$(BIN)/python benchmarks/bench_capture.py $(BENCH_ARGS)

bench-second-order: $(VENV)/.test
	$(BIN)/python benchmarks/second_order.py $(BENCH_ARGS)
bench-start: $(VENV)/.test
	$(BIN)/python benchmarks/bench_start.py $(BENCH_ARGS)

bench-growth: $(VENV)/.test
	$(BIN)/python benchmarks/growth.py $(BENCH_ARGS)

bench-step: $(VENV)/.test
	$(BIN)/python benchmarks/step.py $(BENCH_ARGS)

bench-simulator: $(VENV)/.test
	$(BIN)/python benchmarks/simulator.py $(BENCH_ARGS)

# Says so and ends where there is no GPU. A CUDA build of torch: make bench-gpu TORCH_INDEX=https://download.pytorch.org/whl/cu128
bench-gpu: $(VENV)/.test
	$(BIN)/python benchmarks/gpu.py $(BENCH_ARGS)

fuzz: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --count 20000 --jobs $(JOBS) $(FUZZ_ARGS)

conformance: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance -j $(JOBS) $(CONFORMANCE_ARGS)

conformance-opinfo: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.opinfo_runner $(CONFORMANCE_ARGS)

conformance-calls: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.calls_runner $(CONFORMANCE_ARGS)

conformance-modules: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.module_runner $(CONFORMANCE_ARGS)

conformance-models: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.model_runner $(CONFORMANCE_ARGS)

conformance-switches: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.conformance.switch_runner $(CONFORMANCE_ARGS)

conformance-memory: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.memory_runner $(CONFORMANCE_ARGS)

conformance-stress: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.stress $(CONFORMANCE_ARGS)

# 1,000 kills and 100,000 damaged entries: hours; make conformance-cache CONFORMANCE_ARGS="--only kills --kills 100"
conformance-cache: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance.cache_stress $(CONFORMANCE_ARGS)

# Triton beside a CPU build of torch: its interpreter runs the kernels that Inductor generates for a GPU.
TRITON := $(VENV)-triton
$(TRITON)/triton: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $(TRITON) 'triton>=3.4'
test-triton: $(TRITON)/triton
	PYTHONPATH=$(CURDIR):$(TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

# Each fault of a rank 20 times.
conformance-faults: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.distributed.fault_table $(CONFORMANCE_ARGS)

# Each family of models on a CUDA device that is emulated: make conformance-cuda CONFORMANCE_ARGS="--autocast"
conformance-cuda: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.gpu.emulated.families $(CONFORMANCE_ARGS)

# make test-matrix PAIRS="2.15.0:python3.12 2.13.0:python3.11" MATRIX_ARGS="--docs"
PAIRS ?= $(TORCH):$(PYTHON)
test-matrix: $(VENV)/.test
	$(BIN)/python -m tests.matrix $(PAIRS) $(MATRIX_ARGS)

# make torch-names NAMES_ARGS="--with other/bin/python --docs"
torch-names: $(VENV)/.test
	$(BIN)/python -m tests.torch_names $(NAMES_ARGS)

# Scientific packages, in an environment of their own. One that cannot be installed is named, and its programs are refused. Each
# command pins torch; SchNetPack's own pins do not agree with the others'.
SCIENCE := $(VENV)-science
SCIENCE_PACKAGES := schnetpack mace-torch torchmd-net pina-mathlab deepxde gpytorch torchdiffeq higher torchopt torch_geometric

$(SCIENCE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SCIENCE)
	$(SCIENCE)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==$(TORCH)" -e .
	for package in $(SCIENCE_PACKAGES); do \
	    $(SCIENCE)/bin/python -m pip install --quiet "torch==$(TORCH)" $$package || echo "$$package cannot be installed"; \
	done
	-$(SCIENCE)/bin/python -m pip install --quiet --no-deps --upgrade schnetpack
# NequIP needs another version of e3nn than MACE pins: an environment of its own.
	$(PYTHON) -m venv $(SCIENCE)-nequip
	-$(SCIENCE)-nequip/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==$(TORCH)" 'nequip>=0.7' -e .
	@touch $@

conformance-science: $(SCIENCE)/.installed
	OMP_NUM_THREADS=1 $(SCIENCE)/bin/python -W ignore -m tests.conformance.science_runner -j $(JOBS) $(CONFORMANCE_ARGS); first=$$?; \
	OMP_NUM_THREADS=1 $(SCIENCE)-nequip/bin/python -W ignore -m tests.conformance.science_runner --programs nequip && exit $$first

# Libraries around PyTorch, in an environment of their own. One that cannot be installed is left out, and its tests are skipped.
ECOSYSTEM := $(VENV)-ecosystem

$(ECOSYSTEM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==$(TORCH)" -e '.[test]'
	for package in diffusers peft torchrl pytorch-ignite torch_geometric timm trl; do \
	    $(ECOSYSTEM)/bin/python -m pip install --quiet "torch==$(TORCH)" $$package || echo "$$package cannot be installed"; \
	done
	@touch $@

test-ecosystem: $(ECOSYSTEM)/.installed
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/python -m pytest -n $(JOBS) --slow tests/ecosystem $(PYTEST_ARGS)

backend-tables: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.testing.tables docs/backends.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output
