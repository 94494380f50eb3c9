"""The recipe `arithmetic`: GRPO on a small causal model of transformers that learns sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from redrb.recipe import GRPORecipe, character_tokenizer, option

if TYPE_CHECKING:
    from torch import nn

    from redrb.algorithms import Completion


class Arithmetic(GRPORecipe):
    """Adds numbers: each prompt has its reference answer, and rewards are verified.

    The model is made from a config, so that nothing is downloaded. The first trainer shows it right
    answers for some steps, and reinforcement learns the rest.
    """

    group_size = 16
    max_new_tokens = 3
    learning_rate = 1e-3
    target_reward = 0.95
    extras = ("answer",)
    tags = ("first",)

    largest: int = option(9, "largest number in a sum", least=1)
    supervised_steps: int = option(
        100, "steps on right answers before the first version", least=0, agree=False
    )
    width: int = option(64, "width of the model", least=8)

    @cached_property
    def tokenizer(self) -> Any:
        """One token for each character."""
        return character_tokenizer("0123456789+=")

    def model(self) -> Any:
        """Return the config of a small Llama."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Yield each sum with its answer."""
        for first in range(self.largest + 1):
            for second in range(self.largest + 1):
                yield {
                    "prompt": f"{first}+{second}=",
                    "answer": f"{first + second}",
                    "first": first,
                }

    def held_out(self) -> list[dict[str, Any]]:
        """Return all sums: the question is whether the model has learned them."""
        return list(self.prompts())

    def reward(self, completion: Completion) -> float:
        """Return 1.0 for the answer and EOS and nothing else, else 0.0."""
        return float(bool(completion.finished) and completion.text == completion["answer"])

    def initialise(self, models: dict[str, nn.Module]) -> None:
        """Train on right answers for some steps, until a part of the sums is right."""
        import random

        import torch

        actor, numbers = models["actor"], random.Random(self.seed)  # noqa: S311
        optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
        sums = list(self.prompts())
        for _ in range(self.supervised_steps):
            texts = [each["prompt"] + each["answer"] for each in numbers.choices(sums, k=64)]
            batch = self.tokenizer(
                [text + self.tokenizer.eos_token for text in texts],
                padding=True,
                return_tensors="pt",
                return_token_type_ids=False,
            ).to(actor.device)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = actor(**batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
