"""`DetachedTrainer`: episodes, epochs, callbacks, checkpoints."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import redrb
from redrb import (
    BatchTimeout,
    BufferItem,
    Client,
    ConfigError,
    DetachedTrainer,
    Experience,
    LeaseLost,
    StoreFull,
    StoreUnavailable,
    TrainerCallback,
    WeightPublisher,
    WeightSubscriber,
)
from redrb.errors import DecodeError, PublisherFenced, RecordError
from redrb.train.world import default_device
from tests.signals import sigterm_after

pytestmark = pytest.mark.long  # the same requests as test_weights*.py and test_stream*.py


def item(number: int) -> BufferItem:
    return BufferItem(
        sequences=torch.full((4,), number),
        action_log_probs=torch.full((2,), float(number)),
        values=torch.zeros(2),
        reward=torch.tensor(float(number)),
        kl=torch.zeros(2),
        advantages=torch.zeros(2),
    )


class Trainer(DetachedTrainer):
    """Notes its batches; its model depends on all of them, on their order, and on randomness."""

    def __init__(self, *args: Any, die_at: int = -1, **options: Any) -> None:
        torch.manual_seed(1)
        self.actor = nn.Linear(1, 1).to(default_device())
        self.optimizer = torch.optim.SGD(self.actor.parameters(), lr=0.1, momentum=0.9)
        self.trained: list[list[float]] = []
        self.die_at = die_at
        super().__init__(*args, **options)

    def training_step(self, experience: Experience) -> dict[str, Any]:
        if len(self.trained) == self.die_at:
            raise ZeroDivisionError
        assert experience.reward is not None
        self.trained.append(experience.reward.tolist())
        self.optimizer.zero_grad()
        noise = torch.rand((), device=experience.reward.device)
        loss = (self.actor(experience.reward[:, None] / 50) - noise).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.actor}, fully_update=fully_update)


class Notes(TrainerCallback):
    """Notes every hook."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_fit_start(self) -> None:
        self.hooks.append("fit_start")

    def on_fit_end(self) -> None:
        self.hooks.append("fit_end")

    def on_episode_start(self, episode: int) -> None:
        self.hooks.append(f"episode_start {episode}")

    def on_episode_end(self, episode: int) -> None:
        self.hooks.append(f"episode_end {episode}")

    def on_epoch_start(self, epoch: int) -> None:
        self.hooks.append(f"epoch_start {epoch}")

    def on_epoch_end(self, epoch: int) -> None:
        self.hooks.append(f"epoch_end {epoch}")

    def on_batch_start(self) -> None:
        self.hooks.append("batch_start")

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        assert metrics.keys() == {"loss"}
        assert len(experience) == 2
        self.hooks.append("batch_end")

    def on_update_start(self) -> None:
        self.hooks.append("update_start")

    def on_update_end(self) -> None:
        self.hooks.append("update_end")


@pytest.fixture
def make(client: Client, namespace: str) -> Callable[..., Trainer]:
    def made(**options: Any) -> Trainer:
        options = {"train_batch_size": 2, "timeout": 10, **options}
        return Trainer(["maker_0"], client=client, namespace=namespace, **options)

    return made


def feed(trainer: DetachedTrainer, batches: int, first: int = 0) -> None:
    trainer.buffer_extend([item(number) for number in range(2 * first, 2 * (first + batches))])


def parameters(trainer: Trainer) -> list[float]:
    return [float(p.detach()) for p in trainer.actor.parameters()]


def test_callbacks_come_in_their_order(make: Callable[..., Trainer]) -> None:
    notes = Notes()
    with make(callbacks=[notes]) as trainer:
        feed(trainer, 4)
        trainer.fit(5, 2, train_epochs=2)  # two episodes: the fifth batch is not trained
    batches = ["batch_start", "batch_end"] * 2
    epochs = [
        f"epoch_start {e}" if not end else f"epoch_end {e}" for e in range(2) for end in range(2)
    ]
    expected = ["fit_start"]
    for episode in range(2):
        expected += [f"episode_start {episode}", epochs[0], *batches, epochs[1]]
        expected += [epochs[2], *batches, epochs[3], "update_start", "update_end"]
        expected += [f"episode_end {episode}"]
    assert notes.hooks == [*expected, "fit_end"]


