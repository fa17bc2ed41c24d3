# The two commands of a newcomer: `make demo` and `make test`. Each sets up first, which takes a
# moment when there is nothing to do. What set-up does is in containers/setup.sh.
.PHONY: help setup demo test quick campaign bench testbed bundle lint lock
.DEFAULT_GOAL := help

BIN := .venv/bin
# The CPU build of torch, where pip's own index lacks it: make setup TORCH_INDEX=URL (README.md)
export TORCH_INDEX PYTHON

help:
	@echo "make demo    set up, then train and benchmark a draft model for a small real model"
	@echo "make test    set up, then all tests, in two processes"
	@echo "make setup   .venv from containers/cpu.lock, this package, the small model"
	@echo "make quick   the tests that take under a minute each"
	@echo "make campaign  the long fault tests on a real Slurm"
	@echo "make testbed a real Slurm on this machine, to try submit without a cluster"
	@echo "make bundle  one archive from which machines without internet install the command line"
	@echo "make bench   the benchmarks of tests/bench, beside the libraries' own tools"
	@echo "make lint    ruff"
	@echo "make lock    renew containers/*.lock (needs uv)"

setup:
	@containers/setup.sh

demo: setup
	@$(BIN)/kimi-eagle run jobs/smollm2.toml --run runs/smollm2

test: setup
	@$(BIN)/python -m pytest -q -n 2 --no-loadscope-reorder

quick: setup
	@$(BIN)/python -m pytest -q -m "not slow and not campaign"

campaign: setup
	@$(BIN)/python -m pytest -q -m campaign

testbed:
	@python3 slurm/testbed/testbed.py up

# IMAGES=FILE... puts images in, too
bundle: setup
	@$(BIN)/python containers/bundle.py $(addprefix --image ,$(IMAGES))

bench: setup
	@for f in tests/bench/bench_*.py; do echo "== $$f"; $(BIN)/python "$$f" || exit 1; done

lint:
	@$(BIN)/ruff check .

lock:
	@containers/lock.sh
