"""`GRPORecipe`: GRPO for a causal model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redrb.options import option
from redrb.recipe.language import LanguageRecipe

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from redrb.algorithms import GRPOStep
    from redrb.runtime import ExperienceMaker


class GRPORecipe(LanguageRecipe):
    """GRPO: a user gives `model`, `prompts` and `reward`.

    Each completion is compared with the other completions of its prompt. With `beta` above 0, the
    loss has a term for the divergence from the first weights of the policy.

    Example:
        >>> class Sums(GRPORecipe):
        ...     def model(self):
        ...         return "Qwen/Qwen2.5-0.5B"
        ...     def prompts(self):
        ...         return [{"prompt": f"{a}+{a}=", "answer": str(a + a)} for a in range(100)]
        ...     def reward(self, completion):
        ...         return float(completion.text.strip() == completion["answer"])
    """

    learning_rate: float = option(1e-6, "of AdamW", least=0, agree=False)
    beta: float = option(0.0, "weight of the divergence from the reference policy", least=0)
    scale_by_std: bool = option(
        True, "divide advantages by the group's standard deviation; no: Dr. GRPO"
    )

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return AdamW for the actor."""
        import torch

        trained = [each for each in models["actor"].parameters() if each.requires_grad]
        return {"actor": torch.optim.AdamW(trained, lr=self.learning_rate)}

    def algorithm(self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> GRPOStep:
        """Return the training step; override it for other options."""
        from redrb.algorithms import GRPOStep

        return GRPOStep(
            models["actor"],
            optimizers["actor"],
            beta=self.beta,
            temperature=self.temperature,
            **self.step_options,
        )

    def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:
        """Return the actor if the divergence from its first weights has a price."""
        return models["actor"] if self.beta > 0 else None

    def experience_maker(
        self, models: dict[str, nn.Module], reference: nn.Module | None
    ) -> ExperienceMaker:
        """Return a maker of completions with advantages relative to their group."""
        from redrb.algorithms import GRPOExperienceMaker
        from redrb.recipe.groups import CompletionGroups

        return CompletionGroups(
            self,
            lambda score: GRPOExperienceMaker(
                *(models["actor"], score, reference),
                group_size=self.group_size,
                scale_by_std=self.scale_by_std,
            ),
        )
