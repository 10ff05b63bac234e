# `make demo` and `make test` need Python >= 3.11 and pip; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/demo
export OMP_NUM_THREADS ?= 1

.PHONY: demo quick test check format clean

demo: $(VENV)/installed
	$(BIN)/thinwire demo --out $(OUT)

quick: $(VENV)/installed
	$(BIN)/thinwire demo --quick --out $(OUT)-quick

test: check
	$(BIN)/python -m pytest -n 2

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
