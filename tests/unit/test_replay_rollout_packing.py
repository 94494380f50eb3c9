"""Rollouts to samples and back through the codec: nothing is lost, and types are kept."""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from redrb import BufferItem, ConfigError, Status
from redrb.codec import decode_items, encode_groups, parse_group
from redrb.compat.xtuner.rollout_fields import as_declared, check_declared
from redrb.compat.xtuner.rollout_packing import EXPIRED, META, STEPLESS, pack_group, unpack_group
from redrb.compat.xtuner.values import TAG, pack_value, unpack_value
from redrb.errors import DecodeError, EncodeError, RecordError


def through_the_codec(items: list[BufferItem]) -> list[BufferItem]:
    (encoded,) = encode_groups([items])
    return decode_items(parse_group(encoded.blob))


def there_and_back(group: Sequence[Any], rollout_type: type | None = None) -> list[Any]:
    for rollout in group:
        check_declared(rollout, rollout_type)
    items = through_the_codec(pack_group(group))
    return [as_declared(rollout_type, state) for state in unpack_group(items)]


def same(got: Any, expected: Any) -> None:
    """Compare with types, arrays and bit patterns of floats included."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tolist() == expected.tolist()
    elif isinstance(expected, float):
        assert struct.pack("<d", got) == struct.pack("<d", expected)
    else:
        assert got == expected


FULL: dict[str, Any] = {
    "rollout_id": 7,
    "group_id": 2**63,
    "status": Status.COMPLETED,
    "prompt_ids": [151644, 872, 0],
    "tokens": [151644, 872, 0, 5],
    "response": "naïve 答",
    "response_ids": [5, 6],
    "response_model_steps": [3, 4],
    "response_mask": [1, 0],
    "logprobs": [-0.1, -math.pi],
    "reward": {"score": 1.0, "parts": [1, 2.0, None, True]},
    "error_msg": None,
    "routed_experts": np.arange(12, dtype=np.int64).reshape(2, 3, 2),
    "finish_reason": "stop",
    "seq_staleness": 3,
    "mm_info": {
        "pixel_values": torch.randn(2, 3).to(torch.bfloat16),
        "image_grid_thw": np.array([[1, 2, 3]]),
        "raw": b"\x00\xff",
    },
    "extra_fields": {"train_prompt_ids": [1, 2], "nested": {"deep": {"er": (1, "a")}}},
    "input_ids": None,
    "labels": None,
}


def test_a_dict_comes_back_as_it_was() -> None:
    other = {**FULL, "rollout_id": 8, "logprobs": [-0.5, -0.25], "response_mask": None}
    for got, expected in zip(there_and_back([FULL, other]), [FULL, other], strict=True):
        same(got, expected)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1],
        [-(2**63), 2**63 - 1],
        [2**64 - 1],
        [True, False],
        [1, True],
        [1, 2.0],
        [0.1],
        [0.5, -0.0, math.inf, -math.inf, math.nan],
        [struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]],
        [1e300, 1e-320],
        [None, 1.5],
        [[1, 2], [3]],
        (1, 2),
        None,
        np.zeros((0, 3), dtype=np.int32),
        np.array(3),
        np.array([1.5], dtype=np.float16),
        np.array([1 + 2j]),
        np.array([1], dtype=">i4"),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "bc"]),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([1.5], dtype=torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.empty(0, 4),
        torch.tensor(2.5),
        torch.arange(6).reshape(2, 3).T,
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["logprobs", "routed_experts", "own"])
def test_every_list_and_array_comes_back(name: str, value: Any) -> None:
    (got,) = there_and_back([{name: value}])
    if isinstance(value, torch.Tensor) and value.dtype.itemsize == 1:
        got[name], value = got[name].view(torch.uint8), value.view(torch.uint8)
    same(got, {name: value})


class Colour(Enum):
    RED = "red"
    DEEP = 3


class Level(IntEnum):
    LOW = 1


class Reason(StrEnum):
    STOP = "stop"


@dataclass
class Call:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", None: "b", (1, 2): "c"},
        {TAG: "tuple", "of": [1]},
        {"a": {TAG: 1}},
        {1, 2},
        frozenset({"a"}),
        ((), [(1,)]),
        [Status.ABORTED],
        np.float32(1.5),
        np.int64(-1),
        np.bool_(True),
        np.datetime64("2026-01-01", "ns"),
        datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC),
        "a" * 100_000,
        b"",
    ],
    ids=lambda value: re.sub("0x[0-9a-f]+", "", repr(value))[:30],  # the same in every process
)
def test_every_nested_value_comes_back(value: Any) -> None:
    (got,) = there_and_back([{"extra_fields": {"x": [value]}, "own": value}])
    same(got, {"extra_fields": {"x": [value]}, "own": value})


def test_objects_and_enums_in_fields_become_dicts_and_values() -> None:
    own = [Call("a", {"x": (1,)}), Colour.RED, Colour.DEEP, Level.LOW, Reason.STOP]
    (got,) = there_and_back([{"own": own}])
    same(got, {"own": [{"name": "a", "arguments": {"x": (1,)}}, "red", 3, 1, "stop"]})


def test_subclasses_of_plain_types_become_plain() -> None:
    class Text(str):
        __slots__ = ()

    class Bag(dict):
        pass

    (got,) = there_and_back([{"a": Text("x"), "b": Bag(y=1)}])
    same(got, {"a": "x", "b": {"y": 1}})


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value",
    [
        object(),
        2**64,
        -(2**63) - 1,
        [2**70],
        {"a": [1, 2**64]},
        np.array([object()]),
        np.zeros(1, dtype=[("a", "i4")]),
        Point(1),
        datetime.datetime(2026, 1, 1),  # naive
        1 + 2j,
        torch.eye(2).to_sparse(),
        lambda: None,
    ],
    ids=lambda value: re.sub("0x[0-9a-f]+", "", repr(value))[:30],  # the same in every process
)
@pytest.mark.parametrize("name", ["routed_experts", "extra_fields"])
def test_a_value_that_cannot_be_stored_is_refused_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(RecordError, match=name) as caught:
        pack_group([{name: value}])
    assert caught.value.field == name


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RecordError, match="contains itself"):
        pack_group([{"extra_fields": loop}])


def test_invalid_text_is_refused() -> None:
    with pytest.raises((RecordError, EncodeError), match="response"):
        through_the_codec(pack_group([{"response": "\ud800"}]))


@pytest.mark.parametrize("rollout", [{1: 2}, {META: 2}])
def test_fields_need_names(rollout: Any) -> None:
    with pytest.raises(RecordError, match="fields are named by strings"):
        pack_group([rollout])


@pytest.mark.parametrize("rollout", ["text", 3, [1]])
def test_a_rollout_is_a_dict_or_has_attributes(rollout: Any) -> None:
    with pytest.raises(RecordError, match="use a dict, or an object with fields"):
        pack_group([rollout])


@dataclass
class Rollout:
    rollout_id: int
    status: Status = Status.COMPLETED
    response_ids: list[int] = field(default_factory=list)
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    calls: list[Call] | None = None
    colour: Colour = Colour.RED
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Slotted:
    rollout_id: int
    response_ids: list[int]
    made: int = field(init=False, default=3)


class Plain:
    def __init__(self, rollout_id: int) -> None:
        self.rollout_id = rollout_id


def test_objects_of_the_declared_class_come_back() -> None:
    rollout = Rollout(3, response_ids=[1, 2], response_model_steps=[5, 6], colour=Colour.DEEP)
    got, other = there_and_back([rollout, Rollout(4)], rollout_type=Rollout)
    assert type(got) is Rollout
    assert (got.response_ids, got.response_model_steps, got.colour) == ([1, 2], [5, 6], 3)
    assert other.status is Status.COMPLETED
    (slotted,) = there_and_back([Slotted(1, [2])], rollout_type=Slotted)
    assert slotted == Slotted(1, [2])
    (plain,) = there_and_back([Plain(3)], rollout_type=Plain)
    assert (type(plain), plain.rollout_id) == (Plain, 3)


def test_objects_of_other_classes_are_dicts_or_refused() -> None:
    assert there_and_back([Slotted(1, [2])], rollout_type=dict) == [
        {"rollout_id": 1, "response_ids": [2]}
    ]
    for declared in (None, Rollout):
        with pytest.raises(RecordError, match=r"rollout_type=Slotted"):
            there_and_back([Slotted(1, [2])], rollout_type=declared)


def test_a_model_converts_its_nested_fields() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Part(pydantic.BaseModel):
        name: str
        level: Level = Level.LOW

    class State(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)
        rollout_id: int
        status: Colour
        parts: list[Part]
        call: Call
        routed_experts: np.ndarray | None = None

    own = State(
        rollout_id=1, status=Colour.RED, parts=[Part(name="a")], call=Call("f"), more=Part(name="b")
    )
    with pytest.raises(RecordError, match="status"):
        there_and_back([own], rollout_type=State)
    own.__dict__.update(status=Colour.DEEP)
    packed = pack_value({"own": own}, "x")
    got = as_declared(State, unpack_value(packed)["own"])
    assert (got.parts, got.call, got.status) == ([Part(name="a")], Call("f"), Colour.DEEP)
    assert got.more == {"name": "b", "level": 1}


def test_a_struct_converts_its_nested_fields() -> None:
    msgspec = pytest.importorskip("msgspec")
    part = msgspec.defstruct("part", [("name", str)])
    state = msgspec.defstruct("state", [("rollout_id", int), ("parts", list[part])])
    own = state(rollout_id=1, parts=[part(name="a")])
    assert there_and_back([own], rollout_type=state) == [own]
    with pytest.raises(ConfigError, match="does not take"):
        there_and_back([{"rollout_id": "x"}], rollout_type=state)


@dataclass
class Needs:
    rollout_id: int
    seed: InitVar[int]


class Derives:
    def __init__(self, rollout_id: int) -> None:
        self.rollout_id, self.double = rollout_id, 2 * rollout_id


def _with_alias() -> Any:
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model(
        "Aliased", rollout_id=(int, pydantic.Field(validation_alias="rolloutId"))
    )
    return kind(rolloutId=1)


def _renamed() -> Any:
    msgspec = pytest.importorskip("msgspec")
    return msgspec.defstruct("Renamed", [("rollout_id", int)], rename="camel")(1)


@pytest.mark.parametrize("make", [lambda: Needs(1, 2), lambda: Derives(1), _with_alias, _renamed])
def test_an_object_that_could_not_be_made_again_is_refused_when_it_is_put(
    make: Callable[[], Any],
) -> None:
    rollout = make()
    with pytest.raises(RecordError, match="could not make the object again"):
        there_and_back([rollout], rollout_type=type(rollout))
    assert there_and_back([rollout], rollout_type=dict)[0]["rollout_id"] == 1


def test_a_class_that_does_not_take_the_fields_is_refused() -> None:
    for declared in (Slotted, int):
        with pytest.raises(ConfigError, match="does not take a stored rollout"):
            there_and_back([{"rollout_id": 1, "other": 2}], rollout_type=declared)


@pytest.mark.parametrize(
    "value",
    [
        {TAG: "unknown"},
        {TAG: 3},
        {TAG: ["tuple"]},
        {TAG: "tuple", "of": 3},
        {TAG: "tuple"},
        {TAG: "set", "of": [[1]]},
        {TAG: "dict", "of": [[1]]},
        {TAG: "dict", "of": ["ab"]},
        {TAG: "dict", "of": [[[1], 2]]},
        {TAG: "status", "of": "skipped"},
        {TAG: "status"},
        {TAG: "numpy", "dtype": "|O", "shape": [1], "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i4,<i4", "shape": [1], "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i99", "shape": [1], "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i8", "shape": [2], "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i8", "shape": [-1], "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i8", "shape": [2**40, 2**40], "data": b""},
        {TAG: "numpy", "dtype": "<i8", "shape": "1", "data": b"12345678"},
        {TAG: "numpy", "dtype": "<i8", "shape": [1], "data": "12345678"},
        {TAG: "scalar", "dtype": "<i8", "data": b""},
        {TAG: "tensor", "dtype": "load", "shape": [1], "data": b"1"},
        {TAG: "tensor", "dtype": "int64", "shape": [1], "data": b"1"},
        {TAG: "tensor", "dtype": "int64", "shape": [True], "data": b"12345678"},
    ],
    ids=repr,
)
def test_malformed_values_are_refused(value: Any) -> None:
    with pytest.raises(DecodeError):
        unpack_value(value)


def test_samples_that_are_no_rollouts_are_refused() -> None:
    item = pack_group([{"response_ids": [1]}])[0]
    with pytest.raises(DecodeError, match="no rollouts"):
        unpack_group([BufferItem(None, None)])
    item.extras[META]["format"] = 2
    with pytest.raises(ConfigError, match="upgrade"):
        unpack_group([item])
    item.extras[META]["format"] = 1
    item.tensors["response_ids:list:float16"] = torch.ones(1)
    with pytest.raises(DecodeError, match="column"):
        unpack_group([item])


@pytest.mark.parametrize(
    ("rollout", "version", "tokens", "counts"),
    [
        ({"response_model_steps": [4, 3]}, 3, [4, 3], None),
        ({"response_model_steps": [4, 3], "response_mask": [0, 1]}, 3, [4, 3], [False, True]),
        ({"response_model_steps": [4, 3], "response_mask": [1]}, 3, [4, 3], [True, False]),
        ({"response_model_steps": [4], "response_mask": [1, 1]}, 4, [4], None),
        ({"response_model_steps": [4], "response_mask": [0, 0]}, 4, [4], [False]),
        ({"response_model_steps": [4], "response_mask": [0, 1]}, 4, [STEPLESS], None),
        ({"response_model_steps": [4], "response_ids": []}, 4, [4], [False]),
        ({"response_ids": []}, None, None, None),
        ({"response_model_steps": [4, 3], "labels": [1]}, 3, [4, 3], [False, False]),
        ({"response_model_steps": []}, None, [STEPLESS], None),
        ({}, None, [STEPLESS], None),
    ],
)
def test_the_stream_sees_which_step_made_each_token(
    rollout: dict[str, Any],
    version: int | None,
    tokens: list[int] | None,
    counts: list[bool] | None,
) -> None:
    rollout = {"response_ids": [7, 8], **rollout}
    (item,) = pack_group([rollout])
    assert item.policy_version == version
    assert (None if item.token_versions is None else item.token_versions.tolist()) == tokens
    assert (None if item.action_mask is None else item.action_mask.tolist()) == counts
    same(there_and_back([rollout])[0], rollout)


def test_an_expired_rollout_of_an_aborted_group_expires_it_at_the_next_refresh() -> None:
    group = [
        {"status": "aborted", "response_ids": [7], "response_model_steps": [4]},
        {"status": "expired", "response_ids": [7], "response_model_steps": [3]},
    ]
    items = pack_group(group)
    assert [item.token_versions.tolist() for item in items] == [[4], [EXPIRED]]
    assert [item.policy_version for item in items] == [4, 3]
    same(there_and_back(group), group)


def test_lists_of_numbers_take_few_bytes() -> None:
    tokens, floats = list(range(2000)), torch.randn(2000).tolist()
    group = [
        {"response_ids": tokens, "logprobs": floats, "response_mask": [1] * 2000} for _ in range(4)
    ]
    (encoded,) = encode_groups([pack_group(group)])
    assert encoded.nbytes < 4 * (2000 * 2 + 2000 * 4) + 2000


def test_plain_values_are_stored_as_they_are() -> None:
    plain = {"a": [1, "b", None, 2.5, b"c"], "d": {"e": [1, 2, 3]}}
    assert pack_value(plain, "x") == plain
