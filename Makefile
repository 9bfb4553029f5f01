# Everything runs in .venv, which the first target makes. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# in the order of the folders; by default the files with the fewest tests come last, and those are the longest
DIST := --dist loadfile --no-loadscope-reorder
SERVER := .venv-server
PEERS := .venv-peers
DOCS := .venv-docs
# an old ONNX Runtime, for --target
OLD := .venv-old-ort
OLD_ORT ?= 1.17
# an older Triton, beside the torch of .venv, for the kernels: the one that the measurements were made with
TRITON := .venv-old-triton
OLD_TRITON ?= 3.6
# what others open our files with; for an older torch: make clean-peers test-peers PEER_PACKAGES='torch==2.9.* timm ...'
PEER_PACKAGES ?= timm safetensors peft transformers onnx onnxruntime onnxconverter-common onnxsim onnxslim openvino sympy pillow

# converters that need packages of their own versions, and npm's run times; their folders: .venv-coreml, .venv-litert, ...
COREML := .venv-coreml
LITERT := .venv-litert
ONNX2TF := .venv-onnx2tf
NODE := .node-peers
COREML_PACKAGES ?= coremltools==9.0 torch==2.7.* 'numpy<2.3' timm
LITERT_PACKAGES ?= litert-torch==0.10.0 timm
ONNX2TF_PACKAGES ?= onnx2tf==1.29.24 tensorflow-cpu tf_keras onnx onnxruntime onnxsim onnx_graphsurgeon sng4onnx ai-edge-litert psutil
NODE_PACKAGES ?= onnxruntime-node onnxruntime-web

# tests start many processes: without compiled modules each would compile vtk again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow bench test-server test-peers clean-peers papers check style docs site wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

install: $(STAMP)  ## make .venv and install vtk with the tools for development

demo: $(STAMP)  ## the whole path on bundled digits: train, share, export, verify, profile
	$(BIN)/vtk demo

# one torch thread per worker: two workers on two cores would otherwise fight for them
test: $(STAMP)  ## the default tests: CPU, offline, a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(DIST)

# PART=2/3 runs the second third of the files: every test is in exactly one part
test-slow: $(STAMP)  ## long tables, the demo and the documents' examples; PART=K/N runs a part of them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(DIST) -m 'slow and not timing and not gpu and not server and not peers' $(if $(PART),--part $(PART))
	$(if $(PART),,$(MAKE) bench)

bench: $(STAMP)  ## the tests that compare times, for a machine that does nothing else (a whole test-slow ends with them)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m 'timing and not gpu and not server'

# the Triton Inference Server of that wheel has a Python back-end which gives empty tensors with numpy 2
$(SERVER)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/python -m pip install --quiet --upgrade pip
	$(SERVER)/bin/python -m pip install --quiet -e . 'pytest>=8.3' 'numpy<2' 'nvidia-pytriton>=0.7' 'tritonclient[http]' 'openvino>=2025.2'
	@touch $@

test-server: $(SERVER)/.installed  ## exported repositories in a real Triton Inference Server, on the CPU
	OMP_NUM_THREADS=1 $(SERVER)/bin/python -m pytest -m server -s tests/server

$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet $(PEER_PACKAGES)
	@touch $@

$(OLD)/.installed: Makefile
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --upgrade pip
	$(OLD)/bin/python -m pip install --quiet 'onnxruntime==$(OLD_ORT).*' 'numpy<2' pillow
	@touch $@

# a folder and not an environment: nothing of it is imported but Triton itself
$(TRITON)/.installed: Makefile | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON) 'triton==$(OLD_TRITON).*'
	@touch $@

$(COREML)/.installed: Makefile
	$(PYTHON) -m venv $(COREML)
	$(COREML)/bin/python -m pip install --quiet $(COREML_PACKAGES)
	@touch $@

