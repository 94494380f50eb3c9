"""Turns of a session become samples: one for each end, each sampled token counted once."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from redrb.errors import RecordError, StoreError
from redrb.gateway.messages import Protocol, ask_of
from redrb.gateway.replies import Reply
from redrb.gateway.session import decode_turn, encode_turn
from redrb.train.engines import Generation
from tests.gateway_turns import reply_of, session_of, turn


def test_a_conversation_is_one_sample():
    first, second = turn(given=3), turn(0, given=2)
    second.sampled.versions[:] = [7, 8]
    (item,) = session_of(first, second).items(0.5, {"score": {"a": 1}})
    assert item.sequences is not None
    assert item.action_log_probs is not None
    assert item.action_mask is not None
    assert item.token_versions is not None
    whole = [*first.given, *first.sampled.tokens, *second.given, *second.sampled.tokens]
    assert item.sequences.tolist() == whole
    assert item.action_mask.tolist() == [True, True, False, False, True, True]
    assert item.action_log_probs.tolist() == [
        *(*first.sampled.log_probs, 0.0, 0.0),
        *second.sampled.log_probs,
    ]
    assert item.token_versions.tolist() == [7, 7, -1, -1, 7, 8]
    assert (item.policy_version, float(item.reward or 0)) == (7, 0.5)
    assert item.extras == {"prompt": "p", "redrb_session": "s1", "score": {"a": 1}}


def test_extras_replace_no_id_of_a_session():
    [item] = session_of(turn()).items(1.0, {"redrb_session": "another", "prompt": "text"})
    assert item.extras == {"prompt": "text", "redrb_session": "s1"}


def test_branches_are_samples_and_what_they_share_counts_once():
    #    0 - 1 - 2      and 4 begins anew
    #          \ 3
    session = session_of(turn(), turn(0), turn(1), turn(1), turn(), tags='{"level": 2}')
    items = session.items(1.0)
    assert [session.path(each) for each in (2, 3, 4)] == [[0, 1, 2], [0, 1, 3], [4]]
    assert [session.tokens(each) for each in (2, 3, 4)] == [
        item.sequences.tolist() for item in items if item.sequences is not None
    ]
    shared, own = [True, True, False, True, True, False], [True, True]
    masks = [item.action_mask.tolist() for item in items if item.action_mask is not None]
    assert masks == [shared + own, [False] * len(shared) + own, own]
    assert [item.tags for item in items] == [{"level": 2}] * 3
    assert session.path(-1) == session.tokens(-1) == []


def test_each_sampled_token_of_any_forest_counts_once():
    dice = random.Random(3)
    for size in (1, 2, 30, 300):
        turns = [
            turn(dice.randrange(-1, index), dice.randint(1, 3), given=dice.randint(1, 3))
            for index in range(size)
        ]
        counted: list[int] = []
        for item in session_of(*turns).items(1.0):
            assert item.sequences is not None
            assert item.action_mask is not None
            actions = item.sequences[-len(item.action_mask) :]
            counted += actions[item.action_mask].tolist()
        assert sorted(counted) == sorted(token for each in turns for token in each.sampled.tokens)


def test_routed_experts_are_not_stored():
    given = turn()
    given.sampled.routed_experts = np.zeros((3, 2, 2), np.uint8)
    assert decode_turn(encode_turn(given), 1).sampled.routed_experts is None


def test_a_session_without_a_turn_has_no_sample():
    with pytest.raises(RecordError, match="has no turn: drop it"):
        session_of().items(1.0)


@pytest.mark.parametrize("tokens", [1, 1000, 1001, 100_000])
def test_a_turn_is_stored_as_it_was(tokens):
    given = turn(4, tokens)
    stored = encode_turn(given)
    assert decode_turn(stored, 5) == given
    assert len(stored) < 300 + 15 * tokens


@pytest.mark.parametrize(
    "sampled",
    [
        Generation([], [], [], "stop"),
        Generation([1], [-1.0], [1], "abort"),
        Generation([1, 2], [-1.0], [1, 1], "stop"),
        Generation([1], [-1.0], [], "stop"),
        Generation([2**31], [-1.0], [1], "stop"),
        Generation([2**70], [-1.0], [1], "stop"),
        Generation([-1], [-1.0], [1], "stop"),
        Generation([1], ["x"], [1], "stop"),  # type: ignore[list-item]
    ],
)
def test_a_malformed_turn_is_not_stored(sampled):
    with pytest.raises(RecordError):
        encode_turn(turn(sampled=sampled))


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": 1},
        {"parent": -2},
        {"tokens": []},
        {"tokens": [1]},
        {"tokens": [1, -1]},
        {"tokens": [1, 2**31]},
        {"given": [-1]},
        {"given": [2**40]},
        {"log_probs": [-1.0]},
        {"log_probs": ["x", "y"]},
        {"versions": [1]},
        {"versions": [1, 2**63]},
        {"finish": "abort"},
        {"finish": "other"},
        {"reply": 1},
        {"reply": b""},
        {"reply": b"{}"},
        {"reply": b"[" * 10**5},
        {"given": None},
        {"sampled": None},
    ],
)
def test_a_damaged_turn_is_refused(changes):
    fields = msgspec.msgpack.decode(encode_turn(turn()))
    assert decode_turn(msgspec.msgpack.encode(fields), 1).parent == -1
    for name, value in changes.items():
        (fields["sampled"] if name in fields["sampled"] else fields)[name] = value
    with pytest.raises(StoreError, match="a turn of a session cannot be read"):
        decode_turn(msgspec.msgpack.encode(fields), 1)


PLACES = [(), ("id",), ("created",), ("finish",), ("stop",), ("usage",), ("usage", 0), ("message",)]
PLACES += [("message", name) for name in ("role", "content", "reasoning", "tool_calls")]
CALL = ("message", "tool_calls", 0)
PLACES += [CALL, *((*CALL, name) for name in ("id", "function", "type"))]
PLACES += [(*CALL, "function", name) for name in ("name", "arguments")]
ODD = [None, True, -1, 10**30, 0.5, "", "stop", "{}", [], [None], [1, 2], {}, {"a": []}]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "all")
def test_a_reply_with_any_other_value_is_refused_or_can_be_sent(place):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "1", "reasoning": "2", "tool_calls": [call]}
    bodies: dict[Protocol, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "1"}]},
        "text": {"prompt": "1"},
        "messages": {"messages": [{"role": "user", "content": "1"}]},
    }
    asks = [
        ask_of(protocol, json.dumps({"model": "m", **body}).encode())
        for protocol, body in bodies.items()
    ]
    kept = 0
    for odd in (call, *ODD):
        found: Any = {"all": reply_of("1", message=json.loads(json.dumps(message)))}
        at, name = found, "all"
        for step in place:
            at, name = at[name], step
        at[name] = odd
        damaged = turn(reply=json.dumps(found["all"]).encode())
        try:
            encode_turn(damaged)
        except RecordError:
            continue
        kept += 1
        for ask in asks:
            shown = Reply(ask, json.loads(damaged.reply))
            json.dumps([shown.body(), [each.decode() for each in shown.events()]])
    assert kept < len(ODD) or place[-1] in ("role", "type")


def test_each_truncation_and_each_changed_byte_is_refused_or_is_a_turn():
    stored = encode_turn(turn())
    for at in range(len(stored)):
        for damaged in (stored[:at], stored[:at] + bytes([stored[at] ^ 0xFF]) + stored[at + 1 :]):
            try:
                found = decode_turn(damaged, 1)
            except StoreError:
                continue
            assert len(found.sampled.tokens) == len(found.sampled.log_probs) > 0
