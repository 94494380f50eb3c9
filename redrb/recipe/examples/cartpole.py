"""The recipe `cartpole`: PPO on Gymnasium's CartPole-v1, whose transitions are stored in groups."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from redrb.recipe import Prompt, Recipe, option

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from redrb.experience import Experience

ENVIRONMENT = "CartPole-v1"
LONGEST = 500
"""Steps after which an episode of the environment is over."""


class Cartpole(Recipe):
    """Balances a pole: a group is some steps of parallel environments, one sample a transition."""

    group_size = 256
    prompts_per_step = 2
    groups = 4
    max_staleness = 1
    evaluate_every = 5
    target_reward = 475.0
    device = "cpu"

    environments: int = option(8, "environments that run in parallel", least=1, agree=False)
    width: int = option(64, "width of the networks", least=1)
    learning_rate: float = option(2e-3, "of Adam", above=0, agree=False)
    epochs: int = option(4, "passes over a batch", least=1, agree=False)
    minibatch: int = option(256, "transitions of a step of Adam", least=1, agree=False)
    clip: float = option(0.2, "clipping range of the ratio", above=0, agree=False)
    gamma: float = option(0.99, "discount a step", least=0, most=1)
    lam: float = option(0.95, "GAE's lambda", least=0, most=1)
    entropy_coef: float = option(0.01, "weight of the entropy bonus", least=0, agree=False)
    episodes: int = option(8, "episodes of an evaluation", least=1, agree=False)

    def models(self) -> dict[str, nn.Module]:
        """Return two small networks."""
        return {"actor": self._network(2), "critic": self._network(1)}

    @cached_property
    def running(self) -> dict[str, Any]:
        """The environments of this maker and their states: groups follow each other."""
        import gymnasium

        made = gymnasium.make_vec(
            ENVIRONMENT,
            num_envs=self.environments,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
        )
        state, _ = made.reset(seed=self.worker_seed % 2**31)
        return {"environments": made, "state": state}

    def prompts(self) -> list[Prompt]:
        """Return a prompt without keys: environments need none."""
        return [{}]

    def rollout(self, models: dict[str, nn.Module], prompt: Prompt) -> Experience:  # noqa: ARG002
        """Return the next `group_size` transitions."""
        import torch

        from redrb.experience import Experience

        steps, running = max(1, self.group_size // self.environments), self.running
        seen: dict[str, list[Tensor]] = {
            name: [] for name in ("state", "action", "log_prob", "value", "reward", "over", "next")
        }
        for _ in range(steps):
            states = torch.as_tensor(running["state"]).clone()
            logits = models["actor"](states).log_softmax(-1)
            action = torch.multinomial(logits.exp(), 1)
            state, reward, ended, cut, facts = running["environments"].step(action[:, 0].numpy())
            running["state"] = state
            following = torch.as_tensor(state).clone()
            for row, last in enumerate(facts.get("final_obs", ())):
                if last is not None:
                    following[row] = torch.as_tensor(last)
            after = models["critic"](following).squeeze(-1) * ~torch.as_tensor(ended)
            for name, value in {
                "state": states,
                "action": action[:, 0],
                "log_prob": logits.gather(1, action)[:, 0],
                "value": models["critic"](states).squeeze(-1),
                "reward": torch.as_tensor(reward, dtype=torch.float32),
                "over": torch.as_tensor(ended | cut),
                "next": after,
            }.items():
                seen[name].append(value)
        found = {name: torch.stack(values) for name, values in seen.items()}
        names = ("state", "action", "log_prob", "value")
        return Experience(
            sequences=None,
            action_log_probs=None,
            values=None,
            reward=found["reward"].flatten(),
            kl=None,
            advantages=self._advantages(found).flatten(),
            tensors={name: found[name].flatten(0, 1) for name in names},
        )

    def optimizers(self, models: dict[str, nn.Module]) -> dict[str, Optimizer]:
        """Return Adam for both networks."""
        import torch

        trained = [each for model in models.values() for each in model.parameters()]
        return {"both": torch.optim.Adam(trained, lr=self.learning_rate, eps=1e-5)}

    def step(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        experience: Experience,
    ) -> Mapping[str, Any]:
        """Train some passes over the batch by PPO's clipped losses."""
        import torch

        from redrb.algorithms import policy_loss
        from redrb.algorithms.losses import normalised

        data, advantages = experience.tensors, experience.advantages
        if advantages is None:
            return {}
        targets = advantages + data["value"]
        metrics: dict[str, Any] = {}
        for _ in range(self.epochs):
            for rows in torch.split(torch.randperm(len(experience)), self.minibatch):
                logits = models["actor"](data["state"][rows]).log_softmax(-1)
                log_prob = logits.gather(1, data["action"][rows, None])[:, 0]
                ratio = (log_prob - data["log_prob"][rows]).exp()[:, None]
                every = torch.ones_like(ratio, dtype=torch.bool)
                scaled = normalised(advantages[rows, None], every)
                actor_loss = policy_loss(ratio, scaled, every, clip=self.clip)
                values = models["critic"](data["state"][rows]).squeeze(-1)
                critic_loss = (values - targets[rows]).square().mean()
                entropy = -(logits.exp() * logits).sum(-1).mean()
                loss = actor_loss + 0.5 * critic_loss - self.entropy_coef * entropy
                optimizers["both"].zero_grad()
                loss.backward()
                for model in models.values():
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizers["both"].step()
                metrics = {"actor_loss": actor_loss, "critic_loss": critic_loss, "entropy": entropy}
        return {name: float(value.detach()) for name, value in metrics.items()}

    def evaluate(self, models: dict[str, nn.Module]) -> Mapping[str, float]:
        """Return the mean length of episodes with the most probable actions; the longest is 500."""
        import gymnasium
        import torch

        lengths = []
        environment = gymnasium.make(ENVIRONMENT)
        for episode in range(self.episodes):
            state, _ = environment.reset(seed=10_000 + episode)
            length = 0
            while length < LONGEST:
                length += 1
                action = int(models["actor"](torch.as_tensor(state)).argmax())
                state, _, ended, cut, _ = environment.step(action)
                if ended or cut:
                    break
            lengths.append(float(length))
        environment.close()
        return {"reward": sum(lengths) / len(lengths)}

    def _network(self, outputs: int) -> nn.Module:
        from torch import nn

        hidden = [nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh()]
        return nn.Sequential(*hidden, nn.Linear(self.width, outputs))

    def _advantages(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return GAE's advantages (Schulman et al. 2016, arXiv:1506.02438), float32 `[T, E]`."""
        import torch

        advantages = torch.zeros_like(found["value"])
        running = torch.zeros_like(found["value"][0])
        errors = found["reward"] + self.gamma * found["next"] - found["value"]
        for step in reversed(range(len(errors))):
            running = errors[step] + self.gamma * self.lam * running * ~found["over"][step]
            advantages[step] = running
        return advantages
