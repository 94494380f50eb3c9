"""TRL's GRPOTrainer on a task: ratios, acknowledgements, deaths, ranks."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import redrb
from redrb import ConfigError
from redrb.errors import RecordError
from tests.servers import programs

trl = pytest.importorskip("trl")
from transformers import TrainerCallback  # noqa: E402

from redrb.compat.trl import TaskRollouts, maker_reward, placeholder_prompts  # noqa: E402
from tests.trl_jobs import ScriptedMaker, config, making, tiny_model, tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Watch(TrainerCallback):
    """Notes the task's ledger after each optimizer step; may raise after one."""

    def __init__(self, stream: redrb.ExperienceStream, raise_at: int = -1) -> None:
        self.stream, self.raise_at = stream, raise_at
        self.acked: list[int] = []

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.acked.append(self.stream.stats().ledger.acked)
        if state.global_step == self.raise_at:
            raise OSError("the disk is full")


@pytest.fixture
def url():
    """One backend: what differs between servers is tested where it is implemented."""
    return f"fake://{uuid.uuid4().hex}"


@pytest.fixture
def stream(open_stream):
    return open_stream(max_deliveries=10)


@pytest.fixture
def train(stream, tmp_path):
    """Train on groups of two samples; the second callback watches."""

    def run(*callbacks, rollouts=None, resume=False, **options):
        with TaskRollouts(stream, timeout=20, **(rollouts or {})) as fed:
            trainer = trl.GRPOTrainer(
                tiny_model(),
                maker_reward,
                config(tmp_path, **options),
                train_dataset=placeholder_prompts(64),
                processing_class=tokenizer(),
                rollout_func=fed,
                callbacks=[fed, *callbacks],
            )
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def test_the_loss_uses_the_ratios_to_the_makers_log_probabilities(stream, train):
    ScriptedMaker(shifts=(0.1, 0.2)).put(stream, groups=1)  # the policy's minus these
    history = train(
        max_steps=1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=5.0,
    ).state.log_history
    got = history[0]
    assert got["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert got["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(0.2), rel=1e-4)
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)  # rewards 0 and 1, with the deviation of a sample
    expected = advantage * (math.exp(0.1) - math.exp(0.2)) / 2
    assert got["loss"] == pytest.approx(expected, rel=1e-3)
    assert got["rewards/maker_reward/mean"] == 0.5


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2}, [2, 4]),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, [0, 2]),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 1}, [1, 2]),
        ({"gradient_accumulation_steps": 1, "num_iterations": 2}, [0, 1]),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [4, 8]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, [0, 3]),
    ],
)
def test_groups_are_acknowledged_after_the_last_step_on_them(stream, train, passes, expected):
    ScriptedMaker().put(stream, groups=8)
    watch = Watch(stream)
    train(watch, max_steps=2, **passes)
    assert watch.acked == expected
    ledger = stream.stats().ledger
    assert ledger.leased == 0
    assert ledger.balanced


def test_with_save_groups_are_acknowledged_by_the_checkpoint(stream, train):
    ScriptedMaker().put(stream, groups=3)
    watch = Watch(stream)
    train(
        watch,
        max_steps=3,
        rollouts={"acknowledge": "save"},
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
    )
    assert watch.acked == [0, 0, 2]
    assert stream.stats().ledger.waiting == stream.stats().ledger.put - stream.stats().ledger.acked


