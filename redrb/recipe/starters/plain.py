"""A recipe of your own algorithm: models, rollout, optimizers and step are all written here."""

import torch
from torch import nn

from redrb import BufferItem
from redrb.recipe import Recipe, option


class MyRecipe(Recipe):
    """Learns which arm of a bandit pays in each of eight states, by policy gradients."""

    group_size = 16
    target_reward = 0.9
    steps = 300

    states: int = option(8, "number of states; as many arms", least=2)
    learning_rate: float = option(0.05, "of Adam", above=0, agree=False)

    def models(self):
        """Return the models; each weight version holds all of them."""
        return {"policy": nn.Linear(self.states, self.states)}

    def prompts(self):
        """Return prompts: dicts of your own keys."""
        return [{"state": state} for state in range(self.states)]

    def rollout(self, models, prompt):
        """Return the samples of one prompt; they are stored as one group."""
        state = nn.functional.one_hot(torch.tensor(prompt["state"]), self.states).float()
        actions = torch.multinomial(models["policy"](state).softmax(-1), self.group_size, True)
        rewards = (actions == (prompt["state"] + 1) % self.states).float()
        return [
            BufferItem(
                sequences=None,
                action_log_probs=None,
                reward=reward,
                advantages=reward - rewards.mean(),
                tensors={"state": state, "action": action},
            )
            for action, reward in zip(actions, rewards, strict=True)
        ]

    def optimizers(self, models):
        """Return the optimizers; checkpoints hold them."""
        return {"policy": torch.optim.Adam(models["policy"].parameters(), lr=self.learning_rate)}

    def step(self, models, optimizers, experience):
        """Train on one batch and return metrics."""
        logits = models["policy"](experience.tensors["state"])
        log_probs = torch.distributions.Categorical(logits=logits).log_prob(
            experience.tensors["action"]
        )
        loss = -(log_probs * experience.advantages).mean()
        optimizers["policy"].zero_grad()
        loss.backward()
        optimizers["policy"].step()
        return {"loss": loss.item()}

    def evaluate(self, models):
        """Return metrics, the reward among them."""
        chances = models["policy"](torch.eye(self.states)).softmax(-1)
        return {"reward": chances.roll(-1, 1).diagonal().mean().item()}
