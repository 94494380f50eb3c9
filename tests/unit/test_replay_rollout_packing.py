"""Rollouts to samples and back through the codec: nothing is lost, and types are kept."""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from redrb import BufferItem, ConfigError, Status
from redrb.codec import decode_items, encode_groups, parse_group
from redrb.errors import DecodeError, EncodeError, RecordError
from redrb.replay import rollout_classes as known_classes
from redrb.replay.rollout_classes import RolloutClasses, name_of
from redrb.replay.rollout_packing import META, pack_group, unpack_group
from redrb.replay.values import TAG, pack_value, unpack_value


def through_the_codec(items: list[BufferItem]) -> list[BufferItem]:
    (encoded,) = encode_groups([items])
    return decode_items(parse_group(encoded.blob))


def there_and_back(
    group: Sequence[Any], rollout_type: type | None = None, train_step: int | None = None
) -> list[Any]:
    classes = RolloutClasses(rollout_type)
    items = through_the_codec(pack_group(group, train_step))
    return [unpacked.make(classes) for unpacked in unpack_group(items, classes)]


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
        Colour.RED,
        [Colour.DEEP, Level.LOW, Reason.STOP, Status.ABORTED],
        np.float32(1.5),
        np.int64(-1),
        np.bool_(True),
        np.datetime64("2026-01-01", "ns"),
        datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC),
        [Call("a", {"x": np.ones(2)}), Call("b")],
        "a" * 100_000,
        b"",
    ],
    ids=lambda value: re.sub("0x[0-9a-f]+", "", repr(value))[:30],  # the same in every process
)
def test_every_nested_value_comes_back(value: Any) -> None:
    (got,) = there_and_back([{"extra_fields": {"x": [value]}, "own": value}])
    if isinstance(value, list) and isinstance(value[0], Call):
        assert [type(call) for call in got["own"]] == [Call, Call]
        assert got["own"][0].arguments["x"].tolist() == [1.0, 1.0]
        return
    same(got, {"extra_fields": {"x": [value]}, "own": value})


def test_subclasses_of_plain_types_become_plain() -> None:
    class Text(str):
        __slots__ = ()

    class Bag(dict):  # type: ignore[type-arg]
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
        pack_group([{name: value}], None)
    assert caught.value.field == name


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RecordError, match="contains itself"):
        pack_group([{"extra_fields": loop}], None)


def test_invalid_text_is_refused() -> None:
    with pytest.raises((RecordError, EncodeError), match="response"):
        through_the_codec(pack_group([{"response": "\ud800"}], None))


@pytest.mark.parametrize("rollout", [{1: 2}, {META: 2}])
def test_fields_need_names(rollout: Any) -> None:
    with pytest.raises(RecordError, match="fields are named by strings"):
        pack_group([rollout], None)


@pytest.mark.parametrize("rollout", ["text", 3, [1]])
def test_a_rollout_is_a_dict_or_has_attributes(rollout: Any) -> None:
    with pytest.raises(RecordError, match="use a dict, or an object with attributes"):
        pack_group([rollout], None)


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

    def __post_init__(self) -> None:
        self.made = True


@dataclass(slots=True, frozen=True)
class Slotted:
    rollout_id: int
    response_ids: list[int]


class Plain:
    def __init__(self, number: int) -> None:
        self.rollout_id = number
        self._private = (number,)


class Slots(Plain):
    __slots__ = ("__hidden", "status")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.__hidden = number
        self.status = "completed"

    @property
    def hidden(self) -> int:
        return self.__hidden


def test_objects_come_back_as_their_class() -> None:
    rollout = Rollout(3, response_ids=[1, 2], response_model_steps=[5, 6], calls=[Call("f")])
    rollout.own = np.ones(2)  # type: ignore[attr-defined]
    got, other = there_and_back([rollout, Rollout(4)])
    assert type(got) is Rollout
    assert (got.calls, got.colour, got.made) == ([Call("f")], Colour.RED, True)
    assert (got.response_ids, got.response_model_steps) == ([1, 2], [5, 6])
    assert got.own.tolist() == [1.0, 1.0]
    assert other == Rollout(4)


def test_slots_private_and_frozen_attributes_come_back() -> None:
    slotted, plain, slots = Slotted(1, [2]), Plain(3), Slots(4)
    got = there_and_back([slotted]) + there_and_back([plain, slots])
    assert got[0] == slotted
    assert vars(got[1]) == vars(plain)
    assert (got[2].hidden, got[2].status, got[2]._private) == (4, "completed", (4,))
    assert [type(own) for own in got] == [Slotted, Plain, Slots]


class Modelled:
    """What a pydantic model looks like from outside."""

    __slots__ = ("__dict__", "__pydantic_fields_set__")
    model_fields: ClassVar = {"calls": SimpleNamespace(annotation=list[Call] | None)}

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        object.__setattr__(self, "__pydantic_fields_set__", set(fields))

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("it is rebuilt without validation")


def test_a_model_is_restored_with_its_private_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Modelled(rollout_id=1, calls=[Call("f")], extra_fields={"more": Modelled(x=2)})
    (got,) = there_and_back([own])
    assert type(got) is type(got.extra_fields["more"]) is Modelled
    assert got.__pydantic_fields_set__ == {"rollout_id", "calls", "extra_fields"}
    assert (got.calls, got.extra_fields["more"].x) == ([Call("f")], 2)
    assert there_and_back([own], rollout_type=dict) == [
        {
            "rollout_id": 1,
            "calls": [{"name": "f", "arguments": {}}],
            "extra_fields": {"more": {"x": 2}},
        }
    ]
    items = through_the_codec(pack_group([own], None))
    monkeypatch.setattr(known_classes, "_seen", {})
    classes = RolloutClasses(Modelled)
    assert unpack_group(items, classes)[0].make(classes).calls == [Call("f")]


