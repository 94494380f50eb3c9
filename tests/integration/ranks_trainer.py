"""One rank of a DDP job, for tests.

It starts at the step of its checkpoint and tells what it does. Before each take, and after it, it
waits for a signal to go on, so that a test may end it there.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which takes seconds: once, before the forks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import redrb
from tests.integration.leaving import leave
from tests.samples import numbers

WORLD, COUNT = 2, 8


def trained_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, where there is one; returns the step that comes next."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main(
    test: Connection, url: str, namespace: str, rank: int, steps: int, home: Path, meeting: Path
) -> None:
    """Train from the checkpoint in `home` on; the ranks find each other by the file `meeting`."""

    def say(event: str, **fields: Any) -> None:
        test.send({"event": event, **fields})

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=30),
    )
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    path = home / f"rank{rank}.pt"
    step = trained_state(path, model, optimizer)
    ddp = DistributedDataParallel(model)
    stream = redrb.ExperienceStream(
        redrb.connect(url), "math", namespace=namespace, lease_ms=1500, max_deliveries=100
    )
    try:
        while step < steps:
            say("ready", step=step)
            test.recv()
            with stream.take(
                COUNT, rank=rank, world_size=WORLD, step=step, balance="tokens", timeout=15
            ) as lease:
                say("took", step=step, numbers=numbers(lease))
                test.recv()
                batch = lease.batch()
                reward = batch.reward
                loss = (ddp(reward[:, None] / 10) - reward[:, None].sin()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)
            say("trained", step=step, numbers=reward.int().tolist())
            step += 1
    except (redrb.RedrbError, RuntimeError) as error:
        failure = {"kind": type(error).__name__, "said": str(error)}
        say("failed", step=step, **failure)
        return
    stream.close()
    parameters = [value.tolist() for value in model.state_dict().values()]
    say("ended", parameters=parameters)
    leave()
