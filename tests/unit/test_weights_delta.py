"""Deltas of published weights: without loss, bounded on hostile bytes, in a fixed format."""

from __future__ import annotations

import resource
import struct
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings

from redrb.errors import DecodeError
from redrb.weights.wire.delta import Bytes, Run, largest_encoding
from redrb.weights.wire.delta_decoding import apply_block
from redrb.weights.wire.delta_encoding import encode_block

quick = settings(deadline=None, derandomize=True, max_examples=100)
WIDTHS = (1, 2, 4, 8)
DENSE = 0xFFFF_FFFF
DOC_RUNS = (Run(0, 1024, 2), Run(1024, 16, 4))
DOC_BYTES = bytes.fromhex(
    "01"
    "0d000000 10000000 10000000 0d000000 0d000000"
    "04000000 ffffffff"
    "28b52ffd2004210000 0002ff29"
    "28b52ffd2007390000 02019002040100"
    "28b52ffd2007390000 00000100000000"
    "28b52ffd2004210000 00000000"
    "28b52ffd2004210000 00000000"
)


def doc_blocks() -> tuple[Bytes, Bytes]:
    """The example in docs/reference/weight-format.md."""
    base = np.zeros(1040, np.uint8)
    base[:1024].view("<u2")[:] = 0x3F80
    new = base.copy()
    halves = new[:1024].view("<u2")
    halves[0] += 1
    halves[3] -= 1
    halves[300] += 200
    new[1024:].view("<i4")[:] = [1, 2, -1, 0]
    return base, new


def random_block(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def assert_round_trip(base: Bytes, new: Bytes, runs: Sequence[Run]) -> bytes:
    kept = base.copy(), new.copy()
    encoded = encode_block(base, new, runs)
    np.testing.assert_array_equal(base, kept[0])
    np.testing.assert_array_equal(new, kept[1])
    assert bool(encoded) == bool((base != new).any())
    assert len(encoded) <= largest_encoding(runs)
    for given_as in (encoded, memoryview(encoded)):
        block = base.copy()
        apply_block(block, given_as, runs)
        np.testing.assert_array_equal(block, new)
    return encoded


def change(width: int, items: int, places: Sequence[int], by: int | None = 1) -> bytes:
    """Round trip of one run of which these items change."""
    base = random_block(items * width)
    new = base.copy()
    view = new.view(f"<u{width}")
    amount = int(random_block(width, 1).view(view.dtype)[0]) | 1 if by is None else by
    view[list(places)] += np.array(amount).astype(view.dtype)
    return assert_round_trip(base, new, [Run(0, items * width, width)])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.001, 0.49, 0.51, 1.0])
@pytest.mark.parametrize("items", [1, 9, 70_001, 300_000])
def test_every_width_and_share(width, share, items):
    rng = np.random.default_rng(items)
    base = random_block(items * width)
    new = base.copy()
    chosen = rng.random(items) < share
    new.view(f"<u{width}")[chosen] = random_block(items * width, 1).view(f"<u{width}")[chosen]
    assert_round_trip(base, new, [Run(0, base.size, width)])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("skipped", [0, 1, 254, 255, 256, 510, 65_536])
def test_gaps_of_every_length_are_restored(width, skipped):
    change(width, skipped + 1, [skipped])
    change(width, 2 * skipped + 500, [skipped, 2 * skipped + 1])
    change(width, 300_000, [0, skipped + 1, 299_999])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("items", [1, 2, 8, 262_144, 262_145])
def test_first_and_last_item(width, items):
    change(width, items, [0])
    change(width, items, [items - 1])
    change(width, items, sorted({0, items - 1}), by=None)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_size_of_difference(width):
    bits = 8 * width
    sizes = [1 << n for n in range(bits)]
    values = {sign * (size + by) for size in sizes for by in (-1, 0, 1) for sign in (1, -1)}
    base = random_block(200 * 1000 * width).view(f"<u{width}")
    new = base.copy()
    for place, value in enumerate(sorted(values)):
        new[place * 500] += np.array(value % (1 << bits), new.dtype)
    assert_round_trip(base.view(np.uint8), new.view(np.uint8), [Run(0, base.nbytes, width)])


