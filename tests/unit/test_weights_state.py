"""States: the bytes of chunks in live tensors, in private memory, and in both."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrb.errors import WeightError
from redrb.weights.publishing.publisher import lay_out, published_tensors
from redrb.weights.reading.targets import LoadTarget, named_tensors
from redrb.weights.tensors.state import StateBytes, TensorShard, plain
from redrb.weights.wire.layout import Layout, TensorEntry, runs_of
from tests.published import bits, every_kind

CHUNK = 256


def layout_of(state, chunk_bytes=CHUNK):
    return lay_out(published_tensors(state), chunk_bytes)


def live_state(state, chunk_bytes=CHUNK):
    layout = layout_of(state, chunk_bytes)
    own = [entry.name for entry in layout.tensors if entry.alias is None]
    return StateBytes(layout, {name: plain(state[name]) for name in own})


def content(state):
    """All bytes, by `read` and by `segments`, which agree."""
    chunks = []
    for index in range(state.layout.chunks):
        chunk = state.read(index).tobytes()
        segments = state.segments(index)
        assert segments is None or b"".join(s.tobytes() for s in segments) == chunk
        assert len(chunk) == state.layout.size(index)
        chunks.append(chunk)
    return b"".join(chunks)


def expected(state):
    layout = layout_of(state)
    whole = bytearray(layout.nbytes)
    for entry in layout.tensors:
        raw = bits(state[entry.name])[2]
        offset = entry.offset
        whole[offset : offset + len(raw)] = raw
    return bytes(whole)


def test_live_tensors_are_read_as_they_lie():
    state = every_kind(rows=2)
    assert content(live_state(state)) == expected(state)


def test_private_memory_begins_as_zeros_and_holds_written_bytes():
    state = every_kind(rows=2)
    source, copy = live_state(state), StateBytes(layout_of(state))
    assert not any(content(copy))
    for index in range(source.layout.chunks):
        copy.write(index, source.read(index))
    assert content(copy) == expected(state)
    assert all(bits(tensor) == bits(state[name]) for name, tensor in named_tensors(copy))
    assert [name for name, _ in named_tensors(copy)] == list(state)
    tensors = dict(named_tensors(copy))
    assert tensors["tied"] is tensors["tied too"]


def test_tensors_of_a_copy_share_its_memory():
    state = {"a": torch.zeros(100), "b": torch.zeros(7, dtype=torch.bfloat16)}
    copy = StateBytes(layout_of(state))
    dict(named_tensors(copy))["b"][3] = 1.0
    assert sum(map(bool, content(copy))) == 2  # 0x3f80


def test_part_of_it_live_and_part_not():
    state = {name: torch.randn(37) for name in "abcd"}
    state["none"] = torch.empty(0, 3)
    layout, source = layout_of(state), live_state(state)
    live = {"b": torch.zeros(37), "d": torch.zeros(37)}
    mixed = StateBytes(layout, live)
    for index in range(layout.chunks):
        mixed.write(index, source.read(index))
    mixed.finish()
    assert content(mixed) == content(source)
    assert all(torch.equal(live[name], state[name]) for name in live)
    for name, tensor in named_tensors(mixed):
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_live_tensors_of_more_precision_are_cast_on_the_way(dtype):
    state = {"a": torch.randn(300).bfloat16(), "n": torch.arange(300)}
    source = live_state(state)
    live = {"a": torch.zeros(300, dtype=dtype), "n": torch.zeros(300, dtype=torch.int64)}
    target = StateBytes(source.layout, live)
    assert target.segments(0) is None
    for index in range(source.layout.chunks):
        target.write(index, source.read(index))
    assert torch.equal(live["a"], state["a"].to(dtype))
    assert torch.equal(live["n"], state["n"])
    assert content(target) == content(source)
    assert target.memory is None


def test_nothing_that_lies_together_is_copied():
    tensor = torch.full((1 << 12,), 3, dtype=torch.uint8)
    source = live_state({"a": tensor}, chunk_bytes=1 << 10)
    segments = source.segments(1)
    assert [segment.ctypes.data for segment in segments] == [tensor.data_ptr() + (1 << 10)]
    assert source.read(1).ctypes.data == tensor.data_ptr() + (1 << 10)
    own = StateBytes(source.layout)
    assert own.segments(2)[0].ctypes.data == own.memory.ctypes.data + (2 << 10)


def test_read_bytes_may_be_changed_and_written():
    live = torch.zeros(64)
    state = StateBytes(layout_of({"a": live}), {"a": live})
    chunk = state.read(0)
    chunk[:4] = np.frombuffer(np.float32(5).tobytes(), np.uint8)
    state.write(0, chunk)
    assert live[0] == 5


def test_reading_in_threads_does_not_mix():
    """What is cast is put together in memory of each thread."""
    tensors = {"a": torch.randn(4000)}
    layout = lay_out(published_tensors(tensors), CHUNK, torch.bfloat16)
    state = StateBytes(layout, tensors)
    wanted = [state.read(index).tobytes() for index in range(layout.chunks)]
    wrong = []

    def read(turn):
        for index in range(layout.chunks):
            at = (index * 7 + turn) % layout.chunks
            if state.read(at).tobytes() != wanted[at]:
                wrong.append(at)

    threads = [threading.Thread(target=read, args=[turn]) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_autograd_knows_the_written_tensors():
    live = {name: torch.zeros(200, requires_grad=True) for name in "ab"}
    state = StateBytes(layout_of(live), live)
    losses = {name: (tensor**2).sum() for name, tensor in live.items()}
    state.write(0, np.ones(CHUNK, np.uint8))  # of `a`
    state.finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses["a"].backward()
    losses["b"].backward()


def test_a_state_without_memory_has_no_other_tensors():
    layout = layout_of({"a": torch.zeros(3)})
    state = StateBytes(layout, {"a": torch.zeros(3)})
    other = TensorEntry("b", "float32", (3,), 0)
    with pytest.raises((WeightError, KeyError)):
        state.value(other)


def test_a_state_that_no_memory_holds_is_reported():
    entry = TensorEntry("a", "uint8", (1 << 52,), 0)
    layout = Layout((entry,), 1 << 52, 1 << 46)
    with pytest.raises(WeightError, match="not enough memory"):
        StateBytes(layout)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128], ids=str
)
def test_a_state_of_no_bytes(dtype):
    state = StateBytes(layout_of({"a": torch.empty(0, 3, dtype=dtype)}))
    (found,) = named_tensors(state)
    assert (found[1].shape, found[1].dtype) == ((0, 3), dtype)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    start=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    size=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.int64]),
)
def test_any_box_is_loaded(shape, start, size, dtype):
    torch.manual_seed(0)
    tensor = torch.randint(0, 100, shape).to(dtype)
    layout = layout_of({"a": tensor}, CHUNK)
    state = StateBytes(layout)
    state.value(layout.tensors[0]).copy_(tensor)
    assert torch.equal(dict(named_tensors(state))["a"], tensor)
    start = tuple(min(at, whole) for at, whole in zip(start, shape, strict=True))
    size = tuple(min(n, whole - at) for n, at, whole in zip(size, start, shape, strict=True))
    box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
    target = TensorShard(
        torch.full(size, -1 if dtype.is_signed else 255, dtype=dtype), shape, start
    )
    wanted = LoadTarget({"a": target}, True)
    needed = wanted.chunks(layout)
    assert needed <= set(range(layout.chunks))
    partial = StateBytes(layout)  # with the chunks that are needed, and no others
    for index in needed:
        partial.write(index, state.read(index))
    wanted.load(partial)
    assert torch.equal(target.tensor, tensor[box])


def test_only_chunks_that_are_needed_are_named():
    layout = layout_of({"a": torch.zeros(64, 64, dtype=torch.uint8)}, CHUNK)  # 4 rows a chunk
    rows = TensorShard(torch.zeros(8, 64, dtype=torch.uint8), (64, 64), (10, 0))
    assert LoadTarget({"a": rows}, True).chunks(layout) == {2, 3, 4}
    nothing = TensorShard(torch.zeros(0, 64, dtype=torch.uint8), (64, 64), (10, 0))
    assert LoadTarget({"a": nothing}, True).chunks(layout) == frozenset()


def test_runs_cover_all_that_may_differ():
    state = every_kind(rows=2)
    layout = layout_of(state)
    for index, spans in enumerate(layout.spans()):
        runs = runs_of(spans)
        covered = {byte for run in runs for byte in range(run.start, run.start + run.nbytes)}
        wanted = {b for span in spans for b in range(span.in_chunk, span.in_chunk + span.nbytes)}
        assert wanted <= covered <= set(range(layout.size(index)))
        assert all(run.start + run.nbytes <= after.start for run, after in itertools.pairwise(runs))
