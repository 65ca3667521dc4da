# One command each; `make help` lists them. PY is any Python 3.11 or newer.
PY    ?= python3
TORCH ?= torch==2.13.0
VENV  := .venv
BIN   := $(VENV)/bin
ARGS  ?=

.DEFAULT_GOAL := help
.PHONY: help test test-hosts test-newest lint fmt demo capture-graphs doctor wheel docs patches-check cutlass-aot clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first and alone: a machine without a GPU wants its CPU build (TORCH=... to change).
$(BIN)/.ready: pyproject.toml
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PY) is older than Python 3.11; name another: make PY=python3.12" >&2; exit 1; }
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

test: $(BIN)/.ready ## Run every test that this machine can run
	$(BIN)/python -m tests.hosts.lab install
	$(BIN)/python -m tests.hosts.tritons
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/cpu $(ARGS)
	$(BIN)/python -m pytest tests/gpu tests/e2e  # one at a time: they time, and share one GPU

test-hosts: $(BIN)/.ready ## Play every released host, and our tests on torch 2.9.1 (long, resumable); writes docs/compatibility.*
	$(BIN)/python -m tests.hosts.matrix $(ARGS)

test-newest: $(BIN)/.ready ## Try the newest sglang-kt and sglang, by name; writes no docs
	$(BIN)/python -m tests.hosts.matrix --newest $(ARGS)

lint: $(BIN)/.ready ## Check style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

fmt: $(BIN)/.ready ## Format
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

demo: $(BIN)/.ready ## Show the crash of the real sglang-kt, and the plugin's answer (no GPU needed)
	$(BIN)/python -m tests.hosts.demo $(ARGS)

patches-check: $(BIN)/.ready ## Apply every patch to its release and run the patched trees (minutes)
	$(BIN)/python -m tests.hosts.patches_check $(ARGS)

cutlass-aot: $(BIN)/.ready ## Build the host's CUTLASS kernels for sm_120a and look into shipped ones (minutes; needs nvcc)
	$(BIN)/python -m tests.hosts.cutlass_aot $(ARGS)

# In the caller's environment, where its torch is for CUDA; a server's is the one that matters.
capture-graphs: ## Capture, replay and compare CUDA graphs on this machine's GPU
	@py=; for env in "$$VIRTUAL_ENV" "$$CONDA_PREFIX"; do \
	  if [ -n "$$py" ] || [ -z "$$env" ]; then continue; fi; \
	  if "$$env/bin/python" -c 'import sys, torch; sys.exit(not torch.version.cuda)' 2>/dev/null; then py="$$env/bin/python"; \
	  else echo "$$env has no torch for CUDA that imports" >&2; fi; \
	done; \
	if [ -z "$$py" ]; then make -s VENV="$(VENV)" PY="$(PY)" "$(BIN)/.ready" || exit 1; py="$(BIN)/python"; fi; \
	"$$py" -c 'import rich, typer' 2>/dev/null || { echo "$$py has torch for CUDA, but not this package's commands: $$py -m pip install . first" >&2; exit 1; }; \
	echo "using $$("$$py" -c 'import sys; print(sys.executable)')" >&2; "$$py" -m sglang_kt_sm120 graphs $(ARGS)

doctor: $(BIN)/.ready ## Check this machine
	$(BIN)/python -m sglang_kt_sm120 doctor $(ARGS)

docs: $(BIN)/.ready ## Write the documentation pages that are made from code
	$(BIN)/python -m sglang_kt_sm120 env --markdown > docs/environment.md
	$(BIN)/python -m sglang_kt_sm120 bench --from docs/benchmarks/h200-decode.json --plot docs/benchmarks/h200-decode.png >/dev/null

wheel: $(BIN)/.ready ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove what the commands above made
	rm -rf $(VENV) .hosts build dist .pytest_cache .ruff_cache
