"""Routed experts: read safely, joined over parts and turns, one row for each token of a sample."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from redrb.codec import check_and_encode_groups, decode_batch, decode_items, parse_group
from redrb.errors import EngineError, RecordError
from redrb.experience import BufferItem, Status, make_experience_batch
from redrb.train.engines import Generation, Trajectory, VLLMEngine
from redrb.train.engines.routing import decoded
from tests.engine_server import as_npy, experts_of
from tests.samples import assert_same

quick = settings(deadline=None, derandomize=True, max_examples=100)
dtypes = st.sampled_from(["u1", "<u2", "<i4"])


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bytes_of(array: np.ndarray) -> bytes:
    return base64.b64decode(as_npy(array))


@given(st.data(), dtypes, st.tuples(*[st.integers(0, 5), *[st.integers(1, 4)] * 2]), st.booleans())
@quick
def test_what_numpy_saves_is_read(data, dtype, shape, by_columns):
    values = st.integers(0, np.iinfo(dtype).max)
    array = data.draw(arrays.arrays(dtype, shape, elements=values))
    found = decoded(as_npy(np.asfortranarray(array) if by_columns else array), shape[0])
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


ROWS = experts_of([1, 2, 3], "<u2")


def saved_zip() -> bytes:
    file = io.BytesIO()
    np.savez(file, ROWS)
    return file.getvalue()


def with_shape(text: str) -> bytes:
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {text}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


BAD: dict[str, Any] = {
    "no text": 5,
    "no base64": "%%%",
    "nothing": "",
    "a pickle": as_text(bytes_of(np.array([[[{}]]], dtype=object))),
    "a zip": as_text(saved_zip()),
    "floats": as_npy(ROWS.astype("<f4")),
    "bytes in the other order": as_npy(ROWS.astype(">u2")),
    "two dimensions": as_npy(ROWS[0]),
    "no layers": as_npy(ROWS[:, :0]),
    "too many rows": as_npy(np.concatenate([ROWS, ROWS])),
    "too few bytes": as_text(bytes_of(ROWS)[:-1]),
    "too many bytes": as_text(bytes_of(ROWS) + b"\0"),
    "a large claim": as_text(with_shape("(3, 999999999, 999999999)")),
    "a larger claim": as_text(with_shape(f"({'9' * 5000}, 1, 1)")),
    "rows below 0": as_text(with_shape("(-3, 2, 3)")),
    "numbers below 0": as_npy(-ROWS.astype("<i4")),
    "code": as_text(with_shape("(__import__('os').getpid(), 2, 3)")),
    "depth": as_text(with_shape("(" * 9000)),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_such_file_is_refused(what):
    with pytest.raises(ValueError, match=r"no array|bytes for|below 0|base64|character|padding"):
        decoded(BAD[what], 5)


@given(st.data())
@quick
def test_damaged_files_are_read_or_refused(data):
    damaged = bytearray(bytes_of(ROWS))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = decoded(as_text(bytes(damaged)), 3)
    except ValueError:
        return
    assert found.ndim == 3
    assert found.nbytes == ROWS.nbytes


class Replies:
    """Stands for the client of an engine; each reply has some of the tokens that are left.

    Args:
        text: All tokens.
        sizes: Tokens of each part; the parts before the last are aborted.
        rows: Which parts have rows.
        starts: Whether the server leaves out the rows that are known.
        scale_out: Whether it has `/inference/v1/generate`.
    """

    where = "http://here"

    def __init__(
        self,
        text: list[int],
        sizes: list[int],
        dtype: str,
        *,
        rows: list[bool] | None = None,
        starts: bool = True,
        scale_out: bool = True,
    ) -> None:
        self.text, self.sizes, self.dtype = text, list(sizes), dtype
        self.rows = [True] * len(sizes) if rows is None else list(rows)
        self.starts, self.scale_out = starts, scale_out
        self.sent = 0

    async def request(self, path: str, body: Any = None) -> dict[str, Any]:
        if path == "/inference/v1/generate" and not self.scale_out:
            raise EngineError("no such path", where=self.where, status=404)
        known = body["token_ids"] if self.scale_out else body["prompt"]
        asked = body["sampling_params"] if self.scale_out else body
        start = asked.get("routed_experts_prompt_start", 0) if self.starts else 0
        assert 0 <= start <= len(known)
        size = self.sizes.pop(0)
        tokens = self.text[len(known) : len(known) + size]
        choice: dict[str, Any] = {
            "token_ids": tokens,
            "finish_reason": "abort" if self.sizes else "stop",
            "weight_versions": None,
            "logprobs": {
                "content": [{"logprob": -1.0}] * size,
                "token_logprobs": [-1.0] * size,
            },
        }
        if self.rows.pop(0):
            rows = experts_of([*known, *tokens], self.dtype)[start:-1]
            self.sent += len(rows)
            choice["routed_experts"] = as_npy(rows)
        return {"choices": [choice]}


def sample(replies: Replies, tokens: list[int], **options: Any) -> Generation:
    with patch("redrb.train.engines.engine.JsonClient", lambda *_, **__: replies):
        engine = VLLMEngine("http://here", model="m", retry_s=0)
    return asyncio.run(engine.generate(tokens, max_new_tokens=1000, **options))


turns = st.lists(
    st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3)),
    min_size=1,
    max_size=4,
)


@given(st.integers(1, 4), turns, dtypes, st.booleans(), st.booleans(), st.booleans())
@quick
def test_parts_and_turns_of_an_episode_are_one_tensor(
    prompt, turns, dtype, starts, scale_out, tells
):
    """Each turn has parts, and is followed by some tokens of a tool."""
    text = [number % 9 for number in range(200)]
    trajectory, sent = Trajectory(text[:prompt]), 0
    for sizes, answer in turns:
        replies = Replies(text, sizes, dtype, starts=starts, scale_out=scale_out)
        more = {"routed_tokens": trajectory.routed_tokens} if tells else {}
        trajectory.sampled(sample(replies, trajectory.tokens, **more))
        last = len(trajectory.tokens) - 1
        assert trajectory.routed_tokens == last
        trajectory.given(text[last + 1 : last + 1 + answer])
        sent += replies.sent
    if starts and tells:
        assert sent == last  # each row travels once
    item = trajectory.item(reward=1.0)
    wanted = experts_of(item.sequences.tolist(), dtype)
    wanted[last:] = 0
    assert torch.equal(item.tensors["routed_experts"], torch.from_numpy(wanted))
    other = Trajectory(text[:1])
    other.sampled(sample(Replies(text, [1], dtype), text[:1]))
    items = [item, other.item(reward=0.0)]
    [encoded] = check_and_encode_groups([items], values=True, alike=True)
    layout = parse_group(encoded.blob)
    for got, put in zip(decode_items(layout), items, strict=True):
        assert_same(got, put)
    for side in ("left", "right"):
        batch = decode_batch([layout], side=side)
        assert_same(batch, make_experience_batch(items, side=side))
        assert batch.tensors["routed_experts"].shape == (2, len(wanted), 2, 3)


def test_rows_that_a_part_lacks_come_with_the_next_one():
    text = list(range(9))
    done = sample(Replies(text, [2, 2, 3], "u1", rows=[True, False, True]), text[:2])
    assert done.routed_experts.tolist() == experts_of(text, "u1")[:-1].tolist()
    done = sample(Replies(text, [2, 2, 3], "u1", rows=[True, True, False]), text[:2])
    assert done.routed_experts is None
    assert len(done.tokens) == 7
    trajectory = Trajectory(text[:2])
    trajectory.sampled(sample(Replies(text, [3], "u1"), trajectory.tokens))
    trajectory.sampled(sample(Replies(text, [3], "u1", rows=[False]), trajectory.tokens))
    assert trajectory.item().tensors == {}


@pytest.mark.parametrize("changed", [lambda rows: rows.astype("<i4"), lambda rows: rows[:, :1]])
def test_rows_of_another_kind_or_with_a_gap_are_refused(changed, monkeypatch):
    text = list(range(9))
    replies = Replies(text, [2, 2], "u1")
    trajectory = Trajectory(text[:2])
    trajectory.sampled(sample(Replies(text, [2], "u1"), text[:2]))
    other = Generation([4], [-1.0], [0], "stop", changed(experts_of(text[:4], "u1")))
    with pytest.raises(RecordError, match=r"do not go on .* routed_tokens="):
        trajectory.sampled(other)
    with pytest.raises(RecordError, match="leave a gap after 3"):
        trajectory.sampled(Generation([4, 5], [-1.0] * 2, [0] * 2, "stop", ROWS[:0]))
    assert trajectory.tokens == text[:4]
    asked = replies.request

    async def request(path: str, body: Any = None) -> dict[str, Any]:
        reply = await asked(path, body)
        if not replies.sizes:
            [choice] = reply["choices"]
            choice["routed_experts"] = as_npy(changed(decoded(choice["routed_experts"], 99)))
        return reply

    monkeypatch.setattr(replies, "request", request)
    with pytest.raises(EngineError, match="routed experts that go on"):
        sample(replies, text[:2])


def test_rows_that_are_none_are_no_completion():
    text = list(range(9))
    for scale_out in (True, False):
        replies = Replies(text, [2], "<f4", scale_out=scale_out)
        with pytest.raises(EngineError, match=r"without routed experts as vLLM 0\.32 sends them"):
            sample(replies, text[:2])


def aborted(text: list[int]) -> BufferItem:
    """Return a sample that a maker left after two turns."""
    begun = Trajectory(text[:2])
    begun.sampled(sample(Replies(text, [2], "<u2"), begun.tokens))
    begun.given(text[4:6])
    done = sample(Replies(text, [2], "<u2"), begun.tokens)
    done.finish = "abort"
    begun.sampled(done)
    return begun.item()


def test_an_unfinished_sample_goes_on_with_its_rows():
    text = list(range(12))
    partial = aborted(text)
    partial.tensors["routed_experts"][:7] = 1  # by which one knows them again
    went_on = Trajectory(text[:2], partial)
    replies = Replies(text, [3], "<u2")
    went_on.sampled(sample(replies, went_on.tokens, routed_tokens=went_on.routed_tokens))
    wanted = torch.from_numpy(experts_of(text[:11], "<u2"))
    wanted[:7] = 1
    wanted[10:] = 0
    assert replies.sent == 3
    assert torch.equal(went_on.item().tensors["routed_experts"], wanted)
    for bad in (wanted, wanted[:8, 0]):
        partial.tensors["routed_experts"] = bad
        with pytest.raises(RecordError, match="no row for each token"):
            Trajectory(text[:2], partial)


def test_an_unfinished_group_holds_samples_whose_experts_nobody_knows_yet():
    """A sample that was aborted before its first token has no rows."""
    text = list(range(12))
    begun = Trajectory(text[:2])
    begun.sampled(Generation())
    group = [aborted(text), begun.item()]
    [encoded] = check_and_encode_groups([group], values=True, alike=True)
    assert encoded.status is Status.ABORTED
    for item in group:
        item.status = Status.COMPLETED
    with pytest.raises(RecordError, match="routed_experts is missing in sample 1"):
        check_and_encode_groups([group], values=True, alike=True)
