# Every command a contributor needs. `make test` and `make demo` work on a fresh machine.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install dev demo test test-cpus test-slow mutants check lint docs claims release gpu-proofs bench bench-gpu bench-domains bench-which-bf16 bench-fp8 exhaustive clean

install: $(VENV)/.lab
dev: $(VENV)/.dev

$(VENV)/.lab $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	@touch $@

demo: install
	$(BIN)/halfstep compare --jobs 2

# Tests start many processes: each finds the sources compiled, whatever the shell says of that.
test: export PYTHONDONTWRITEBYTECODE =
test: dev .triton/3.7.1/.fetched
	$(BIN)/python -m pytest -n logical --dist worksteal

test-cpus: dev
	$(BIN)/python tests/cpus.py -n logical --dist worksteal

test-slow: dev
	$(BIN)/python -m pytest -m slow

release: dev
	$(BIN)/python tests/release.py --pip-flags '$(PIP_FLAGS)' $(RELEASE)

# Versions of triton to prove the GPU kernels with, each in a folder of its own: torch for CPUs brings none, and looks
# for one. Where there is no wheel (not Linux), the proofs are skipped, and say so.
.triton/%/.fetched: $(VENV)/.dev
	-$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --target $(@D) triton==$* && touch $@

gpu-proofs: dev .triton/3.7.1/.fetched .triton/3.6.0/.fetched .triton/3.9.0/.fetched
	$(BIN)/python -m pytest -n logical -m 'slow or not slow' tests/gpu

mutants: dev
	$(BIN)/python tests/mutants.py

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

docs: dev
	$(BIN)/halfstep claims --markdown > docs/claims.md
	$(BIN)/halfstep kb validate
	$(BIN)/python docs/build.py
	$(BIN)/halfstep site docs/_build/site/tools.html

claims: install
	$(BIN)/halfstep claims --check

exhaustive: dev
	$(BIN)/python tests/exhaustive/float32.py
	$(BIN)/python tests/exhaustive/readers.py
	$(BIN)/python tests/exhaustive/pairs.py
	$(BIN)/python tests/exhaustive/logarithm.py
	$(BIN)/python tests/exhaustive/signs.py

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/step.py --keep
	$(BIN)/python benchmarks/optimizer.py --keep
	$(BIN)/python benchmarks/overhead.py --keep
	$(BIN)/python benchmarks/micro_batches.py --keep
	$(BIN)/python benchmarks/quantize.py --keep
	$(BIN)/python benchmarks/inspect_speed.py --keep
	$(BIN)/python benchmarks/inference.py --keep
	$(BIN)/python benchmarks/generation.py --keep

# On a bare machine with a GPU: PYTHON is one that has torch for it; nothing is installed, nothing fetched (docs/gpu_figures.md).
bench-gpu:
	$(PYTHON) benchmarks/gpu.py --minutes 9 --out runs/gpu

bench-which-bf16: install
	$(BIN)/python benchmarks/which_bf16.py --keep

bench-fp8: install
	$(BIN)/python benchmarks/fp8.py --keep

bench-domains: install
	$(BIN)/python benchmarks/domains.py --keep

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
