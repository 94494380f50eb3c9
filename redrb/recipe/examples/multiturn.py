"""The recipe `multiturn`: GRPO on episodes in which a small model calls a calculator."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from redrb.recipe import EpisodeRecipe, character_tokenizer, option

if TYPE_CHECKING:
    from torch import nn

    from redrb.experience import BufferItem
    from redrb.recipe.local_engine import LocalEngine

CALL = "?"
"""Ends a call of the calculator."""


class Multiturn(EpisodeRecipe):
    """Adds three numbers by calls of a calculator, which adds two.

    In the episode `3+8+5=3+8?11+5?16`, the model writes `3+8?`, gets `11`, writes `+5?`, gets `16`,
    and ends: the reward is 1.0 if the last result is the sum. The calculator adds the numbers of a
    call, and the result before it if the call begins with `+`. The model is made from a config, so
    that nothing is downloaded. The first trainer shows it right calls for some steps, and
    reinforcement learns the rest.
    """

    group_size = 16
    prompts_per_step = 8
    groups = 8
    max_new_tokens = 6
    learning_rate = 5e-4
    target_reward = 0.9
    extras = ("answer",)

    largest: int = option(9, "largest number in a sum", least=1, most=9)
    turns: int = option(3, "most turns of an episode", least=1)
    supervised_steps: int = option(
        65, "steps on right calls before the first version", least=0, agree=False
    )
    width: int = option(64, "width of the model", least=8)

    @cached_property
    def tokenizer(self) -> Any:
        """One token for each character."""
        return character_tokenizer(f"0123456789+={CALL}")

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

    def prompts(self) -> list[dict[str, Any]]:
        """Return each sum of three numbers with its answer."""
        numbers = range(self.largest + 1)
        return [
            {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
            for a in numbers
            for b in numbers
            for c in numbers
        ]

    def held_out(self) -> list[dict[str, Any]]:
        """Return every fifth sum: the question is whether the model has learned to call."""
        return self.prompts()[::5]

    async def episode(self, prompt: dict[str, Any], engine: LocalEngine) -> BufferItem:
        """Let the model call until it ends; the reward is 1.0 if the last result is the answer."""
        from redrb.train.engines import Trajectory

        trajectory, result = Trajectory(prompt["input_ids"]), ""
        [end] = self._tokens(CALL)
        for _ in range(self.turns):
            said = await engine.generate(trajectory.tokens, stop_token_ids=[end])
            trajectory.sampled(said)
            if trajectory.aborted:
                return trajectory.item()  # a later maker begins it again
            if said.tokens[-1] != end:
                ended = said.tokens == [self.tokenizer.eos_token_id]
                return trajectory.item(reward=float(ended and result == prompt["answer"]))
            result = added(result, self.tokenizer.decode(said.tokens, skip_special_tokens=True))
            trajectory.given(self._tokens(result))
        return trajectory.item(reward=0.0)

    def initialise(self, models: dict[str, nn.Module]) -> None:
        """Train on right calls for some steps, until a part of the episodes is right."""
        import random

        import torch
        from torch.nn.functional import cross_entropy

        from redrb.algorithms.models import device_of

        actor, numbers = models["actor"], random.Random(self.seed)  # noqa: S311
        optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
        prompts = self.prompts()
        for _ in range(self.supervised_steps):
            shown = [self._right_episode(each["prompt"]) for each in numbers.choices(prompts, k=64)]
            longest = max(len(tokens) for tokens, _ in shown)
            tokens = torch.full((len(shown), longest), self.pad_token_id)
            labels = torch.full((len(shown), longest), -100)
            for row, (episode, own) in enumerate(shown):
                tokens[row, : len(episode)] = torch.tensor(episode)
                labels[row, : len(episode)] = torch.tensor(own)
            device = device_of(actor)
            logits = actor(input_ids=tokens.to(device)).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _right_episode(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a right episode, and the same with -100 where they are given."""
        first, second, third = prompt.removesuffix("=").split("+")
        tokens = self.encode({"prompt": prompt}).tolist()
        own, result = [-100] * len(tokens), ""
        for call in (f"{first}+{second}{CALL}", f"+{third}{CALL}"):
            result = added(result, call)
            tokens += self._tokens(call + result)
            own += self._tokens(call) + [-100] * len(result)
        end = self.tokenizer.eos_token_id
        return [*tokens, end], [*own, end]

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


def added(result: str, call: str) -> str:
    """Return the calculator's answer to `3+8?`, or `+5?` after a result; "" if it is malformed."""
    if call.startswith("+"):
        call = result + call
    numbers = call.removesuffix(CALL).split("+")
    return str(sum(map(int, numbers))) if all(map(str.isdecimal, numbers)) else ""
