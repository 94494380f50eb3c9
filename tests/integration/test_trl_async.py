"""TRL's AsyncGRPOTrainer on a task, on the CPU: its attention kernel for GPUs is replaced."""

from __future__ import annotations

import queue
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import redrb
from redrb import ConfigError

pytest.importorskip("trl")
from transformers import TrainerCallback

from tests.trl_jobs import EOS, ScriptedMaker, making, tiny_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def url():
    return f"fake://{uuid.uuid4().hex}"


@pytest.fixture
def parts(monkeypatch):
    """Import TRL's experimental module without its warning."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    from redrb.compat.trl import PublishedWeights, TaskRolloutWorker, placeholder_prompts

    kernel = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", lambda *_: None)

    def train(folder, weights, worker, *callbacks, **options):
        """Make a trainer of groups of two, and train."""
        tiny_model().save_pretrained(folder / "model")
        trainer = async_grpo.AsyncGRPOTrainer(
            str(folder / "model"),
            args=async_grpo.AsyncGRPOConfig(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=2,
                num_generations=2,
                learning_rate=1e-3,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                dtype="float32",
                gradient_checkpointing=False,
                disable_tqdm=True,
                **options,
            ),
            train_dataset=placeholder_prompts(1),
            processing_class=tokenizer(),
            rollout_worker=worker,
            weight_transfer=weights,
            callbacks=[worker, *callbacks],
        )
        trainer.train()
        return trainer

    return SimpleNamespace(
        train=train,
        weights=PublishedWeights,
        worker=TaskRolloutWorker,
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of each segment to its keys, aligned at their ends, as FlashAttention's."""
    out = torch.empty_like(query)
    bounds = zip(
        *(starts[:-1].tolist() for starts in (query_starts, key_starts)),
        *(starts[1:].tolist() for starts in (query_starts, key_starts)),
        strict=True,
    )
    for q_from, k_from, q_to, k_to in bounds:
        length, keys = q_to - q_from, k_to - k_from
        mask = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        q, k, v = (
            x.transpose(0, 1) for x in (query[q_from:q_to], key[k_from:k_to], value[k_from:k_to])
        )
        seen = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out[q_from:q_to] = seen.transpose(0, 1)
    return out


class Watch(TrainerCallback):
    """Notes the acknowledged groups after each step."""

    def __init__(self, stream: redrb.ExperienceStream) -> None:
        self.stream = stream
        self.acked: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.acked.append(self.stream.stats().ledger.acked)


@pytest.mark.parametrize("token_budget", [0, 64])
def test_it_trains_on_groups_with_the_makers_log_probabilities(
    parts, open_stream, client, namespace, tmp_path, token_budget
):
    stream = open_stream(max_deliveries=10)
    ScriptedMaker(shifts=(0.1, 0.1)).put(stream, groups=40)
    watch = Watch(stream)
    with redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher:
        weights = parts.weights(publisher)
        worker = parts.worker(stream, weights, group_size=2)
        options = {
            "token_budget": token_budget,
            "max_steps": 6,
            "max_staleness": 10,
            "logging_steps": 1,
        }
        trainer = parts.train(tmp_path, weights, worker, watch, **options)
    first = trainer.state.log_history[0]
    assert first["ratio"] == pytest.approx(np.exp(0.1), rel=1e-3)
    assert first["reward"] == 0.5
    assert watch.acked[0] == 0
    assert watch.acked[-1] > 0
    ledger = stream.stats().ledger
    assert ledger.leased == 0
    assert ledger.waiting == 40 - ledger.acked
    model = tiny_model()
    loaded = redrb.WeightSubscriber(client, "policy", namespace=namespace).poll(model, strict=False)
    assert loaded.version == 7
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight)


@pytest.mark.parametrize(
    ("bound", "passes", "released"),
    [
        (4, 4, 0),
        (1, 4, 0),
        (1, 1, 0),
        # the trainer reads ahead of its step, beyond the bound: after 10 s it gets what is missing
        pytest.param(0, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_makers_wait_for_no_step_and_no_group_expires(
    parts, open_stream, client, namespace, tmp_path, bound, passes, released
):
    stream = open_stream(max_staleness=bound, weights="policy")
    with (
        redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher,
        making(client, open_stream(max_staleness=bound, weights="policy")),
    ):
        weights = parts.weights(publisher)
        worker = parts.worker(stream, weights, group_size=2)
        options = {"token_budget": 0, "max_steps": 12, "max_staleness": bound}
        parts.train(tmp_path, weights, worker, gradient_accumulation_steps=passes, **options)
    stats = stream.stats()
    assert (stats.ledger.expired, stats.admission.released) == (0, released)


def test_the_queue_is_that_of_trl(parts, open_stream):
    stream = open_stream(max_deliveries=10)
    worker = parts.worker(stream)
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=0)
    worker.check_health(60)
    with pytest.raises(redrb.BatchTimeout):
        worker.check_health(0)
    ScriptedMaker(tool=True).put(stream, groups=1)
    samples = [worker.get(timeout=5) for _ in range(2)]
    assert [sample.advantage for sample in samples] == pytest.approx([-1, 1], abs=1e-4)
    assert samples[0].completion_mask.tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert samples[0].old_log_probs[[0, 1, 2, 4]].tolist() == [0, 0, 0, 0]
    assert stream.stats().ledger.leased == 1
    worker.stop()
    assert stream.stats().ledger.waiting == 1


def test_groups_beyond_the_trainers_bound_expire(parts, open_stream, client, namespace):
    stream = open_stream(max_deliveries=10)
    maker = ScriptedMaker()
    stream.put(maker.group(), policy_version=1)
    stream.put(maker.group(), policy_version=3)
    with redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher:
        weights = parts.weights(publisher)
        worker = parts.worker(stream, weights)
        worker.on_train_begin(
            SimpleNamespace(
                max_staleness=1,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=1,
                world_size=1,
                weight_sync_steps=1,
                num_generations=2,
            )
        )
        for version in range(11, 14):  # the trainer's numbers go on after a restart
            weights.send_weights(iter(tiny_model().named_parameters()))
            worker.update_model_version(version)
        assert worker.get(timeout=5).model_version == 13
        worker.stop()
    assert stream.stats().ledger.expired == 1


def test_samples_without_log_probabilities_become_dead_letters_and_others_are_taken(
    parts, open_stream, caplog
):
    stream = open_stream(checks=())
    bad = redrb.BufferItem(torch.tensor([5, EOS]), None, reward=torch.tensor(1.0))
    good = redrb.BufferItem(torch.tensor([5, 6]), -torch.ones(1), reward=torch.tensor(1.0))
    stream.put_many([[bad], [good]])
    worker = parts.worker(stream)
    assert worker.get(timeout=5).advantage == 0
    assert stream.stats().ledger.dead == 1
    assert "1 of the 1 groups of a batch has no usable 'action_log_probs'" in caplog.text
    with pytest.raises(ConfigError, match="ExperienceStream"):
        parts.worker("math")
    with pytest.raises(ConfigError, match="PublishedWeights"):
        parts.worker(stream, "policy")
    with pytest.raises(ConfigError, match="WeightPublisher"):
        parts.weights("policy")
    with pytest.raises(ConfigError, match="rank 0"):
        parts.weights(None).send_weights(iter(()))
