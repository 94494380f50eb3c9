"""The recipe `sorting`, which `redrb demo` runs: PPO on small networks that sort digits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from redrb.recipe import PPORecipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from redrb.algorithms import Completion


class Sorting(PPORecipe):
    """Sorts digits; its policy begins with a short supervised start."""

    task = "sort"
    group_size = 4
    max_new_tokens = 8
    shuffle = False  # prompts are drawn at random
    actor_learning_rate = 1e-3
    critic_learning_rate = 2e-3
    target_reward = 0.97
    device = "cpu"

    extras = ("text",)
    tags = ("digits",)
    eos_token_id = 3
    pad_token_id = 0

    def model(self) -> nn.Module:
        """Return a policy with random weights."""
        from redrb.recipe.examples.sorting.policy import Actor

        return Actor()

    def critic(self, actor: nn.Module) -> nn.Module:  # noqa: ARG002 (it has a network of its own)
        """Return a critic with random weights."""
        from redrb.recipe.examples.sorting.policy import Critic

        return Critic()

    def initialise(self, models: dict[str, nn.Module]) -> None:
        """Train the policy a little on right answers; the critic begins as its copy."""
        from redrb.recipe.examples.sorting.policy import warm_start

        warm_start(models["actor"], models["critic"], self.seed)  # type: ignore[arg-type]

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Yield random prompts for ever."""
        import torch

        from redrb.recipe.examples.sorting.digits import sample_prompts

        generator = torch.Generator().manual_seed(self.worker_seed)
        while True:
            for prompt in sample_prompts(generator, 32):
                yield as_prompt(prompt)

    def held_out(self) -> list[dict[str, Any]]:
        """Return the prompts of the fixed evaluation set."""
        from redrb.recipe.examples.sorting.digits import held_out_prompts

        return [as_prompt(prompt) for prompt in held_out_prompts()]

    def reward(self, completion: Completion) -> float:
        """Return 1.0 for the sorted digits and EOS and nothing else, else 0.0."""
        from redrb.recipe.examples.sorting import digits

        return digits.reward(completion.prompt_tokens, completion.tokens)

    def decode(self, tokens: Tensor) -> str:
        """Return tokens as digits and names in brackets."""
        from redrb.recipe.examples.sorting.digits import show

        return show(tokens)


def as_prompt(tokens: torch.Tensor) -> dict[str, Any]:
    """Return a prompt of the recipe from its token ids, int64 `[P]`."""
    from redrb.recipe.examples.sorting.digits import show

    return {"input_ids": tokens, "text": show(tokens), "digits": len(tokens) - 2}
