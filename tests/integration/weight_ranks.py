"""One rank of a job that publishes DTensors; run by test_weights_dtensors."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import redrb


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return what the version of a step holds."""
    state = {
        "rows": torch.arange(3000.0).reshape(60, 50),
        "columns": torch.arange(700.0).reshape(7, 100).bfloat16(),
        "everywhere": torch.arange(40.0),
        "uneven": torch.arange(15.0).reshape(5, 3),
    }
    for tensor in state.values():
        tensor[0] += step
    return state


def main(url: str, namespace: str, rank: int, world: int, meeting: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    places = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "everywhere": [Replicate()],
        "uneven": [Shard(0)],
    }
    with redrb.connect(url) as client:
        publisher = redrb.WeightPublisher(
            *(client, "actor"), namespace=namespace, rank=rank, world_size=world, timeout=30
        )
        reader = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        own: dict[str, DTensor] = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, places[name])
            for name, tensor in whole(0).items()
        }
        for step in range(steps):
            state = {
                name: distribute_tensor(tensor, mesh, places[name])
                for name, tensor in whole(step).items()
            }
            version = publisher.publish(state)
            dist.barrier()
            assert reader.poll(own) is not None
            for name, tensor in state.items():  # its own slice
                assert torch.equal(own[name].to_local(), tensor.to_local()), name
            print(version.version, version.kind, flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    address, experiment, own_rank, size, file, count = sys.argv[1:]
    main(address, experiment, int(own_rank), int(size), file, int(count))
