# Two commands: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
MINUTES ?= 4
SECONDS ?= 30
WORKERS ?= auto
VENV := .venv
BIN := $(VENV)/bin
# Tests start hundreds of processes; where this is set, as in many containers, each compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
DEMO := demo
BUNDLE ?= $(DEMO)/model.txl
PYTHON_VERSION ?= 3.10
# A worker per core, each of one thread: an idle worker takes tests from the end of a busy one's, so that tests which
# share what they made stay together. WORKERS=0 runs them in one process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 30

ENGINE := $(BIN)/python -m pip install --quiet --no-deps --no-compile --only-binary :all: --target .engines

.PHONY: demo test test-device sweep fuzz lint published outside cpp cpp-fuzz cpp-full packages versions clients triton browser js cuda site screenshots gpu-check wheel wheelhouse clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small model, export, verify, stream and score it (MINUTES=$(MINUTES) of training, and 4 more)"
	@echo "make test       lint, types and the tests (WORKERS=$(WORKERS): processes that share them)"
	@echo "make test-device  the tests of devices, engines and benchmarks that make test leaves out"
	@echo "make sweep      a sample of the slow tests, always the same one; one that fails is run again alone (ALL=1: all)"
	@echo "make fuzz       hostile bytes for every reader of files, guided by coverage (SECONDS=$(SECONDS) for each)"
	@echo "make packages   the packages whose models some tests export, for these tests alone; they skip without"
	@echo "make versions   the lowest declared and the newest versions, for the tests of these alone; they skip without"
	@echo "make clients    the clients of the server and of Triton, and Ray, for the tests of these alone; they skip without"
	@echo "make lint       ruff, mypy --strict, and the wording of docstrings and comments"
	@echo "make published  docs/*.json, which readers of bundles in other languages are made with, from this project's code"
	@echo "make cpp        the runtime in C++, under the sanitizers, held to the conformance list and fuzzed; it says so where tools are missing"
	@echo "make cpp-full   besides: every compiler, races of threads, clang-tidy, other versions of ONNX Runtime, and aarch64"
	@echo "make cpp-fuzz   the fuzz targets of the runtime in C++ alone (SECONDS=$(SECONDS) for each; 3600 before a release)"
	@echo "make triton     Triton's server with its Python backend, for the tests of packages; they skip without"
	@echo "make browser    what drives Chromium (Debian's own) in the tests of pages, and axe-core; they skip without"
	@echo "make js         ONNX Runtime for Node and browsers, which the runtime in JavaScript is tested with; its tests skip without"
	@echo "make cuda       ONNX Runtime for GPUs and NVIDIA's headers, for the tests of these alone; they skip without"
	@echo "make site       the documentation as a site, in site/; it can be opened from the disk"
	@echo "make screenshots  both pages in three widths and two themes, as pictures in screenshots/ (BUNDLE=$(BUNDLE))"
	@echo "make gpu-check  the first contact with this machine's GPU, in ten minutes (SITE=, OPTIONS=; PYTHON=: no pip)"
	@echo "make wheel      the package, as a file in dist/"
	@echo "make wheelhouse  the package and all it needs to build engines on a Jetson, as files (PYTHON_VERSION=$(PYTHON_VERSION))"
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
	$(BIN)/python tests/helpers/wording.py

published: $(VENV)/ready
	$(BIN)/python tests/helpers/published.py

# Debian's packages: cmake, ninja-build, g++, pkg-config, nlohmann-json3-dev, and libssl-dev, zlib1g-dev, clang and
# libclang-rt-dev where they are; clang brings the fuzz targets.
cpp: $(VENV)/ready
	$(PYTEST) -rs tests/cpp

# Beside those: clang-tidy; mingw-w64, wine and wine64; and g++-aarch64-linux-gnu with a qemu-aarch64 of version 10 or newer,
# which Debian has from 13 on.
cpp-full: $(VENV)/ready .engines/ready
	TXL_CPP_FULL=1 $(PYTEST) -rs tests/cpp

cpp-fuzz: $(VENV)/ready
	TXL_FUZZ_SECONDS=$(SECONDS) $(PYTEST) -s tests/cpp/test_fuzzing.py

test: lint
	$(PYTEST) -m "not slow and not device"

test-device: $(VENV)/ready
	$(PYTEST) -m "device and not slow"

sweep: $(VENV)/ready
	$(PYTEST) --sweep=$(if $(ALL),all,sample)

# What fails is kept beside the log that it names; then `python -m fuzz.run --keep` puts it into the corpus for good.
fuzz: $(VENV)/ready
	cd tests && $(CURDIR)/$(BIN)/python -m fuzz.run --seconds $(SECONDS)

# Without their dependencies, which want other versions of torch; into a folder that nothing else looks into.
# Files of other people's repositories, checked out in the folder OUTSIDE: see tests/outside/test_checkouts.py.
outside: $(VENV)/ready
	OUTSIDE=$(abspath $(OUTSIDE)) $(PYTEST) tests/outside

packages: .packages/ready

