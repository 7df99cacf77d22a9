# `make demo` trains, exports and evaluates a small model; `make test` runs the suite. Both set up
# .venv first. PYTHON names the interpreter to make it with (3.11 or 3.12).
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test test-slow lint docs golden gpu-check clean

demo: .venv/ready
	PY=$(BIN)/python bash launch/demo.sh

test: .venv/ready
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as pages, into build/docs; a link that leads nowhere is an error.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

golden: .venv/ready
	$(BIN)/python -m tests.golden $(or $(DIR),tests/golden)

# On a machine with a GPU: $(PYTHON) as it is, no network, ten minutes, results in OUT. ARGS are
# options of benchmarks.gpu_check, such as --card DIR.
OUT ?= build/gpu-check
gpu-check:
	@$(PYTHON) -m benchmarks.gpu_check --out $(OUT) $(ARGS)

# torch comes first and alone: whatever depends on it then finds the build that is there.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(f"Python 3.11 or 3.12 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11") if not (3, 11) <= v < (3, 13) else None'
	$(PYTHON) -m venv .venv
	@echo "installing torch (once)"
	$(PIP) torch
	@echo "installing everything else (once)"
	$(PIP) -e '.[train,eval,docs,dev]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
