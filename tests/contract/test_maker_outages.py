"""`ExperienceMakerHolder` when Redis is away or emptied, and updates that go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import redrb
from redrb import Client, ConfigError, ExperienceStream, MakerCallback, Strategy
from redrb.connection.messages import post
from redrb.connection.stop import Stop
from redrb.errors import SendFailed, WeightError, WeightMismatch, WeightTimeout
from redrb.keys import maker_key
from redrb.train import AccelerateStrategy, strategy
from redrb.train.broadcast import Broadcast
from redrb.train.following import MakerWeights
from tests.contract.test_maker_holder import Holder, Linear, prompts
from tests.servers import Server
from tests.signals import sigterm_after

pytestmark = pytest.mark.long  # the same requests as test_weights*.py and test_stream*.py


@pytest.fixture
def holder(client: Client, namespace: str) -> Iterator[Callable[..., Holder]]:
    made: list[Holder] = []

    def make(**options: Any) -> Holder:
        options = {"client": client, "namespace": namespace, **options}
        models = (Linear(), Linear(), None, None)
        made.append(Holder(["trainer_0"], Strategy, lambda: models, **options))
        return made[-1]

    yield make
    for maker in made:
        maker.close()


def put_in_order(client: Client, namespace: str = "default") -> list[int]:
    with ExperienceStream(client, "trainer_0", namespace=namespace) as stream:
        count = len(stream)
        with stream.take(count, timeout=5) as lease:
            return [int(item.sequences[0]) for item in lease.items()]  # type: ignore[index]


def test_a_maker_goes_on_while_redis_is_away_longer_than_its_retries(
    own_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server("--appendonly", "yes", "--appendfsync", "always")

    def loader() -> Iterator[torch.Tensor]:
        for number in range(8):
            if number == 2:
                server.kill()
            if number == 6:
                server.start()
            yield prompts(number)

    with redrb.connect(server.url, retry_s=0.2) as client:
        maker = Holder(["trainer_0"], Strategy, lambda: (Linear(), None, None, None), client=client)
        maker.workingloop(loader)
        maker.close()
        assert caplog.text.count("goes on with the weights it has: ") == 1
        assert put_in_order(client) == list(range(8))


def test_a_signal_is_heeded_while_redis_is_away(
    own_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server()
    with redrb.connect(server.url, retry_s=60) as client:
        for synced in (False, True):
            maker = Holder(
                ["trainer_0"],
                Strategy,
                lambda: (Linear(), None, None, None),
                client=client,
                sync_models_from_trainers=synced,
                stop_timeout=0.3,
            )
            timer = sigterm_after(0.5)
            server.kill()
            began = time.monotonic()
            maker.workingloop(lambda: [prompts(1), prompts(2)])
            maker.close()
            assert time.monotonic() - began < 30
            timer.join()
            assert maker.stopped == "SIGTERM"
            server.start()


def test_later_updates_that_do_not_fit_are_not_loaded(
    holder: Callable[..., Holder], client: Client, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    maker = holder()
    trainer = Broadcast(client, namespace, "trainer_0", ["maker_0"])
    models = {"actor": Linear(1.0), "critic": Linear(1.0)}
    wrong = {"actor": Linear(2.0), "critic": torch.nn.Linear(3, 3)}
    trainer.push(wrong, fully=True)
    with pytest.raises(WeightMismatch):  # the first one
        maker.workingloop(lambda: [prompts(1)])
    trainer.push(models, fully=True)
    maker.workingloop(lambda: [prompts(1)])
    trainer.push(wrong, fully=True)
    maker.workingloop(lambda: [prompts(2)])
    post(client, [maker_key(namespace, "maker_0")], {"trainer": "a b", "version": 1})
    maker.workingloop(lambda: [prompts(3), prompts(4)])
    assert caplog.text.count("keeps the weights it has") == 2
    assert maker.policy_version == 2
    trainer.push(models, fully=True)
    maker.workingloop(lambda: [prompts(5)])
    assert maker.policy_version == 4


def followed(
    client: Client, namespace: str, first_timeout: float = 5.0
) -> tuple[Linear, MakerWeights]:
    model = Linear()
    place = (client, namespace, "m", {"actor": model}, Stop())
    return model, MakerWeights(*place, follow="t", first_timeout=first_timeout)


def delete_all(client: Client, namespace: str) -> None:
    keys = client.execute("KEYS", f"redrb:{{{namespace}:*")
    client.execute("DEL", *keys)


def value(model: Linear) -> float:
    return float(model.trained.detach())


def test_versions_may_start_again_in_a_redis_that_was_emptied(
    client: Client, namespace: str
) -> None:
    model, follower = followed(client, namespace)
    trainer = Broadcast(client, namespace, "t", ["m"])
    for version in range(1, 6):
        trainer.push({"actor": Linear(float(version))}, fully=True)
    follower.load_announced()
    assert (follower.version, value(model)) == (5, 5.0)
    delete_all(client, namespace)
    again = Broadcast(client, namespace, "t", ["m"])
    follower.load_announced()  # it is named, and there are no weights yet
    assert (follower.version, value(model)) == (5, 5.0)
    for version in (1, 2):
        again.push({"actor": Linear(10.0 + version)}, fully=True)
        follower.load_announced()
        assert (follower.version, value(model)) == (version, 10.0 + version)
    third = Broadcast(client, namespace, "t", ["m"])  # a restart alone counts on
    third.push({"actor": Linear(30.0)}, fully=True)
    follower.load_announced()
    assert (follower.version, value(model)) == (3, 30.0)


def test_weights_that_are_gone_do_not_make_a_maker_complete(
    client: Client, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, follower = followed(client, namespace, first_timeout=0.3)
    trainer = Broadcast(client, namespace, "t", ["m"])
    trainer.push({"actor": Linear(1.0)}, fully=True)
    client.execute("DEL", f"redrb:{{{namespace}:weights:t}}:versions")
    with pytest.raises(WeightTimeout):
        follower.wait_until_initialised()
    assert not follower.initialised
    assert "is not in Redis any more" in caplog.text
    trainer.push({"actor": Linear(2.0)}, fully=True)
    assert follower.load_announced()
    assert (follower.initialised, value(model)) == (True, 2.0)


def test_the_newest_groups_are_sent_again_when_earlier_ones_are_given_up(
    holder: Callable[..., Holder], client: Client, namespace: str
) -> None:
    maker = holder(stream_options={"on_bad_group": "raise"})
    make = maker.experience_maker.make_experience

    def odd(inputs: Any, **options: Any) -> Any:
        experience = make(inputs, **options)
        if int(inputs[0, 0]) == 0:  # found out by the sender's thread
            experience.tags = [{"x": object()}]  # type: ignore[dict-item]
        return experience

    maker.experience_maker.make_experience = odd  # type: ignore[method-assign]

    def loader() -> Iterator[torch.Tensor]:
        yield prompts(0)
        while not maker._sender._behind._failures:
            time.sleep(0.01)
        yield prompts(1)

    with pytest.raises(SendFailed) as caught:
        maker.workingloop(loader)
    assert caught.value.dropped == 1
    maker._sender.flush(timeout=5)
    assert put_in_order(client, namespace) == [1]


def test_a_bad_group_does_not_end_a_maker(
    holder: Callable[..., Holder],
    client: Client,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    maker = holder()
    make = maker.experience_maker.make_experience

    def odd(inputs: Any, **options: Any) -> Any:
        experience = make(inputs, **options)
        if int(inputs[0, 0]) == 1:
            experience.reward = torch.full_like(experience.reward, float("nan"))
        return experience

    maker.experience_maker.make_experience = odd  # type: ignore[method-assign]
    maker.workingloop(lambda: [prompts(0), prompts(1), prompts(2)])
    maker.close()
    assert put_in_order(client, namespace) == [0, 2]
    (message,) = [text for text in caplog.messages if "a group is dropped" in text]
    assert "reward of sample 0 in group 0 is nan" in message


def test_a_stopped_maker_counts_the_groups_it_gives_up_in_one_warning(
    holder: Callable[..., Holder], caplog: pytest.LogCaptureFixture
) -> None:
    class AtTheFourth(MakerCallback):
        sends = 0

        def on_send_start(self) -> None:
            self.sends += 1
            if self.sends == 4:  # it waits for room from now on
                timer.start()

    options = {"limit": 1}
    maker = holder(
        stop_timeout=0.2, stream_options=options, max_unsent=2, callbacks=[AtTheFourth()]
    )
    timer = threading.Timer(0.5, maker.stop)
    maker.workingloop(lambda: [prompts(1), prompts(2), prompts(3), prompts(4, 5, 6)])
    timer.join()
    maker.close()
    warnings = [one for one in caplog.messages if "given up" in one]
    assert len(warnings) == 1
    assert "5 groups are given up" in warnings[0]


def test_every_drawn_batch_of_prompts_is_used(holder: Callable[..., Holder]) -> None:
    class Stopping(MakerCallback):
        stops = False

        def on_batch_end(self) -> None:
            if self.stops:
                maker.stop()

    stopping, drawn = Stopping(), list[int]()
    maker = holder(callbacks=[stopping])

    def loader() -> Iterator[torch.Tensor]:
        for number in range(9):
            drawn.append(number)
            yield prompts(number)

    maker.workingloop(loader, num_steps=2)
    assert drawn == [0, 1]
    stopping.stops = True
    maker.workingloop(loader)
    assert drawn == [0, 1, 0]
    maker.workingloop(loader)  # it was asked to end
    assert drawn == [0, 1, 0]


def test_an_update_while_making_experience_is_refused_at_once(
    holder: Callable[..., Holder],
) -> None:
    class Updating(MakerCallback):
        def on_make_experience_end(self, experience: Any) -> None:
            maker.update_experience_maker(new_actor_state_dict={}, fully_update=True)

    maker = holder(callbacks=[Updating()])
    began = time.monotonic()
    with pytest.raises(WeightError, match="makes experience"):
        maker.workingloop(lambda: [prompts(1)])
    assert time.monotonic() - began < 30
    maker.update_experience_maker(new_actor_state_dict={})  # the lock is free again


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(AccelerateStrategy("cpu").prepare(Linear()), Linear)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert AccelerateStrategy("cpu").prepare(None) is None
    with pytest.raises(ConfigError, match="init_process_group"):
        AccelerateStrategy("cpu").prepare(Linear())


def test_the_gpu_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "default_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, index in (("1", 1), ("7", 0), ("", 0), ("x", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert Strategy().device.index == index
