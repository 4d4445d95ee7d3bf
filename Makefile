# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first; nothing is installed outside it but
# nftables, miniupnpd and faketime, for the tests, by root on Debian (.ci/packages). `make install` is for volunteers:
# it needs neither .venv nor a compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Tests at once: on two cores more than these, since most tests wait more than they compute.
NUM_TESTERS ?= 4
# Tests and demo start hundreds of interpreters, which otherwise compile the sources each time.
export PYTHONDONTWRITEBYTECODE :=
# Where `make install` puts the program, and a link to it.
PREFIX ?= $(HOME)/.local/share/farandole
BIN_DIR ?= $(HOME)/.local/bin

.PHONY: help setup demo test lint types unit soak soak-hostile fuzz lock release-check reference docs bench wheel install release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "farandole needs Python 3.11 or newer; this is $$($(PYTHON) --version). Say which: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 2; }
	@echo "Setting up $(VENV), once: torch is most of it (on Linux with CUDA, gigabytes; README.md says how to go without)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' || \
	  { echo "That failed. If a package could not be built: on Debian or Ubuntu, apt install gcc python3-dev libgmp-dev"; exit 2; }
	@touch $@

setup: $(STAMP) ## Make .venv with everything in it

demo: $(STAMP) ## Eight nodes on this machine train a model together (at most 5 minutes)
	$(BIN)/farandole testnet run demo --out out/demo

test: $(STAMP) lint ## Lint, type-check, test (7 to 9 minutes on 2 fast cores, 30 on slow ones)
	@$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	@.ci/packages
	$(BIN)/pytest -m "not soak" --numprocesses $(NUM_TESTERS) --dist worksteal

fuzz: $(STAMP) ## A million mutations for each decoder of a peer's bytes (some hours; Linux)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run

soak: $(STAMP) fuzz ## The long tests: fuzzing, 100 starts of a testnet, churn, many simulated runs
	@.ci/packages
	$(BIN)/pytest -m soak -s

soak-hostile: $(STAMP) ## Search for what hostile members that have read the code cost a run at most (2 hours)
	$(BIN)/farandole testnet bench attacker --write

lock: $(STAMP) ## Write requirements.lock and requirements-cuda.lock from constraints.txt: hashes, for image and releases
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	PATH=$(CURDIR)/$(BIN):$$PATH .ci/lock

release-check: $(STAMP) ## What a release needs besides `make test`: no known vulnerability in what is locked
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/pip-audit --disable-pip --require-hashes --requirement requirements.lock --requirement requirements-cuda.lock

install: ## Install the program for a volunteer, without the developers' tools (TORCH=cpu or pypi; PREFIX, BIN_DIR)
	@rm -rf build  # what setuptools left there would be installed too
	PYTHON=$(PYTHON) .ci/install-runtime $(PREFIX) .
	@mkdir -p $(BIN_DIR)
	@if [ -e $(BIN_DIR)/farandole ] && [ ! -L $(BIN_DIR)/farandole ]; then echo "$(BIN_DIR)/farandole is another program: run $(PREFIX)/bin/farandole"; \
	  else ln -sfn $(PREFIX)/bin/farandole $(BIN_DIR)/farandole; echo "farandole is in $(BIN_DIR); farandole doctor checks this machine"; \
	  case ":$$PATH:" in *":$(BIN_DIR):"*) ;; *) echo "this shell does not find it there: log in again, or type $(BIN_DIR)/farandole";; esac; fi

wheel: ## Build the wheel into dist/, and check it in a new environment without a C compiler
	rm -rf build dist/farandole-*.whl
	$(PYTHON) -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .
	sed -n '/^libp2p==/,/[^\\]$$/p' requirements-runtime.lock > build/libp2p.lock
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes --target build/libp2p -r build/libp2p.lock
	$(PYTHON) .ci/carry-libp2p build/libp2p dist/farandole-*.whl
	PYTHON=$(PYTHON) .ci/check-wheel dist/farandole-*.whl

release: ## Release: check, test, commit and tag the version, write wheel, hashes and notes into dist/ (hours)
	@$(PYTHON) .ci/release check
	@$(MAKE) --no-print-directory lock
	@$(PYTHON) .ci/release check  # the locks were up to date
	@$(MAKE) --no-print-directory release-check wheel test soak
	@$(PYTHON) .ci/release version
	@$(MAKE) --no-print-directory wheel
	@$(PYTHON) .ci/release publish

reference: $(STAMP) ## Write docs/reference.md, docs/errors.md and the figures of docs/faq.md from the code
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/figures.py docs/faq.md

docs: $(STAMP) ## Build the documents as a site in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "out/site/index.html"

bench: $(STAMP) ## How contributions move, beside hivemind and Lattica (10 minutes); the others: farandole testnet bench --help
	$(BIN)/farandole testnet bench exchange --out out/bench --write

clean: ## Remove .venv, out/ and caches
	rm -rf $(VENV) out .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
