"""One rank of a job whose first rank publishes a sharded model; run by test_weights_dtensors."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import redrb
from redrb.train.world import whole_tensors
from tests.integration.leaving import leave

PLACES: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "everywhere": [Replicate()],
    "uneven": [Shard(0)],
    "one_row": [Shard(0)],  # the second rank has nothing of it
}


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return what the version of a step holds."""
    state = {
        "rows": torch.arange(3000.0).reshape(60, 50),
        "columns": torch.arange(700.0).reshape(7, 100).bfloat16(),
        "everywhere": torch.arange(40.0),
        "uneven": torch.arange(15.0).reshape(5, 3),
        "one_row": torch.arange(4.0).reshape(1, 4),
        "plain": torch.arange(6.0),
    }
    for tensor in state.values():
        tensor[0] += step
    return state | {"tied": state["rows"]}


def model(step: int, mesh: object) -> nn.Module:
    made = nn.Module()
    for name, tensor in whole(step).items():
        if name == "tied":
            made.register_parameter(name, made.get_parameter("rows"))
            continue
        value = distribute_tensor(tensor, mesh, PLACES[name]) if name in PLACES else tensor
        made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(url: str, namespace: str, rank: int, world: int, meeting: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    with redrb.connect(url) as client:
        reader = redrb.WeightSubscriber(client, "actor", namespace=namespace)
        own, memory = model(-1, mesh), dict[str, torch.Tensor]()
        for step in range(steps):
            trained = model(step, mesh)
            state = whole_tensors({"actor": trained}, memory)
            if rank == 0:
                assert state["actor.tied"] is state["actor.rows"]
                if step == 0:
                    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
                publisher.publish({name.removeprefix("actor."): t for name, t in state.items()})
            else:
                assert list(state) == ["actor.plain"]
            dist.barrier()
            assert reader.poll(own) is not None
            for name, tensor in trained.named_parameters():  # its own slice
                assert torch.equal(local(own.get_parameter(name)), local(tensor)), name
            print(reader.version, flush=True)
            dist.barrier()
    leave()


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    )
