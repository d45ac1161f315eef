# Two commands: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
MINUTES ?= 4
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.PHONY: demo test sweep lint packages gpu-check wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model, export, verify, stream and score it (MINUTES=$(MINUTES) of training)"
	@echo "make test       lint, types and the tests"
	@echo "make sweep      the tests that take minutes: every oracle case exported, engines of every kind, benchmarks"
	@echo "make packages   the packages whose models some tests export, for these tests alone; they skip without"
	@echo "make lint       ruff and mypy --strict"
	@echo "make gpu-check  build, verify and time everything that this machine's GPU can run (SITE=, OPTIONS=)"
	@echo "make wheel      the package, as a file in dist/"
	@echo "make clean      remove what the other commands made"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/python samples/train_char_lm.py --out $(DEMO) --minutes $(MINUTES) --force
	$(BIN)/txl-deploy export $(DEMO)/model.pt -o $(DEMO)/model.txl --text $(DEMO)/heldout.txt --force
	$(BIN)/txl-deploy inspect $(DEMO)/model.txl
	$(BIN)/txl-deploy verify $(DEMO)/model.txl --checkpoint $(DEMO)/model.pt --text $(DEMO)/heldout.txt --segments 200
	$(BIN)/txl-deploy selftest $(DEMO)/model.txl
	$(BIN)/txl-deploy generate $(DEMO)/model.txl --prompt "def main(" --max-new-tokens 300 --temperature 0.7 --seed 1
	$(BIN)/txl-deploy score $(DEMO)/model.txl $(DEMO)/heldout.txt
	$(BIN)/python samples/embed.py $(DEMO)/model.txl "class Stream:" --tokens 100

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow"

sweep: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

# Without their dependencies, which want other versions of torch; into a folder that nothing else looks into.
packages: .packages/ready

.packages/ready: tests/packages.txt | $(VENV)/ready
	rm -rf .packages
	$(BIN)/python -m pip install --quiet --no-deps --target .packages -r tests/packages.txt
	rm -f .packages/torchaudio/lib/*.so  # the extension wants CUDA's libraries; its models do without
	@touch $@

# SITE=FOLDER of carried packages: no pip, no network, and PYTHON runs it. OPTIONS: see benchmarks/gpu_check.py --help
gpu-check: $(if $(SITE),,$(VENV)/ready)
	$(if $(SITE),$(PYTHON),$(BIN)/python) benchmarks/gpu_check.py --out gpu-check $(if $(SITE),--site $(SITE)) $(OPTIONS)

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) .packages $(DEMO) gpu-check build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
