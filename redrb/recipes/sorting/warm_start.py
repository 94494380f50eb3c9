"""The supervised start: a policy that sorts a quarter of the prompts, for PPO to improve.

A few steps on right answers only: for most prompts the policy then samples both right and wrong
completions, so that an exact and sparse reward can distinguish them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from redrb.recipes.sorting.digits import pad_prompts, sample_prompts, target
from redrb.recipes.sorting.policy import ActorCritic, PolicySettings


@dataclass(frozen=True, kw_only=True)
class WarmStartSettings:
    """How the supervised start is trained.

    Attributes:
        steps: Optimizer steps.
        batch_size: Prompts a step.
        learning_rate: Of Adam, at its highest.
        ramp_steps: Steps until the learning rate is reached; from then on it falls to 0.
    """

    steps: int = 42
    batch_size: int = 64
    learning_rate: float = 5e-3
    ramp_steps: int = 10


def warm_start(
    seed: int,
    *,
    settings: WarmStartSettings | None = None,
    policy: PolicySettings | None = None,
) -> ActorCritic:
    """Return a half-trained actor, and a critic that starts from it.

    The same seed gives the same weights in every process of one machine (with as many threads), so
    makers can make the reference policy by themselves. The critic takes over the actor's decoder,
    as RLHF starts critics from a trained model (Ouyang et al. 2022, arXiv:2203.02155), and starts
    with value 0 everywhere. The global random state is neither read nor changed.
    """
    settings = settings or WarmStartSettings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ActorCritic(policy)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.actor.parameters(), lr=settings.learning_rate, fused=True)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            left = (settings.steps - step) / (settings.steps - settings.ramp_steps)
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.ramp_steps, left)
        prompts = sample_prompts(generator, settings.batch_size)
        loss = supervised_loss(model, prompts, [target(prompt) for prompt in prompts])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.critic.decoder.load_state_dict(model.actor.decoder.state_dict())
    torch.nn.init.zeros_(model.critic.head.weight)
    torch.nn.init.zeros_(model.critic.head.bias)
    return model


def supervised_loss(model: ActorCritic, prompts: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Return the mean cross-entropy of the right completions' tokens, float32 `[]`."""
    longest = max(answer.shape[0] for answer in targets)
    sequences, mask = pad_prompts(prompts)
    answers = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(answer) for answer in targets], batch_first=True
    )
    logits = model.actor(torch.cat([sequences, answers], 1), torch.cat([mask, real], 1), longest)
    return functional.cross_entropy(logits[real.bool()], answers[real.bool()])
