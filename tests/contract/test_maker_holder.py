"""`ExperienceMakerHolder`: loops, sending, updates, transmission graphs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

import redrb
from redrb import (
    Client,
    ConfigError,
    DetachedReplayBuffer,
    DetachedTrainer,
    Experience,
    ExperienceMakerHolder,
    MakerCallback,
    Strategy,
)
from redrb.errors import RecordError, WeightError, WeightTimeout
from tests.networks import PlainActor, PlainCritic
from tests.signals import sigterm_after

pytestmark = pytest.mark.long  # the same requests as test_weights*.py and test_stream*.py


class Linear(nn.Module):
    """A model of one number, so that a test sees which weights made a sample."""

    def __init__(self, value: float = 0.0, *, frozen: bool = False) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((1, 1), value))
        self.frozen = nn.Parameter(torch.full((1, 1), value), requires_grad=not frozen)


class Rewarding:
    """Makes experience whose reward and values are the weights of actor and critic."""

    def __init__(self, actor: Linear, critic: Linear | None) -> None:
        self.actor, self.critic = actor, critic
        self.pause: Callable[[], None] = lambda: None

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> Experience:
        tokens = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
        batch = tokens.shape[0]
        first = float(self.actor.trained.detach())
        self.pause()
        critic = 0.0 if self.critic is None else float(self.critic.trained.detach())
        return Experience(
            sequences=tokens,
            action_log_probs=torch.full((batch, 1), float(self.actor.frozen.detach())),
            values=torch.full((batch,), critic),
            reward=torch.full((batch,), first),
            kl=torch.full((batch,), float(generate_kwargs.get("kl", 0.0))),
            advantages=torch.zeros(batch),
        )


class Holder(ExperienceMakerHolder):
    def build_experience_maker(
        self, actor: Any, critic: Any, reward_model: Any, initial_model: Any, kl_coef: float
    ) -> Rewarding:
        assert kl_coef == 0.1
        return Rewarding(actor, critic)


class Trainer(DetachedTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.actor, self.critic = Linear(1.0), Linear(1.0)
        super().__init__(*args, **options)

    def training_step(self, experience: Experience) -> dict[str, Any]:
        return {}

    def set(self, value: float) -> None:
        with torch.no_grad():
            for model in (self.actor, self.critic):
                model.trained.fill_(value)

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        models = {"actor": self.actor, "critic": self.critic}
        self.push_weights(models, fully_update=fully_update)


@pytest.fixture
def holder(client: Client, namespace: str, scope: ExitStack) -> Callable[..., Holder]:
    def made(trainers: Sequence[str] = ("trainer_0",), **options: Any) -> Holder:
        models = options.pop("models", lambda: (Linear(), Linear(), None, None))
        held = Holder(
            list(trainers), Strategy, models, client=client, namespace=namespace, **options
        )
        return scope.enter_context(held)

    return made


@pytest.fixture
def buffer(client: Client, namespace: str, scope: ExitStack) -> Callable[..., DetachedReplayBuffer]:
    def opened(task: str = "trainer_0", size: int = 1) -> DetachedReplayBuffer:
        made = DetachedReplayBuffer(size, client=client, namespace=namespace, task=task)
        return scope.enter_context(made)

    return opened


@pytest.fixture
def trainer(client: Client, namespace: str, scope: ExitStack) -> Callable[..., Trainer]:
    def made(makers: Sequence[str] = ("maker_0",), **options: Any) -> Trainer:
        return scope.enter_context(
            Trainer(list(makers), client=client, namespace=namespace, timeout=20, **options)
        )

    return made


def prompts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


def stored(buffer: DetachedReplayBuffer) -> list[int]:
    found = []
    while len(buffer.stream):
        found.append(int(buffer.sample(timeout=5).sequences[0, 0]))  # type: ignore[index]
    return found


def test_hooks_come_in_their_order(holder: Callable[..., Holder]) -> None:
    hooks: list[str] = []

    class Notes(MakerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                return lambda *_: hooks.append(name[3:])
            return super().__getattribute__(name)

    maker = holder(callbacks=[Notes()])
    maker.workingloop(lambda: [prompts(1), prompts(2)])
    step = ["batch_start", "make_experience_start", "make_experience_end", "send_start"]
    step += ["send_end", "batch_end"]
    assert hooks == ["loop_start", *step, *step, "loop_end"]


def test_the_steps_of_a_maker_are_announced(holder: Callable[..., Holder]) -> None:
    maker = holder()
    maker.workingloop(lambda: [prompts(1), prompts(2)])
    said = msgpack.unpackb(maker._streams[0].worker.announcement())
    assert (said["steps"], said["step_s"]) == (2, 0)
    assert said["steps_s"] > 0


def test_samples_go_round_robin_and_the_cursor_is_kept_across_steps(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker = holder(["a", "b", "c"])
    maker.workingloop(lambda: [prompts(0, 1, 2, 3), prompts(4, 5, 6, 7)])
    maker.workingloop(lambda: [prompts(8)])
    assert [stored(buffer(task)) for task in "abc"] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_completions_of_a_prompt_are_one_group_where_they_are_named(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker, read = holder(), buffer()
    make = maker.experience_maker.make_experience
    for names, sizes in (
        (None, [1, 1, 1, 1]),
        ([None] * 4, [1, 1, 1, 1]),
        (["a", "b", "a", None], [2, 1, 1]),
        (["a", "b", "c", None], [1, 1, 1, 1]),
    ):

        def named(inputs: Any, names: Any = names, **options: Any) -> Experience:
            experience = make(inputs, **options)
            experience.group_id = names
            return experience

        maker.experience_maker.make_experience = named  # type: ignore[method-assign]
        maker.workingloop(lambda: [prompts(0, 1, 2, 3)])
        with read.stream.take(len(sizes), timeout=5) as lease:
            assert [len(group) for group in lease.groups()] == sizes
        assert len(read.stream) == 0


def test_epochs_and_steps(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker, read = holder(), buffer()
    loaders: list[int] = []

    def loader() -> list[torch.Tensor]:
        loaders.append(1)
        return [prompts(number) for number in range(3)]

    maker.workingloop(loader, num_epochs=2)
    assert stored(read) == [0, 1, 2, 0, 1, 2]
    maker.workingloop(loader, num_epochs=9, num_steps=4)  # steps count, the loader begins anew
    assert stored(read) == [0, 1, 2, 0]
    assert len(loaders) == 2
    maker.workingloop(lambda: iter(loader()), num_steps=3)
    assert stored(read) == [0, 1, 2]
    for numbers in ({"num_epochs": 2}, {"num_steps": 4}):
        with pytest.raises(ConfigError, match="once for all passes"):
            maker.workingloop(lambda: iter(loader()), **numbers)
    with pytest.raises(ConfigError, match="single batch"):
        maker.workingloop(list, num_steps=2)


def test_inputs_are_tensors_or_dicts_of_them(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker = holder(kl=0.5)
    maker.workingloop(lambda: [{"input_ids": prompts(7), "attention_mask": prompts(1)}])
    sample = buffer().sample(timeout=5)
    assert sample.sequences is not None
    assert sample.kl is not None
    assert (int(sample.sequences[0, 0]), float(sample.kl[0])) == (7, 0.5)
    for wrong in ([1, 2], "text", None):
        with pytest.raises(RecordError, match=type(wrong).__name__):
            maker.workingloop(lambda wrong=wrong: [wrong])  # type: ignore[misc]


def test_a_maker_waits_for_its_first_full_update(
    holder: Callable[..., Holder],
    trainer: Callable[..., Trainer],
    buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    maker = holder(sync_models_from_trainers=True)
    learner = trainer()
    timer = threading.Timer(0.3, learner.sync_models_to_remote_makers)
    timer.start()
    maker.workingloop(lambda: [prompts(1)])
    timer.join()
    sample = buffer().sample(timeout=5)
    assert sample.reward is not None
    assert (float(sample.reward[0]), sample.policy_version) == (1.0, [1])
    late = holder(sync_models_from_trainers=True)  # it finds the earlier announcement
    late.workingloop(lambda: [prompts(1)])
    assert late.policy_version == 1


class Overriding(Holder):
    """A maker that makes experience by itself, without a weight version."""

    def make_experience(self, inputs: Any) -> Experience:
        made: Experience = self.experience_maker.make_experience(inputs)
        return made


@pytest.mark.parametrize("kind", [Holder, Overriding])
def test_samples_of_makers_that_began_before_the_trainer_become_stale(
    client: Client, namespace: str, scope: ExitStack, trainer: Callable[..., Trainer], kind: Any
) -> None:
    """Its bound is not known when they are put."""
    models = (Linear(), Linear(), None, None)
    maker = scope.enter_context(
        kind(["trainer_0"], Strategy, lambda: models, client=client, namespace=namespace)
    )
    maker.workingloop(lambda: [prompts(1, 2)])
    learner = trainer([], max_staleness=1, train_batch_size=1)
    learner.sync_models_to_remote_makers()
    first = learner.buffer.sample(timeout=5)
    assert first.policy_version == [0]
    maker.workingloop(lambda: [prompts(3)])
    for _ in range(2):
        learner.sync_models_to_remote_makers()
    assert learner.buffer.stream.expire() == 2
    maker.workingloop(lambda: [prompts(4)])
    assert learner.buffer.sample(timeout=5).policy_version == [3]


def test_a_maker_that_no_trainer_names_follows_the_first_of_its_list(
    holder: Callable[..., Holder],
    trainer: Callable[..., Trainer],
    buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    early = holder(["a", "b"], name="early", sync_models_from_trainers=True)
    first, second = trainer([], name="a"), trainer(["somebody"], name="b")
    second.set(9.0)
    second.sync_models_to_remote_makers()
    timer = threading.Timer(0.3, first.sync_models_to_remote_makers)  # it is woken by this
    timer.start()
    early.workingloop(lambda: [prompts(1)])
    timer.join()
    first.set(5.0)
    first._update_remote_makers()
    early.workingloop(lambda: [prompts(2, 3)])
    late = holder(["a"], name="late", sync_models_from_trainers=True)
    late.workingloop(lambda: [prompts(4)])
    other = holder(["a"], name="other", follow="b", sync_models_from_trainers=True)
    other.workingloop(lambda: [prompts(5)])
    read = buffer("a", size=4).sample(timeout=5)
    assert read.sequences is not None
    assert read.reward is not None
    assert read.sequences[:, 0].tolist() == [1, 3, 4, 5]
    assert read.reward.tolist() == [1.0, 5.0, 5.0, 9.0]
    assert read.policy_version == [1, 2, 2, 1]


def test_a_maker_follows_the_trainer_that_names_it_from_then_on(
    holder: Callable[..., Holder], trainer: Callable[..., Trainer]
) -> None:
    maker = holder(["a", "b"], name="m", sync_models_from_trainers=True)
    chosen, naming = trainer([], name="a"), trainer(["m"], name="b")
    chosen.sync_models_to_remote_makers()
    timer = threading.Timer(0.3, naming.sync_models_to_remote_makers)
    naming.set(3.0)
    timer.start()
    maker.workingloop(lambda: [prompts(1)])  # it was named before there were weights: it waited
    timer.join()
    assert float(maker.experience_maker.actor.trained.detach()) == 3.0  # type: ignore[attr-defined]
    chosen.sync_models_to_remote_makers()
    chosen.sync_models_to_remote_makers()
    maker.workingloop(lambda: [prompts(1)])
    assert maker.policy_version == 1
    alone = holder(["a"], name="alone", sync_models_from_trainers=True)
    alone.workingloop(lambda: [prompts(1)])
    assert alone.policy_version == 3
    later = trainer(["alone"], name="c")
    later.set(7.0)
    later.sync_models_to_remote_makers()
    alone.workingloop(lambda: [prompts(1)])
    assert float(alone.experience_maker.actor.trained.detach()) == 7.0  # type: ignore[attr-defined]


def test_without_weights_a_maker_times_out_or_ends_when_asked(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker = holder(sync_models_from_trainers=True, weights_timeout=0.7, name="m1")
    with pytest.raises(WeightTimeout, match="m1"):
        maker.workingloop(lambda: [prompts(1)])
    maker = holder(sync_models_from_trainers=True, name="m2")
    timer = sigterm_after(0.2)
    maker.workingloop(lambda: [prompts(1)])
    timer.join()
    assert maker.stopped == "SIGTERM"
    assert len(buffer().stream) == 0


def test_each_batch_is_made_with_the_newest_weights_of_both_models(
    holder: Callable[..., Holder],
    trainer: Callable[..., Trainer],
    buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    maker, learner = holder(sync_models_from_trainers=True), trainer()
    learner.sync_models_to_remote_makers()

    def loader() -> Iterator[torch.Tensor]:
        for number in range(6):
            if number % 2 == 0:
                learner.set(float(number))
                learner._update_remote_makers()
            yield prompts(number)

    announced, make = [], maker.experience_maker.make_experience

    def make_noted(*args: Any, **options: Any) -> Experience:
        announced.append(maker._streams[0].worker.weight_version)
        return make(*args, **options)

    maker.experience_maker.make_experience = make_noted  # type: ignore[method-assign]
    maker.workingloop(loader)
    assert announced == [2, 2, 3, 3, 4, 4]  # the version of the batch that is being made
    read = buffer(size=6).sample(timeout=5)
    assert read.reward is not None
    assert read.values is not None
    assert read.reward.tolist() == read.values.tolist() == [0, 0, 2, 2, 4, 4]
    assert read.policy_version == [2, 2, 3, 3, 4, 4]


def shards(maker: Holder, value: float, *, fully_update: bool) -> None:
    """Send an update as ColossalAI's trainer does, up to its last call."""
    update = maker.update_experience_maker
    update(chunk_start=True, fully_update=fully_update)
    for name in ("trained", "frozen"):
        shard = {name: torch.full((1, 1), value)}
        update(new_actor_state_dict=shard, fully_update=fully_update)
        update(new_critic_state_dict=shard, fully_update=fully_update)


