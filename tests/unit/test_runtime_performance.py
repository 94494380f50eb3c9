"""Performance figures follow ColossalAI's formulas."""

from __future__ import annotations

import pytest
import torch

from redrb import Experience
from redrb.compat.coati import (
    ExperienceMakerPerformanceEvaluator,
    TrainerPerformanceEvaluator,
    performance,
)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(performance.time, "perf_counter", clock.perf_counter)
    return clock


def batch(samples: int, length: int, actions: int) -> Experience:
    return Experience(
        sequences=torch.zeros(samples, length, dtype=torch.int64),
        action_log_probs=torch.zeros(samples, actions),
        values=None,
        reward=None,
        kl=None,
        advantages=None,
        action_mask=torch.ones(samples, actions, dtype=torch.bool),
    )


def test_a_trainer_is_measured_from_its_second_episode(clock: Clock) -> None:
    evaluator = TrainerPerformanceEvaluator(1000, 500, ignore_first_episodes=1)
    for episode in range(3):
        evaluator.on_episode_start(episode)
        for _ in range(2):
            clock.now += 1  # waits for a batch
            evaluator.on_batch_start()
            clock.now += 3
            evaluator.on_batch_end({}, batch(4, 10, 5))
        evaluator.on_update_start()
        clock.now += 2
        evaluator.on_update_end()
        evaluator.on_episode_end(episode)
    evaluator.on_fit_end()
    # episodes 1 and 2: 4 batches of 4 samples; 10 s each, 6 of them training, 2 updating;
    # 2 * (1000 + 500) * 4 * 10 * 3 operations a batch, 4 batches in 12 s
    assert evaluator.figures == pytest.approx(
        {
            "samples_per_second": 16 / 20,
            "tflops": 4 * 360_000 / 12 / 1e12,
            "overall_s_per_sample": 20 / 16,
            "train_s_per_sample": 12 / 16,
            "update_s_per_sample": 4 / 16,
        }
    )


def test_checkpointing_costs_one_forward_pass_more(clock: Clock) -> None:
    figures = []
    for checkpointing in (False, True):
        evaluator = TrainerPerformanceEvaluator(1000, 0, checkpointing, ignore_first_episodes=0)
        evaluator.on_episode_start(0)
        evaluator.on_batch_start()
        clock.now += 1
        evaluator.on_batch_end({}, batch(1, 10, 5))
        evaluator.on_episode_end(0)
        evaluator.on_fit_end()
        figures.append(evaluator.figures["tflops"])
    assert figures[1] / figures[0] == pytest.approx(4 / 3)


def test_a_maker_is_measured(clock: Clock) -> None:
    evaluator = ExperienceMakerPerformanceEvaluator(1000, 200, 1000, 300)
    evaluator.on_loop_start()
    for _ in range(2):
        evaluator.on_batch_start()
        evaluator.on_make_experience_start()
        clock.now += 4
        evaluator.on_make_experience_end(batch(8, 12, 5))
        evaluator.on_send_start()
        clock.now += 1
        evaluator.on_send_end()
        evaluator.on_batch_end()
    evaluator.on_loop_end()
    # generation: 2 * 1000 * 8 * (7 + 12 - 1) * 5 / 2; forward passes: 2 * 2500 * 8 * 12
    flops = 2 * (2 * 1000 * 8 * 45 + 2 * 2500 * 8 * 12)
    assert evaluator.figures == pytest.approx(
        {
            "samples_per_second": 16 / 10,
            "tflops": flops / 8 / 1e12,
            "overall_s_per_sample": 10 / 16,
            "make_s_per_sample": 8 / 16,
            "send_s_per_sample": 2 / 16,
            "make_share": 0.8,
            "send_share": 0.2,
        }
    )


def test_without_measurements_there_are_no_figures() -> None:
    trainer = TrainerPerformanceEvaluator()
    trainer.on_fit_end()
    maker = ExperienceMakerPerformanceEvaluator(1, 1, 1, 1)
    maker.on_loop_end()
    assert trainer.figures == maker.figures == {}
