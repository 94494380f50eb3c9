"""Ready makers and trainers with a bound of staleness: rights instead of groups that expire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from redrb import (
    Client,
    ConfigError,
    DetachedGRPOTrainer,
    DetachedReplayBuffer,
    Experience,
    ExperienceMakerHolder,
    ExperienceSender,
    ExperienceStream,
    GRPOMakerHolder,
    Strategy,
    TrainerCallback,
)
from redrb.algorithms import Completions
from redrb.train.rights import split_rows
from tests.networks import TokenNetwork
from tests.samples import numbered

pytestmark = pytest.mark.long  # the same requests as test_admission.py and test_stream*.py

VOCABULARY = 8


def score(completions: Completions) -> torch.Tensor:
    return completions.sequences[:, -1].float()


class Oldest(TrainerCallback):
    """Notes the staleness of the oldest sample of each batch."""

    def __init__(self) -> None:
        self.staleness: list[int] = []
        self.trainer: Any = None

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        versions = experience.policy_version
        oldest = min(versions) if isinstance(versions, list) else versions
        self.staleness.append(self.trainer.weight_version - oldest)


class Job:
    """A trainer of 4 groups a version, and a maker of 32 groups a batch of prompts."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._options: dict[str, Any] = {"client": client, "namespace": namespace}
        self._scope = ExitStack()
        self.oldest = Oldest()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    def trainer(self, batch: int = 4, **options: Any) -> DetachedGRPOTrainer:
        trainer = DetachedGRPOTrainer(
            [],
            lambda: Strategy("cpu"),
            lambda: TokenNetwork(VOCABULARY, VOCABULARY),
            train_batch_size=batch,
            timeout=20,
            callbacks=[self.oldest],
            **self._options,
            **options,
        )
        self.oldest.trainer = trainer
        return self._scope.enter_context(trainer)

    def maker(self, trainers: Sequence[str] = ("trainer_0",), **options: Any) -> GRPOMakerHolder:
        maker = GRPOMakerHolder(
            trainers,
            lambda: Strategy("cpu"),
            lambda: (TokenNetwork(VOCABULARY, VOCABULARY), None, score, None),
            sync_models_from_trainers=True,
            group_size=2,
            max_new_tokens=2,
            **self._options,
            **options,
        )
        return self._scope.enter_context(maker)


@pytest.fixture
def job(client: Client, namespace: str) -> Iterator[Job]:
    with Job(client, namespace) as job:
        yield job


def prompts() -> list[torch.Tensor]:
    return [torch.randint(2, VOCABULARY, (32, 3))]


@pytest.mark.parametrize(("in_flight", "order"), [(False, "fifo"), (True, "admission")])
def test_nothing_expires_where_a_maker_waits_before_it_generates(
    job: Job, in_flight: bool, order: str
) -> None:
    trainer = job.trainer(max_staleness=2, order=order)
    maker = job.maker(in_flight_updates=in_flight)
    trainer.sync_models_to_remote_makers()
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(maker.workingloop, prompts, num_steps=100_000)
        trainer.fit(24, 1)
        maker.stop()
        loop.result(20)
    stats = trainer.buffer.stream.stats()
    assert stats.ledger.expired == 0
    assert max(job.oldest.staleness) <= 2
    assert stats.admission is not None
    assert stats.admission.balanced
    assert (stats.admission.most, stats.admission.late) == (12, 0)
    assert maker.admission_s > 0
    assert stats.admission.used == stats.ledger.put


def test_the_groups_of_a_version_follow_from_batch_steps_and_ranks(job: Job) -> None:
    def expected(trainer: DetachedGRPOTrainer, update_steps: int) -> str:
        trainer.fit(0, update_steps)
        values = trainer.buffer.stream.settings().values
        trainer.close()
        return values["groups_per_version"]

    assert expected(job.trainer(4, max_staleness=2), 3) == "12"
    assert expected(job.trainer(8, max_staleness=2, buffer_limit=2), 1) == "8"
    assert expected(job.trainer(8), 2) == "16"  # the task knows its bound
    ranks = {"rank": 0, "world_size": 3, "task": "ranks", "max_staleness": 1}
    assert expected(job.trainer(4, **ranks), 1) == "12"
    given = {"task": "given", "max_staleness": 1, "groups_per_version": 5}
    assert expected(job.trainer(4, **given), 3) == "5"


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1, "max_reads": 2}])
def test_a_maker_does_not_wait_where_a_task_gives_no_rights(
    job: Job, client: Client, namespace: str, options: dict[str, Any]
) -> None:
    trainer = job.trainer(**options)
    trainer.sync_models_to_remote_makers()
    maker = job.maker()
    maker.workingloop(prompts)
    maker.close()
    stats = trainer.buffer.stream.stats()
    assert (stats.ledger.put, stats.admission) == (32, None)