def test_an_update_comes_in_the_calls_of_colossalais_trainer(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker, read = holder(sync_models_from_trainers=True, weights_timeout=0.2), buffer(size=1)
    actor = maker.experience_maker.actor  # type: ignore[attr-defined]
    shards(maker, 3.0, fully_update=True)
    assert float(actor.trained.detach()) == 0.0
    assert not maker._weights.initialised
    maker.update_experience_maker(chunk_end=True, fully_update=True)
    shards(maker, 4.0, fully_update=False)
    maker.update_experience_maker(chunk_end=True, fully_update=False)
    maker.update_experience_maker(new_critic_state_dict={"trained": torch.full((1, 1), 5.0)})
    maker.workingloop(lambda: [prompts(1)])
    sample = read.sample(timeout=5)
    numbers = (sample.reward, sample.action_log_probs, sample.values)
    assert [float(number.squeeze()) for number in numbers if number is not None] == [4.0, 4.0, 5.0]


def test_a_failed_update_in_shards_loads_none_of_them(holder: Callable[..., Holder]) -> None:
    maker = holder(models=lambda: (Linear(), None, None, None))
    actor, update = maker.experience_maker.actor, maker.update_experience_maker  # type: ignore[attr-defined]
    shard = {"trained": torch.ones(1, 1)}
    update(chunk_start=True)
    with pytest.raises(WeightError, match="has no critic"):
        update(new_critic_state_dict=shard)
    for call in ({"new_actor_state_dict": shard}, {"new_actor_state_dict": shard}, {}):
        with pytest.raises(WeightError, match="no update is under way"):
            update(**call, chunk_end=None if call else True)
    update(chunk_start=True)
    update(new_actor_state_dict=shard, chunk_start=True)  # the trainer was started again
    assert float(actor.trained.detach()) == 0.0
    update(chunk_end=True)
    assert float(actor.trained.detach()) == 1.0


def test_options_of_generation_are_checked_when_the_maker_is_made(
    client: Client, namespace: str
) -> None:
    def made(**options: Any) -> ExperienceMakerHolder:
        models = (Linear(), Linear(), None, None)
        return ExperienceMakerHolder(
            ["t"], Strategy, lambda: models, client=client, namespace=namespace, **options
        )

    of_coati = {"do_sample": True, "top_k": 50, "use_cache": True, "num_beams": 1}
    made(max_length=9, early_stopping=True, **of_coati).close()
    for wrong, said in (
        ({"max_length": 9, "typical_p": 1}, "no option typical_p"),
        ({"max_length": 9, "num_beams": 2}, "num_beams 2"),
        ({"max_length": 9, "temperature": 0}, "temperature 0"),
        ({"top_k": 9}, "max_new_tokens or max_length"),
    ):
        with pytest.raises(ConfigError, match=said):
            made(**wrong)


def test_a_late_maker_gets_frozen_and_trained_weights(
    holder: Callable[..., Holder], trainer: Callable[..., Trainer]
) -> None:
    learner = trainer(name="t")
    for model in (learner.actor, learner.critic):
        model.frozen.requires_grad_(False)
        with torch.no_grad():
            model.frozen.fill_(9.0)
    learner.sync_models_to_remote_makers()
    learner.set(2.0)
    learner._update_remote_makers()
    learner.set(3.0)
    learner._update_remote_makers()
    late = holder(["t"], sync_models_from_trainers=True)
    late.workingloop(lambda: [prompts(1)])
    made = late.experience_maker.make_experience(prompts(1))
    assert made.reward is not None
    assert made.action_log_probs is not None
    assert (float(made.reward[0]), float(made.action_log_probs[0, 0])) == (3.0, 9.0)
    assert late.policy_version == 3
    learner.set(4.0)
    learner.sync_models_to_remote_makers()
    late.workingloop(lambda: [prompts(1)])
    assert late.policy_version == 4


@pytest.mark.parametrize(
    ("makers", "trainers"),
    [
        ({"m0": ["t0", "t1"], "m1": ["t0", "t1"]}, {"t0": ["m0"], "t1": ["m1"]}),
        ({"m0": ["t0", "t1", "t2"]}, {"t0": ["m0"], "t1": [], "t2": []}),
        ({"m0": ["t1"], "m1": ["t0"], "m2": ["t0"]}, {"t0": ["m2", "m0"], "t1": ["m1"]}),
    ],
)
def test_transmission_graphs_by_name(
    holder: Callable[..., Holder],
    trainer: Callable[..., Trainer],
    client: Client,
    namespace: str,
    makers: dict[str, list[str]],
    trainers: dict[str, list[str]],
) -> None:
    learners = {name: trainer(targets, name=name) for name, targets in trainers.items()}
    for value, learner in enumerate(learners.values(), 10):
        learner.set(float(value))
        learner.sync_models_to_remote_makers()
    expected: dict[str, list[float]] = {name: [] for name in trainers}
    for name, targets in makers.items():
        made = holder(targets, name=name, sync_models_from_trainers=True)
        made.workingloop(lambda targets=targets: [prompts(*range(len(targets)))])  # type: ignore[misc]
        source = next(t for t, named in trainers.items() if name in named)
        for target in targets:
            expected[target].append(10.0 + list(trainers).index(source))
    for name in learners:
        count = len(expected[name])
        if count:
            with DetachedReplayBuffer(
                count,
                client=client,
                namespace=namespace,
                task=name,
            ) as read:
                sample = read.sample(timeout=5)
            assert sample.reward is not None
            assert sorted(sample.reward.tolist()) == sorted(expected[name])


def test_a_signal_ends_the_loop_when_all_is_sent(
    holder: Callable[..., Holder], buffer: Callable[..., DetachedReplayBuffer]
) -> None:
    maker, read = holder(), buffer()

    def loader() -> Iterator[torch.Tensor]:
        for number in range(1000):
            if number == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            yield prompts(number)

    maker.workingloop(loader)
    assert maker.stopped == "SIGTERM"
    assert stored(read) == list(range(5))


@pytest.mark.parametrize("room", [True, False])
def test_a_loop_that_is_asked_to_end_waits_for_room_until_stop_timeout(
    holder: Callable[..., Holder],
    buffer: Callable[..., DetachedReplayBuffer],
    caplog: pytest.LogCaptureFixture,
    room: bool,
) -> None:
    options = {"stream_options": {"limit": 2}, "max_unsent": 1}
    maker, read = holder(stop_timeout=0.5 if not room else 20, **options), buffer()

    def read_later() -> None:
        timer.join()
        time.sleep(0.5)
        for _ in range(3):
            read.sample(timeout=5)

    timer = sigterm_after(0.5)
    reader = threading.Thread(target=read_later)
    if room:
        reader.start()
    began = time.monotonic()
    maker.workingloop(lambda: [prompts(number) for number in range(9)])
    maker.close()
    assert time.monotonic() - began < 10
    timer.join()
    put = read.stream.stats().ledger.put
    if room:
        reader.join()
        assert put == 4  # two were in, one on its way, one waited to be taken over
        assert caplog.text == ""
    else:
        assert put == 2
        assert "given up" in caplog.text
    read.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainers": []}, "at least one"),
        ({"name": "a b"}, "maker"),
        ({"callbacks": [1]}, "MakerCallback"),
    ],
)
def test_bad_options_are_refused(
    holder: Callable[..., Holder], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        holder(**options)


def test_the_samples_of_each_batch_are_logged_for_debugging(
    holder: Callable[..., Holder], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "redrb")
    holder(name="m", debug=True).workingloop(lambda: [prompts(1, 2, 3), prompts(4)])
    said = [text for text in caplog.messages if " made " in text]
    assert said == ["maker 'm' made 3 samples", "maker 'm' made 1 sample"]


def test_the_environment_of_ranks_is_set(
    holder: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    holder(env_info={"rank": 2, "world_size": "4"})
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "4")


def test_the_own_make_experience_of_a_subclass_is_called(client: Client, namespace: str) -> None:
    """Also where its experience maker makes groups part by part."""

    class Own(ExperienceMakerHolder):
        calls = 0

        def make_experience(self, inputs: Any) -> Experience:
            self.calls += 1
            return super().make_experience(inputs)

    models = (PlainActor(), PlainCritic(), _length, PlainActor())
    place = {"client": client, "namespace": namespace, "max_new_tokens": 3}
    with Own(["t"], Strategy, lambda: models, sync_models_from_trainers=False, **place) as held:
        held.workingloop(lambda: [torch.randint(1, 5, (4, 3))])
        assert held.calls == 1


def _length(completion: redrb.algorithms.Completion) -> float:
    return float(completion.length)
