# The environment is made once in .venv and made anew when pyproject.toml changes.
PYTHON ?= python3
# The version that CI tests with; any from 2.6 on should do.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: setup demo test test-gpu attack lint

setup: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

# Real routing of Qwen3-30B-A3B on this machine playing 2 nodes x 2 ranks: verified, then measured beside the baseline.
demo: setup
	mkdir -p out
	$(BIN)/fusco bench shuffle --nodes 2 --ranks-per-node 2 --traffic trace --json out/demo.jsonl

test: setup
	$(BIN)/pytest

# On a machine with GPUs: each kernel on one of them, then several ranks, which share GPUs where there are fewer.
test-gpu: export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES = 1
test-gpu: setup
	$(BIN)/pytest tests/cuda
	$(BIN)/pytest tests/multirank --device cuda
	$(BIN)/pytest tests/multirank --device cuda-nodes

# Minutes of random work, faults and strangers; ATTACK="--seconds 60 --seed 3 --only faults" chooses.
attack: setup
	PYTHONPATH=tests:tests/multirank $(BIN)/python -m attack $(ATTACK)

lint: setup
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