def test_a_batch_of_prompts_for_several_trainers_gets_the_rights_of_each(job: Job) -> None:
    trainers = [job.trainer(n, name=f"trainer_{n}", max_staleness=0) for n in (4, 9)]
    trainers[1].sync_models_to_remote_makers()
    trainers[0].buffer.stream.advance(1)
    maker = job.maker(["trainer_9", "trainer_4"])

    def rights() -> list[Any]:
        return [trainer.buffer.stream.stats().admission for trainer in trainers]

    def stop_when_all_are_used() -> None:
        until = time.monotonic() + 60
        while [each.used for each in rights()] != [4, 5] and time.monotonic() < until:
            time.sleep(0.01)
        maker.stop()

    stopping = threading.Thread(target=stop_when_all_are_used)
    stopping.start()
    maker.workingloop(lambda: [torch.full((20, 3), 2)])
    stopping.join()
    maker.close()
    assert [(each.used, each.held, each.most) for each in rights()] == [(4, 0, 4), (5, 0, 9)]


def test_a_sender_of_several_streams_uses_the_rights_of_each(
    client: Client, namespace: str
) -> None:
    options: dict[str, Any] = {"max_staleness": 0, "groups_per_version": 4}
    streams = [
        ExperienceStream(client, task, namespace=namespace, **options) for task in ("a", "b")
    ]
    with ExperienceSender(streams) as sender:
        for shares in ([1, 0], [0, 1]):
            assert sender.shares(1) == shares
            rights = [
                s.admit(1, timeout=0) if n else None for s, n in zip(streams, shares, strict=True)
            ]
            sender.send(numbered(0), policy_version=1, admission=rights)
        assert sender.shares(3) == [2, 1]
        with pytest.raises(ConfigError, match="2 streams"):
            sender.send(numbered(1), policy_version=1, admission=streams[0].admit(1, timeout=0))
        (right := streams[0].admit(1, timeout=0)).cancel()
        with pytest.raises(ConfigError, match="0 rights are left"):
            sender.send(numbered(1), policy_version=1, admission=[right, None])
        sender.flush()
    used = [stream.stats().admission for stream in streams]
    assert [each.used for each in used if each] == [1, 1]


class Twins(ExperienceMakerHolder):
    """Makes two groups of each row, and says so only if it is asked to."""

    def build_experience_maker(self, *_: Any) -> Any:
        holder = self

        class Maker:
            counted: Callable[[Any], int] | None = None

            def make_experience(self, inputs: Any, **_options: Any) -> Experience:
                rows = 2 * inputs.shape[0]
                holder.sizes.append(inputs.shape[0])
                return Experience(
                    sequences=inputs.repeat_interleave(2, 0),
                    action_log_probs=torch.zeros(rows, 1),
                    values=torch.zeros(rows),
                    reward=torch.zeros(rows),
                    kl=torch.zeros(rows),
                    advantages=torch.zeros(rows),
                    policy_version=1,
                )

        return Maker()

    sizes: list[int] = []  # noqa: RUF012 (of one test)


@pytest.mark.parametrize("counts", [False, True])
def test_a_maker_of_more_groups_than_prompts_has_to_say_how_many(
    client: Client, namespace: str, counts: bool
) -> None:
    options: dict[str, Any] = {"client": client, "namespace": namespace}
    Twins.sizes = []
    with (
        DetachedReplayBuffer(4, task="t", max_staleness=1, **options) as buffer,
        Twins(["t"], lambda: None, lambda: (None, None, None, None), **options) as maker,
    ):
        buffer.stream.advance(1)
        if counts:
            maker.experience_maker.count_groups = lambda inputs: 2 * len(inputs)  # type: ignore[attr-defined]
        if not counts:
            with pytest.raises(ConfigError, match="Maker made 6 groups where 3 were announced"):
                maker.workingloop(lambda: [torch.zeros(3, 2, dtype=torch.int64)])
        else:
            maker.workingloop(lambda: [torch.zeros(3, 2, dtype=torch.int64)])
        rights = buffer.stream.stats().admission
        assert rights is not None
        assert (rights.used, rights.held) == ((6, 0) if counts else (0, 0))


def test_rows_are_split_in_every_tensor_of_a_batch() -> None:
    batch = {"input_ids": torch.arange(6).view(3, 2), "attention_mask": torch.ones(3, 2), "k": 1}
    first, rest = split_rows(batch, 2)
    assert (first["input_ids"].tolist(), first["k"]) == ([[0, 1], [2, 3]], 1)
    assert (rest["input_ids"].tolist(), len(rest["attention_mask"])) == ([[4, 5]], 1)
    assert split_rows(batch, 3) == (batch, None)
    assert split_rows(torch.arange(3), 1)[1].tolist() == [1, 2]
