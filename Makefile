# Everything here sets up its own environment: a fresh machine needs python3.11 or newer and make.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Where no GPU is found, torch without gigabytes of CUDA libraries: uv has the addresses of its builds.
GPU := $(wildcard /dev/nvidia0 /dev/kfd)
CPU_TORCH = $(BIN)/python -m pip --disable-pip-version-check install --quiet "uv==0.13.*" && \
	$(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu --no-deps -c constraints.txt torch
WHEEL = $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
KERNELS := build/kernels
CLIENTS := current older evaluation fuzz images openresponses ollama_examples programs open_webui
# Kernels for other processors without optimisations; bytecode is kept for the processes that the tests start.
QUICK := QUICK_KERNELS=1 PYTHONDONTWRITEBYTECODE=
PROCESSORS = $$(getconf _NPROCESSORS_ONLN)
# One more than processors: some tests wait for processes and time limits.
WORKERS = $$(($(PROCESSORS) + 1))
FAST := not slow and not gpu and not container and not arm64 and not browser and not ray

.PHONY: help serve test test-all test-container test-arm64 test-clients test-browser test-gpu bench-gpu test-ray page mutants check bench wheel sbom clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

serve: .venv/serve  ## install, then serve the bundled model on http://127.0.0.1:8000 (ARGS="MODEL --port N ...")
	@exec $(BIN)/cellar serve $(ARGS)

test: .venv/test  ## install, then run the tests and list the slowest 20 (minutes, no network, no GPU)
	$(QUICK) $(BIN)/python -m tests.libraries
	$(QUICK) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "$(FAST)" --durations 20 $(ARGS)

test-all: .venv/test  ## all tests, the slow ones too (images, arm64 and the page have their own)
	$(BIN)/python -m pytest -q -m "not container and not arm64 and not browser and not ray" $(ARGS)

test-container: .venv/test  ## build and run the image with buildah (Debian: apt-get install buildah crun mmdebstrap)
	$(BIN)/python -m pytest -q -m container tests/container $(ARGS)

test-arm64: .venv/test  ## kernels for arm64 under qemu (Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSORS) --dist worksteal -m arm64 tests/arm64 --durations 20 $(ARGS)

test-clients: .venv/test $(CLIENTS:%=.venv/clients-%/done)  ## run other people's clients against a server
	$(BIN)/python -m tests.clients $(foreach name,$(CLIENTS),$(name)=.venv/clients-$(name))

test-browser: .venv/browser server/page/node_modules  ## drive the web page in Chromium (Debian: apt-get install chromium npm)
	$(BIN)/python -m pytest -q -m browser tests/page $(ARGS)
	$(BIN)/python -m pytest -q tests/page/test_build.py

bench-gpu: .venv/test  ## measure a GPU with random weights of published shapes; rows in out/gpu/bench.json
	$(BIN)/python -m benchmarks.gpu.throughput --json out/gpu/bench.json $(ARGS)

test-gpu: .venv/test  ## what only a GPU can show, in stages; report in out/gpu (without a GPU: why not)
	$(BIN)/python -m tests.gpu $(ARGS)

test-ray: .venv/ray  ## replicas on Ray Serve (minutes; 2 GB of memory)
	$(BIN)/python -m pytest -q -m ray tests/ray $(ARGS)

page: server/page/node_modules  ## build the web page from server/page/src (needs npm)
	cd server/page && node node_modules/typescript/bin/tsc --noEmit && node build.mjs

mutants: .venv/mutants  ## mutation tests of the cache, for a nightly job (hours; MODULE=rotary: one module)
	$(BIN)/mutmut run $(if $(MODULE),"kvcache.$(MODULE).*")
	$(BIN)/mutmut results

check: .venv/dev  ## ruff, mypy, import-linter, Dockerfile, compose file, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/house
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

bench: .venv/test  ## start a server on the bundled model and measure it; figures and plots in out/bench (ARGS="MODEL ...")
	$(BIN)/cellar bench $(ARGS)

wheel: .venv/serve  ## build two wheels in dist: with the C++ kernels of this platform, and without (KERNELS=folder: cross-built ones)
	$(if $(filter build/kernels,$(KERNELS)),$(BIN)/python -m engine.kernels.cpu.build $(KERNELS))
	KERNELS= $(WHEEL)
	KERNELS=$(KERNELS) $(WHEEL)

sbom: .venv/serve .venv/sbom/done  ## list the packages of the environment with versions and licences: out/sbom.json (CycloneDX)
	@mkdir -p out
	.venv/sbom/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible -o out/sbom.json

clean:  ## remove the environment and all that was built
	rm -rf .venv out dist build mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A command with a name, and the time that it takes.
step = @echo "cellar: install $(1)"; started=$$(date +%s); { $(2); } && echo "cellar: took $$(( $$(date +%s) - started )) s"

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "cellar needs python3.11 or newer, and none is on the PATH"; exit 1; }
	$(PYTHON) -m venv .venv

# One stamp a set of packages, made anew when a requirement changes.
.venv/serve: .venv/bin/python pyproject.toml constraints.txt
	$(if $(GPU),,$(call step,torch for CPUs,$(CPU_TORCH) || echo "cellar: no CPU build of torch to be had: pip's default follows"))
	$(call step,cellar and its packages,$(PIP) -e .)
	@touch $@
.venv/test: .venv/serve
	$(PIP) -e ".[test]"
	@touch $@
.venv/dev: .venv/test
	$(PIP) -e ".[test,dev]"
	@touch $@
.venv/browser: .venv/test
	$(PIP) -e ".[test,test-browser]"
	@touch $@
.venv/ray: .venv/test
	$(PIP) -e ".[test,ray]"
	@touch $@
# Apart, so that it does not list itself.
.venv/sbom/done: .venv/bin/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "cyclonedx-bom>=7,<8"
	@touch $@
server/page/node_modules: server/page/package-lock.json
	cd server/page && npm ci --no-audit --no-fund
	@touch $@
# Clients whose requirements exclude each other live apart.
.venv/clients-%/done: tests/clients/%.txt .venv/bin/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@
# With the examples of the source archive, and the JavaScript client.
.venv/clients-ollama_examples/done: tests/clients/ollama_examples.txt .venv/bin/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	$(@D)/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --no-binary ollama -d $(@D)/source $(firstword $(shell cat $<))
	if command -v npm > /dev/null; then npm install --prefix $(@D) --no-audit --no-fund --silent ollama@0.6.4; fi
	@touch $@
# Without the packages for speech and for models of its own: a gigabyte less, and torch is not needed.
.venv/clients-open_webui/done: tests/clients/open_webui.txt tests/clients/open_webui.overrides .venv/bin/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet "uv==0.13.*"
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --override tests/clients/open_webui.overrides -r $<
	@touch $@
# Programs of npm.
.venv/clients-programs/done: tests/clients/programs.txt tests/clients/programs.npm .venv/bin/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	if command -v npm > /dev/null; then npm install --prefix $(@D) --no-audit --no-fund --silent $(shell cat tests/clients/programs.npm); fi
	@touch $@
.venv/mutants: .venv/test
	$(PIP) -e ".[mutants]"
	@touch $@
