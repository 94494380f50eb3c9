"""ColossalAI's usage examples of detached RLHF, line by line, on redrb.

The original lines are comments above the new ones. Run it with an embedded Redis:

    python examples/colossalai.py

or with a server; the functions below may then run in any number of processes and machines:

    REDRB_URL=redis://host:6379/0 python examples/colossalai.py
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

# from coati.experience_buffer.utils import BufferItem, split_experience_batch, ...
# from coati.ray.detached_replay_buffer import DetachedReplayBuffer
# from coati.ray.detached_trainer_base import DetachedTrainer
# from coati.ray.experience_maker_holder import ExperienceMakerHolder
import redrb
from redrb import (
    BufferItem,
    DetachedReplayBuffer,
    DetachedTrainer,
    Experience,
    ExperienceMakerHolder,
    make_experience_batch,
    split_experience_batch,
)
from redrb.algorithms import NaiveExperienceMaker, PPOStep

VOCABULARY = 16


class Network(nn.Module):
    """A toy model: one number, or `outputs` numbers, for each token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.read = nn.Linear(32, outputs)

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return float32 `[B, S, outputs]`."""
        return self.read(self.embed(sequences)) * attention_mask[..., None]


class RewardModel(nn.Module):
    """Rewards large tokens, float32 `[B]`."""

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mean token of each sample, between 0 and 1."""
        return (sequences * attention_mask).sum(1) / attention_mask.sum(1) / VOCABULARY


def my_dataloader() -> DataLoader[torch.Tensor]:
    """Return a loader of batches of prompts, int64 `[8, 4]`."""
    prompts = torch.randint(2, VOCABULARY, (32, 4), generator=torch.Generator().manual_seed(0))
    return DataLoader(prompts, batch_size=8)  # type: ignore[arg-type]


def experience_buffer_utils(experience_batch: Experience) -> None:
    """The example of `experience_buffer.utils`."""
    # items = split_experience_batch(experience_batch)
    items: list[BufferItem] = split_experience_batch(experience_batch)
    # sampled_items = items[:8]
    # new_batch = make_experience_batch(sampled_items)
    sampled_items = items[:8]
    new_batch = make_experience_batch(sampled_items)
    print(f"split and batched again: {len(new_batch)} samples")


def detached_replay_buffer(experience: Experience) -> None:
    """The example of `DetachedReplayBuffer`."""
    # buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
    buffer = DetachedReplayBuffer(sample_batch_size=8, limit=16)
    # buffer.append(experience)                      remotely called by the holder
    buffer.append(experience)
    # batch = buffer.sample(to_device="cuda:0")      locally called by the trainer
    batch = buffer.sample(to_device="cuda:0" if torch.cuda.is_available() else "cpu")
    print(f"sampled: {len(batch)} samples, {buffer.get_length()} batches left")
    buffer.close()  # acknowledges the last batch


# @ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, ...})
class MyTrainer(DetachedTrainer):
    """The example of `DetachedTrainer`; without a decorator it runs in any process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = Network(VOCABULARY), Network(1)
        self.optimizer = torch.optim.AdamW([*self.actor.parameters(), *self.critic.parameters()])
        self.step = PPOStep(self.actor, self.critic, self.optimizer, self.optimizer)
        super().__init__(*args, **options)

    # def training_step(self, experience: Experience):
    def training_step(self, experience: Experience) -> dict[str, Any]:
        """Train on one batch."""
        return self.step(experience)

    # def _update_remote_makers(self, fully_update=False, **kwargs):
    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        """Send both models to the makers, as one version."""
        models = {"actor": self.actor, "critic": self.critic}
        self.push_weights(models, fully_update=fully_update)


def trainer_process() -> None:
    """Run a trainer."""
    # trainer = MyTrainer.options(name="trainer_0").remote(
    #     experience_maker_holder_name_list=["maker_0"], train_batch_size=8)
    with MyTrainer(["maker_0"], train_batch_size=8, name="trainer_0", timeout=60) as trainer:
        trainer.sync_models_to_remote_makers()
        # ray.get(trainer.fit.remote(total_steps=1000, update_steps=100, train_epochs=2))
        trainer.fit(total_steps=16, update_steps=4, train_epochs=2)
        print(f"trained, and sent weights up to version {trainer.weight_version}")


def maker_process() -> None:
    """Run a maker."""
    # maker = ExperienceMakerHolder.options(name="maker_0", num_gpus=1).remote(
    #     detached_trainer_name_list=["trainer_0"], strategy_fn=..., model_fn=..., kl_coef=0.1, ...)
    maker = ExperienceMakerHolder(
        detached_trainer_name_list=["trainer_0"],
        strategy_fn=lambda: redrb.Strategy("cpu"),
        model_fn=lambda: (Network(VOCABULARY), Network(1), RewardModel(), Network(VOCABULARY)),
        kl_coef=0.1,
        buffer_cpu_offload=True,
        eval_performance=True,
        sync_models_from_trainers=True,
        max_length=16,
        eos_token_id=1,
        pad_token_id=0,
        top_k=50,
        name="maker_0",
    )
    with maker:
        # ray.get(maker.workingloop.remote(dataloader_fn=lambda: my_dataloader(), num_epochs=5))
        maker.workingloop(dataloader_fn=my_dataloader, num_epochs=5)
        print(f"made experience with weights up to version {maker.policy_version}")


def main() -> None:
    """Run all examples; trainer and maker in two processes, which could be on two machines."""
    # ray.init()
    with redrb.connect(os.environ.get("REDRB_URL", "embedded://")) as client:
        os.environ["REDRB_URL"] = client.url
        maker = NaiveExperienceMaker(
            Network(VOCABULARY), Network(1), RewardModel(), Network(VOCABULARY)
        )
        experience = maker.make_experience(
            next(iter(my_dataloader())), max_new_tokens=8, eos_token_id=1
        )
        experience_buffer_utils(experience)
        detached_replay_buffer(experience)
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=run) for run in (trainer_process, maker_process)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
