"""Rewards of completions: their text and keys, several kinds of functions, failures of a group."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redrb.algorithms import (
    Completion,
    GRPOExperienceMaker,
    NaiveExperienceMaker,
    Reward,
    generate,
)
from redrb.algorithms.user_functions import Calls, submit
from redrb.errors import ConfigError, RecordError
from redrb.experience.faults import faults_reported
from tests.networks import PlainActor, PlainCritic, seeded

PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 4, 5, 6]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
    "answer": ["a", "b", "c"],
    "level": torch.tensor([1, 2, 3]),
    "token_type_ids": torch.zeros(3, 4),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": 3}


def words(tokens: torch.Tensor) -> str:
    return " ".join(map(str, tokens.tolist()))


def made(reward: Any, *, size: int = 2, **options: Any) -> Any:
    maker = GRPOExperienceMaker(seeded(PlainActor), reward, group_size=size)
    generator = torch.Generator().manual_seed(0)
    return maker.make_experience(PROMPTS, generator=generator, **OPTIONS, **options)


def test_a_reward_sees_text_tokens_lengths_and_the_keys_of_its_prompt():
    seen: list[Completion] = []

    def reward(completion):
        seen.append(completion)
        return float(completion["level"])

    experience = made(Reward(reward, decode=words), extras=["answer", "level"], tags=["answer"])
    assert experience.reward.tolist() == [1, 1, 2, 2, 3, 3]
    assert [each["answer"] for each in seen] == list("aabbcc")
    assert [each.prompt_text for each in seen[::2]] == ["5 6", "7 8 9 10", "4 5 6"]
    for row, each in enumerate(seen):
        chosen = experience.action_mask[row]
        assert each.tokens.tolist() == experience.sequences[row, -len(chosen) :][chosen].tolist()
        assert each.text == words(each.tokens)
        assert each.length == len(each.tokens) == int(chosen.sum())
        assert each.finished == (each.tokens[-1] == 3)
    assert {each.finished for each in seen} == {True, False}
    assert experience.extras[2] == {"answer": "b", "level": 2}
    assert experience.tags == [{"answer": answer} for answer in "aabbcc"]


def test_what_is_missing_is_named():
    completion = Completion({"answer": 1}, torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(RecordError, match="no key 'label'; beside its tokens it has 'answer'"):
        completion["label"]
    with pytest.raises(ConfigError, match=r"decode=tokenizer\.decode"):
        _ = completion.text
    with pytest.raises(RecordError, match=r"no key 'solution'; .* 'answer', 'level'"):
        made(Reward(len), extras=["solution"])
    with pytest.raises(ConfigError, match="function=3"):
        Reward(3)


async def slow(completion: Completion) -> float:
    return await asyncio.sleep(0, float(completion["level"]))


async def at_once(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([float(each["level"]) for each in completions])


@pytest.mark.parametrize(
    "reward",
    [
        Reward(lambda one: one["level"]),
        Reward(slow),
        Reward(lambda several: [one["level"] for one in several], batched=True),
        Reward(at_once, batched=True),
        lambda done: done.keys["level"],
    ],
    ids=["one", "one async", "batched", "batched async", "of Completions"],
)
def test_all_kinds_of_rewards_agree(reward):
    assert made(reward).reward.tolist() == [1, 1, 2, 2, 3, 3]
    networks = seeded(PlainActor), seeded(PlainCritic), reward, seeded(PlainActor)
    naive = NaiveExperienceMaker(*networks).make_experience(PROMPTS, **OPTIONS)
    assert naive.tensors["raw_reward"].tolist() == [1, 2, 3]


def bad(problem: Any) -> Callable[[Completion], Any]:
    """Return a reward that fails for the second prompt."""

    def reward(completion: Completion) -> Any:
        if completion["answer"] != "b":
            return 1.0
        if isinstance(problem, Exception):
            raise problem
        return problem

    return reward


def together(function: Callable[[Completion], Any]) -> Callable[..., list[Any]]:
    return lambda completions: [function(one) for one in completions]


def awaited(function: Callable[[Completion], Any]) -> Callable[[Completion], Any]:
    async def reward(completion: Completion) -> Any:
        return function(completion)

    return reward


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ValueError("no verdict"), "raised ValueError: no verdict"),
        (None, "is None"),
        (math.nan, "is nan"),
        (math.inf, "is inf"),
        ("good", "is no number, but 'good'"),
    ],
)
@pytest.mark.parametrize("kind", ["one", "async", "batched"])
def test_a_bad_reward_costs_only_its_group(problem, said, kind, caplog):
    function = bad(problem)
    reward = {
        "one": lambda: Reward(function),
        "async": lambda: Reward(awaited(function)),
        "batched": lambda: Reward(together(function), batched=True),
    }[kind]()
    with caplog.at_level(logging.WARNING, "redrb"):
        found = made(reward).reward.tolist()
    assert found[:2] + found[4:] == [1, 1, 1, 1]
    assert all(map(math.isnan, found[2:4]))
    assert len(caplog.messages) == 1
    assert f"the reward of 2 of its 2 completions {said}" in caplog.text
    if isinstance(problem, Exception):  # the line of the user's function
        line = bad.__code__.co_firstlineno + 7
        assert f"(test_algorithms_rewards.py, line {line})" in caplog.text


def test_groups_that_fail_for_one_reason_are_one_line_and_are_counted(caplog):
    def reward(completion):
        return float(completion["missing"])

    found: list[tuple[str, int]] = []
    with faults_reported(lambda fault, groups: found.append((str(fault), groups))):
        made(Reward(reward))
    assert len(caplog.messages) == 1
    assert "3 groups are filtered: the reward of 6 of their 6 completions raised" in caplog.text
    line = reward.__code__.co_firstlineno + 1
    [(why, groups)] = found
    assert why.startswith("the reward raised RecordError: the prompt has no key 'missing'")
    assert why.endswith(f"(test_algorithms_rewards.py, line {line})")
    assert groups == 3


def test_a_function_of_completions_that_raises_costs_only_its_group():
    def reward(done):
        return [bad(KeyError("x"))(one) for one in done.each()]

    found = made(reward).reward.tolist()
    assert [math.isnan(each) for each in found] == [False] * 2 + [True] * 2 + [False] * 2
    assert math.isnan(made(lambda done: [None] * len(done)).reward[0])


def test_a_number_of_rewards_that_does_not_fit_is_an_error():
    with pytest.raises(RecordError, match="for 6 completions"):
        made(Reward(lambda _: [1.0], batched=True))


def test_groups_whose_rewards_are_ready_first_come_first():
    first, second = threading.Event(), threading.Event()
    waits = {"a": second, "b": None, "c": first}

    async def reward(completion):
        gate = waits[completion["answer"]]
        if gate is not None:
            await asyncio.to_thread(gate.wait, 10)
        return float(completion["level"])

    maker = GRPOExperienceMaker(seeded(PlainActor), Reward(reward), group_size=2)
    parts = maker.make_parts(PROMPTS, policy_version=4, extras=["answer"], **OPTIONS)
    found = []
    for gate in (first, second, None):
        part = next(parts)
        found.append((part.reward.tolist(), part.extras[0]["answer"], part.policy_version))
        assert len(part.sequences) == 2
        assert torch.equal(part.advantages, torch.zeros(2))
        if gate is not None:
            gate.set()
    assert found == [([2, 2], "b", [4, 4]), ([3, 3], "c", [4, 4]), ([1, 1], "a", [4, 4])]
    assert next(parts, None) is None


def test_a_subclass_that_scores_in_another_way_makes_one_part():
    class Other(GRPOExperienceMaker):
        def score(self, completions):
            return torch.zeros(len(completions))

    maker = Other(seeded(PlainActor), Reward(slow), group_size=2)
    [part] = maker.make_parts(PROMPTS, **OPTIONS)
    assert part.reward.tolist() == [0] * 6


def test_a_reward_that_lasts_too_long_costs_its_group():
    async def reward(completion):
        if completion["answer"] == "b":
            await asyncio.sleep(60)
        return 1.0

    found = made(Reward(reward, timeout=0.05)).reward.tolist()
    assert [math.isnan(each) for each in found] == [False] * 2 + [True] * 2 + [False] * 2


def test_a_reward_that_blocks_its_event_loop_costs_the_groups_that_wait_for_it(monkeypatch, caplog):
    monkeypatch.setattr("redrb.algorithms.user_functions.GRACE_S", 0.0)
    over = threading.Event()

    async def reward(completion):
        if completion["answer"] == "b":
            over.wait(60)
        return 1.0

    try:
        found = made(Reward(reward, timeout=0.3)).reward.tolist()
    finally:
        over.set()
    assert [math.isnan(each) for each in found[2:]] == [True] * 4
    assert "given up: no end came in time" in caplog.text


def test_calls_that_end_one_after_the_other_are_not_given_up(monkeypatch):
    now, gates, found = [0.0], [threading.Event() for _ in range(4)], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("redrb.algorithms.user_functions.time", clock)

    async def wait_for_turn(number):
        await asyncio.to_thread(gates[number].wait, 60)
        return number

    gates[0].set()
    for ready in Calls(60).results([partial(wait_for_turn, number) for number in range(4)]):
        found += ready
        now[0] += 50
        for gate in gates[: len(found) + 1]:
            gate.set()
    assert found == [(number, number) for number in range(4)]


@pytest.mark.parametrize("kind", ["plain", "async", "batched"])
def test_rewards_without_groups_come_with_the_reason_of_those_that_failed(kind):
    def plain(completion):
        if completion["answer"] == "b":
            raise ValueError("no answer found")
        return 0.5 if completion["answer"] == "a" else None

    async def coroutine(completion):
        return plain(completion)

    functions = {"plain": plain, "async": coroutine, "batched": lambda each: list(map(plain, each))}
    reward = Reward(functions[kind], batched=kind == "batched")
    found = reward.of_each(generate(seeded(PlainActor), PROMPTS, **OPTIONS))
    assert found[0] == (0.5, "")
    assert [why for _, why in found[1:]] == ["raised ValueError: no answer found", "is None"]
    assert all(math.isnan(reward) for reward, _ in found[1:])


@pytest.mark.parametrize(
    ("kind", "error"),
    [("plain", SystemExit(2)), ("async", SystemExit(2)), ("async", asyncio.CancelledError())],
)
def test_a_call_that_exits_or_cancels_itself_fails_alone(kind, error):
    def plain(completion):
        if completion["answer"] == "b":
            raise error
        return 0.5

    async def coroutine(completion):
        return plain(completion)

    reward = Reward(plain if kind == "plain" else coroutine, timeout=5)
    found = reward.of_each(generate(seeded(PlainActor), PROMPTS, **OPTIONS))
    assert [why for _, why in found if why] == [found[1][1]]
    assert found[1][1].startswith(f"raised RuntimeError: {type(error).__name__}")


def test_the_event_loop_of_the_users_code_outlives_a_task_that_exits():
    async def exits():
        raise SystemExit(2)

    async def begins_tasks():
        left = [asyncio.create_task(exits()) for _ in range(3)]
        await asyncio.wait(left)
        return [task.exception().code for task in left]

    with pytest.raises(SystemExit):
        submit(exits()).result(10)
    assert submit(begins_tasks()).result(10) == [2, 2, 2]


def test_coroutines_compute_no_gradients():
    weight = torch.ones(1, requires_grad=True)

    async def scored():
        return weight * 2

    assert not submit(scored()).result(10).requires_grad


def test_a_tensor_of_another_shape_is_an_error_and_any_iterable_is_read():
    with pytest.raises(RecordError, match="return a list or a tensor with a number for each"):
        made(Reward(lambda them: torch.ones(len(them), 1), batched=True))
    found = made(Reward(lambda them: (1.0 for _ in them), batched=True))
    assert found.reward.tolist() == [1.0] * len(found.reward)