def test_changes_that_a_sample_does_not_see():
    """The choice between gaps and all items is a guess: either way nothing is lost."""
    base = random_block(1 << 20)
    new = base.copy()
    new[: 3 << 18] ^= random_block(3 << 18, 2)
    step = 2 * ((1 << 19) // 1024 | 1)
    new.reshape(-1)[::step] = base[::step]
    assert_round_trip(base, new, [Run(0, base.size, 2)])


def test_runs_of_all_widths_with_padding_between():
    runs = [
        Run(0, 6, 2),
        Run(64, 0, 4),
        Run(64, 4096, 4),
        Run(4160, 333, 1),
        Run(4496, 800, 8),
        Run(5296, 5000, 2),
        Run(10_296, 0, 8),
        Run(10_296, 4, 1),
    ]
    base = random_block(10_300)
    new = base.copy()
    for run in runs[::2]:
        new[run.start : run.start + run.nbytes : 97] ^= 5
    assert_round_trip(base, new, runs)
    for run in runs:
        part = slice(run.start, run.start + run.nbytes)
        new[part] ^= 3
    assert_round_trip(base, new, runs)


def test_no_runs_no_bytes():
    empty = np.empty(0, np.uint8)
    assert encode_block(empty, empty, []) == b""
    apply_block(empty, b"", [])
    for encoded in (b"\x01", b"\x01" + bytes(4), b"\x01" + bytes(5)):
        try:
            apply_block(empty, encoded, [])
        except DecodeError:
            continue


@pytest.mark.parametrize("width", [2, 4, 8])
def test_blocks_need_no_alignment(width):
    base, new = random_block(80_003), random_block(80_003)
    new[1000:50_000:1000] ^= 1
    runs = [Run(width, 79_992, width)]
    encoded = encode_block(base[3:], new[3:], runs)
    apply_block(base[3:], encoded, runs)
    np.testing.assert_array_equal(base, new)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Bytes, Bytes, list[Run]]:
    runs, end = [], 0
    for width, items, skip in draw(
        st.lists(
            st.tuples(st.sampled_from(WIDTHS), st.integers(0, 700), st.integers(0, 20)), max_size=5
        )
    ):
        start = -(-(end + skip) // width) * width
        runs.append(Run(start, items * width, width))
        end = start + items * width
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base = rng.integers(0, 256, end, dtype=np.uint8)
    new = base.copy()
    for run in runs:
        view = new[run.start : run.start + run.nbytes].view(f"<u{run.width}")
        chosen = rng.random(view.size) < draw(st.sampled_from([0, 0.01, 0.2, 1]))
        bits = draw(st.integers(1, 8 * run.width))
        view[chosen] += rng.integers(0, 1 << bits, view.size, dtype=np.uint64).astype(view.dtype)[
            chosen
        ]
    return base, new, runs


@quick
@given(cases())
def test_round_trip(case):
    assert_round_trip(*case)


def attempt(base: Bytes, encoded: bytes, runs: Sequence[Run]) -> None:
    """Apply, or refuse and leave the block as it was."""
    block = base.copy()
    try:
        apply_block(block, encoded, runs)
    except DecodeError:
        np.testing.assert_array_equal(block, base)


@quick
@given(cases(), st.data())
def test_damaged_bytes(case, data):
    base, new, runs = case
    encoded = bytearray(encode_block(base, new, runs))
    if not encoded:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    attempt(base, bytes(encoded), runs)
    attempt(base, bytes(encoded) + b"\0", runs)
    attempt(base, bytes(encoded[: data.draw(st.integers(0, len(encoded)))]), runs)


@quick
@given(st.binary(max_size=200), st.sampled_from([[Run(0, 512, 2)], [Run(0, 8, 8), Run(8, 9, 1)]]))
def test_random_bytes(encoded, runs):
    attempt(random_block(512), encoded, runs)
    attempt(random_block(512), b"\x01" + encoded, runs)


def test_every_truncation_is_refused():
    base, _ = doc_blocks()
    for size in range(1, len(DOC_BYTES)):
        with pytest.raises(DecodeError):
            apply_block(base, DOC_BYTES[:size], DOC_RUNS)
    with pytest.raises(DecodeError):
        apply_block(base, DOC_BYTES + b"\0", DOC_RUNS)
    np.testing.assert_array_equal(base, doc_blocks()[0])


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content) if content else b""


def delta_of(frames: Sequence[bytes], counts: Sequence[int], form: int = 1) -> bytes:
    head = struct.pack(f"<B{len(frames)}I{len(counts)}I", form, *map(len, frames), *counts)
    return head + b"".join(frames)


