"""Whatever a put accepts, every reader gives back equal; everything else the put refuses."""

from __future__ import annotations

import base64
import enum
import itertools
import json
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from redrb import BufferItem, ExperienceStream, Status, Table
from redrb.codec import decode_batch, encode_groups, parse_groups
from redrb.connection import Client
from redrb.errors import ConfigError, EncodeError, RecordError
from redrb.experience.records import TENSOR_FIELDS, named_tensors
from redrb.stream.export import export_task
from redrb.table.saving import resume_table, save_table
from redrb.watch.groups import Browser, as_json
from redrb.watch.rows import read_rows
from tests.samples import numbered

REFUSALS = (ConfigError, EncodeError, RecordError)


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Share(float):
    pass


Pair = namedtuple("Pair", "a b")


def nested(levels: int) -> Any:
    """Return lists and dicts in each other."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


LAST, FIRST = datetime.max, datetime.min
ZONES = [
    UTC,
    timezone(timedelta(hours=14)),
    timezone(-timedelta(hours=12)),
    ZoneInfo("Europe/Oslo"),
]
NUMBERS = [
    0,
    -1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**40,
]
FLOATS = [0.5, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308, 1e300, float(2**53 + 2)]
TEXTS = [
    "",
    "a",
    "ü✓",
    "a\0b",
    "\ud800",
    "$x",
    "x" * 300,
    "\x7f\n",
    "1",
    "count",
    "\u2028",
    "ab" * 3000,
]
SCALARS: list[Any] = [
    *(None, True, False, *NUMBERS, *FLOATS, *TEXTS),
    *(b"", b"\xff\0", bytearray(b"ab"), memoryview(b"abcd"), memoryview(b"abcd")[::2]),
    *(memoryview(np.arange(3.0)), memoryview(np.array([-1], np.int8))),
    *(
        msgpack.ExtType(5, b"x"),
        msgpack.ExtType(127, b""),
        msgpack.ExtType(5, b"x")._replace(code=-1),
    ),
    *(msgpack.Timestamp(1, 1), msgpack.Timestamp(2**62, 0), msgpack.Timestamp(0, 0)),
    *(LAST, date(2020, 1, 1), timedelta(1), Decimal(1), 1j, object(), int, len, ..., range(3)),
    *(
        at.replace(tzinfo=zone)
        for at in (LAST, FIRST, datetime(2024, 10, 27, 2, 30))
        for zone in ZONES
    ),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Oslo")),
    *((), (1, 2), Pair(1, [2]), {1, 2}, frozenset([1]), itself()),
    *(Colour.RED, Level.HIGH, Share(0.5), enum.Flag("F", "A").A, OrderedDict(b=1, a=2)),
    *(kind(1) for kind in (np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64)),
    *(np.longdouble(1) / 3, np.complex64(1j), np.str_("a\0"), np.bytes_(b"a\0"), np.void(b"abc")),
    *(np.float32("nan"), np.datetime64("2020-01-01T00:00:00.000000001"), np.datetime64("NaT")),
    *(np.datetime64("2020-01-01"), np.timedelta64(5, "ns"), np.uint64(2**64 - 1)),
    *(np.array(1), np.arange(3), np.array(["a"]), np.array([1], ">i4"), np.array([object()])),
    *(np.zeros(2, "i4,f4"), np.ma.masked_array([1, 2], [0, 1]), np.zeros((2, 2), order="F")),
    *(np.array(2.5, np.longdouble), np.array("2020", "M8[s]"), np.rec.array([(1, 2.0)])),
    *(torch.ones(2), torch.tensor(3), torch.tensor([math.nan, -0.0])),
    *({1: 2}, {True: 1}, {None: 1}, {1.5: 1}, {(1,): 1}, {b"k": 1, "k": 2}, {"": {}}, {"$x": 1}),
    *({Colour.RED: Level.HIGH}, {"\ud800": 1}, {"a\0": b""}),
    *(nested(levels) for levels in (1, 60, 61, 62, 63, 64, 65, 66, 130)),
]
VALUES = st.recursive(
    st.sampled_from(range(len(SCALARS))).map(SCALARS.__getitem__)
    | st.integers(-(2**66), 2**66)
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.sampled_from(ZONES)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(
            st.sampled_from(["", "a", "$b", b"\xff", Colour.RED, 1]), inner, max_size=3
        )
    ),
    max_leaves=5,
)

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
"""All dtypes of torch."""


@dataclass(frozen=True)
class Drawn:
    """A tensor; torch cannot print those of all dtypes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    view: str

    def tensor(self) -> Tensor:
        draw, size = torch.Generator().manual_seed(self.seed), max(self.dtype.itemsize, 1)
        bits = torch.randint(0, 256, (*self.shape, size), dtype=torch.uint8, generator=draw)
        if self.dtype is torch.bool:
            return bits[..., 0] > 127
        if str(self.dtype).startswith("torch.q"):
            return torch._empty_affine_quantized(
                self.shape, scale=1.0, zero_point=0, dtype=self.dtype
            )
        tensor = bits.view(self.dtype).reshape(self.shape)
        if self.view == "negated" and tensor.is_floating_point():
            return torch._neg_view(tensor)
        return tensor.mT if self.view == "turned" and tensor.dim() > 1 else tensor


