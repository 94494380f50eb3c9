"""The fast path for groups of one sample and one shape writes the bytes of the general path."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from redrb.codec import EncodedGroup, encode_groups
from redrb.experience import BufferItem, Experience, Status
from redrb.experience.batching import padded_rows
from redrb.experience.records import TENSOR_FIELDS
from tests.unit.codec_kernels import kernel  # noqa: F401 (used by every test)
from tests.unit.test_codec import ALL_DTYPES, METADATA, make

SHAPES = [(), (0,), (1,), (15,), (16,), (17,), (40,), (3, 0, 2), (5, 7), (2, 3, 4, 2)]
ANY_METADATA = st.fixed_dictionaries(
    {
        "policy_version": st.sampled_from([None, 0, 3, -(2**63), 2**63 - 1, True]),
        "status": st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.FAILED]),
        "group_id": st.sampled_from([None, None, "", "prompt ✓"]),
        "tags": st.sampled_from([{}, {}, {"a": 1.5, "b": True, "c": "d"}, {"n": 1}]),
        "extras": st.sampled_from([{}, {}, {"t": datetime(2024, 5, 1, tzinfo=UTC), "l": [1]}]),
    }
)


def join(groups: list[EncodedGroup]) -> list[tuple[Any, ...]]:
    blobs = [group.blob for group in groups]
    assert [len(blob) for blob in blobs] == [group.nbytes for group in groups]
    rest = [(group.samples, group.policy_version, group.status) for group in groups]
    return list(zip(blobs, rest, strict=True))


def generally(items: list[BufferItem], **options: Any) -> list[tuple[Any, ...]]:
    """Encode by the general path, which a neighbour of two samples forces."""
    return join(encode_groups([*([item] for item in items), [make(), make()]], **options))[:-1]


@st.composite
def rows(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...], samples: int) -> list[Tensor]:
    """Draw tensors of small or any values, with runs at some of their starts and ends."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = torch.empty(0, dtype=dtype).element_size()
    whole = (samples, *shape)
    if draw(st.booleans()):
        raw = torch.randint(0, 256, (*whole, size), generator=generator).to(torch.uint8)
        drawn = raw.view(dtype).reshape(whole)
    else:
        low, high = draw(st.sampled_from([(0, 2), (0, 200), (0, 300), (-100, 100), (1, 32_000)]))
        drawn = torch.randint(low, high, whole, generator=generator).to(dtype)
    out = [row.clone() for row in drawn]
    value = draw(st.sampled_from([0.0, 1.0, -100.0, 151_643.0, float("nan")]))
    if not dtype.is_floating_point:
        value = 7.0 if value != value else value
    filler = torch.tensor(value, dtype=torch.float64 if dtype.is_floating_point else torch.int64)
    for row in out:
        flat = row.view(-1)
        lead, trail = draw(st.tuples(*[st.sampled_from([0, 0, 1, 15, 16, 20, 99])] * 2))
        flat[:lead] = filler.to(dtype)
        flat[len(flat) - min(trail, len(flat)) :] = filler.to(dtype)
    return out


@st.composite
def batches(draw: st.DrawFn) -> list[BufferItem]:
    """Draw samples whose shapes and dtypes are all alike."""
    samples = draw(st.integers(1, 5))
    fields: list[dict[str, Any]] = [{**draw(ANY_METADATA), "tensors": {}} for _ in range(samples)]
    for name in draw(st.sets(st.sampled_from([*TENSOR_FIELDS, "x", "ä"]), max_size=5)):
        integers = ALL_DTYPES[1:9] if name == "token_versions" else ALL_DTYPES
        dtype, shape = draw(st.sampled_from(integers)), draw(st.sampled_from(SHAPES))
        for own, tensor in zip(fields, draw(rows(dtype, shape, samples)), strict=True):
            (own if name in TENSOR_FIELDS else own["tensors"])[name] = tensor
    return [make(**own) for own in fields]


@settings(
    deadline=None,
    derandomize=True,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(batches(), st.sampled_from([None, 9]))
def test_the_fast_path_writes_the_bytes_of_the_general_path(items, version):
    options = {"policy_version": version}
    wanted = generally(items, **options)
    assert join(encode_groups([[item] for item in items], **options)) == wanted
    named = {name: getattr(items[0], name) for name in TENSOR_FIELDS}
    names = [name for name, tensor in named.items() if tensor is not None]
    if not names:
        return
    batch: dict[str, Any] = {
        **dict.fromkeys(TENSOR_FIELDS),
        **{name: torch.stack([getattr(item, name) for item in items]) for name in names},
        **{name: [getattr(item, name) for item in items] for name in METADATA},
        "tensors": {
            name: torch.stack([item.tensors[name] for item in items]) for name in items[0].tensors
        },
    }
    rows = [[row] for row in padded_rows(Experience(**batch))]
    assert join(encode_groups(rows, **options)) == wanted


@pytest.mark.parametrize("pad", [0, 7, 151_643, -100, 2**40])
def test_padded_rollouts_have_the_bytes_of_the_general_path(pad):
    items = []
    for seed in range(6):
        tokens = torch.randint(1, 50_000, (90,), generator=torch.Generator().manual_seed(seed))
        tokens[: 9 * seed] = pad
        labels = tokens.clone()
        labels[: 40 + seed] = -100
        mask = (torch.arange(90) >= 9 * seed) & (torch.arange(90) < 90 - 5 * seed)
        items.append(
            make(
                sequences=tokens,
                values=torch.full((50,), float("nan")) if seed % 2 else torch.randn(50),
                reward=torch.tensor(float(seed)),
                attention_mask=mask.long(),
                action_mask=torch.ones(50, dtype=torch.bool),
                tensors={"labels": labels, "mask": mask, "turns": mask ^ (torch.arange(90) == 50)},
                policy_version=seed // 2,
            )
        )
    assert join(encode_groups([[item] for item in items])) == generally(items)


def test_layouts_in_memory_do_not_matter():
    base = torch.randn(4, 3, 5, 6)
    odd = torch.tensor([0, 2, 255, 1], dtype=torch.uint8).view(torch.bool).repeat(9)
    items = [
        make(
            values=torch.arange(80.0)[seed::2][:30].requires_grad_(),
            tensors={
                "channels": base.to(memory_format=torch.channels_last)[seed : seed + 1],
                "turned": base[seed].transpose(0, 2),
                "odd": odd,
            },
        )
        for seed in range(4)
    ]
    assert join(encode_groups([[item] for item in items])) == generally(items)
