# Every target sets up what it needs. A fresh machine needs Python >= 3.11 and make, nothing else.

PYTHON ?= python3
UV_VERSION := 0.13.9
EXTRAS := smollm2,hub,nixl,dev

# Scripts of an activated environment must not decide what ours does.
unexport VIRTUAL_ENV PYTHONPATH

BIN := .venv/bin
UV := $(BIN)/uv
# One stamp a step, inside .venv: removing .venv forgets them all.
INSTALLED := .venv/.installed
PROTOS := .venv/.protos
step = @echo '==> $(1)'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup protos model lint test demo constraints hooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) $(PROTOS) model ## .venv with everything in it, the stubs of protos/, the default model

$(UV):
	$(call step,creating .venv)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		"Baton needs Python >= 3.11 and this is %d.%d: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(INSTALLED): pyproject.toml setup.py constraints.txt deploy/overrides.txt | $(UV)
	$(call step,installing the packages: 6 GB and minutes the first time)
	@$(UV) pip install --python .venv --constraints constraints.txt --build-constraints constraints.txt \
		--overrides deploy/overrides.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(PROTOS): $(wildcard protos/*.proto) $(INSTALLED)
	$(call step,compiling protos/*.proto)
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto
	@touch $@

protos: $(PROTOS) ## the stubs of protos/*.proto

model: $(INSTALLED)
	$(call step,the default model)
	@$(BIN)/python -m model_store smollm2-135m

lint: $(INSTALLED) $(PROTOS) ## ruff and pyright
	$(call step,ruff)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	$(call step,pyright)
	@$(BIN)/pyright

test: setup lint ## lint, then every test
	$(call step,pytest)
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest

demo: setup ## a cluster under Ray answers one question, then goes away
	@$(BIN)/baton demo

constraints: | $(UV) ## write constraints.txt anew from the ranges of pyproject.toml
	@$(UV) pip compile pyproject.toml --all-extras --overrides deploy/overrides.txt --python-version 3.11 \
		--upgrade --no-header --no-annotate --no-emit-index-url --quiet --output-file constraints.txt

hooks: $(INSTALLED) ## run format, lint and types before each commit
	@$(BIN)/pre-commit install

clean: ## remove .venv, the stubs, caches and build outputs
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis protos/*_pb2*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
