# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first; nothing is reinstalled
# unless pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Two OpenMP threads that spin while another process works can be many times slower than one.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help setup demo test lint types unit browser clean
help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt
demo: $(STAMP)   ## train PCLMix from scribbles on the built-in phantom, write demo/report.html
	$(BIN)/pclmix demo --out demo --overwrite
test: lint types unit  ## ruff, mypy, pytest
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: $(STAMP)
	$(BIN)/mypy
unit: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile
# The workbench is tested in a real browser. CI installs one where it may; elsewhere those tests skip and say why.
browser:
	@if [ "$${CI:-}" = true ] && ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	  >/dev/null || echo "Chromium could not be installed: the browser tests will be skipped"; fi
clean:           ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis demo

# torch first and by its exact version: a CPU build is taken where the index offers one, and nothing that
# depends on torch can pull in another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pclmix needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[web,export,dicom,dev]'
	@touch $@
