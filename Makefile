# Everything below sets itself up in .venv. `make demo` and `make test` are all that a newcomer needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The release that the project is tested with. One that is in .venv already is kept, so a CPU or
# CUDA build of your choice can be put there first.
TORCH := torch==2.13.0

.PHONY: demo test engine-test matrix lint docs bench fuzz clean

demo: $(VENV)/installed
	$(BIN)/kvcache-plugin demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -m "not engine"

# Starts the released vLLM and SGLang, and asks the released FlashInfer; with --jobs=2 side by side.
# The first run builds their environments, outside the checkout: some minutes, and some 11 GB.
engine-test: engine-test-vllm engine-test-sglang engine-test-flashinfer

engine-test-%: $(VENV)/ready
	$(BIN)/python -m pytest -m engine -k $*

# Three releases of each engine, of which engine-test starts the newest; writes docs/releases.md.
# The older ones take another 1.3 GB, and all of them some fifteen minutes.
matrix: $(VENV)/ready
	$(BIN)/python -m tests.engine.matrix

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, in site/. Whatever is wrong with a page, a link or a docstring stops it.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/ready
	$(BIN)/kvcache-plugin bench
	$(BIN)/python -m tests.benchmarks.loaded
	$(BIN)/python -m tests.benchmarks.overhead
	$(BIN)/python -m tests.benchmarks.checkpoint
	$(BIN)/python -m tests.benchmarks.cpu
	$(BIN)/python -m tests.benchmarks.decoding

# Damaged files and configurations, many more of them than in `make test`: some minutes.
fuzz: $(VENV)/ready
	KVCACHE_FUZZ_EXAMPLES=5000 $(BIN)/python -m pytest tests/test_hostile_files.py -k fuzz

clean:
	rm -rf $(VENV) build site *.egg-info

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[cli]"
	touch $@

$(VENV)/ready: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[cli,test]"
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[cli,docs]"
	touch $@
