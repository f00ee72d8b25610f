# Short names for the commands that the README spells out.
PYTHON ?= python3
BIN := .venv/bin
HERE := $(CURDIR)/.gno
DEMO = GNO_CONFIG_DIR=$(HERE)/config GNO_DATA_DIR=$(HERE)/data GNO_CACHE_DIR=$(HERE)/cache $(BIN)/gno

.PHONY: venv test bench lint demo

venv: $(BIN)/gno
$(BIN)/gno: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[test]'
	@touch $@

test: venv
	$(BIN)/python -m pytest

bench: venv
	$(BIN)/python tests/bench.py

lint: venv
	$(BIN)/python -m pip install -q ruff
	$(BIN)/ruff check .

demo: venv
	$(DEMO) setup tests/vault
	$(DEMO) query "what do we do when the dome will not close?"