SHAPES = [(), (0,), (1,), (3,), (40,), (2, 3), (2, 0, 3), (1,) * 9]
TENSORS = st.builds(
    Drawn,
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.integers(0, 9),
    st.sampled_from(["plain", "turned", "negated"]),
)


def same(given: Any, found: Any) -> bool:
    """Return whether a value is what a reader may give back for another one."""
    if isinstance(given, Tensor):
        plain = given.detach().resolve_neg().contiguous()
        return (
            (plain.dtype, plain.shape) == (found.dtype, found.shape)
            and bits_of(plain) == bits_of(found)
        )  # fmt: skip
    if isinstance(given, np.ndarray):
        kinds = type(found) is np.ndarray and given.dtype == found.dtype
        return kinds and given.shape == found.shape and given.tobytes() == found.tobytes()
    if type(found) is list:
        pairs = zip(given, found, strict=True)
        return (
            isinstance(given, list)
            and len(given) == len(found)
            and all(itertools.starmap(same, pairs))
        )
    if type(found) is dict:
        return (
            isinstance(given, dict)
            and list(given) == list(found)
            and all(same(*pair) for pair in zip(given.values(), found.values(), strict=True))
        )
    if isinstance(given, datetime):
        return bool(given.astimezone(UTC) == found)
    if isinstance(found, float):
        alike = isinstance(given, float | np.floating) and math.copysign(1, given) == math.copysign(
            1, found
        )
        return alike and (found == given or (math.isnan(given) and math.isnan(found)))
    return isinstance(given, bool | np.bool_) == isinstance(found, bool) and bool(given == found)


