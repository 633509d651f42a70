# `make demo` and `make test` do all the set-up on a fresh machine: they create $(VENV) and install into it once.
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
# An index with torch for the CPU, where the usual one has it for CUDA alone (2.6 GB more): pytorch.org names it.
TORCH_INDEX ?=
# What `make test` installs; .ci/run names others as well.
EXTRAS := dev,writeup
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Of all that pip says, downloads of 100 MB and more, and errors.
INSTALL = $(RUN) -m pip install --disable-pip-version-check --progress-bar off $(1) 2> >(grep -v ^WARNING >&2) | \
	sed -nE 's/^ *(Downloading .*\(([0-9]{3,}[0-9.]* M|[0-9.]+ G)B\)).*/  \1/p; s/^Installing collected packages.*/  installing .../p'

.DEFAULT_GOAL := help
.PHONY: help demo test proof test-all writeup lint format types bench readme clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) (once; a minute or two; 2 GB on the disk, without CUDA) ..."
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "error: Python 3.11 to 3.13 is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(call INSTALL,--index-url $(TORCH_INDEX) torch))
	@$(call INSTALL,--editable .)
	@nvidia-smi >/dev/null 2>&1 || $(RUN) -c 'import sys, torch.version as here; sys.exit(here.cuda is not None)' || \
		echo "note: this torch brings CUDA, 2.6 GB, and there is no GPU: make clean, and TORCH_INDEX=URL of torch for the CPU"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Adding what tests, lint and write-up need (once; some seconds) ..."
	@$(call INSTALL,--editable '.[$(EXTRAS)]')
	@touch $@ $(VENV)/.writeup

demo: $(VENV)/.installed ## train a small language model and print a benchmark table (half a minute to a minute)
	$(RUN) -m cs336_systems.train --size tiny --steps 150 --decay-steps 150 --log-file runs/demo/train.jsonl
	$(RUN) -m benchmarks.e2e --size tiny --results runs/demo

# The version of the GPU machines, for the test that reads kernels' generated code; there is none but for Linux.
$(VENV)/.other-triton: $(VENV)/.installed
	@[ "$$(uname)" != Linux ] || \
		$(RUN) -m pip install --quiet --quiet --no-deps --upgrade --target $(VENV)/triton-3.6.0 triton==3.6.0
	@touch $@

# One more than two cores, since ranks also wait for each other; 5 take 14% longer. Each needs a gigabyte of memory.
WORKERS ?= 3
# Workers and the commands that tests start read compiled files, even where the environment says not to write any. GPUs
# are hidden: beside one, a process that has computed gradients cannot fork ranks.
PYTEST := CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(WORKERS) --dist worksteal --maxfail 25

test: $(VENV)/.dev ## run the tests (no GPU needed; three to seven minutes on two cores)
	$(PYTEST) -m "not slow"

proof: $(VENV)/.dev ## run the proof alone: equality, misuse, kernels against float64, crashes, broken variants
	$(PYTEST) -m "proof and not slow"

test-all: $(VENV)/.dev $(VENV)/.other-triton ## run all tests, the slow ones too
	$(PYTEST)

$(VENV)/.writeup: $(VENV)/.installed
	@echo "Adding what the write-up needs (once; some seconds) ..."
	@$(call INSTALL,--editable '.[writeup]')
	@touch $@

writeup: $(VENV)/.writeup ## make the write-up from the committed records: build/writeup/index.html and writeup.pdf
	$(RUN) -m writeup --out build/writeup

lint: $(VENV)/.dev ## check style and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.dev ## rewrite the files in the project's format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(VENV)/.dev ## type-check the packages
	$(RUN) -m mypy

bench: $(VENV)/.installed ## benchmark every model size of the course on this machine, into runs/results (long)
	$(RUN) -m benchmarks.e2e --all-sizes

readme: $(VENV)/.installed ## write the measured tables of README and docs/ from benchmarks/results/
	$(RUN) -m benchmarks.tables --write README.md
	$(RUN) -m benchmarks.tables --what parallel --write docs/data_parallel.md
	$(RUN) -m benchmarks.tables --what kernels --write docs/kernels.md
	$(RUN) -m benchmarks.tables --what memory --write docs/profiling.md
	$(RUN) -m benchmarks.tables --what scaling --write docs/model_parallelism.md
	$(RUN) -m benchmarks.tables --what experts --write docs/experts.md
	$(RUN) -m benchmarks.tables --what cost --write docs/cost.md
	$(RUN) -m benchmarks.tables --what checkpoints --write docs/checkpoints.md
	$(RUN) -m benchmarks.tables --what context --write docs/long_sequences.md

clean: ## remove .venv and what the demo and the write-up wrote; other runs, and an environment of VENV=..., stay
	rm -rf .venv runs/demo build *.egg-info
	@rmdir runs 2>/dev/null || true
