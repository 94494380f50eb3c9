"""One pass collects and checks the samples of a put; whatever is unusual, Python collects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrb.codec import (
    EncodedGroup,
    check_and_encode_groups,
    collecting,
    decode_items,
    encode_groups,
    kernels,
    parse_group,
)
from redrb.codec import encode as codec_encode
from redrb.codec.collecting import BY_TORCH, Collector
from redrb.errors import EncodeError, RecordError
from redrb.experience import BufferItem
from redrb.experience.checking import check_groups
from redrb.experience.records import TENSOR_FIELDS, named_tensors
from redrb.table.values import Values
from tests.samples import numbered
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)

needs_exchange = pytest.mark.skipif(
    kernels.NAME != "compiled" or not hasattr(Tensor, "__dlpack_c_exchange_api__"),
    reason="the codec was not compiled, or torch is too old",
)


def is_compiled() -> bool:
    return not kernels.kernel.__name__.endswith("plain")


def decoded(item: BufferItem, encode: Callable[..., Any] = encode_groups) -> BufferItem:
    (group,) = encode([[item]])
    (found,) = decode_items(parse_group(group.blob))
    return found


SOUND: list[dict[str, Any]] = [
    {},
    {"policy_version": 3, "token_versions": torch.tensor([-1, 4])},
    {"values": torch.zeros(2), "kl": torch.zeros(2).bfloat16()},
    {"attention_mask": torch.ones(3).bool(), "action_mask": torch.ones(2)},
    {"reward": None, "sequences": None},
    {"reward": torch.tensor(3)},
    {"tensors": {"x": torch.zeros(3, 0, 2), "y": torch.full((4,), math.nan)}},
]
MALFORMED: list[dict[str, Any]] = [
    {"sequences": torch.ones(3)},
    {"sequences": torch.ones(1, 3).long()},
    {"sequences": torch.ones(1).long()},
    {"sequences": 1},
    {"reward": torch.ones(1)},
    {"reward": 1.0},
    {"reward": torch.tensor(math.nan)},
    {"reward": torch.tensor(math.inf, dtype=torch.float16)},
    {"reward": torch.tensor(-math.inf, dtype=torch.bfloat16)},
    {"reward": torch.tensor(math.nan, dtype=torch.float64)},
    {"reward": torch.tensor(math.nan).to(torch.float8_e4m3fn)},
    {"values": torch.zeros(2, 2)},
    {"values": torch.zeros(3)},
    {"attention_mask": torch.ones(2)},
    {"action_mask": torch.ones(1) > 0},
    {"token_versions": torch.zeros(2)},
    {"token_versions": torch.zeros(2).bool()},
    {"policy_version": -1},
    {"policy_version": -(2**70)},
    {"policy_version": 1.5},
    {"policy_version": True},
]


@pytest.mark.parametrize("changes", SOUND)
def test_sound_samples_are_encoded_as_they_are_without_a_check(changes):
    group = [numbered(0, **changes), numbered(1, **changes)]
    assert check_and_encode_groups([group]) == encode_groups([group])
    columns = Collector().plain(group)
    # torch before 2.10 gives no table of functions that read tensors
    assert (columns is not None) is (is_compiled() and collecting._EXCHANGE is not None)
    assert columns is None or columns.sound


@pytest.mark.parametrize("changes", MALFORMED)
def test_malformed_samples_are_refused_as_check_groups_does(changes):
    groups = [[numbered(0)], [numbered(1), numbered(2, **changes)]]
    with pytest.raises(RecordError) as caught:
        check_and_encode_groups(groups)
    with pytest.raises(RecordError) as expected:
        for bad_reward in check_groups(groups).values():
            raise bad_reward
    assert str(caught.value) == str(expected.value)
    assert caught.value.field == expected.value.field


@pytest.mark.parametrize("group", [[1], [None], [numbered(0), {}]])
def test_what_is_no_sample_is_refused(group):
    with pytest.raises(RecordError, match=r"redrb\.BufferItem"):
        check_and_encode_groups([group])


INTEGERS = [dtype for dtype in BY_TORCH if not dtype.is_floating_point and dtype != torch.bool]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(INTEGERS), default=st.none() | st.integers(0, 300))
def test_the_oldest_and_the_newest_version_are_those_of_samples_and_tokens(data, dtype, default):
    bounds = torch.iinfo(dtype)
    near = st.sampled_from([bounds.min, bounds.max, min(bounds.max, 2**63 - 1), 0])
    version = near | st.integers(max(bounds.min, -3), min(bounds.max, 300))
    tokens = data.draw(st.lists(st.none() | st.lists(version, max_size=40), min_size=1, max_size=4))
    own = data.draw(st.lists(st.none() | st.integers(0, 300), min_size=4, max_size=4))
    group = [
        BufferItem(
            None,
            None,
            token_versions=None if each is None else torch.tensor(each, dtype=dtype),
            policy_version=policy,
        )
        for each, policy in zip(tokens, own, strict=False)
    ]
    policies = [default if item.policy_version is None else item.policy_version for item in group]
    known = [each for each in policies if each is not None]
    known += [each for row in tokens for each in row or () if 0 <= each < 2**63]
    (found,) = encode_groups([group], policy_version=default)
    assert found.policy_version == min(known, default=None)
    assert found.newest == max(known, default=None)


def unusual_tensors() -> list[Tensor]:
    halves = torch.complex(torch.zeros(4), torch.arange(4.0)).conj()
    return [
        halves.imag,
        halves.imag[3],
        halves.imag[1:2],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.ones(4).expand(3, 4),
        torch.ones(1, 4).expand(1, 4).t(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True) * 2,
        torch.arange(6).as_strided((1, 6), (99, 1)),
        torch.empty(0, 3, 2),
        torch.ones(2, 3).to_sparse().to_dense(),
        torch._neg_view(torch.arange(3.0)),
        torch.arange(6, dtype=torch.int8)[::2],
    ]


@pytest.mark.parametrize("tensor", unusual_tensors(), ids=str)
def test_unusual_tensors_come_back_as_they_were(tensor):
    for encode in (encode_groups, check_and_encode_groups):
        found = decoded(numbered(0, tensors={"x": tensor}), encode)
        assert torch.equal(found.tensors["x"], tensor.detach().resolve_neg())
        assert not found.tensors["x"].requires_grad


def test_a_number_whose_sign_stands_elsewhere_keeps_it():
    reward = torch.complex(torch.zeros(()), torch.ones(())).conj().imag
    assert reward.is_neg()
    found = decoded(numbered(0, reward=reward), check_and_encode_groups).reward
    assert found.item() == -1


def freed() -> Tensor:
    tensor = torch.ones(40)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(Tensor):
    """A tensor without memory of its own, as those of quantization and sharding are."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(2)


