"""The recipes for real models that `redrb new grpo --model --dataset` and `new agent` write."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from redrb.errors import ConfigError
from redrb.recipe.rows import FILES, data_rows

_REWARDS: Mapping[str, Mapping[str, str]] = {
    "boxed": {
        "summary": "Answers questions: the reward is 1 for the right answer in a box.",
        "instruction": r"Think step by step, then put the final answer in \\boxed{}.",
        "keys": '"answer": final_answer(row["$answer"])',
        "imports": "boxed, data_rows, final_answer, option, same_answer",
        "reward": '''def reward(self, completion: Completion) -> float:
        """Return the reward of one completion."""
        return float(same_answer(boxed(completion.text), completion["answer"]))''',
    },
    "exact": {
        "summary": "Answers questions: the reward is 1 for the right answer and nothing else.",
        "instruction": "Give the final answer and nothing else.",
        "keys": '"answer": final_answer(row["$answer"])',
        "imports": "data_rows, final_answer, option, same_answer",
        "reward": '''def reward(self, completion: Completion) -> float:
        """Return the reward of one completion."""
        return float(same_answer(completion.text, completion["answer"]))''',
    },
    "tests": {
        "summary": "Writes code: the reward is 1 if it passes its unit tests.",
        "instruction": "Answer with one block of Python code.",
        "keys": '"tests": row["$tests"]',
        "imports": "code_in, data_rows, option, passes_tests",
        "reward": '''async def reward(self, completion: Completion) -> float:
        """Return the reward of one completion; the process of the tests has limits."""
        return float(await passes_tests(code_in(completion.text), completion["tests"]))''',
    },
}

_COLUMNS = {
    "question": ("question", "problem", "prompt", "instruction", "text", "input"),
    "answer": ("answer", "solution", "final_answer", "response", "output", "label", "target"),
    "tests": ("tests", "test", "test_list"),
}
"""Usual names of columns; the first one is written where the data set is not a file."""

_SERVERS = {
    "vllm": "VLLM_SERVER_DEV_MODE=1 vllm serve {model} --logprobs-mode processed_logprobs \\\n"
    """    --enable-scale-out --weight-transfer-config '{{"backend": "redrb"}}'""",
    "sglang": "python -m sglang.launch_server --model-path {model}",
    "local": "",
}

_DATASET_HELP = "file of JSON lines, or NAME[:CONFIGURATION] of Hugging Face"

_SHARED = {
    "vllm": "--gpu-memory-utilization 0.4",
    "sglang": "--port 8000 --mem-fraction-static 0.4",
    "local": "",
}
"""Options of a server that leave the trainer room on the same GPU."""

_HEADER = """
One GPU:

  SERVE \\
    {shared}
  redrb run {file} --makers 1

One node with eight GPUs, four of them for sampling. In a terminal of its own, which stays open:

  redrb server ./data

In another terminal, in the same folder:

  export REDRB_URL=unix://$PWD/data/redis.sock
  for n in 0 1 2 3; do
    CUDA_VISIBLE_DEVICES=$n SERVE \\
      --port 800$n &
    {visible}redrb-maker {file}{url} &
  done
  CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc-per-node 4 -m redrb.cli.processes.trainer \\
    {file} --shard --checkpoints ./checkpoints

Several nodes, with the REDRB_URL of a Redis that all of them reach: on nodes that sample, the loop
above over all GPUs; on each of the N nodes that train:

  torchrun --nnodes N --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m redrb.cli.processes.trainer {file} --shard --checkpoints /shared/checkpoints

Each rank trains `groups` groups a step. With --lora-rank 32, and without --shard, LoRA layers are
trained instead of all weights.
"""


def real_recipe(options: argparse.Namespace, file: Path) -> str:
    """Return the text of a recipe; the columns of a file of JSON lines are looked up.

    Raises:
        ConfigError: The file of the data set cannot be read, or lacks a column that the reward
            needs.
    """
    row: Mapping[str, Any] | None = None
    if options.dataset.endswith(FILES):
        row = data_rows(options.dataset)[0]
    engine = options.engine or "vllm"
    has_tests = row is not None and any(name in row for name in _COLUMNS["tests"])
    kind = options.reward or ("tests" if has_tests else "boxed")
    parts = _REWARDS[kind]
    needed = ("question", "tests" if kind == "tests" else "answer")
    columns = {column: _column(column, row, options.dataset) for column in needed}
    values = {name: Template(text).substitute(columns) for name, text in parts.items()}
    has_server = engine != "local"
    header = _HEADER.format(
        file=file,
        shared=_SHARED[engine],
        visible="" if has_server else "CUDA_VISIBLE_DEVICES=$n ",
        url=" --engine-url http://localhost:800$n" if has_server else "",
    )
    if not has_server:
        header = re.sub(r".*SERVE .*\n.*\n", "", header)
    header = header.replace("SERVE", _SERVERS[engine].format(model=options.model))
    template = files("redrb.recipe.starters") / "real.txt"
    quoted = {name: json.dumps(getattr(options, name))[1:-1] for name in ("model", "dataset")}
    return Template(template.read_text(encoding="utf-8")).substitute(
        **columns, **values, **quoted, header=header, engine=engine
    )


_AGENT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"

_SUMS = """[
            {"question": f"What is {a} * {b}?", "answer": str(a * b)}
            for a in range(1, self.largest + 1)
            for b in range(1, self.largest + 1)
        ]"""

_ROWS = """[
            {"question": row["$question"], "answer": final_answer(row["$answer"])}
            for row in data_rows(self.dataset)
        ]"""


def agent_recipe(options: argparse.Namespace, file: Path) -> str:
    """Return the text of a recipe with an agent; without a data set, for products of numbers.

    Raises:
        ConfigError: The file of the data set cannot be read, or lacks a column.
    """
    model, dataset = options.model or _AGENT_MODEL, options.dataset
    imports = ["AgentRecipe", "boxed", "option", "same_answer"]
    setting = 'largest: int = option(99, "largest number of the questions", least=1)'
    prompts = _SUMS
    if dataset:
        row = data_rows(dataset)[0] if dataset.endswith(FILES) else None
        columns = {name: _column(name, row, dataset) for name in ("question", "answer")}
        prompts = Template(_ROWS).substitute(columns)
        imports += ["data_rows", "final_answer"]
        setting = f'dataset: str = option({json.dumps(dataset)}, "{_DATASET_HELP}")'
    template = files("redrb.recipe.starters") / "agent.txt"
    return Template(template.read_text(encoding="utf-8")).substitute(
        model=json.dumps(model)[1:-1],
        file=file,
        imports=", ".join(sorted(imports)),
        option=setting,
        prompts=prompts,
    )


def _column(wanted: str, row: Mapping[str, Any] | None, dataset: str) -> str:
    """Return the name of a column in a data set; None stands for the row of one that is no file."""
    known = _COLUMNS[wanted]
    if row is None:
        return known[0]
    for name in known:
        if name in row:
            return name
    raise ConfigError(
        f"{dataset} has the columns {', '.join(row)}, and none of {', '.join(known)}: rename one, "
        f"since the reward needs it as {wanted}."
    )
