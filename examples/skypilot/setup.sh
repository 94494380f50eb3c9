#!/bin/bash
# Makes the environment ~/redrb on a node, and with the word `vllm` that of vLLM, ~/vllm.
set -e
pip install --quiet uv
for name in redrb "$@"; do uv venv --quiet --python "${PYTHON:-3.12}" ~/"$name"; done
uv pip install --quiet --python ~/redrb -c constraints.txt '.[recipes,engines,accelerate,data]'
[ "$1" != vllm ] || uv pip install --quiet --python ~/vllm 'vllm>=0.32' .
~/redrb/bin/python examples/gsm8k/data.py gsm8k.jsonl