def test_a_class_that_this_process_does_not_know_needs_a_rollout_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = [Rollout(3, calls=[Call("f", {"x": (1,)})], extra_fields={"level": Level.LOW})]
    items = through_the_codec(pack_group(group, None))
    monkeypatch.setattr(known_classes, "_seen", {})

    def read(rollout_type: type | None) -> Any:
        classes = RolloutClasses(rollout_type)
        return unpack_group(items, classes)[0].make(classes)

    with pytest.raises(ConfigError, match="rollout_type"):
        read(None)
    rebuilt = read(Rollout)
    assert type(rebuilt) is Rollout
    assert rebuilt.calls == [Call("f", {"x": (1,)})]
    assert rebuilt.colour is Colour.RED
    assert rebuilt.extra_fields == {"level": 1}  # no annotation names Level
    plain = read(dict)
    assert plain["calls"] == [{"name": "f", "arguments": {"x": (1,)}}]
    assert (plain["rollout_id"], plain["status"]) == (3, Status.COMPLETED)


def test_a_class_is_rebuilt_under_another_name() -> None:
    @dataclass
    class Elsewhere:
        rollout_id: int
        status: Status

    (got,) = there_and_back([Elsewhere(1, Status.FAILED)], rollout_type=Rollout)
    assert type(got) is Rollout
    assert (got.rollout_id, got.status) == (1, Status.FAILED)


def test_a_subclass_of_the_rollout_type_is_kept() -> None:
    @dataclass
    class Below(Rollout):
        more: int = 3

    group = [Below(1), Rollout(2)]
    assert there_and_back(group, rollout_type=Rollout) == group


def test_a_builtin_class_cannot_be_smuggled_in() -> None:
    name = "subprocess:Popen"
    with pytest.raises(ConfigError, match="does not know that class"):
        unpack_value({TAG: "object", "class": name, "state": {"args": ["true"]}}, RolloutClasses())


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
        {TAG: "enum", "value": 1},
        {TAG: "enum", "class": name_of(Status), "value": "skipped"},
        {TAG: "object", "class": "x:Y", "state": [1]},
        {TAG: "object", "state": {}},
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
        unpack_value(value, RolloutClasses())


def test_samples_that_are_no_rollouts_are_refused() -> None:
    item = pack_group([{"response_ids": [1]}], None)[0]
    with pytest.raises(DecodeError, match="no rollouts"):
        unpack_group([BufferItem(None, None)], RolloutClasses())
    item.extras[META]["format"] = 2
    with pytest.raises(ConfigError, match="upgrade"):
        unpack_group([item], RolloutClasses())
    item.extras[META]["format"] = 1
    item.tensors["response_ids:list:float16"] = torch.ones(1)
    with pytest.raises(DecodeError, match="column"):
        unpack_group([item], RolloutClasses())


def test_a_state_that_does_not_fit_its_class_is_refused() -> None:
    with pytest.raises(RecordError, match="cannot be rebuilt"):
        there_and_back([Rollout(1)], rollout_type=Slotted)
    with pytest.raises(RecordError, match="cannot be rebuilt"):
        there_and_back([Rollout(1)], rollout_type=int)


@pytest.mark.parametrize(
    ("rollout", "version", "tokens", "counts"),
    [
        ({"response_model_steps": [4, 3]}, 3, [4, 3], None),
        ({"response_model_steps": [4, 3], "response_mask": [0, 1]}, 3, [4, 3], [False, True]),
        ({"response_model_steps": [4, 3], "response_mask": [1]}, 3, [4, 3], [True, False]),
        ({"response_model_steps": [4], "response_mask": [1, 1]}, 4, [4], [True]),
        ({"response_model_steps": [4, 3], "labels": [1]}, 3, [4, 3], [False, False]),
        ({"response_model_steps": []}, None, None, None),
        ({}, None, None, None),
    ],
)
def test_the_stream_sees_which_step_made_each_token(
    rollout: dict[str, Any],
    version: int | None,
    tokens: list[int] | None,
    counts: list[bool] | None,
) -> None:
    (item,) = pack_group([rollout], None)
    assert item.policy_version == version
    assert (None if item.token_versions is None else item.token_versions.tolist()) == tokens
    assert (None if item.action_mask is None else item.action_mask.tolist()) == counts
    same(there_and_back([rollout])[0], rollout)


def test_lists_of_numbers_take_few_bytes() -> None:
    tokens, floats = list(range(2000)), torch.randn(2000).tolist()
    group = [
        {"response_ids": tokens, "logprobs": floats, "response_mask": [1] * 2000} for _ in range(4)
    ]
    (encoded,) = encode_groups([pack_group(group, None)])
    assert encoded.nbytes < 4 * (2000 * 2 + 2000 * 4) + 2000


def test_plain_values_are_stored_as_they_are() -> None:
    plain = {"a": [1, "b", None, 2.5, b"c"], "d": {"e": [1, 2, 3]}}
    assert pack_value(plain, "x") == plain