def test_a_trainer_that_resumes_from_its_checkpoint_trains_every_group(stream, train):
    ScriptedMaker().put(stream, groups=4)
    options: dict[str, Any] = {
        "rollouts": {"acknowledge": "save"},
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    with pytest.raises(OSError, match="disk is full"):
        train(Watch(stream, raise_at=3), **options)
    assert stream.stats().ledger.acked == 2
    trainer = train(resume=True, **options)
    assert trainer.state.global_step == 4
    assert stream.stats().ledger.acked == 4


def test_a_trainer_that_fails_between_steps_loses_nothing(stream, train):
    ScriptedMaker().put(stream, groups=3)
    with pytest.raises(OSError, match="disk is full"):
        train(Watch(stream, raise_at=1), max_steps=3, steps_per_generation=2)
    ledger = stream.stats().ledger
    assert (ledger.acked, ledger.waiting) == (0, 3)


@pytest.mark.parametrize(
    ("bound", "passes"),
    [
        (0, {"gradient_accumulation_steps": 4, "steps_per_generation": 4}),
        (1, {"gradient_accumulation_steps": 4, "steps_per_generation": 4}),
        (0, {"gradient_accumulation_steps": 1, "steps_per_generation": 4}),
        (0, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}),
        (4, {"gradient_accumulation_steps": 2, "steps_per_generation": 3}),
    ],
)
def test_makers_wait_for_no_step_and_no_group_expires(
    open_stream, client, namespace, tmp_path, passes, bound
):
    stream = open_stream(max_staleness=bound, weights="policy")
    with (
        redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher,
        making(client, open_stream(max_staleness=bound, weights="policy")),
        TaskRollouts(stream, publisher=publisher, timeout=30) as fed,
    ):
        trainer = trl.GRPOTrainer(
            tiny_model(),
            maker_reward,
            config(tmp_path, max_steps=12, **passes),
            train_dataset=placeholder_prompts(200),
            processing_class=tokenizer(),
            rollout_func=fed,
            callbacks=[fed],
        )
        trainer.train()
    stats = stream.stats()
    assert stats.ledger.expired == 0
    assert stats.admission.released == 0, "nothing was blocked"
    assert stats.ledger.acked > 10


def test_makers_follow_the_published_policy(stream, train, client, namespace):
    ScriptedMaker().put(stream, groups=2)
    subscriber = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    with redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher:
        trainer = train(max_steps=2, learning_rate=0.1, rollouts={"publisher": publisher})
    model = tiny_model()
    loaded = subscriber.poll(model, strict=True)
    assert loaded.version == 3  # before the first step, and after each
    for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_extras_and_masks_of_tools_reach_the_trainer(stream):
    ScriptedMaker(tool=True, extras={"answer": "42"}).put(stream, groups=1)
    fed = TaskRollouts(stream, extras=["answer"], timeout=5)
    got = fed(["", ""], stub(fed))
    assert got["answer"] == ["42", "42"]
    assert got["reward"] == [0.0, 1.0]
    assert got["env_mask"] == [[1, 0, 1, 1], [1, 0, 1, 1]]
    assert all(log_probs[1] == 0 for log_probs in got["logprobs"])
    assert [len(ids) for ids in got["prompt_ids"]] == [3, 3]


def test_wrong_use_is_refused_with_advice(stream):
    with pytest.raises(ConfigError, match="ExperienceStream"):
        TaskRollouts("math")
    with pytest.raises(ConfigError, match="WeightPublisher"):
        TaskRollouts(stream, publisher="policy")
    with pytest.raises(ConfigError, match="other names"):
        TaskRollouts(stream, extras=["prompt"])
    with pytest.raises(ConfigError, match="TaskRollouts"):
        maker_reward(["a"])
    fed = TaskRollouts(stream, timeout=1)
    with pytest.raises(ConfigError, match="callbacks"):
        fed(["", ""], stub(None))
    with pytest.raises(ConfigError, match="eval_strategy"):
        fed(["", ""], stub(fed, training=False))
    with pytest.raises(ConfigError, match="multiple of"):
        fed([""], stub(fed))
    with pytest.raises(redrb.BatchTimeout):
        fed(["", ""], stub(fed))


def test_groups_that_do_not_fit_are_failed_deliveries(stream):
    maker = ScriptedMaker()
    maker.put(stream, groups=1)
    stream.put(maker.group()[:1])
    fed = TaskRollouts(stream, timeout=5)
    with pytest.raises(RecordError, match="num_generations=1 in the GRPOConfig"):
        fed([""] * 4, stub(fed))
    ledger = stream.stats().ledger
    assert (ledger.waiting, ledger.leased) == (2, 0)


