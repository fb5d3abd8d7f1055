# make pretrain    a virtual environment, data, and a training run, from nothing but Python >= 3.10
# make test        the whole test suite
# make fuzz        5,000 random attention layers against attention in float64 (FUZZ_DRAWS, FUZZ_SEED)
# Options: PYTHON=python3.12 VENV=.venv312 CONFIG=examples/configs/....yaml ARGS="--batch...=.."
#          DATA=runs/data/mine (prepared data; a CONFIG names its own)

PYTHON ?= python3
VENV ?= .venv
DATA ?= runs/data/python_stdlib
CONFIG ?=
ARGS ?=
TESTS ?=
EXTRAS ?= dev
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
# The pins that are tested for this Python; an empty PINS= takes whatever pip finds.
PINS ?= $(shell $(PYTHON) -c "import sys; print('requirements/megatron-0.%d.txt' % (19 if sys.version_info >= (3, 12) else 16))")

.PHONY: help pretrain test parity fuzz faults test-gpu benchmark lint typecheck venv venv-train data clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile
	@echo "Also: parity, faults, benchmark, lint, typecheck, data, venv, clean"

# One stamp per set of extras: a broken or interrupted install is done again.
$(VENV)/.installed-%: pyproject.toml setup.py requirements/*.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python >= 3.10 is needed, $(PYTHON) is ' + sys.version.split()[0])"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ulysses-mc[$*] into $(VENV); this takes some minutes the first time"
	$(BIN)/python -m pip install -q $(if $(PINS),-c $(PINS)) -e '.[$*]'
	@touch $@

venv: $(VENV)/.installed-$(EXTRAS)
venv-train: $(VENV)/.installed-train

data: $(DATA)/data.json
$(DATA)/data.json: | $(VENV)/.installed-train
	$(BIN)/python examples/prepare_data.py --output $(DATA)

pretrain: $(VENV)/.installed-train $(DATA)/data.json
	PATH="$(abspath $(BIN)):$$PATH" CONFIG="$(CONFIG)" examples/pretrain_gpt.sh \
		$(if $(CONFIG),,--data.path '[$(DATA)/text]') $(ARGS)

test: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest $(TESTS)

parity: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest tests/megatron/test_parity.py $(TESTS)

fuzz: export FUZZ_DRAWS ?= 5000
fuzz: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest -v tests/fuzz $(TESTS)

faults: $(VENV)/.installed-$(EXTRAS)
	FAULT_SEEDS=10 $(BIN)/python -m pytest tests/faults $(TESTS)

test-gpu: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest -m gpu $(TESTS)

benchmark: $(VENV)/.installed-$(EXTRAS) $(VENV)/.installed-bench
	$(BIN)/python benchmarks/exchange.py $(ARGS)

lint: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# In one folder, as a wheel has them: mypy does not follow an editable install.
typecheck: $(VENV)/.installed-$(EXTRAS)
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -r ulysses_mc build/typecheck/ && cp -r parallel_state layers build/typecheck/ulysses_mc/
	cd build/typecheck && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p ulysses_mc

clean:
	rm -rf $(VENV) build dist *.egg-info