def bits_of(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
    return found


def accepted(put: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Put each value; return those that were not refused, each with what its put returned."""
    kept = []
    for value in values:
        try:
            kept.append((value, put(value)))
        except REFUSALS:
            continue
    return kept


def from_json(value: Any) -> Any:
    """Return the value of a line of an export, as its page describes it."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        [(kind, of)] = value.items()
        return {
            "$bytes": lambda: base64.b64decode(of),
            "$datetime": lambda: datetime.fromisoformat(of),
            "$float": lambda: float(of),
            "$ext": lambda: msgpack.ExtType(of[0], base64.b64decode(of[1])),
            "$map": lambda: {from_json(key): from_json(each) for key, each in of},
        }[kind]()
    return {key: from_json(each) for key, each in value.items()}


PLACES: dict[str, Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "extras": lambda value: ({"extras": {"v": value}}, {}),
    "key of extras": lambda value: ({"extras": {value: 1}}, {}),
    "tags": lambda value: ({"tags": {"v": value}}, {}),
    "key of tags": lambda value: ({"tags": {value: 1}}, {}),
    "indexed tags": lambda value: ({"tags": {"level": value}}, {}),
    "tags of a put": lambda value: ({}, {"tags": {"level": value}}),
    "group_id": lambda value: ({"group_id": value}, {}),
    "status": lambda value: ({"status": value}, {}),
    "status of a put": lambda value: ({}, {"status": value}),
    "policy_version": lambda value: ({"policy_version": value}, {}),
    "policy_version of a put": lambda value: ({}, {"policy_version": value}),
    "priority": lambda value: ({}, {"priority": value}),
    "tensors": lambda value: ({"tensors": {"v": value}}, {}),
    "name of a tensor": lambda value: ({"tensors": {value: torch.ones(2)}}, {}),
    **{
        name: lambda value, name=name: ({name: value}, {})  # type: ignore[misc]
        for name in TENSOR_FIELDS
    },
}

quick = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FRESH = itertools.count()
PUTS = st.lists(
    st.tuples(st.sampled_from(list(PLACES)), VALUES | st.sampled_from(Status))
    | st.tuples(st.sampled_from(["tensors", *TENSOR_FIELDS]), TENSORS),
    min_size=1,
    max_size=30,
)


def hashable(value: object) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:ComplexHalf|.*quantize_per_tensor")
@given(puts=PUTS)
@example(puts=[(place, value) for place in PLACES for value in SCALARS])
@quick
def test_groups(
    client: Client, namespace: str, tmp_path: Path, puts: list[tuple[str, Any]]
) -> None:
    space, folder = f"{namespace}.{next(FRESH)}", tmp_path / str(next(FRESH))
    folder.mkdir()
    with ExperienceStream(
        client, "from", namespace=space, checks=[], tags=["level"], order="priority"
    ) as stream:
        check_groups(client, space, folder, stream, puts)


def check_groups(
    client: Client, space: str, folder: Path, stream: ExperienceStream, puts: list[tuple[str, Any]]
) -> None:
    def put(choice: tuple[str, Any]) -> tuple[int, BufferItem, dict[str, Any]]:
        place, value = choice
        value = value.tensor() if isinstance(value, Drawn) else value
        fields, options = PLACES[place](value) if hashable(value) or "of" not in place else ({}, {})
        item = numbered(1, **fields)
        (group,) = stream.put(item, **options)
        return group, item, options

    kept = [found for _, found in accepted(put, puts)]
    if not kept:
        return
    ids = [group for group, _, _ in kept]
    for (_, item, options), stored in zip(kept, stream.read(ids), strict=True):
        assert stored is not None
        [found] = stored.items
        check_item(item, found, options)
        (layout,) = parse_groups([encoded.blob for encoded in encode_groups([[item]])])
        assert same([found.extras], decode_batch([layout]).extras)
    stream.save(folder / "saved")
    with ExperienceStream(client, "to", namespace=space) as other:
        other.resume(folder / "saved")
        exported = export_task(client, "to", folder / "out", namespace=space)
        assert exported.unreadable == ()
        # groups are put anew, in their order: their ids count on
        ids = [ids[-1] + place for place in range(1, len(ids) + 1)]
        kept = [(group, *rest) for group, (_, *rest) in zip(ids, kept, strict=True)]
        check_export(folder / "out", kept)
        browser = Browser(client, "to", namespace=space)
        for group in ids:
            view = browser.group(group)
            assert view is not None
            assert not view.damaged
            json.dumps(as_json(view), allow_nan=False)
        for status in Status:
            if waiting := other.count(status=status):
                other.take(waiting, timeout=0, status=status).reject("bad")
        letters = {letter.id: letter.items for letter in other.dead_letters(len(ids))}
        for group, item, options in kept:
            [found] = letters[group] or []
            check_item(item, found, options)


def check_item(given: BufferItem, found: BufferItem, options: dict[str, Any]) -> None:
    for name in ("extras", "tags", "group_id", "status"):
        assert same(getattr(given, name), getattr(found, name)), name
    default = options.get("policy_version")
    version = default if given.policy_version is None else given.policy_version
    assert (None if version is None else int(version)) == found.policy_version
    expected, got = named_tensors(given), named_tensors(found)
    assert sorted(expected) == sorted(got)
    for name, tensor in expected.items():
        assert same(tensor, got[name]), name


def check_export(folder: Path, kept: Sequence[tuple[int, BufferItem, dict[str, Any]]]) -> None:
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    by_id = {line["id"]: line for line in lines}
    shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    for group, item, _ in kept:
        line = by_id[group]
        [sample] = line["samples"]
        assert same(item.extras, from_json(sample["extras"]))
        assert same(item.tags, from_json(sample["tags"]))
        stored = shards[line["shard"]]
        for name, tensor in named_tensors(item).items():
            assert same(tensor, stored[f"{group}/0/{str.__str__(name)}"]), name


COLUMNS: dict[str, Callable[[Any], tuple[list[Any], dict[Any, Any], list[Any]]]] = {
    "value": lambda value: (["k"], {"v": [value]}, [{}]),
    "two values": lambda value: (["k", "k"], {"v": [value, value]}, [{}, {}]),
    "column": lambda value: (["k"], {"v": value}, [{}]),
    "tag": lambda value: (["k"], {}, [{"t": value}]),
    "name of a tag": lambda value: (["k"], {}, [{value: 1}]),
    "name of a column": lambda value: (["k"], {value: [1]}, [{}]),
    "key of a row": lambda value: ([value], {"v": [1]}, [{}]),
}
ROWS = st.lists(
    st.tuples(st.sampled_from(list(COLUMNS)), VALUES)
    | st.tuples(st.sampled_from(["value", "two values", "column"]), TENSORS),
    min_size=1,
    max_size=30,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf|.*quantize_per_tensor")
@given(puts=ROWS)
@example(puts=[(place, value) for place in COLUMNS for value in SCALARS])
@quick
def test_rows(client: Client, namespace: str, tmp_path: Path, puts: list[tuple[str, Any]]) -> None:
    space, file = f"{namespace}.{next(FRESH)}", tmp_path / f"{next(FRESH)}.redrb"
    table, counted = Table(client, "from", namespace=space), itertools.count()
    expected: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def put(choice: tuple[str, Any]) -> None:
        place, value = choice
        value = value.tensor() if isinstance(value, Drawn) else value
        keys, columns, tags = (
            COLUMNS[place](value) if hashable(value) or "of" not in place else ([], {}, [])
        )
        keys = [
            f"k{next(counted)}" if key == "k" else key
            for key in keys
            if isinstance(key, str) or keys
        ]
        table.put(keys, columns, tags)
        for row, (key, of_row) in enumerate(zip(keys, tags, strict=True)):
            expected[key] = {name: values[row] for name, values in columns.items()}, of_row

    accepted(put, puts)
    save_table(client, "from", file, namespace=space)
    resume_table(client, "to", file, namespace=space)
    for name in ("from", "to"):
        table = Table(client, name, namespace=space)
        found = table.tags().rows
        assert list(found) == list(expected)
        keys = list(expected)
        assert [view.key for view in read_rows(client, name, space, keys, len(keys) or 1)] == keys
        for key, (columns, tags) in expected.items():
            assert same(tags, found[key])
            rows = table.get([key])
            assert sorted(rows) == sorted(columns)
            for column, value in columns.items():
                assert same(value, rows[column][0])
        having = [key for key, (columns, _) in expected.items() if "v" in columns]
        together = table.get(having, ["v"])["v"] if having else []
        assert all(
            same(expected[key][0]["v"], each) for key, each in zip(having, together, strict=True)
        )
