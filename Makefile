# Everything from nothing: a virtual environment in .venv, then the job that was asked for.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint clean

.venv/ready: pyproject.toml constraints.txt setup.py $(wildcard src/mirrorquant/packing/kernels/csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cli,dev,images,onnx,openvino,plots]'
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

clean:
	rm -rf .venv build dist
