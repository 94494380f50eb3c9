"""Makers whose weights change between two tokens: versions of tokens, errors, outages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import redrb
from redrb import Client, ExperienceMakerHolder, ExperienceStream, GRPOMakerHolder, Strategy
from redrb.connection.stop import Stop
from redrb.errors import WeightMismatch
from redrb.experience import Experience
from redrb.train.broadcast import Broadcast
from redrb.train.following import MakerWeights
from tests.contract.test_weights_standby import Versioned, blocked
from tests.networks import LoraLinear
from tests.scenes import until
from tests.servers import Server

pytestmark = pytest.mark.long  # the same requests as test_weights*.py and test_stream*.py

PROMPTS = torch.ones(1, 2, dtype=torch.int64)


class Slow(Versioned):
    """Says the number of its weights, and calls `meanwhile` before each token."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.tokens = 0
        self.meanwhile: Callable[[int], None] = lambda _: None

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        answer = super().forward(tokens, attention_mask)
        self.meanwhile(self.tokens)
        self.tokens += 1
        return answer


def no_reward(completions: redrb.algorithms.Completions) -> Tensor:
    return torch.zeros(len(completions))


@pytest.fixture
def made(client: Client, namespace: str, scope: ExitStack) -> Callable[..., GRPOMakerHolder]:
    def make(model: nn.Module, **options: Any) -> GRPOMakerHolder:
        options = {"client": client, "namespace": namespace, "max_new_tokens": 12, **options}
        maker = GRPOMakerHolder(
            ["trainer_0"],
            lambda: Strategy("cpu"),
            lambda: (model, None, no_reward, None),
            group_size=2,
            in_flight_updates=True,
            do_sample=False,
            **options,
        )
        return scope.enter_context(maker)

    return make


def samples(client: Client, namespace: str) -> list[redrb.BufferItem]:
    with ExperienceStream(client, "trainer_0", namespace=namespace) as stream:
        lease = stream.take(len(stream), timeout=10)
        with lease:
            return lease.items()


def check(item: redrb.BufferItem) -> list[int]:
    """Check that each token is the version noted on it; returns the versions in their order."""
    assert item.token_versions is not None
    versions = item.token_versions.tolist()
    assert item.sequences[-len(versions) :].tolist() == versions
    assert item.policy_version == min(versions)
    return versions


def followed(client: Client, namespace: str, model: nn.Module, **options: Any) -> MakerWeights:
    place = (client, namespace, "m", {"actor": model}, Stop())
    return MakerWeights(*place, follow="t", **options)


def test_updates_are_swapped_between_tokens(
    client: Client, namespace: str, made: Callable[..., GRPOMakerHolder]
) -> None:
    trainer = Broadcast(client, namespace, "trainer_0", [])
    trainer.push({"actor": Versioned(1)}, fully=True)
    model = Slow()
    maker = made(model, sync_models_from_trainers=True)

    def meanwhile(token: int) -> None:
        if token in (3, 6):
            version = trainer.push({"actor": Versioned(token)}, fully=True)
            source = Versioned(version + 1)  # its tokens show its version
            assert trainer.push({"actor": source}, fully=True) == version + 1
            until(lambda: maker._weights._prepared.ready == version + 1)

    model.meanwhile = meanwhile
    maker.workingloop(lambda: [PROMPTS, PROMPTS])
    first, _, second, _ = map(check, samples(client, namespace))
    assert first == [1] * 4 + [3] * 3 + [5] * 5
    assert second == [5] * 12
    assert maker.policy_version == 5
    assert not [one for one in threading.enumerate() if one.name == "redrb-in-flight"]


