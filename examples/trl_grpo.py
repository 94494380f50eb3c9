"""TRL's GRPOTrainer on redrb: a maker in another process, with its log-probabilities and rewards.

Run it with an embedded Redis:

    python examples/trl_grpo.py

or with a server; then any number of makers, on any machine, feed the same trainer:

    REDRB_URL=redis://host:6379/0 python examples/trl_grpo.py
    REDRB_URL=redis://host:6379/0 python examples/trl_grpo.py maker

The model is made from a config, so nothing is downloaded. The reward is the share of one token.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import redrb
from redrb.algorithms import generate

VOCABULARY, PAD, EOS, WANTED = 24, 0, 3, 7
GROUP, STEPS = 8, int(os.environ.get("STEPS", "40"))


def policy() -> LlamaForCausalLM:
    """Return the model that is trained; in place of it, load yours."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=64,
            bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD,
        )
    )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words w0, w1, ...; in place of it, load the model's."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")),
        unk_token="w1", pad_token=f"w{PAD}", eos_token=f"w{EOS}",
    )  # fmt: skip


def task(client: redrb.Client) -> redrb.ExperienceStream:
    """Open the task; groups that are more than 4 versions old expire."""
    return redrb.ExperienceStream(client, "trl", limit=64, max_staleness=4, weights="trl-policy")


def make(url: str) -> None:
    """Make groups with the newest policy, until the process is ended."""
    torch.set_num_threads(1)
    client = redrb.connect(url)
    stream = task(client)
    subscriber = redrb.WeightSubscriber(client, "trl-policy")
    subscriber.wait(timeout=300)
    model = policy().eval()
    while True:
        subscriber.poll(model)
        prompt = torch.randint(4, VOCABULARY, (1, 4)).repeat(GROUP, 1)
        done = generate(model, prompt, max_new_tokens=8, eos_token_id=EOS, pad_token_id=PAD)
        rewards = (done.sequences[:, 4:] == WANTED).sum(1) / done.action_mask.sum(1)
        group = [
            redrb.BufferItem(
                sequences=done.sequences[row],
                action_log_probs=done.action_log_probs[row],
                reward=rewards[row],
                attention_mask=done.attention_mask[row],
                action_mask=done.action_mask[row],
            )
            for row in range(GROUP)
        ]
        stream.put(group, policy_version=subscriber.version)  # waits while the task is full


def train(url: str, output: str) -> None:
    """Train on the makers' groups, and publish the policy after each step."""
    from trl import GRPOConfig, GRPOTrainer

    from redrb.compat.trl import TaskRollouts, maker_reward, placeholder_prompts

    with redrb.connect(url) as client, task(client) as stream:
        with (
            redrb.WeightPublisher(client, "trl-policy") as publisher,
            TaskRollouts(stream, publisher=publisher, timeout=300) as rollouts,
        ):
            trainer = GRPOTrainer(
                policy(),
                maker_reward,
                GRPOConfig(
                    output,
                    num_generations=GROUP,
                    per_device_train_batch_size=4 * GROUP,
                    learning_rate=1e-2,
                    max_steps=STEPS,
                    vllm_importance_sampling_mode="token_truncate",  # of the makers' ratios
                    logging_steps=1,
                    report_to="none",
                    disable_tqdm=True,
                    save_strategy="no",
                    gradient_checkpointing=False,
                    bf16=False,
                ),
                train_dataset=placeholder_prompts(4 * STEPS),
                processing_class=tokenizer(),
                rollout_func=rollouts,
                callbacks=[rollouts],
            )
            trainer.train()
        rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
        print(f"reward: {rewards[0]:.2f} at first, {sum(rewards[-5:]) / 5:.2f} in the end")
        print(stream.stats().ledger)


def main() -> None:
    """Run trainer and maker, or with the argument `maker` only a maker."""
    with redrb.connect(os.environ.get("REDRB_URL", "embedded://")) as client:
        if sys.argv[1:] == ["maker"]:
            make(client.url)
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(client.url,))
        maker.start()
        try:
            with tempfile.TemporaryDirectory() as output:
                train(client.url, output)
        finally:
            maker.terminate()
            maker.join()


if __name__ == "__main__":
    main()
