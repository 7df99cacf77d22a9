#!/usr/bin/env bash
# usage: launch/demo.sh [key=value ...]
# Train the demo on a CPU, export it, evaluate it, sample from it, and draw its figures.
# PY is the Python to use (default .venv/bin/python); key=value overrides settings of the training.
set -eu

cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}

echo "== train: configs/lm/demo.yaml into runs/demo"
"$PY" -m lm train --config configs/lm/demo.yaml "$@"

echo "== export: runs/demo/hf, a folder that from_pretrained loads"
"$PY" -m lm export runs/demo runs/demo/hf

echo "== eval: 50 questions on small stories"
"$PY" -m lm eval runs/demo/hf --tasks catbabi_mini --limit 50

echo "== generate: runs/demo/sample.txt"
sample=$("$PY" -m lm generate runs/demo/hf --prompt "The following")
printf '%s\n' "$sample" | tee runs/demo/sample.txt

echo "== report: the figures of runs/demo"
"$PY" -m lm report runs/demo

echo "next: fprnn demo s3, in which FP-Mamba tracks a state that Mamba cannot (80 s)"