$(LITERT)/.installed: Makefile
	$(PYTHON) -m venv $(LITERT)
	$(LITERT)/bin/python -m pip install --quiet $(LITERT_PACKAGES)
	@touch $@

$(ONNX2TF)/.installed: Makefile
	$(PYTHON) -m venv $(ONNX2TF)
	$(ONNX2TF)/bin/python -m pip install --quiet $(ONNX2TF_PACKAGES)
	@touch $@

$(NODE)/.installed: Makefile
	mkdir -p $(NODE)
	cd $(NODE) && npm install --no-save --no-audit --no-fund --ignore-scripts $(NODE_PACKAGES)
	@touch $@

# what passes is recorded in the repository, and `make docs` makes docs/reference/tools.md of it
test-peers: $(STAMP) $(PEERS)/.installed $(OLD)/.installed $(TRITON)/.installed $(COREML)/.installed $(LITERT)/.installed $(ONNX2TF)/.installed $(NODE)/.installed  ## what vtk writes, in plain timm, transformers, PEFT, tools of ONNX, JavaScript, Core ML and LiteRT without vtk; kernels under an older Triton
	OMP_NUM_THREADS=1 VTK_PEERS=$(CURDIR)/$(PEERS)/bin/python VTK_OLD_ORT=$(CURDIR)/$(OLD)/bin/python VTK_OLD_TRITON=$(CURDIR)/$(TRITON) \
	VTK_COREML=$(CURDIR)/$(COREML)/bin/python VTK_LITERT=$(CURDIR)/$(LITERT)/bin/python VTK_ONNX2TF=$(CURDIR)/$(ONNX2TF)/bin/python \
	VTK_NODE=$(CURDIR)/$(NODE) VTK_PEER_RECORDS=$(CURDIR)/tests/peers/records.json $(BIN)/python -m pytest -m peers tests/peers

clean-peers:  ## remove the environments of test-peers, for some with other packages
	rm -rf $(PEERS) $(OLD) $(TRITON) $(COREML) $(LITERT) $(ONNX2TF) $(NODE)

# two processes of one thread; what benchmarks/results/papers.csv has already is not done again. PAPERS is for flags
papers: $(STAMP)  ## the papers' claims at a small scale, on the CPU: at most 2 hours, then docs/results/papers.md
	$(BIN)/python benchmarks/papers $(PAPERS)
	$(BIN)/python docs/_generate/papers.py

check: $(STAMP)  ## lint, types, and the direction of imports; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/_generate/commands.py --check
	$(BIN)/python docs/_generate/performance.py --check
	$(BIN)/python docs/_generate/families.py --check
	$(BIN)/python docs/_generate/architectures.py --check
	$(BIN)/python docs/_generate/initialization.py --check
	$(BIN)/python docs/_generate/papers.py --check
	$(BIN)/python docs/_generate/architecture.py --check
	$(BIN)/python docs/_generate/peers.py --check

style: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages again, from the help texts, the tests' table and the results
	$(BIN)/python docs/_generate/commands.py
	$(BIN)/python docs/_generate/performance.py
	$(BIN)/python docs/_generate/families.py
	$(BIN)/python docs/_generate/architectures.py
	$(BIN)/python docs/_generate/initialization.py
	$(BIN)/python docs/_generate/papers.py
	$(BIN)/python docs/_generate/architecture.py
	$(BIN)/python docs/_generate/peers.py

$(DOCS)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

site: $(DOCS)/.installed  ## build site/ from docs/, without a warning, and check its links; needs neither torch nor .venv
	$(DOCS)/bin/python docs/_generate/site.py

wheel: $(STAMP)  ## build dist/*.whl; build/ goes first, since removed modules would be packed again
	rm -rf build dist
	$(BIN)/python -m build --wheel

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(SERVER) $(PEERS) $(COREML) $(LITERT) $(ONNX2TF) $(NODE) $(DOCS) site .cache build dist demo-out papers-out *.egg-info .pytest_cache .mypy_cache .ruff_cache