.packages/ready: tests/packages.txt | $(VENV)/ready
	rm -rf .packages
	$(BIN)/python -m pip install --quiet --no-deps --target .packages -r tests/packages.txt
	rm -f .packages/torchaudio/lib/*.so  # the extension wants CUDA's libraries; its models do without
	@touch $@

# Two sets: the lowest declared on the oldest Python, the newest on the newest Python that is here.
versions: .versions/ready

.versions/ready: pyproject.toml tests/versions/environments.py $(shell find runtime txl_deploy -name '*.py') | $(VENV)/ready
	$(BIN)/python tests/versions/environments.py .versions
	@touch $@

# The versions of ONNX Runtime that one binary of the runtime in C++ has to run on, and the newest for another processor and for Windows.
.engines/ready: tests/engines.txt | $(VENV)/ready
	rm -rf .engines
	for version in $$(cat tests/engines.txt); do $(ENGINE)/$$version onnxruntime==$$version || exit 1; done
	$(ENGINE)/aarch64 --python-version 3.12 --platform manylinux_2_28_aarch64 onnxruntime==$$(tail -n 1 tests/engines.txt)
	$(ENGINE)/windows --python-version 3.12 --platform win_amd64 onnxruntime==$$(tail -n 1 tests/engines.txt)
	@touch $@

# An environment of its own: these want other versions than the project. Every package is pinned, so nothing is resolved,
# and what no test imports is not compiled. The last line is what an editable install would write.
clients: .clients/ready

.clients/ready: tests/clients.txt
	rm -rf .clients
	$(PYTHON) -m venv .clients
	.clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r tests/clients.txt
	printf '%s\n' "$(CURDIR)" "$(CURDIR)/export" "$(CURDIR)/runtime" \
		> "$$(.clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/txl-deploy.pth"
	@touch $@

# A server that the tests start; its clients are those of `make clients`.
triton: .triton/ready

.triton/ready: tests/deploy/triton/environment.py | $(VENV)/ready
	$(BIN)/python tests/deploy/triton/environment.py .triton
	@mkdir -p .triton && touch $@

# Where npm is missing, the tests that need axe-core or TypeScript skip. Nothing that npm fetches runs while it installs.
browser: .browser/ready

.browser/ready: tests/browser.txt | $(VENV)/ready
	rm -rf .browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .browser \
		-r tests/browser.txt
	npm install --prefix .browser --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --silent \
		axe-core@4.14.1 typescript@7.0.2 || echo "npm is not here or failed; tests with axe-core will skip"
	@touch $@

# Versions and hashes are those of the lock file; nothing that npm fetches runs while it installs.
site: .site/ready | $(VENV)/ready
	.site/bin/python docs/site/build.py
	@echo "site/index.html"

# What builds the site; iframe-worker is what the search needs in pages that are opened from a disk.
.site/ready: docs/site/requirements.txt
	rm -rf .site
	$(PYTHON) -m venv .site
	.site/bin/python -m pip install --quiet -r docs/site/requirements.txt
	npm install --prefix .site --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --silent iframe-worker@1.0.4 \
		|| echo "npm is not here or failed; pages opened from a disk will have no search"
	@touch $@

js: .js/ready

.js/ready: tests/js/package.json tests/js/package-lock.json
	rm -rf .js && mkdir .js && cp $^ .js
	npm ci --prefix .js --ignore-scripts --no-audit --no-fund --silent || { rm -rf .js/node_modules; echo "npm is not here or failed; tests of JavaScript will skip"; }
	@touch $@

# For a machine without a GPU: tests bring what stands in for CUDA's libraries, so NVIDIA's own are not wanted there.
cuda: .cuda/ready

.cuda/ready: tests/cuda.txt | $(VENV)/ready
	rm -rf .cuda
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .cuda -r tests/cuda.txt
	mkdir -p .cuda && rm -rf .cuda/nvidia/*/lib
	@touch $@

screenshots: .browser/ready
	$(BIN)/python tests/browser/screenshots.py $(BUNDLE) --out screenshots $(patsubst %,--text %,$(wildcard $(dir $(BUNDLE))heldout.txt))

# SITE=FOLDER of carried packages, or PYTHON=python3: no pip, no network. OPTIONS: see benchmarks/gpu/gpu_check.py --help
CHECKED_BY := $(if $(SITE)$(filter command,$(origin PYTHON)),$(PYTHON))
gpu-check: $(if $(CHECKED_BY),,$(VENV)/ready)
	$(or $(CHECKED_BY),$(BIN)/python) benchmarks/gpu/gpu_check.py --out gpu-check $(if $(SITE),--site $(SITE)) $(OPTIONS)

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel

# docs/jetson.md has the same command, for whoever has the wheel alone.
wheelhouse: wheel
	rm -rf wheelhouse
	$(BIN)/python -m pip download --dest wheelhouse --only-binary :all: --python-version $(PYTHON_VERSION) \
		--platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 "./$$(ls -t dist/txl_deploy-*.whl | head -1)[build]"

clean:
	rm -rf $(VENV) .bundles .site site .packages .versions .clients .triton .browser .js .cuda .engines $(DEMO) screenshots gpu-check gpu-check.tar.gz build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache .hypothesis
