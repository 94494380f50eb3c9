"""Makers learn that the job is over, and end; a trainer that starts again takes that back."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from redrb import Client, DetachedTrainer, Experience, ExperienceMakerHolder, Strategy
from redrb.keys import trainer_key
from redrb.train import announcements as job_end
from redrb.train.announcements import AnnouncementReader
from tests.signals import sigterm_after


class Trainer(DetachedTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.actor = nn.Linear(1, 1)
        super().__init__(*args, **options)

    def training_step(self, experience: Experience) -> dict[str, Any]:
        return {}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        self.push_weights({"actor": self.actor}, fully_update=fully_update)


class Rewarding:
    def __init__(self, began: threading.Event) -> None:
        self._began = began

    def make_experience(self, inputs: torch.Tensor, **generate_kwargs: Any) -> Experience:
        self._began.set()
        ones = torch.ones(len(inputs))
        return Experience(inputs.long(), ones[:, None], ones, ones, ones, ones)


class Holder(ExperienceMakerHolder):
    def build_experience_maker(self, *models: Any) -> Any:
        self.began = threading.Event()
        return Rewarding(self.began)


class Job:
    """Trainers and makers of one namespace."""

    def __init__(self, client: Client, namespace: str, scope: ExitStack) -> None:
        self._options: dict[str, Any] = {"client": client, "namespace": namespace}
        self._scope = scope
        self._pool = scope.enter_context(ThreadPoolExecutor(2))

    def trainer(self, *makers: str, **options: Any) -> Trainer:
        return self._scope.enter_context(Trainer(list(makers), **self._options, **options))

    def maker(self, *trainers: str, **options: Any) -> Holder:
        models = lambda: (nn.Linear(1, 1), None, None, None)  # noqa: E731
        named = list(trainers) or ["trainer_0"]
        return self._scope.enter_context(
            Holder(named, Strategy, models, **self._options, **options)
        )

    def loop(self, maker: Holder) -> Future[None]:
        """Run a maker's endless loop in a thread."""
        loop = self._pool.submit(maker.workingloop, lambda: [torch.ones(1, 1)], num_steps=10**9)
        self._scope.callback(loop.result, 10)
        self._scope.callback(maker.stop)
        return loop


@pytest.fixture
def job(client, namespace):
    with ExitStack() as scope:
        yield Job(client, namespace, scope)


def test_the_watching_thread_ends_with_the_loop(job):
    """Python's end would stop it in the middle of C++ code, which aborts the process."""
    maker = job.maker()
    job.trainer("maker_0").push_weights({"actor": nn.Linear(1, 1)}, fully_update=True)
    maker.workingloop(lambda: [torch.ones(1, 1)], num_steps=1)
    assert not [each for each in threading.enumerate() if each.name == "redrb-job-end"]


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(job_end, "GRACE_S", 0.3)
    monkeypatch.setattr(job_end, "_WAIT_S", 0.1)


def test_makers_end_when_the_trainer_has_ended_the_job(job, monkeypatch):
    # A maker whose thread first looks after the end takes it for that of an earlier run.
    monkeypatch.setattr(job_end, "GRACE_S", 3.0)
    trainer = job.trainer("named", buffer_limit=1)  # beyond 8 groups makers wait for room
    makers = [job.maker(name="named", room_timeout=0.1), job.maker(name="other", room_timeout=0.1)]
    trainer.sync_models_to_remote_makers()
    loops = [job.loop(maker) for maker in makers]
    assert all(maker.began.wait(10) for maker in makers)
    assert trainer.end_job("enough reward")
    for maker, loop in zip(makers, loops, strict=True):
        loop.result(10)
        assert maker.stopped == "trainer 'trainer_0' has ended the job: enough reward"


def test_the_end_as_the_documents_print_it(job, client, namespace):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from-coati.md").read_text()
    [example] = re.findall(r"```python\n(trainer\..*?)```", page, re.DOTALL)
    exec(example.replace("1000", "0"), {"trainer": job.trainer()})
    newest = AnnouncementReader(client, trainer_key(namespace, "trainer_0")).newest()
    assert newest.ended == "all steps are trained"


@pytest.mark.long
def test_a_trainer_resumes_as_the_documents_print_it(job, tmp_path, monkeypatch):
    """Its maker waits for the first weights, which a trainer sends that only fits never."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from-coati.md").read_text()
    [example] = re.findall(r"```python\n(trainer = MyTrainer\(.*?)```", page, re.DOTALL)
    assert "fit(total_steps=100_000, update_steps=100)" in example
    maker = job.maker(name="maker_0", sync_models_from_trainers=True, weights_timeout=20)
    job.loop(maker)
    for steps in (2, 5):
        names = {"MyTrainer": lambda makers, **given: job.trainer(*makers, timeout=20, **given)}
        exec(
            example.replace("100_000", str(steps)).replace("update_steps=100", "update_steps=1"),
            names,
        )
        names["trainer"].close()
        assert names["trainer"]._loop.position.step == steps
        assert names["trainer"].weight_version > steps  # one before the first step


def test_a_maker_of_several_trainers_ends_with_the_last(job):
    first, second = job.trainer(name="a"), job.trainer(name="b")
    second.sync_models_to_remote_makers()
    maker = job.maker("a", "b", max_unsent=1)
    loop = job.loop(maker)
    assert maker.began.wait(10)
    first.sync_models_to_remote_makers()
    first.end_job()
    with pytest.raises(TimeoutError):
        loop.result(0.5)
    second.end_job()
    loop.result(10)
    assert "'a' has ended the job: all steps are trained" in maker.stopped


def test_a_maker_that_starts_late_waits_whether_the_end_is_taken_back(job, short_grace):
    job.trainer("m").end_job("done")
    late = job.maker(name="m", sync_models_from_trainers=True)
    loop = job.loop(late)
    loop.result(10)
    assert late.stopped.endswith("done")
    again = job.trainer()
    early = job.maker(name="n", sync_models_from_trainers=True)
    loop = job.loop(early)
    with pytest.raises(TimeoutError):
        loop.result(0.8)
    again.sync_models_to_remote_makers()
    assert early.began.wait(10)
    assert not early.stopped


def test_a_maker_may_go_on(job, short_grace):
    maker = job.maker(end_with_job=False)
    job.trainer().end_job()
    loop = job.loop(maker)
    with pytest.raises(TimeoutError):
        loop.result(0.8)


def test_after_a_signal_the_job_is_not_over(job):
    trainer = job.trainer(timeout=20)
    sigterm_after(0.3)
    trainer.fit(None, 1)
    assert trainer.stopped == "SIGTERM"
    assert not trainer.end_job()
    other = job.trainer(name="trainer_1")
    other.stop("the reward is high enough")
    assert other.end_job()