def masked() -> Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def fake() -> Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


NOT_PLAIN: dict[str, tuple[Callable[[], Tensor], str]] = {
    "freed": (freed, "has no memory"),
    "zeros alone": (lambda: torch._efficientzerotensor((2,)), "has no memory|plain memory"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        "nested",
    ),
    "coo": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
    "bsr": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "layout torch.sparse_bsr"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), "layout torch._mkldnn"),
    "meta": (lambda: torch.ones(2, device="meta"), "device meta"),
    "wrapper": (Wrapper, "Wrapper, a tensor that stands for others"),
    "masked": (masked, "MaskedTensor, a tensor that stands for others"),
    "fake": (fake, "FakeTensor, a tensor that stands for others"),
    "lazy": (torch.nn.UninitializedParameter, "uninitialized"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "qint8"),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "complex64"),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|MaskedTensors|quantize_per_tensor)")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_without_plain_memory_is_refused_for_its_own_cause(kind):
    make, cause = NOT_PLAIN[kind]
    for encode in (encode_groups, check_and_encode_groups):
        with pytest.raises(EncodeError, match=rf"x .*({cause})"):
            encode([[numbered(0, tensors={"x": make()})]])
    for values in ([make()], [make(), make()], [torch.ones(2), make()]):
        with pytest.raises(EncodeError, match=rf"'x'.*({cause})"):
            Values().encode_column("x", values, ["a", "b"][: len(values)])
    for name in TENSOR_FIELDS:
        for encode in (encode_groups, partial(check_and_encode_groups, values=True, alike=True)):
            with pytest.raises((RecordError, EncodeError), match=name):
                encode([[numbered(0, **{name: make()})]])


def test_the_tensors_of_a_transform_are_refused():
    def put(row: Tensor) -> Tensor:
        for encode in (encode_groups, check_and_encode_groups):
            with pytest.raises(EncodeError, match="x cannot be read as plain memory"):
                encode([[numbered(0, tensors={"x": row})]])
        return row

    torch.func.vmap(put)(torch.ones(2, 3))


ALL_DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_each_dtype_of_torch_comes_back_or_is_refused_by_its_name(dtype):
    if str(dtype).startswith("torch.q"):
        tensor = torch._empty_affine_quantized((8,), scale=1.0, zero_point=0, dtype=dtype)
    else:
        bits = torch.arange(8 * dtype.itemsize, dtype=torch.uint8)
        tensor = (bits % 2 if dtype is torch.bool else bits).view(dtype)
    for encode in (encode_groups, check_and_encode_groups):
        sample = numbered(0, tensors={"x": tensor})
        if dtype in BY_TORCH:
            found = decoded(sample, encode).tensors["x"]
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
            continue
        with pytest.raises(EncodeError, match=f"x is {dtype}"):
            encode([[sample]])
        for name in TENSOR_FIELDS:
            for one in (tensor, tensor[:3], tensor[0]):
                with pytest.raises((RecordError, EncodeError), match=name):
                    encode([[numbered(0, **{name: one})]])
        for values in ([tensor], [tensor, tensor], tensor):
            with pytest.raises(EncodeError, match=f"dtype {str(dtype)[6:]}"):
                Values().encode_column("x", values, [str(row) for row in range(len(values))])