@pytest.mark.parametrize(
    ("frames", "counts", "form"),
    [
        pytest.param([frame(b"\0"), frame(b"\1"), frame(b"\0")], [1], 0, id="format 0"),
        pytest.param([frame(b"\0"), frame(b"\1"), frame(b"\0")], [1], 2, id="format 2"),
        pytest.param([frame(b"\4"), frame(b"\1"), frame(b"\0")], [1], 1, id="beyond the run"),
        pytest.param([frame(b"\3\0"), frame(b"\1\1"), frame(b"\0\0")], [2], 1, id="last beyond"),
        pytest.param([frame(b"\xff"), b"", b""], [1], 1, id="goes on beyond"),
        pytest.param([frame(bytes(5)), frame(bytes(5)), frame(bytes(5))], [5], 1, id="many gaps"),
        pytest.param([b"", b"", b""], [DENSE - 1], 1, id="very many gaps"),
        pytest.param([b"", b"", b""], [1], 1, id="gaps missing"),
        pytest.param([frame(b"\0"), frame(b"\1"), b""], [1], 1, id="plane missing"),
        pytest.param([frame(b"\0"), frame(b"\1\1"), frame(b"\0")], [1], 1, id="plane too long"),
        pytest.param([frame(b"\0"), frame(b"\1"), frame(b"\0")], [0], 1, id="gaps too many"),
        pytest.param([b"", frame(bytes(3)), frame(bytes(4))], [DENSE], 1, id="dense too short"),
        pytest.param([frame(b"\0"), frame(bytes(4)), frame(bytes(4))], [DENSE], 1, id="dense gap"),
        pytest.param([b"", b"\x50\x2a\x4d\x18" + bytes(4), b""], [0], 1, id="skippable frame"),
        pytest.param([frame(b"\0") * 2, frame(b"\1"), frame(b"\0")], [1], 1, id="two frames"),
        pytest.param([frame(b"\0") + b"x", frame(b"\1"), frame(b"\0")], [1], 1, id="a byte more"),
    ],
)
def test_a_delta_for_other_runs_is_refused(frames, counts, form):
    block = random_block(8)
    kept = block.copy()
    with pytest.raises(DecodeError):
        apply_block(block, delta_of(frames, counts, form), [Run(0, 8, 2)])
    np.testing.assert_array_equal(block, kept)


def hostile_frames() -> list[bytes]:
    magic = b"\x28\xb5\x2f\xfd"
    raw_block = b"\x09\0\0\0"  # the last block: raw, one byte
    return [
        magic + b"\xa0" + struct.pack("<I", 2 << 30) + raw_block,
        magic + b"\xe0" + struct.pack("<Q", (1 << 64) - 3) + raw_block,
        magic + b"\x00\xf8" + raw_block,  # says no size, and a window of 2 TiB
        magic + b"\xa0" + struct.pack("<I", 2 << 30) + b"\x03\x00\x10\0",  # 128 KiB of one byte
        magic + b"\x80\xf8" + struct.pack("<I", 1) + raw_block,  # a byte in a window of 2 TiB
        magic + b"\x80\x88" + struct.pack("<I", 1) + raw_block,  # and of 128 MiB
    ]


@pytest.mark.parametrize("bomb", hostile_frames())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_frame_that_claims_much_costs_nothing(bomb, place):
    frames = [frame(b"\0"), frame(b"\2"), frame(b"\0")]
    frames[place] = bomb
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
    try:
        attempt(random_block(1 << 10), delta_of(frames, [1]), [Run(0, 1 << 10, 2)])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_more_bytes_than_runs_allow_are_refused_unread():
    runs = [Run(0, 64, 2)]
    with pytest.raises(DecodeError, match="too long"):
        apply_block(random_block(64), b"\x01" + bytes(largest_encoding(runs)), runs)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("items", [1, 300, 100_000])
def test_incompressible_changes_fit_the_bound(width, items):
    runs = [Run(0, items * width, width)]
    base, new = random_block(items * width, 1), random_block(items * width, 2)
    assert len(encode_block(base, new, runs)) <= largest_encoding(runs)


@pytest.mark.parametrize(
    ("start", "nbytes", "width"), [(0, 6, 3), (1, 2, 2), (0, 3, 2), (-2, 2, 2), (0, -2, 2)]
)
def test_runs_hold_whole_items(start, nbytes, width):
    with pytest.raises(ValueError, match="item"):
        Run(start, nbytes, width)


def test_runs_lie_in_their_block():
    block: npt.NDArray[np.uint8] = random_block(8)
    for call in (
        lambda: encode_block(block, block, [Run(4, 8, 4)]),
        lambda: apply_block(block, b"", [Run(4, 8, 4)]),
        lambda: encode_block(block, block[:4], [Run(0, 4, 4)]),
    ):
        with pytest.raises(ValueError, match="block"):
            call()


def test_golden_bytes():
    base, new = doc_blocks()
    assert encode_block(base, new, DOC_RUNS) == DOC_BYTES
    apply_block(base, DOC_BYTES, DOC_RUNS)
    np.testing.assert_array_equal(base, new)


def test_small_steps_are_few_bytes():
    """One item in a hundred, by one unit: entropy asks for 0.56 percent."""
    base = random_block(1 << 20)
    new = base.copy()
    view = new.view("<u2")
    chosen = np.random.default_rng(1).random(view.size) < 0.01
    view[chosen] += np.where(random_block(int(chosen.sum()), 3) < 128, 1, 0xFFFF).astype("<u2")
    assert len(encode_block(base, new, [Run(0, base.size, 2)])) < base.size // 150