def test_later_epochs_train_the_same_batches_in_a_new_order(make: Callable[..., Trainer]) -> None:
    with make() as trainer:
        feed(trainer, 16)
        trainer.fit(16, 16, train_epochs=3)
        epochs = [trainer.trained[start : start + 16] for start in (0, 16, 32)]
        assert epochs[0] == [[2 * n, 2 * n + 1] for n in range(16)]
        assert epochs[1] != epochs[0] != epochs[2] != epochs[1]
        assert sorted(epochs[1]) == sorted(epochs[2]) == epochs[0]
        ledger = trainer.buffer.stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (32, 0, 0)


def test_full_updates_and_the_end_of_each_episode_are_announced(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make(name="learner") as trainer:
        trainer.sync_models_to_remote_makers()
        assert trainer.weight_version == 1
        feed(trainer, 2)
        trainer.fit(2, 1)
        assert trainer.weight_version == 3
        found = WeightSubscriber(client, "learner", namespace=namespace).fetch()
        assert sorted(found) == ["actor.bias", "actor.weight"]
        assert float(found["actor.bias"]) == float(trainer.actor.bias.detach())
    entries = client.execute(
        "XRANGE", f"redrb:{{{namespace}:maker:maker_0}}:announcements", "-", "+"
    )
    assert len(entries) == 1  # the newest alone is kept


def test_a_failed_step_requeues_its_batch(make: Callable[..., Trainer]) -> None:
    with make(die_at=2) as trainer:
        feed(trainer, 4)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(4, 4)
        ledger = trainer.buffer.stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (4, 0, 4)
        trainer.die_at = -1
        trainer.fit(2, 1)
        assert trainer.trained[2:] == [[4, 5], [6, 7]]


def test_fit_may_be_called_again_and_resumes_in_the_call_it_was_in(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    with make(checkpoint_dir=tmp_path, die_at=5) as first:
        feed(first, 9)
        first.fit(3, 1)
        with pytest.raises(ZeroDivisionError):
            first.fit(6, 1)
    with make(checkpoint_dir=tmp_path) as second:
        second.fit(3, 1)  # was done
        assert second.trained == []
        second.fit(6, 1)
        assert first.trained + second.trained == [[2 * n, 2 * n + 1] for n in range(9)]


def test_a_batch_timeout_names_the_whole_wait(make: Callable[..., Trainer]) -> None:
    with make(timeout=1.2) as trainer:
        trainer.buffer_extend([item(0)])
        with pytest.raises(BatchTimeout) as caught:
            trainer.fit(1, 1)
        assert caught.value.waited_s >= 1.2
        assert caught.value.available == 1
        assert trainer.wait_for_batch_s >= 1.2


def test_with_a_limit_of_one_makers_continue_while_a_batch_trains(
    make: Callable[..., Trainer],
) -> None:
    hooks: list[str] = []

    class PutWhileTraining(TrainerCallback):
        def on_batch_start(self) -> None:
            if not trainer.trained:
                trainer.buffer.extend([item(2), item(3)], timeout=10)
                with pytest.raises(StoreFull):
                    trainer.buffer.extend([item(4)], timeout=0)
                hooks.append("put")

    with make(buffer_limit=1, prefetch=0, callbacks=[PutWhileTraining()]) as trainer:
        feed(trainer, 1)
        trainer.fit(2, 1)
        assert hooks == ["put"]
        assert trainer.trained == [[0, 1], [2, 3]]


def test_a_limit_holds_up_no_checkpoint(make: Callable[..., Trainer], tmp_path: Path) -> None:
    with make(buffer_limit=1, checkpoint_dir=tmp_path, ack="checkpoint", prefetch=0) as trainer:
        items = [item(number) for number in range(8)]
        thread = threading.Thread(target=trainer.buffer.extend, args=(items,))
        thread.start()
        trainer.fit(4, 4)  # all four batches are leased until the checkpoint
        thread.join(20)
        assert len(trainer.trained) == 4


def test_an_overridden_sample_may_pass_over_batches(client: Client, namespace: str) -> None:
    class Original(Trainer):
        def _buffer_sample(self) -> Experience:
            while True:  # every other batch is passed over
                experience = super()._buffer_sample()
                if experience.reward[0] % 4 == 0:  # type: ignore[index]
                    return experience

    notes = Notes()
    options: dict[str, Any] = {"timeout": 5, "callbacks": [notes]}
    with Original([], 2, client=client, namespace=namespace, **options) as trainer:
        feed(trainer, 4)
        trainer.fit(2, 2)
        assert trainer.detached_replay_buffer is trainer.buffer
        assert trainer.trained == [[0, 1], [4, 5]]
        assert notes.hooks.count("episode_start 0") == 1
        assert trainer.buffer.stream.stats().ledger.acked == 6
        rest = DetachedTrainer._buffer_sample(trainer)
        assert rest.reward.tolist() == [6, 7]  # type: ignore[union-attr]


def test_a_stop_ends_fit_after_the_current_step(make: Callable[..., Trainer]) -> None:
    class StopAtThird(TrainerCallback):
        batches = 0

        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            self.batches += 1
            if self.batches == 3:
                trainer.stop("enough")

    notes = Notes()
    with make(callbacks=[StopAtThird(), notes]) as trainer:
        feed(trainer, 8)
        trainer.fit(8, 4)
        assert trainer.stopped == "enough"
        assert len(trainer.trained) == 3
        assert notes.hooks[-1] == "fit_end"
        ledger = trainer.buffer.stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (6, 0, 10)


def test_a_signal_ends_a_wait(make: Callable[..., Trainer]) -> None:
    with make(timeout=None) as trainer:
        feed(trainer, 1)
        before = signal.getsignal(signal.SIGTERM)
        timer = sigterm_after(0.3)
        trainer.fit(8, 4)
        timer.join()
        assert trainer.stopped == "SIGTERM"
        assert len(trainer.trained) == 1
        assert signal.getsignal(signal.SIGTERM) == before


def reference_run(
    make: Callable[..., Trainer], epochs: int
) -> tuple[list[list[float]], list[float]]:
    with make(name="reference", task="reference") as trainer:
        feed(trainer, 12)
        trainer.fit(12, 3, train_epochs=epochs)
        return trainer.trained, parameters(trainer)


@pytest.mark.parametrize(("epochs", "stop_after"), [(1, 4), (2, 1), (2, 7)])
def test_a_stopped_run_resumes_bit_for_bit(
    make: Callable[..., Trainer], tmp_path: Path, epochs: int, stop_after: int
) -> None:
    class StopAfter(TrainerCallback):
        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            if len(first.trained) == stop_after:
                first.stop()

    trained, weights = reference_run(make, epochs)
    with make(checkpoint_dir=tmp_path, callbacks=[StopAfter()]) as first:
        feed(first, 12)
        first.fit(12, 3, train_epochs=epochs)
        assert len(first.trained) == stop_after
    torch.rand(7)
    torch.rand(7, device=default_device())
    with make(checkpoint_dir=tmp_path) as second:
        assert second.resume()
        second.fit(12, 3, train_epochs=epochs)
        assert first.trained + second.trained == trained
        assert parameters(second) == weights
        assert second.buffer.stream.stats().ledger.acked == 24


def test_batches_of_a_checkpoint_are_not_trained_again(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after the checkpoint is written, before its batches are acknowledged."""
    trained, weights = reference_run(make, 1)
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "ack": "checkpoint"}
    with make(**options) as first:
        feed(first, 12)
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr("redrb.stream.take.lease.Lease.ack", lambda *_: {}["crash"])
            first.fit(12, 3)
    with make(**options) as second:
        assert second.resume()
        assert second.buffer.stream.stats().ledger.acked == 6
        second.fit(12, 3)
        assert second.trained == trained[3:]
        assert parameters(second) == weights


def test_ack_step_trains_nothing_twice(make: Callable[..., Trainer], tmp_path: Path) -> None:
    with make(checkpoint_dir=tmp_path, die_at=8) as first:
        feed(first, 12)
        with pytest.raises(ZeroDivisionError):
            first.fit(12, 3)
    with make(checkpoint_dir=tmp_path) as second:
        feed(second, 4, first=12)
        second.fit(12, 3)  # goes on after the six batches of its checkpoint
        together = first.trained + second.trained
        assert sorted(map(tuple, together)) == sorted({*map(tuple, together)})
        assert len(second.trained) == 6


def test_a_trainer_gets_the_batches_of_its_predecessor_at_once(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    first = make(timeout=5)
    feed(first, 3)
    first.buffer.stream.take(
        4, timeout=5
    )  # it dies with this: its heartbeat would hold it for 30 s
    with make(timeout=5) as second:
        second.fit(3, 1)
        assert second.trained == [[0, 1], [2, 3], [4, 5]]
    first.close()


def test_staleness_counts_from_the_trainers_version(
    make: Callable[..., Trainer],
) -> None:
    with make(max_staleness=2) as trainer:
        trainer.sync_models_to_remote_makers()
        for version in (1, 1, 4, 5):
            trainer.buffer.stream.put(item(version), policy_version=version)
        for _ in range(4):
            trainer._update_remote_makers()
        trainer.fit(1, 1)
        assert trainer.trained == [[4, 5]]
        assert trainer.buffer.stream.stats().ledger.expired == 2


def test_groups_that_expire_before_the_first_batch_are_in_the_ledger(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make(max_staleness=0) as trainer:
        stream = trainer.buffer.stream
        with redrb.ExperienceStream(client, stream.task, namespace=namespace) as maker:
            maker.advance(5)
            maker.put(item(1), policy_version=1)
            maker.discard_expired(2)
        ledger = stream.stats().ledger
        assert (ledger.put, ledger.expired) == (3, 3)
        assert ledger.balanced


def test_a_checkpoint_acknowledges_nothing_of_a_task_that_was_created_anew(
    make: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "ack": "checkpoint"}
    with make(**options) as first:
        feed(first, 2)
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr("redrb.stream.take.lease.Lease.ack", lambda *_: {}["crash"])
            first.fit(2, 2)
        first.buffer.stream.clear()
    with make(**options) as second:
        second.buffer.stream.join_group()
        feed(second, 2)
        assert second.resume()
        assert second.buffer.stream.stats().ledger.acked == 0
        assert len(second.buffer.stream) == 4


def away(*_: Any, **__: Any) -> None:
    raise StoreUnavailable("Redis is away", where="there", uncertain=True)


def test_an_update_without_a_reply_does_not_hinder_the_next(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish = WeightPublisher.publish

    def unheard(self: WeightPublisher, *arguments: Any, **options: Any) -> None:
        publish(self, *arguments, **options)
        away()

    with make() as trainer:
        feed(trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(WeightPublisher, "publish", unheard)
            trainer.fit(1, 1)
        assert "keep their old weights" in caplog.text
        trainer.fit(1, 1)
        assert trainer.weight_version == 2


def test_an_error_in_a_step_is_raised_also_while_redis_is_away(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No checkpoint is written of an unfinished step."""
    with make(checkpoint_dir=tmp_path, ack="checkpoint", die_at=2) as trainer:
        feed(trainer, 3)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr("redrb.stream.take.lease.Lease.release", away)
            trainer.fit(3, 3)
        assert not list(tmp_path.glob("*.pt"))
    with make(checkpoint_dir=tmp_path, ack="checkpoint", task="other", name="other") as trainer:
        feed(trainer, 2)
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
            patch.setattr(trainer, "training_step", away)
            trainer.fit(2, 2)
        assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("ack", ["step", "checkpoint"])
def test_ranks_resume_after_a_crash(make: Callable[..., Trainer], tmp_path: Path, ack: str) -> None:
    def run(die_at: int) -> list[Trainer]:
        def work(trainer: Trainer) -> None:
            with trainer, suppress(ZeroDivisionError):
                trainer.fit(6, 1)

        options: dict[str, Any] = {"task": "shared", "world_size": 2, "lease_ms": 1000}
        options |= {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "ack": ack, "prefetch": 1}
        ranks = [
            make(rank=rank, name=f"trainer_{rank}", die_at=die_at, **options) for rank in range(2)
        ]
        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        return ranks

    with make(task="shared", name="feeder") as feeder:
        feed(feeder, 14)
        before, after = run(3), run(-1)
        assert [len(rank.trained) for rank in before] == [3, 3]
        assert [len(rank.trained) for rank in after] == [4, 4]  # its checkpoint is after two
        trained = [tuple(part) for rank in [*before, *after] for part in rank.trained]
        twice = len(trained) - len(set(trained))
        assert twice == (0 if ack == "step" else 2)
        ledger = feeder.buffer.stream.stats().ledger
        assert ledger.balanced
        assert ledger.acked == 4 * (7 if ack == "step" else 6)


def test_a_stop_is_for_all_calls_of_fit_that_follow(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    class StopAtThird(TrainerCallback):
        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            if len(first.trained) == 3:
                first.stop()

    with make(checkpoint_dir=tmp_path, callbacks=[StopAtThird()]) as first:
        feed(first, 12)
        first.fit(8, 2)
        first.fit(4, 2)
        assert len(first.trained) == 3
    with make(checkpoint_dir=tmp_path) as second:
        second.fit(8, 2)
        assert len(second.trained) == 5
        second.fit(4, 2)
        assert len(second.trained) == 9


def test_a_checkpoint_belongs_to_one_trainer_and_is_not_empty(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    with make(checkpoint_dir=tmp_path) as first:
        feed(first, 1)
        first.fit(1, 1)
    with (
        make(checkpoint_dir=tmp_path, name="another") as second,
        pytest.raises(ConfigError, match="separate checkpoint_dir"),
    ):
        second.resume()
    with make(checkpoint_dir=tmp_path / "empty") as third:
        third.models = {"actor": third.actor, "rest": [third.optimizer]}
        del third.actor, third.optimizer
        assert list(third.checkpointed()) == ["models.actor"]
        third.models.clear()
        with pytest.raises(ConfigError, match="nothing for a checkpoint"):
            third.fit(1, 1)
    (tmp_path / "checkpoint-1.pt").write_bytes(b"damaged")
    with make(checkpoint_dir=tmp_path) as fourth:
        for _ in range(2):  # it does not begin anew by itself
            with pytest.raises(DecodeError):
                fourth.fit(1, 1)


def test_named_groups_and_right_padding_are_kept_as_they_are(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    class StopAtSecond(TrainerCallback):
        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            if len(first.trained) == 2:
                first.stop()

    items = [item(number) for number in range(8)]
    for number, each in enumerate(items):
        each.group_id, each.tags, each.extras = f"p{number // 2}", {"n": number}, {"note": [1, "x"]}
    with make(checkpoint_dir=tmp_path, callbacks=[StopAtSecond()]) as first:
        first.buffer_extend(items)
        first.fit(4, 4, train_epochs=2)
    with make(checkpoint_dir=tmp_path) as second:
        second.resume()
        [kept, _] = second._loop.position.kept
        assert kept.group_id == ["p0", "p0"]
        assert kept.extras == [{"note": [1, "x"]}] * 2
        second.fit(4, 4, train_epochs=2)
        assert len(second.trained) == 6


def test_a_timeout_writes_a_checkpoint(make: Callable[..., Trainer], tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "ack": "checkpoint", "timeout": 0.3}
    with make(**options) as first:
        feed(first, 5)
        with pytest.raises(BatchTimeout):
            first.fit(8, 4)
    with make(**options) as second:
        feed(second, 3, first=5)
        second.fit(8, 4)
        assert len(second.trained) == 3
        assert second.buffer.stream.stats().ledger.acked == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 3}, "buffer_limit"),
        ({"ack": "later"}, "ack="),
        ({"rank": 1}, "world_size"),
        ({"callbacks": [print]}, "TrainerCallback"),
        ({"name": "a b"}, "trainer"),
        ({"weights_dtype": "int8"}, "bfloat16"),
    ],
)
def test_bad_options_are_refused(
    make: Callable[..., Trainer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_numbers_of_steps_are_checked(make: Callable[..., Trainer], tmp_path: Path) -> None:
    with make(checkpoint_dir=tmp_path, ack="checkpoint") as trainer:
        for numbers in ((4, 0), (4, 2, 0)):
            with pytest.raises(ConfigError, match="at least 1"):
                trainer.fit(*numbers)


def test_fit_without_total_steps_trains_until_it_is_stopped(
    make: Callable[..., Trainer],
) -> None:
    class StopAtFifth(TrainerCallback):
        waited: list[float] = []  # noqa: RUF012

        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            self.waited.append(trainer.wait_for_batch_s)
            if len(self.waited) == 2:
                timer.start()
            if len(self.waited) == 5:
                trainer.stop("enough")

    def feed_after_wait() -> None:
        steps = trainer.buffer.stream.worker.steps
        while steps.lasted_s:  # until the loop asks for the next batch
            time.sleep(0.002)
        time.sleep(0.5)
        feed(trainer, 4)

    with make(callbacks=[StopAtFifth()]) as trainer:
        feed(trainer, 2)
        timer = threading.Thread(target=feed_after_wait)
        trainer.fit(None, 2)
        timer.join()
        assert (len(trainer.trained), trainer.weight_version) == (5, 2)
        assert trainer.wait_for_batch_s >= 0.3
        assert sorted(StopAtFifth.waited) == StopAtFifth.waited  # counted while the wait goes on
        assert StopAtFifth.waited[2] - StopAtFifth.waited[1] >= 0.3


def test_a_trainer_takes_over_the_weights_of_its_name(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make() as first, make() as second:
        assert first.take_over({"actor": first.actor}) == 0
        first.sync_models_to_remote_makers()
        feed(first, 2)
        first.fit(1, 1)
        before = [parameter.detach().clone() for parameter in second.actor.parameters()]
        assert second.take_over({"actor": second.actor}) == 2
        assert parameters(second) == parameters(first) != [float(p) for p in before]
        with pytest.raises(PublisherFenced):
            first.fit(1, 1)
        second.sync_models_to_remote_makers()
        assert second.weight_version == 3


def test_a_trainer_publishes_newer_versions_than_a_running_one_of_its_name(
    make: Callable[..., Trainer],
) -> None:
    with make() as first:
        first.sync_models_to_remote_makers()
        with make() as second:
            first.sync_models_to_remote_makers()
            second.sync_models_to_remote_makers()
            assert second.weight_version == 3


def test_a_version_that_was_published_and_not_announced_is_found(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make(name="t") as trainer:
        trainer.sync_models_to_remote_makers()
    announcements = f"redrb:{{{namespace}:trainer:t}}:announcements"
    client.execute("DEL", announcements)  # as if it had died between the two
    with make(name="t") as trainer:
        assert trainer.take_over({"actor": trainer.actor}) == 1
    assert len(client.execute("XRANGE", announcements, "-", "+")) == 1


def test_a_trainer_is_found_by_its_successor_after_redis_lost_its_data(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make(name="t") as first:
        client.execute("DEL", *client.execute("KEYS", f"redrb:{{{namespace}*"))
        first.sync_models_to_remote_makers()
        feed(first, 1)
        lease = first.buffer.stream.take(1, timeout=5)
        with make(name="t"), pytest.raises(LeaseLost):  # which gives the group to all
            lease.ack()


def test_weights_may_be_sent_in_another_dtype(
    make: Callable[..., Trainer], client: Client, namespace: str
) -> None:
    with make(name="t", weights_dtype="bfloat16") as trainer:
        assert trainer.published == ()
        kept = parameters(trainer)
        trainer.sync_models_to_remote_makers()
        assert parameters(trainer) == kept
        (published,) = trainer.published
        assert (published.version, published.kind, published.name) == (1, "full", "t")
        sent = redrb.WeightSubscriber(client, "t", namespace=namespace).fetch()
        assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
        assert torch.equal(sent["actor.weight"], trainer.actor.weight.to("cpu", torch.bfloat16))


def test_callbacks_are_called_for_lost_batches_and_misfits(make: Callable[..., Trainer]) -> None:
    events: list[str] = []

    class Hears(TrainerCallback):
        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            if len(trainer.trained) == 1:
                trainer.buffer.stream.clear()

        def on_batch_lost(self, error: LeaseLost) -> None:
            events.append("lost")
            feed(trainer, 1)
            wide = item(7)
            wide.kl = torch.zeros(())
            trainer.buffer_extend([item(6), wide])
            feed(trainer, 1, first=5)

        def on_misfits(self, error: RecordError) -> None:
            events.append(f"misfits {len(error.ids)}")

    with make(callbacks=[Hears()]) as trainer:
        feed(trainer, 1)
        trainer.fit(3, 3)
        assert events == ["lost", "misfits 1"]
        assert trainer.trained[1:] == [[0, 1], [6, 10]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_step_trains_groups_beyond_the_bound_of_staleness(
    make: Callable[..., Trainer], prefetch: int
) -> None:
    trained: list[int | None] = []

    def put() -> None:
        for number in range(6):
            trainer.buffer.stream.put([item(number)], policy_version=trainer.weight_version)

    class Steps(TrainerCallback):
        def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
            versions = experience.policy_version
            assert isinstance(versions, list)
            trained.extend(made and trainer.weight_version - made for made in versions)

        def on_update_end(self) -> None:
            put()

    with make(prefetch=prefetch, max_staleness=0, callbacks=[Steps()]) as trainer:
        trainer.sync_models_to_remote_makers()
        put()
        trainer.fit(total_steps=4, update_steps=1)
    assert trained == [0] * 8
