"""`PPORecipe`: PPO for a causal model and its critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redrb.options import option
from redrb.recipe.language import LanguageRecipe

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from redrb.algorithms import PPOStep
    from redrb.runtime import ExperienceMaker


class PPORecipe(LanguageRecipe):
    """PPO: a user gives `model`, `prompts` and `reward`.

    Advantages are those of GAE, made by makers; values learn the returns. With `kl_coef` above 0,
    each action pays for its divergence from the first weights of the policy.
    """

    gamma: float = option(1.0, "discount a token", least=0, most=1)
    lam: float = option(
        0.95, "GAE's lambda: 0 trusts the critic, 1 the sampled return", least=0, most=1
    )
    kl_coef: float = option(
        0.01, "weight of the KL divergence from the reference policy, in rewards a nat", least=0
    )
    actor_learning_rate: float = option(1e-6, "of Adam, for the actor", least=0, agree=False)
    critic_learning_rate: float = option(1e-5, "of Adam, for the critic", least=0, agree=False)
    value_clip: float = option(
        0.5, "how far a value may move from the value at the time of making", above=0, agree=False
    )
    entropy_coef: float = option(0.0, "weight of the entropy bonus", least=0, agree=False)

    def models(self) -> dict[str, nn.Module]:
        """Return the policy as `actor`, and its critic."""
        models = super().models()
        return {**models, "critic": self.critic(models["actor"])}

    def critic(self, actor: nn.Module) -> nn.Module:
        """Return the critic; default: a second copy of the policy with a head for values."""
        import copy

        from redrb.algorithms import ValueHead

        return ValueHead(copy.deepcopy(actor))

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return Adam for the actor and for the critic."""
        import torch

        rates = {"actor": self.actor_learning_rate, "critic": self.critic_learning_rate}
        return {
            name: torch.optim.Adam(
                [each for each in models[name].parameters() if each.requires_grad], lr=rate
            )
            for name, rate in rates.items()
        }

    def algorithm(self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> PPOStep:
        """Return the training step; override it for other options."""
        from redrb.algorithms import PPOStep

        return PPOStep(
            *(models["actor"], models["critic"], optimizers["actor"], optimizers["critic"]),
            value_clip=self.value_clip,
            value_target="returns",
            entropy_coef=self.entropy_coef,
            normalise_advantages=True,
            temperature=self.temperature,
            **self.step_options,
        )

    def reference(self, models: dict[str, nn.Module]) -> nn.Module | None:
        """Return the actor if the divergence from its first weights has a price."""
        return models["actor"] if self.kl_coef > 0 else None

    def experience_maker(
        self, models: dict[str, nn.Module], reference: nn.Module | None
    ) -> ExperienceMaker:
        """Return a maker of completions with values and GAE's advantages."""
        from redrb.algorithms import GAE, NaiveExperienceMaker
        from redrb.recipe.groups import CompletionGroups

        gae = GAE(gamma=self.gamma, lam=self.lam)
        actor, critic = models["actor"], models["critic"]
        return CompletionGroups(
            self,
            lambda score: NaiveExperienceMaker(
                *(actor, critic, score, actor if reference is None else reference),
                kl_coef=self.kl_coef,
                gae=gae,
            ),
        )