def test_without_the_exchange_of_tensors_the_bytes_are_the_same(monkeypatch):
    versions = torch.tensor([3, 4])
    group = [numbered(number, token_versions=versions) for number in range(3)]
    expected = check_and_encode_groups([group])
    monkeypatch.setattr(collecting, "_EXCHANGE", None)
    assert Collector().plain(group) is None
    assert check_and_encode_groups([group]) == expected


@needs_exchange
def test_collected_columns_are_encoded_once():
    if not is_compiled():
        pytest.skip("the plain kernel collects nothing")
    columns = Collector().plain([numbered(0)])
    blob, _ = kernels.kernel.encode(1, columns.memory, 0, b"", b"")
    assert parse_group(blob).samples == 1
    with pytest.raises(ValueError, match="once"):
        kernels.kernel.encode(1, columns.memory, 0, b"", b"")
    again = Collector().plain([numbered(0)])
    with pytest.raises(ValueError, match="samples"):
        kernels.kernel.encode(2, again.memory, 0, b"", b"")


def test_a_collected_group_holds_its_tensors():
    item = numbered(0, sequences=torch.arange(100_000))
    columns = Collector().plain([item])
    if columns is None:
        pytest.skip("the plain kernel collects nothing")
    for name in TENSOR_FIELDS:
        setattr(item, name, None)
    torch.full((100_000,), 7)
    blob, _ = kernels.kernel.encode(1, columns.memory, 0, b"", b"")
    (found,) = decode_items(parse_group(blob))
    assert torch.equal(named_tensors(found)["sequences"], torch.arange(100_000))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_tensors_that_another_thread_changes_are_stored_in_one_size(dtype):
    """The run at the start and the one at the end are found one after the other.

    A change between these may not make them overlap.
    """
    changing = torch.zeros(1_000_000, dtype=dtype)
    stopped = Event()

    def change():
        while not stopped.is_set():
            changing[16] = 1
            changing[16] = 0

    thread = Thread(target=change, daemon=True)
    thread.start()
    try:
        for _ in range(50):
            found = decoded(numbered(0, tensors={"x": changing})).tensors["x"]
            assert found.shape == changing.shape
            assert found.count_nonzero() <= 1
    finally:
        stopped.set()
        thread.join(10)


def test_a_column_that_no_sample_has_is_left_out():
    blob, _ = kernels.kernel.encode(2, [(b"\x00", 4, -1, [None, None], False)], 0, b"", b"")
    assert parse_group(blob).fields == ()


@needs_exchange
@pytest.mark.parametrize(
    "column",
    [
        (b"\x00", 15, -1, [None]),
        (b"\x00", -1, -1, [None]),
        (b"\x00", 4, 15, [None]),
        (b"\x00", 4, -1, []),
        (b"\x00", 4, -1, [(0, (3,))]),
        (b"\x00", 10, 9, [(8, (3,))]),
        (b"\x00", 10, -1, [(8, (3,), 8)]),
        (b"\x00", 4, -1, [(8, (2**31, 2))]),
        (b"\x00", 4, -1, [(8, (1,) * 9)]),
    ],
)
def test_the_compiled_kernel_refuses_columns_that_contradict_themselves(column):
    if not is_compiled():
        pytest.skip("the plain kernel trusts its caller")
    with pytest.raises(ValueError, match=r"column|address|large"):
        kernels.kernel.encode(1, [(*column, False)], 0, b"", b"")


FLOATS = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def numbers_with(bad: float, where: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return 99 numbers that begin and end with a run, some of them bad."""
    numbers = torch.cat([torch.ones(30), torch.arange(39.0), torch.ones(30)])
    numbers[torch.tensor(where, dtype=torch.long)] = bad
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "where", [[], [0], [35], [68], [*range(30)], [*range(69, 99)], [*range(99)]], ids=len
)
def test_numbers_that_are_not_finite_are_found_as_they_are_copied(dtype, where):
    for bad in (math.nan, -math.inf):  # float8_e4m3fn has no infinity
        numbers = numbers_with(bad, where, dtype)
        sample = numbered(0, sequences=torch.arange(120), values=numbers, action_log_probs=None)
        other = replace(sample, values=torch.ones(99).to(dtype))
        for group in ([sample], [other, sample], [replace(sample, values=numbers[::2])]):
            finite = bool(named_tensors(group[-1])["values"].double().isfinite().all())
            found = encode_checked(group)
            assert found.finite == finite
            assert found.blob == encode_groups([group])[0].blob


def encode_checked(group: list[BufferItem]) -> EncodedGroup:
    """Encode a group with a check of its values, whatever the check says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_encode, "check_values", lambda *_: None)
        (found,) = check_and_encode_groups([group], values=True)
    return found


def test_only_values_are_checked_and_only_if_asked():
    bad = torch.full((40,), math.nan)
    assert encode_groups([[numbered(0, values=bad)]])[0].finite
    assert encode_checked([numbered(0, tensors={"x": bad})]).finite
    with pytest.raises(RecordError, match="kl of sample 1 in group 4 is nan at position 0"):
        check_and_encode_groups([[numbered(0), numbered(1, kl=bad[:2])]], values=True, first=4)
