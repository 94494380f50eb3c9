"""`Maker`: redrb's own loop of makers, without the arguments of any framework."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from redrb import Client, ConfigError, Experience, ExperienceStream, MakerCallback
from redrb.connection.stop import Stop
from redrb.train.broadcast import Broadcast
from redrb.train.following import MakerWeights
from redrb.train.maker import Maker, maker_stream


class Numbers:
    """Makes a sample of each number of a batch; its reward is the weight of the model."""

    def __init__(self, model: nn.Linear) -> None:
        self.model = model

    def make_experience(self, inputs: torch.Tensor, *, kl: float) -> Experience:
        count = len(inputs)
        reward = self.model.weight.detach().flatten().expand(count).clone()
        zeros = torch.zeros(count)
        return Experience(inputs[:, None], zeros[:, None], zeros, reward, zeros + kl, zeros)


class Parts(Numbers):
    """Makes each number of a batch as a part of its own."""

    def make_parts(self, inputs: torch.Tensor, *, kl: float) -> Any:
        for number in inputs:
            yield self.make_experience(number[None], kl=kl)


class Made:
    """A maker of the tasks "a" and "b", which waits for weights of trainer "t"."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        self.model = nn.Linear(1, 1, bias=False)
        self.stop = Stop()

    def maker(self, kind: type[Numbers] = Numbers, **options: Any) -> Maker:
        place = (self.client, self.namespace, "m", {"actor": self.model}, self.stop)
        weights = MakerWeights(*place, follow="t", first_timeout=20.0)
        streams = [maker_stream(self.client, task, "m", namespace=self.namespace) for task in "ab"]
        options = {"room_timeout": 1.0, "generate_kwargs": {"kl": 0.5}, **options}
        return Maker(streams, kind(self.model), weights, **options)

    def publish(self, weight: float) -> None:
        source = nn.Linear(1, 1, bias=False)
        nn.init.constant_(source.weight, weight)
        Broadcast(self.client, self.namespace, "t", []).push({"actor": source}, fully=True)

    def taken(self, task: str) -> list[tuple[int, float, float, int | None]]:
        """Return number, reward, kl and weight version of each sample of a task."""
        with ExperienceStream(self.client, task, namespace=self.namespace) as stream:
            count = len(stream)
            with stream.take(count, timeout=5) as lease:
                return [
                    (int(item.sequences), float(item.reward), float(item.kl), item.policy_version)
                    for item in lease.items()
                ]


@pytest.fixture
def made(client: Client, namespace: str) -> Made:
    return Made(client, namespace)


@pytest.mark.parametrize("kind", [Numbers, Parts])
def test_batches_are_made_with_the_newest_weights_and_dealt_to_the_tasks(
    made: Made, kind: type[Numbers]
) -> None:
    made.publish(1.0)
    with made.maker(kind) as maker:

        def batches() -> Any:
            yield torch.arange(3)
            made.publish(2.0)
            yield torch.arange(3, 5)

        maker._run(batches())
        assert maker.policy_version == 2
    first, second = made.taken("a"), made.taken("b")
    assert first == [(0, 1.0, 0.5, 1), (2, 1.0, 0.5, 1), (4, 2.0, 0.5, 2)]
    assert second == [(1, 1.0, 0.5, 1), (3, 2.0, 0.5, 2)]


def test_no_batch_is_drawn_after_the_maker_was_asked_to_end(made: Made) -> None:
    drawn = []

    class Ending(MakerCallback):
        def on_batch_end(self) -> None:
            maker.stop("enough")

    def batches() -> Any:
        for number in range(3):
            drawn.append(number)
            yield torch.tensor([number])

    made.publish(1.0)
    with made.maker(callbacks=[Ending()]) as maker:
        maker._run(batches())
        assert maker.stopped == "enough"
        maker._run(batches())
    assert drawn == [0]
    assert made.taken("a") == [(0, 1.0, 0.5, 1)]


def test_options_that_the_experience_maker_does_not_know_are_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'length'"):
        made.maker(generate_kwargs={"length": 3})
