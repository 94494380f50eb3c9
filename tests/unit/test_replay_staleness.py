"""Staleness and expiry of rollouts: the rules, on the caller's own objects, without a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import pytest
import torch

from redrb import ConfigError, Status
from redrb.compat.xtuner.rollout_fields import (
    checked_status,
    find_status,
    status_of,
    steps_of,
    write_status,
)
from redrb.compat.xtuner.staleness import (
    FRESHEST,
    Thresholds,
    expire,
    expired_members,
    fill_steps,
    staleness,
    too_stale,
    version_to_order_by,
    write_staleness,
)
from redrb.errors import RecordError


def rollout(**fields: Any) -> dict[str, Any]:
    return {"status": Status.COMPLETED, "seq_staleness": 0, **fields}


@pytest.mark.parametrize(
    ("steps", "train_step", "expected"),
    [([4], 5, 0), ([3, 4], 5, 1), ([0, 9], 10, 9), ([], 10, 0), (None, 10, 0), ([6], 5, -2)],
)
def test_staleness_is_train_step_minus_the_oldest_step_minus_one(
    steps: list[int] | None, train_step: int, expected: int
) -> None:
    assert staleness(rollout(response_model_steps=steps), train_step) == expected


def test_without_a_train_step_seq_staleness_counts() -> None:
    assert staleness(rollout(response_model_steps=[0], seq_staleness=7), None) == 7
    assert staleness({"response_model_steps": [0]}, None) == 0
    for wrong in (1.5, True, 2**60):
        with pytest.raises(RecordError, match="seq_staleness"):
            staleness(rollout(seq_staleness=wrong), None)


@pytest.mark.parametrize("steps", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1])])
def test_steps_are_read_from_any_sequence(steps: Any) -> None:
    assert steps_of({"response_model_steps": steps}) == [3, 1]


@pytest.mark.parametrize("steps", [["a"], [1.5], 3, torch.tensor(3), [-1, 2], [2**53]])
def test_invalid_steps_are_refused(steps: Any) -> None:
    with pytest.raises(RecordError) as caught:
        steps_of({"response_model_steps": steps})
    assert caught.value.field == "response_model_steps"


@pytest.mark.parametrize(
    ("steps", "mask", "newest"),
    [
        ([1, 9], None, 9),
        ([1, 9], [1, 0], 1),
        ([1, 9], [0, 0], None),
        ([1, 9, 9], [1], 1),  # tokens beyond the mask do not count
        ([], None, -2),  # tokens without a step are older than any threshold
        ([1], [0, 1], -2),
    ],
)
def test_only_tokens_that_count_are_fresh(
    steps: list[int], mask: list[int] | None, newest: int | None
) -> None:
    own = rollout(response_ids=[7, 8], response_model_steps=steps, response_mask=mask)
    expires = [bool(expired_members([own], at, Thresholds(token=1))) for at in range(12)]
    assert expires == [newest is not None and at >= newest + 2 for at in range(12)]


def test_a_rollout_expires_at_its_threshold() -> None:
    old, new = rollout(response_model_steps=[2]), rollout(response_model_steps=[3])
    assert expired_members([old, new], 6, Thresholds(sequence=3)) == [old]
    assert expired_members([old, new], 6, Thresholds(sequence=4)) == []
    assert expired_members([old, new], 6, Thresholds()) == []


def test_a_rollout_expires_when_all_tokens_that_count_are_stale() -> None:
    partly = rollout(response_ids=[7, 8], response_model_steps=[0, 4])
    wholly = rollout(response_ids=[7, 8], response_model_steps=[0, 0])
    assert expired_members([partly, wholly], 5, Thresholds(token=4)) == [wholly]
    partly["response_mask"] = [1, 0]
    assert expired_members([partly], 5, Thresholds(token=4)) == [partly]
    partly["response_mask"] = [0, 0]
    assert expired_members([partly], 5, Thresholds(token=4)) == []
    assert expired_members([rollout(response_model_steps=[0])], 5, Thresholds(token=4)) == []


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_agentic_groups_skip_the_token_rule_only(name: str) -> None:
    group = [rollout(response_model_steps=[0]), rollout(response_model_steps=[0], **{name: [1]})]
    assert expired_members(group, 5, Thresholds(token=1)) == []
    assert expired_members(group, 5, Thresholds(token=1, sequence=4)) == group


@pytest.mark.parametrize("status", Status)
def test_without_a_train_step_nothing_expires(status: Status) -> None:
    own = rollout(response_model_steps=[0], seq_staleness=3, status=status)
    assert expired_members([own], None, Thresholds(sequence=3, token=1)) == []


@pytest.mark.parametrize("value", [0, -1])
def test_thresholds_below_one_are_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="stale_threshold"):
        Thresholds(sequence=value)
    with pytest.raises(ConfigError, match="token_stale_threshold"):
        Thresholds(token=value)


@pytest.mark.parametrize(
    ("status", "expires"),
    [
        (Status.INIT, True),
        (Status.COMPLETED, True),
        (Status.ABORTED, True),
        (Status.FAILED, False),
        (Status.FILTERED, False),
        (Status.EXPIRED, True),
        (Status.ARCHIVED, True),
    ],
)
def test_finished_groups_do_not_expire_on_arrival(status: Status, *, expires: bool) -> None:
    group = [rollout(response_model_steps=[0], status=status)]
    assert bool(too_stale(group, 9, Thresholds(sequence=1))) is expires


def test_missing_steps_are_filled_at_the_end() -> None:
    group = [
        rollout(response_ids=[7, 8, 9], response_model_steps=[2]),
        rollout(response_ids=[7, 8]),
        rollout(response_ids=[7], response_model_steps=[4]),
        rollout(response_ids=None, response_model_steps=None),
        rollout(response_ids=torch.tensor([7, 8]), response_model_steps=None),
    ]
    fill_steps(group, 5)
    steps = [own.get("response_model_steps") for own in group]
    assert steps == [[2, 5, 5], [5, 5], [4], None, [5, 5]]


def test_refresh_writes_where_there_is_a_field() -> None:
    known, unknown = rollout(response_model_steps=[1]), {"response_model_steps": [1]}
    write_staleness([known, unknown], 5)
    assert known["seq_staleness"] == 3
    assert "seq_staleness" not in unknown


FULL: dict[str, Any] = {
    "rollout_id": 3,
    "group_id": 4,
    "prompt_ids": [1, 2],
    "tokens": [1, 2, 3],
    "response": "three",
    "response_ids": [3],
    "response_model_steps": [0],
    "response_mask": [1],
    "logprobs": [-0.5],
    "reward": {"score": 1.0},
    "error_msg": "slow",
    "routed_experts": np.ones((1, 2)),
    "finish_reason": "stop",
    "mm_info": {"pixel_values": np.ones(3)},
    "extra_fields": {"note": 1},
    "input_ids": [1, 2, 3],
    "labels": [-100, -100, 3],
}


def test_an_expired_rollout_loses_its_response_and_keeps_the_rest() -> None:
    own = rollout(**FULL)
    expire([own])
    assert own["status"] is Status.EXPIRED
    assert own["tokens"] == [1, 2]
    assert own["tokens"] is not own["prompt_ids"]
    for name in ("rollout_id", "group_id", "prompt_ids", "mm_info", "extra_fields"):
        assert own[name] is FULL[name]
    assert (own["response"], own["response_ids"], own["logprobs"]) == ("", [], [])
    assert own["response_model_steps"] == []
    for name in ("response_mask", "reward", "error_msg", "routed_experts", "finish_reason"):
        assert own[name] is None
    assert own["input_ids"] is own["labels"] is None


def test_a_discarded_rollout_keeps_nothing_heavy() -> None:
    own = rollout(**FULL)
    expire([own], for_good=True)
    assert own["status"] is Status.EXPIRED
    assert (own["prompt_ids"], own["tokens"], own["mm_info"]) == (None, None, None)
    assert own["extra_fields"] == {}
    assert (own["rollout_id"], own["response_ids"]) == (3, [])
    assert FULL["extra_fields"] == {"note": 1}


def test_fields_that_a_rollout_lacks_are_not_made() -> None:
    own: dict[str, Any] = {"status": "completed", "response_ids": [1]}
    expire([own])
    assert own == {"status": "expired", "response_ids": []}


class Lowercase(Enum):
    COMPLETED = "completed"
    EXPIRED = "expired"


class Named(Enum):
    COMPLETED = auto()
    EXPIRED = auto()


class Lacking(Enum):
    COMPLETED = "completed"


@dataclass
class Typed:
    status: Any
    response_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    status: str = "completed"
    seq_staleness: int = 0


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (Status.COMPLETED, Status.EXPIRED),
        ("completed", "expired"),
        (Lowercase.COMPLETED, Lowercase.EXPIRED),
        (Named.COMPLETED, Named.EXPIRED),
        (None, Status.EXPIRED),
    ],
)
def test_a_status_is_written_in_the_type_of_the_old_one(own: Any, expected: Any) -> None:
    typed = Typed(own)
    assert status_of(typed) is Status.COMPLETED
    write_status(typed, Status.EXPIRED)
    assert typed.status is expected or (type(own) is str and typed.status == "expired")
    assert type(typed.status) is type(expected)


def test_an_enum_that_lacks_a_status_is_refused() -> None:
    with pytest.raises(RecordError, match="no member 'expired'"):
        write_status(Typed(Lacking.COMPLETED), Status.EXPIRED)


def test_unknown_statuses_name_the_known_ones() -> None:
    with pytest.raises(RecordError, match="archived"):
        status_of({"status": "skipped"})
    with pytest.raises(ConfigError, match="archived"):
        checked_status("skipped")
    assert find_status(3) is None
    assert checked_status("COMPLETED") is Status.COMPLETED


def test_a_frozen_rollout_cannot_be_updated() -> None:
    with pytest.raises(RecordError, match="seq_staleness of a Frozen"):
        write_staleness([Frozen()], 3)


def test_the_order_goes_by_version_or_by_seq_staleness() -> None:
    def version(train_step: int | None, heard: int, *group: dict[str, Any]) -> int:
        return version_to_order_by(group, train_step, heard)

    steps = rollout(response_model_steps=[5, 3]), rollout(response_model_steps=[4])
    assert version(9, 9, *steps) == 3
    assert version(None, 9, *steps) == 3
    assert version(9, 9, rollout()) == version(None, 9, rollout()) == FRESHEST
    assert version(None, 9, rollout(seq_staleness=2), rollout(seq_staleness=4)) == 4
    assert version(9, 9, rollout(response_model_steps=[2], seq_staleness=99)) == 2
    failed = rollout(response_model_steps=[2], seq_staleness=5, status=Status.FAILED)
    assert version(9, 9, rollout(), failed) == version(None, 9, failed) == -5
