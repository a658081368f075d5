PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.15.0
TESTS  ?=
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.installed-demo
STAMP  := $(VENV)/.installed
PINNED := torch==$(shell sed -n 's/^torch==//p' constraints-dev.txt)

.PHONY: demo test lint docs package setup test-torch test-torchtitan test-tuning test-kernels test-gpu clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create the environment (.venv) and install the package in it

$(DEMO): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints-dev.txt $(PINNED)
	$(BIN)/pip install --quiet -c constraints-dev.txt -e '.[cli]'
	touch $@

$(STAMP): $(DEMO)
	$(BIN)/pip install --quiet -c constraints-dev.txt -e '.[test,lint,docs,release]'
	touch $@

demo: $(DEMO)  ## train a small MoE transformer, sharded over four local processes
	$(BIN)/ragged-fsdp demo

test: $(STAMP)  ## run the unit and multi-process tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(STAMP)  ## ruff, mypy and the layering contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)  ## build the documentation into build/docs; a warning is an error
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/docs

package: $(STAMP)  ## build wheel and sdist into dist, check them, try the wheel in a clean environment
	rm -rf dist build/package
	$(BIN)/python -m build --outdir dist . > build.log || { cat build.log; exit 1; }
	rm build.log
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --quiet $(PINNED)
	build/package/bin/pip install --quiet $(PINNED) "$$(ls dist/*.whl)[cli]"
	cd build && package/bin/python ../tests/installed.py

test-torch:  ## run the suite on another torch release: make test-torch TORCH=2.15.0 [TESTS=tests/unit]
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/pip install --quiet "torch==$(TORCH)"
	.venv-torch-$(TORCH)/bin/pip install --quiet -e '.[test]' "torch==$(TORCH)"
	.venv-torch-$(TORCH)/bin/python -m pytest -q -n 2 --dist loadfile $(TESTS)

test-torchtitan:  ## run torchtitan's tests and its trainer with our sharding, in an environment of its own
	$(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/pip install --quiet "torch==$(TORCH)"
	.venv-torchtitan/bin/pip install --quiet "torch==$(TORCH)" torchtitan==0.3.0 triton
	.venv-torchtitan/bin/pip install --quiet "torch==$(TORCH)" pytest pytest-timeout hypothesis -e .
	.venv-torchtitan/bin/python -m pytest -q tests/spmd/test_integration_torchtitan.py

test-tuning:  ## run fine-tuning through peft, trl, bitsandbytes and torchao, in an environment of its own
	$(PYTHON) -m venv .venv-tuning
	.venv-tuning/bin/pip install --quiet "$(PINNED)"
	.venv-tuning/bin/pip install --quiet "$(PINNED)" -e '.[cli,hf]' pytest pytest-timeout hypothesis accelerate datasets \
	  peft==0.21.2 trl==1.16.0 bitsandbytes==0.50.2 torchao==0.18.0
	RAGGED_FSDP_TEST_PRELOAD="transformers.models.llama.modeling_llama transformers.trainer peft trl.trainer.sft_trainer bitsandbytes" \
	  .venv-tuning/bin/python -m pytest -q tests/spmd/test_tuning_matrix.py tests/spmd/test_fsdp_frozen_codes.py \
	  tests/spmd/test_integration_trl.py tests/spmd/test_integration_accelerate_script.py tests/spmd/test_fsdp_lora_example.py
	.venv-tuning/bin/python -m pytest -q tests/spmd/test_integration_libraries.py -k script_of_the_trainer

test-kernels:  ## run the GPU kernels without a GPU: in Triton's interpreter under a memcheck, and through its compiler
	$(PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/pip install --quiet "$(PINNED)"
	.venv-kernels/bin/pip install --quiet "$(PINNED)" -e . pytest pytest-timeout pytest-xdist hypothesis
	.venv-kernels/bin/pip install --quiet --no-deps triton==3.6.0  # whichever this torch asks for
	TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest -q -n 2 --timeout 600 tests/gpu/test_interpreted.py \
	  $(addprefix tests/gpu/test_,$(addsuffix .py,code_kernels experts_kernels fp8_kernels muon_kernels sums_kernels optim_kernel))
	.venv-kernels/bin/python -m pytest -q -n 2 --timeout 600 tests/gpu/test_kernel_compilation.py

test-gpu: $(STAMP)  ## run all tests that a GPU can run (2 and 4 NCCL ranks may share one); keeps the results
	$(BIN)/python tests/gpu/run.py

clean:  ## remove environments and caches
	rm -rf .venv .venv-torch* .venv-tuning .venv-kernels .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
