# Every target sets up .venv first, from requirements.lock (hashed) and requirements-torch.lock, and only when these or
# pyproject.toml changed. With TORCH=2.11.0 it is an environment of its own, with that torch.

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
TORCH_REQUIREMENT := $(if $(TORCH),torch==$(TORCH),-r requirements-torch.lock)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --quiet --disable-pip-version-check
OLD := setup: expected Python 3.11 or later, $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11
STAMP := $(VENV)/.installed
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full bench lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned packages

$(STAMP): requirements.lock requirements-torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(OLD)" % sys.version_info[:2])'
	@test -x $(PY) || { echo "setup: creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing requirements.lock (a minute or two the first time)"
	@$(PIP) install --require-hashes --no-deps -r requirements.lock
	@echo "setup: installing torch ($(TORCH_REQUIREMENT))"
	@$(PIP) install $(TORCH_REQUIREMENT)
	@echo "setup: installing halfstep, editable"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## which precision? an MLP in several of them, three seeds each, with a report (about a minute)
	@$(VENV)/bin/halfstep compare --fresh --out runs/demo

lint: $(STAMP) ## ruff and mypy
	@echo "lint: ruff check"
	@$(PY) -m ruff check .
	@echo "lint: ruff format"
	@$(PY) -m ruff format --check .
	@echo "lint: mypy"
	@$(PY) -m mypy

test: lint ## lint, then every test that is not slow
	@echo "test: pytest"
	@$(PY) -m pytest -q -n 2 --dist loadfile

test-full: test ## test, then the slow tests, more cases, a browser and the mutants
	@echo "test-full: pytest, slow"
	@$(PY) -m pytest -q -m slow || test $$? -eq 5  # 5: no test is slow
	@echo "test-full: new cases for the property tests"
	@$(PY) -m pytest -q -n 2 --hypothesis-profile=search $$(grep -rlE '^@given' tests)
	@echo "test-full: a browser, and the report in it"
	@$(PIP) install playwright
	@$(PY) -m playwright install --with-deps chromium || apt-get install -qq -y chromium
	@HALFSTEP_NEEDS_BROWSER=1 $(PY) -m pytest -q tests/unit/report/test_browser.py
	@echo "test-full: a real S3 server, in an environment of its own over this one"
	@$(PY) -m venv .venv-stores
	@$(PY) -c '$(PURELIB)' > $$(.venv-stores/bin/python -c '$(PURELIB)')/beside.pth
	@.venv-stores/bin/python -m pip --quiet --quiet --disable-pip-version-check install 'moto[server]' s3fs
	@.venv-stores/bin/python -m pytest -q -m slow tests/faults/test_store_s3.py
	@echo "test-full: mutants"
	@$(PY) tests/rules/mutants.py

bench: $(STAMP) ## measure the overhead of step and fit over a bare loop, and the data path
	@$(PY) benchmarks/overhead.py
	@$(PY) benchmarks/fit.py
	@$(PY) benchmarks/data.py --samples 10000

clean: ## remove caches and build products; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find halfstep tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
