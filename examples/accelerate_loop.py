"""A training loop with Accelerate on two ranks, fed from redrb.

Start a maker, which puts 21 groups, and then two ranks; they take 8 groups a step, 4 each:

    export REDRB_URL=redis://host:6379/0
    python examples/accelerate_loop.py maker
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py

All ranks train the same number of steps. The last step has the groups that are left, rounded down
to equal parts; then all ranks end.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import redrb
from redrb.algorithms import action_log_probs

VOCABULARY, GROUP = 16, 4
TIMEOUT = float(os.environ.get("TIMEOUT", "30"))


def task() -> redrb.ExperienceStream:
    """Open the task."""
    client = redrb.connect(os.environ.get("REDRB_URL", "redis://127.0.0.1:6379/0"))
    return redrb.ExperienceStream(client, "accelerate")


def make(groups: int) -> None:
    """Put groups of random completions; the reward is the share of large tokens."""
    dice = torch.Generator().manual_seed(0)
    with task() as stream:
        for _ in range(groups):
            tokens = torch.randint(0, VOCABULARY, (GROUP, 8), generator=dice)
            reward = (tokens[:, 3:] >= VOCABULARY // 2).float().mean(1)
            advantage = reward - reward.mean()
            log_probs = torch.full((GROUP, 5), 1 / VOCABULARY).log()
            group = redrb.Experience(tokens, log_probs, None, reward, None, advantage)
            stream.put(redrb.split_experience_batch(group), policy_version=0)


def train() -> None:
    """Train until no more groups come; each batch is acknowledged after its optimizer step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    stream = task()
    loader = redrb.ExperienceLoader(  # not for accelerator.prepare: it deals to the ranks itself
        stream,
        8,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        at_least=accelerator.num_processes,
        acknowledge=False,
        prefetch=0,
        device=accelerator.device,
        timeout=TIMEOUT,
    )
    steps, held = 0, []
    try:
        for batch in loader:
            held.append(loader.lease)
            with accelerator.accumulate(model):
                logits = model(batch.sequences)
                log_probs = action_log_probs(logits, batch.sequences, 5)
                ratio = (log_probs - batch.action_log_probs).exp()
                loss = -(ratio * batch.advantages[:, None]).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # the optimizer has stepped on all held batches
                for lease in held:
                    lease.ack()
                held.clear()
                steps += 1
    except redrb.BatchTimeout:
        accelerator.print("no more groups come")
    accelerator.wait_for_everyone()
    weight = accelerator.unwrap_model(model)[1].weight.sum()
    print(f"rank {accelerator.process_index}: {steps} steps, weight {weight:.6f}", flush=True)
    loader.close()
    stream.close()
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1:] == ["maker"]:
        make(21)
    else:
        train()
