# Two commands need nothing but Python 3.11 or 3.12 and a network: `make demo` and `make test`.
# Each makes .venv first. PyTorch comes from the index pip is set up with; to take PyTorch's own
# CPU builds on a machine whose index serves only CUDA builds: make demo TORCH_INDEX=<url of that index>

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch>=2.7,<2.14
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
PYTEST  = $(VENV)/bin/python -m pytest

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/.core
	$(VENV)/bin/ddtree generate --compare </dev/null

test: $(VENV)/.test $(VENV)/.triton lint
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.test $(VENV)/.triton lint
	$(PYTEST)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	mkdir -p $(VENV)/types/ddtree
	for p in plugins builder runtime; do ln -sfn $(CURDIR)/$$p $(VENV)/types/ddtree/$$p; done
	MYPYPATH=$(VENV)/types $(VENV)/bin/mypy -p ddtree.plugins -p ddtree.builder -p ddtree.runtime

bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/tree_operations.py
	$(VENV)/bin/python benchmarks/generation.py
	$(VENV)/bin/python benchmarks/batches.py
	$(VENV)/bin/python benchmarks/losslessness.py
	$(VENV)/bin/python benchmarks/startup.py

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	$(PIP) -e . "$(TORCH)"
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) -e ".[test,cuda,rtx,grammar,chat]" "$(TORCH)"
	touch $@

$(VENV)/.triton: $(VENV)/.test tests/triton_server/environment.py
	$(VENV)/bin/python tests/triton_server/environment.py
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
