# make demo   train a real model on the CPU and write its report
# make test   the whole test suite
# make lint   ruff; make types   mypy; make format   rewrite in house style
#
# Each makes .venv first, once, and again when pyproject.toml or constraints.txt changes.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types format clean

demo: $(STAMP)
	$(BIN)/python -m paceline.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and alone: where the package index has a CPU build of the version, it is taken
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "paceline needs Python 3.11 or newer, and none was found as python3, python3.13, python3.12 or" \
		     "python3.11. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[gguf,dev]' || { \
		echo "The installation failed. If pip's message above is about pycosat (needed by reasoning-gym, which ships it" \
		     "as source only): install a C compiler and Python's headers, then run make again." >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
