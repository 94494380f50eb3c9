"""Reward of TRL's GRPOTrainer against steps, for several bounds of staleness.

Two makers in processes of their own wait for rights and sample from the newest published weights;
TRL trains on their groups and publishes after each step. The model is made from a config, and the
reward is the share of one half of the vocabulary: python -m benchmarks.trl_staleness
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import redrb
from benchmarks.machine import machine
from benchmarks.plots import PALETTE
from benchmarks.server import private_server
from redrb.algorithms import generate
from redrb.compat.trl import TaskRollouts, maker_reward, placeholder_prompts
from redrb.errors import AdmissionTimeout

BOUNDS = (0, 1, 4)
MAKERS = 2
VOCABULARY, PAD, EOS = 24, 0, 3
GROUPS, GROUP, LENGTH = 4, 8, 8
"""Groups of a step, samples of a group, tokens of a completion."""

RESULTS = Path(__file__).parent / "results"


def policy() -> LlamaForCausalLM:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer; makers choose the prompts, so no text is tokenized."""
    words = {f"w{number:02}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w01")),
        pad_token=f"w{PAD:02}",
        eos_token=f"w{EOS:02}",
    )


def stream_of(client: redrb.Client, bound: int) -> redrb.ExperienceStream:
    """Open the task of a bound."""
    return redrb.ExperienceStream(
        client, f"bound-{bound}", max_staleness=bound, weights=f"policy-{bound}"
    )


def make(url: str, bound: int, seed: int) -> None:
    """Make groups with rights and the newest weights, until the process is ended."""
    torch.set_num_threads(1)
    with redrb.connect(url) as client, stream_of(client, bound) as stream:
        subscriber = redrb.WeightSubscriber(client, f"policy-{bound}")
        subscriber.wait(timeout=300)
        model = policy().eval()
        torch.manual_seed(seed)
        while True:
            try:
                with stream.admit(timeout=10) as right:
                    subscriber.poll(model)
                    stream.put(group(model), policy_version=subscriber.version, admission=right)
            except AdmissionTimeout:
                continue


def group(model: LlamaForCausalLM) -> list[redrb.BufferItem]:
    """Return the samples of one prompt."""
    prompts = torch.randint(4, VOCABULARY, (1, 3)).repeat(GROUP, 1)
    done = generate(model, prompts, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD)
    wanted = done.sequences[:, 3:] >= VOCABULARY // 2
    rewards = (wanted & done.action_mask).sum(1) / LENGTH
    return [
        redrb.BufferItem(
            done.sequences[row],
            done.action_log_probs[row],
            reward=rewards[row],
            attention_mask=done.attention_mask[row],
            action_mask=done.action_mask[row],
        )
        for row in range(GROUP)
    ]


def train(url: str, bound: int, steps: int) -> dict[str, Any]:
    """Train with a bound; return the rewards of the steps and what became of the groups."""
    with (
        redrb.connect(url) as client,
        stream_of(client, bound) as stream,
        tempfile.TemporaryDirectory(prefix="redrb-trl-") as output,
    ):
        with (
            redrb.WeightPublisher(client, f"policy-{bound}") as publisher,
            TaskRollouts(stream, publisher=publisher, timeout=300) as rollouts,
        ):
            trainer = GRPOTrainer(
                policy(),
                maker_reward,
                GRPOConfig(
                    output,
                    num_generations=GROUP,
                    per_device_train_batch_size=GROUPS * GROUP,
                    learning_rate=3e-3,
                    lr_scheduler_type="constant",
                    max_steps=steps,
                    vllm_importance_sampling_mode="token_truncate",
                    logging_steps=1,
                    report_to="none",
                    disable_tqdm=True,
                    save_strategy="no",
                    gradient_checkpointing=False,
                    use_cpu=True,
                    bf16=False,
                ),
                train_dataset=placeholder_prompts(GROUPS * steps),
                processing_class=tokenizer(),
                rollout_func=rollouts,
                callbacks=[rollouts],
            )
            trainer.train()
        history = [each for each in trainer.state.log_history if "reward" in each]
        stats = stream.stats()
        return {
            "rewards": [round(float(each["reward"]), 4) for each in history],
            "seconds": round(float(trainer.state.log_history[-1]["train_runtime"]), 1),
            "expired": stats.ledger.expired,
            "acked": stats.ledger.acked,
            "balanced": stats.ledger.balanced,
        }


def measure(url: str, bound: int, steps: int) -> dict[str, Any]:
    """Train with a bound, beside its makers."""
    start = multiprocessing.get_context("spawn").Process
    makers = [start(target=make, args=(url, bound, seed)) for seed in range(MAKERS)]
    for maker in makers:
        maker.start()
    try:
        return train(url, bound, steps)
    finally:
        for maker in makers:
            maker.terminate()
            maker.join()


def draw(runs: dict[str, Any], path: Path) -> None:
    """Draw the rewards of the steps as a PNG."""
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for colour, (bound, run) in zip(PALETTE, runs.items(), strict=False):
        label = f"max_staleness={bound}: {run['expired']} groups expired"
        axes.plot(range(1, len(run["rewards"]) + 1), run["rewards"], color=colour, label=label)
    axes.set(xlabel="step", ylabel="mean reward of the step", title="TRL's GRPOTrainer on a task")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, facecolor="white")


def main() -> None:
    """Measure all bounds, and write trl_staleness.json and .png."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_staleness")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory to write to")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    runs = {}
    with private_server() as server:
        for bound in BOUNDS:
            runs[str(bound)] = run = measure(server.url, bound, options.steps)
            shown = {name: each for name, each in run.items() if name != "rewards"}
            print(f"bound {bound}: last ten {sum(run['rewards'][-10:]) / 10:.3f}, {shown}")
    written = {"run": machine(), "steps": options.steps, "runs": runs}
    (options.results / "trl_staleness.json").write_text(json.dumps(written) + "\n")
    draw(runs, options.results / "trl_staleness.png")


if __name__ == "__main__":
    main()