def test_a_trainer_that_names_the_maker_in_mid_generation_is_followed(
    client: Client, namespace: str, made: Callable[..., GRPOMakerHolder]
) -> None:
    first = Broadcast(client, namespace, "trainer_0", [])
    first.push({"actor": Versioned(1)}, fully=True)
    model = Slow()
    maker = made(model, sync_models_from_trainers=True, name="m")

    def meanwhile(token: int) -> None:
        if token == 5:
            other = Broadcast(client, namespace, "other", ["m"])
            for number in (1, 2, 3):
                other.push({"actor": Versioned(number)}, fully=True)
            until(lambda: maker._weights.name == "other" and maker._weights._prepared.ready == 3)

    model.meanwhile = meanwhile
    maker.workingloop(lambda: [PROMPTS])
    assert check(samples(client, namespace)[0]) == [1] * 6 + [3] * 6


def test_a_swap_during_a_fetch_gets_the_update_later(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Versioned()
    weights = followed(client, namespace, model, in_flight=True)
    trainer = Broadcast(client, namespace, "t", [])
    with weights.prefetching():
        trainer.push({"actor": Versioned(1)}, fully=True)
        until(lambda: weights.swap() == 1)
        began, go_on = blocked(monkeypatch)
        trainer.push({"actor": Versioned(2)}, fully=True)
        assert began.wait(10)
        assert weights.swap() == 1  # while the fetch is blocked
        began.clear()
        trainer.push({"actor": Versioned(3)}, fully=True)  # waits for its turn
        go_on.set()
        until(lambda: weights._prepared.ready)
        time.sleep(0.1)
        assert not began.is_set()
        assert (weights.swap(), model.number()) == (2, 2)
        until(lambda: weights.swap() == 3)
        trainer.push({"actor": Versioned(4)}, fully=True)
        ended = time.monotonic()
    assert time.monotonic() - ended < 10


def test_lora_is_merged_into_the_newest_full_weights(client: Client, namespace: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    source = nn.Sequential(LoraLinear(4, 4, bias=False), nn.Linear(4, 4))
    weights = followed(client, namespace, model)
    trainer = Broadcast(client, namespace, "t", [])
    plans = [(True, True), (False, True), (False, True), (True, True), (False, False)]
    plans += [(False, True), (True, False), (False, True), (False, True)]
    for fully, lora in plans:
        with torch.no_grad():
            for tensor in source.parameters():
                if tensor.requires_grad or fully:
                    tensor.normal_()
        trainer.push({"actor": source}, fully=fully, lora_only=lora)
        weights.load_announced()
        assert weights.version == trainer.version
        layer = source[0]
        merged = layer.weight + 2.0 * (layer.lora_B @ layer.lora_A)
        expected = merged if lora else layer.weight
        assert torch.allclose(model[0].weight, expected, atol=1e-5)
        if not lora:
            assert torch.equal(model[1].weight, source[1].weight)
    newest = redrb.WeightSubscriber(client, "t", namespace=namespace).latest()
    assert newest is not None
    assert newest.kind == "lora"
    again = nn.Sequential(LoraLinear(4, 4, bias=False), nn.Linear(4, 4))
    later = Broadcast(client, namespace, "t", [])
    assert later.take_over({"actor": again}) == trainer.version
    assert torch.equal(again[0].lora_A, source[0].lora_A)


def test_adapters_in_a_redis_that_was_emptied_come_with_their_base(
    client: Client, namespace: str
) -> None:
    source = nn.Sequential(LoraLinear(4, 4, bias=False))
    trainer = Broadcast(client, namespace, "t", [])
    trainer.push({"actor": source}, fully=False, lora_only=True)
    client.execute("FLUSHALL")
    trainer.push({"actor": source}, fully=False, lora_only=True)
    late = nn.Sequential(nn.Linear(4, 4, bias=False))
    weights = followed(client, namespace, late, first_timeout=30.0)
    assert weights.wait_until_initialised()
    layer = source[0]
    merged = layer.weight + 2.0 * (layer.lora_B @ layer.lora_A)
    assert torch.allclose(late[0].weight, merged, atol=1e-5)


def test_without_token_versions_the_first_version_of_the_batch_is_noted(
    client: Client, namespace: str, scope: ExitStack
) -> None:
    trainer = Broadcast(client, namespace, "trainer_0", [])
    trainer.push({"actor": Versioned(1)}, fully=True)

    class Own:
        def make_experience(self, inputs: Any, *, before_token: Any, **options: Any) -> Experience:
            version = trainer.push({"actor": Versioned(2)}, fully=True)
            until(lambda: before_token() == version)
            zeros = torch.zeros(1, 1)
            return Experience(inputs, zeros, zeros[0], zeros[0], zeros[0], zeros[0])

    class Holder(ExperienceMakerHolder):
        def build_experience_maker(self, *_: Any) -> Own:
            return Own()

    models = (Versioned(), None, None, None)
    maker = Holder(
        ["trainer_0"],
        Strategy,
        lambda: models,
        sync_models_from_trainers=True,
        client=client,
        namespace=namespace,
        in_flight_updates=True,
    )
    scope.enter_context(maker).workingloop(lambda: [PROMPTS])
    assert samples(client, namespace)[0].policy_version == 1
    assert maker.policy_version == 2


def test_updates_that_do_not_fit_are_logged_between_batches(
    client: Client,
    namespace: str,
    made: Callable[..., GRPOMakerHolder],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Broadcast(client, namespace, "trainer_0", [])
    trainer.push({"actor": Versioned(1)}, fully=True)
    model = Slow()
    maker = made(model, sync_models_from_trainers=True)

    def meanwhile(token: int) -> None:
        if token == 3:
            trainer.push({"actor": Versioned(2).parts}, fully=True)
            until(lambda: maker._weights._error)
        if token == 15:
            trainer.push({"actor": Versioned(3)}, fully=True)
            until(lambda: maker._weights._prepared.ready)

    model.meanwhile = meanwhile
    maker.workingloop(lambda: [PROMPTS, PROMPTS])
    assert caplog.text.count("keeps the weights it has") == 1
    first, _, second, _ = map(check, samples(client, namespace))
    assert (first, second) == ([1] * 12, [1] * 4 + [3] * 8)


def test_a_first_update_that_does_not_fit_ends_the_loop(
    client: Client, namespace: str, made: Callable[..., GRPOMakerHolder]
) -> None:
    trainer = Broadcast(client, namespace, "trainer_0", [])
    trainer.push({"actor": Versioned(2).parts}, fully=True)
    model = Slow(7)
    maker = made(model)
    model.meanwhile = lambda _: until(lambda: maker._weights._error)
    with pytest.raises(WeightMismatch):
        maker.workingloop(lambda: [PROMPTS] * 3)


def test_a_maker_goes_on_in_flight_while_redis_is_away(
    own_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    model = Slow()
    with redrb.connect(server.url, retry_s=0.2) as client:
        trainer = Broadcast(client, "default", "trainer_0", [])
        trainer.push({"actor": Versioned(1)}, fully=True)

        def meanwhile(token: int) -> None:
            if token == 12:
                server.kill()
                until(lambda: maker._weights._outage.lasts)
            if token == 40:
                server.start()
                until(lambda: trainer_is_back(trainer))
                until(lambda: maker._weights._prepared.ready)

        model.meanwhile = meanwhile
        maker = GRPOMakerHolder(
            ["trainer_0"],
            lambda: Strategy("cpu"),
            lambda: (model, None, no_reward, None),
            group_size=1,
            in_flight_updates=True,
            sync_models_from_trainers=True,
            client=client,
            max_new_tokens=12,
            do_sample=False,
        )
        with maker:
            maker.workingloop(lambda: [PROMPTS] * 5)
        made = [check(item) for item in samples(client, "default")]
    assert made[:3] == [[1] * 12] * 3
    assert made[-1] == [2] * 12
    assert caplog.text.count("goes on with the weights it has: ") == 1


def trainer_is_back(trainer: Broadcast) -> bool:
    try:
        return trainer.push({"actor": Versioned(2)}, fully=True) == 2
    except redrb.StoreUnavailable:
        return False
