# The environment is made once in .venv and made anew when pyproject.toml changes; with BIN=... of another environment,
# such as BIN=/usr/bin, nothing is installed.
PYTHON ?= python3
# The version that CI tests with; any from 2.7 on should do, 2.11 for fusco.fsdp.
TORCH ?= torch==2.13.0
# The oldest version that pyproject.toml allows, without what needs the newer one of fusco[fsdp].
MINIMUM_TORCH ?= torch==2.7.0
BIN := .venv/bin
# Python keeps the bytecode of sources, or each process that a test starts would compile them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup warm-up demo test test-architectures test-minimum test-gpu wheel test-wheel bench-gpu bench-frameworks attack sanitize lint docs pictures

setup: $(if $(filter .venv/bin,$(BIN)),.venv/.installed)

.venv/.installed: pyproject.toml tests/frameworks.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps -r tests/frameworks.txt
	touch $@

# Kernels of CPUs and of the simulator are compiled once, not by each process that is the first to call one.
warm-up: .venv/.warm

.venv/.warm: .venv/.installed $(shell find src -name '*.py')
	$(BIN)/fusco warm-up
	$(BIN)/fusco simulate --nodes 2 --tokens 64 > /dev/null
	touch $@

# Real routing of Qwen3-30B-A3B on this machine playing 2 nodes x 2 ranks: verified, then compared with the baseline.
demo: setup
	mkdir -p out
	$(BIN)/fusco bench shuffle --nodes 2 --ranks-per-node 2 --traffic trace --json out/demo.jsonl

# In two processes; tests that compare times with limits are beside each other, as most of their time they wait.
test: setup warm-up
	$(BIN)/pytest -n 2 --dist loadfile tests/unit tests/cuda src/fusco
	$(BIN)/pytest -n 2 --dist loadfile tests/multirank -m "not alone"
	$(BIN)/pytest -n 2 --dist loadfile $$(grep -l mark.alone tests/multirank/test_*.py)
	$(BIN)/pytest tests/testbed

# Files, biases and gradients of every MoE architecture of transformers; gradients alone took a quarter of an hour on two
# cores. Writes the table of docs/training/architectures.md. ARCHITECTURES="--only gpt_oss llama4" chooses.
test-architectures: setup
	PYTHONPATH=tests:tests/multirank $(BIN)/python -m check_architectures $(ARCHITECTURES)

# An environment of its own. INDEX=https://download.pytorch.org/whl/cpu spares the CUDA packages, some gigabytes.
test-minimum: .venv-minimum/.installed
	.venv-minimum/bin/pytest --ignore-glob='*fsdp*' --ignore-glob='*train*' --ignore-glob='*prefill*'

.venv-minimum/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/pip install --quiet "$(MINIMUM_TORCH)" $(if $(INDEX),--index-url $(INDEX))
	.venv-minimum/bin/pip install --quiet --editable '.[test]'
	touch $@

# On a machine with GPUs: each kernel on one of them, and several ranks, which share GPUs where there are fewer; the
# three at the same time, as most of it waits.
test-gpu: setup
	$(MAKE) --no-print-directory -j3 --keep-going --output-sync=target test-gpu-parts

# Tests of several ranks at a time, of each of two parts: one for every 40 GB of all GPUs, as the four ranks of most take
# up to 3 GiB each, and for every six cores. Each test is named as it ends, with why it failed: runs may be cut off.
GPU_WORKERS ?= $(or $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | \
    awk -v cores=$$(nproc) '{ mb += $$1 } END { by_memory = int(mb / 40000); by_cores = int(cores / 6); \
    print by_memory < by_cores ? by_memory : by_cores }' | grep -v '^0$$'),1)
GPU_PARTS := test-gpu-kernels test-gpu-within-node test-gpu-between-nodes
.PHONY: test-gpu-parts $(GPU_PARTS)
$(GPU_PARTS): export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES = 1
$(GPU_PARTS) bench-gpu bench-frameworks: export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
test-gpu-parts: $(GPU_PARTS)
test-gpu-kernels:
	$(BIN)/python -m pytest -n 4 tests/cuda
test-gpu-within-node:
	$(BIN)/python -m pytest -v -n $(GPU_WORKERS) --dist worksteal tests/multirank --device cuda
test-gpu-between-nodes:
	$(BIN)/python -m pytest -v -n $(GPU_WORKERS) --dist worksteal tests/multirank --device cuda-nodes

# On a machine with two GPUs, in at most twenty minutes: what docs/performance says of them, as records of docs/data in
# out/bench-gpu/records.jsonl. BENCH="--only 'h7168-*' train" chooses, BENCH="--resume --limit-s 540" does it in parts.
bench-gpu: setup
	$(BIN)/python tools/bench_gpu.py $(if $(CARRIED),--carried $(CARRIED)) $(BENCH)

# On a machine with two GPUs, in at most nine minutes: frameworks, their own tests and prefills, with the files of
# CARRIED (tools/bench_frameworks.py says which). Results in out/bench-frameworks; BENCH="--resume" runs what is missing,
# BENCH="--device cpu" all of it on two cores with small sizes.
bench-frameworks: setup
	$(BIN)/python tools/bench_frameworks.py --carried $(CARRIED) $(BENCH)

# Minutes of random work, faults, foreign clients, hostile peers of rails and impossible addresses; ATTACK="--seconds 60 --seed 3 --only faults" chooses.
attack: setup
	PYTHONPATH=tests:tests/multirank:tests/unit/rails $(BIN)/python -m attack $(ATTACK)

lint: setup
	$(BIN)/ruff check src tests examples tools
	$(BIN)/ruff format --check src tests examples tools
	$(BIN)/mypy

# The documentation site, in out/site, with plots from docs/data. Broken links and names are errors. The API pages parse
# the sources.
docs: setup
	$(BIN)/python tools/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A wheel whose C parts are compiled, and a source distribution, in out/wheels.
wheel: setup
	$(BIN)/python -m build --outdir out/wheels .

# The wheel in a clean environment of each Python of PYTHONS, with what it requires: its commands, and a shuffle.
PYTHONS ?= python3
test-wheel: wheel
	for python in $(PYTHONS); do \
	    rm -rf out/clean && $$python -m venv out/clean && out/clean/bin/pip install --quiet "$(TORCH)" && \
	    out/clean/bin/pip install --quiet out/wheels/fusco-*.whl && cd out && clean/bin/fusco --version && \
	    clean/bin/fusco doctor && clean/bin/fusco bench shuffle --tokens 64 --hidden 64 --iterations 2 && cd .. || exit 1; \
	done

# Pictures of the page of `fusco explore`, in a browser (chromium-headless-shell or FUSCO_BROWSER). OUT=... takes another
# folder.
pictures: setup
	$(BIN)/python tools/pictures.py $(or $(OUT),docs/figures)

# The tests of rails, whose engine is compiled with sanitizers; the interpreter itself is not. ThreadSanitizer needs
# addresses that are not random.
RAILS_TESTS := $(BIN)/pytest -p no:cacheprovider tests/unit/rails
sanitize: setup
	ENGINE_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined" ASAN_OPTIONS=detect_leaks=0 \
	env LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" $(RAILS_TESTS)
	ENGINE_FLAGS="-g -fsanitize=thread" TSAN_OPTIONS="exitcode=66 die_after_fork=0" \
	setarch -R env LD_PRELOAD="$$(cc -print-file-name=libtsan.so)" $(RAILS_TESTS)