def test_groups_without_log_probabilities_become_dead_letters_and_others_are_taken(
    open_stream, caplog
):
    stream = open_stream(checks=())
    bad = redrb.BufferItem(torch.tensor([5, 6]), None)
    maker = ScriptedMaker()
    maker.put(stream, groups=1)
    stream.put_many([[bad] * 2] * 2)
    maker.put(stream, groups=1)
    fed = TaskRollouts(stream, timeout=5)
    assert len(fed([""] * 4, stub(fed))["prompt_ids"]) == 4
    ledger = stream.stats().ledger
    assert (ledger.dead, ledger.leased, ledger.waiting) == (2, 2, 0)
    assert "1 of the 2 groups of a batch has no usable 'action_log_probs'" in caplog.text


def test_ranks_take_their_parts_together(open_stream):
    streams = [open_stream() for _ in range(2)]
    ScriptedMaker().put(streams[0], groups=4)

    def train(rank):
        fed = TaskRollouts(streams[rank], timeout=20)
        trainer = stub(fed, rank=rank, ranks=2)
        samples = 0
        for step in range(2):
            samples += len(fed(["", ""], trainer)["completion_ids"])
            fed.on_step_end(None, SimpleNamespace(global_step=step + 1))
        return samples

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [4, 4]
    assert streams[0].stats().ledger.acked == 4


@pytest.mark.parametrize("real_url", list(programs())[-1:], indirect=True)
def test_a_trainer_that_is_killed_before_its_step_loses_nothing(real_url, namespace):
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(
            client, "math", namespace=namespace, lease_ms=1000, max_deliveries=10
        )
        ScriptedMaker().put(stream, groups=1)
        dying = multiprocessing.get_context("fork").Process(
            target=_take_and_die, args=(real_url, namespace)
        )
        dying.start()
        dying.join(60)
        assert dying.exitcode == -signal.SIGKILL
        assert stream.stats().ledger.leased == 1
        fed = TaskRollouts(stream, timeout=20)
        assert len(fed(["", ""], stub(fed))["completion_ids"]) == 2
        fed.on_step_end(None, SimpleNamespace(global_step=1))
        assert stream.stats().ledger.acked == 1
        stream.clear()
        stream.close()


@pytest.mark.slow
@pytest.mark.parametrize("real_url", list(programs())[-1:], indirect=True)
def test_two_processes_of_trl_train_the_same_policy(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        ScriptedMaker().put(stream, groups=6)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *launch, "-m", "tests.integration.trl_rank", real_url, namespace, "3"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        ends = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
        assert [end.split(":")[0] for end in ends] == ["rank 0 of 2", "rank 1 of 2"]
        assert ends[0].split(":")[1] == ends[1].split(":")[1]
        assert stream.stats().ledger.acked == 6
        latest = redrb.WeightSubscriber(client, "policy", namespace=namespace).latest()
        assert latest.version == 4


def stub(
    fed: TaskRollouts | None, *, training: bool = True, rank: int = 0, ranks: int = 1
) -> SimpleNamespace:
    """Return what a TaskRollouts reads of a trainer."""
    return SimpleNamespace(
        model=SimpleNamespace(training=training),
        callback_handler=SimpleNamespace(callbacks=[fed]),
        num_generations=2,
        num_iterations=1,
        args=SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(
            num_processes=ranks, process_index=rank, distributed_type="MULTI_CPU"
        ),
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
    )


def _take_and_die(url: str, namespace: str) -> None:
    stream = redrb.ExperienceStream(
        redrb.connect(url), "math", namespace=namespace, lease_ms=1000, max_deliveries=10
    )
    fed = TaskRollouts(stream, timeout=20)
    fed(["", ""], stub(fed))
    os.kill(os.getpid(), signal.SIGKILL)
