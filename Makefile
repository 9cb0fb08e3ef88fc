# Two commands do everything on a fresh machine with python3, pip and make:
#
#     make demo    virtual environment, install, the main job (examples/digits.py)
#     make test    install what the tests need, run them
#
# Another interpreter: make demo PYTHON=python3.13. Arguments: make test ARGS='-k reactor -x'.

PYTHON ?= python3
ARGS   ?=

VENV := .venv
BIN  := $(VENV)/bin
pip  := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# What a stamp file stands for is installed; it is stale once one of these changes.
inputs := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo train overlap serve test lint format bench clean

help:
	@echo "make demo | train | overlap | serve | test | lint | format | bench | clean"

demo: $(VENV)/.examples
	$(BIN)/python examples/digits.py $(ARGS)

# A training loop that never waits; checkpoints and going on: make train ARGS='--checkpoints out --resume'.
train: $(VENV)/.examples
	$(BIN)/python examples/train.py $(ARGS)

# The backward of one model chunk beside the forward of another.
overlap: $(VENV)/.examples
	$(BIN)/python examples/overlapped_forward_backward.py $(ARGS)

# A web service on http://127.0.0.1:8000, on the GPU or the CPU; load for it: examples/serve/load.py.
serve: $(VENV)/.serve
	$(BIN)/python examples/serve/app.py $(ARGS)

# The examples are tested, too, so their libraries are needed here.
test: $(VENV)/.examples $(VENV)/.serve $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.examples $(VENV)/.serve $(VENV)/.test $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict aiogpu
	$(BIN)/python -m pytest -q tests/test_exports.py tests/test_architecture.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.examples $(VENV)/.test $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Debian's python3 has no ensurepip; its pip can still fill an environment that has none of its own.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] < (3, 15) or sys.exit( \
		"aiogpu needs Python 3.11 to 3.14, this is " + sys.version.split()[0] + \
		": make $(MAKECMDGOALS) PYTHON=python3.13")'
	$(PYTHON) -m venv --clear $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

$(VENV)/.%: $(inputs) | $(VENV)/.python
	@echo "installing aiogpu[$*] into $(VENV) ..."
	@$(pip) -e '.[$*]'
	@touch $@
