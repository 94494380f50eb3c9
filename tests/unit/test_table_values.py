"""Values of tables: each dtype comes back as it was, and nothing else is ever loaded."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from redrb.codec import kernels
from redrb.codec.dtypes import DTYPES
from redrb.codec.plain.cells import ARRAY, TENSOR
from redrb.errors import DecodeError, EncodeError, RecordError
from redrb.table.rows import Cells, Rows
from redrb.table.values import OBJECT, PICKLE, TagReader, Values, pack_tags
from tests.unit.codec_kernels import kernel  # noqa: F401 (each test runs with both)

PLAIN, SIGNED = Values(), Values("s3cret")
NAMES = [dtype.name for dtype in DTYPES]


def stored(values: Any, reader: Values = PLAIN) -> list[memoryview]:
    strided = isinstance(values, torch.Tensor) and values.is_nested
    keys = [f"r{number}" for number in range(values.size(0) if strided else len(values))]
    return [memoryview(b"".join(row)) for row in reader.encode_column("x", values, keys)]


def rows_of(cells: Sequence[memoryview | bytes], reader: Values = PLAIN) -> Rows:
    """Return rows with one column, whose parts have something before and behind each value."""
    parts = tuple(b"before" + bytes(cell) + b"behind" for cell in cells)
    column = Cells(parts, (6,) * len(parts), tuple(map(len, cells)))
    return Rows(tuple(f"r{number}" for number in range(len(parts))), {"x": column}, reader)


def again(values: Any, reader: Values = PLAIN) -> list[Any]:
    """Return a column as it is read after it was stored."""
    cells = stored(values, reader)
    whole = rows_of(cells, reader)["x"]
    alone = [reader.decode("x", f"r{number}", cell) for number, cell in enumerate(cells)]
    for one, other in zip(whole, alone, strict=True):
        same(one, other)
    return alone


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        left, right = (each.detach().contiguous().view(-1) for each in (one, other))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_every_dtype_come_back(name):
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]:
        whole = of_dtype(name, 2, *shape)
        for values in (whole, list(whole), [whole[0], of_dtype(name, 5)], [whole[1]]):
            for one, other in zip(values, again(values), strict=True):
                same(one, other)


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(np, name) or name == "bool"])
def test_arrays_of_every_dtype_come_back(name):
    whole = np.arange(24).reshape(2, 3, 4).astype(name)
    for values in (whole, list(whole), whole[:, ::2, ::-1], [whole[0].T, np.array(1, name)]):
        for one, other in zip(values, again(values), strict=True):
            same(np.asarray(one), other)


def test_views_and_gradients_are_stored_as_they_look():
    base = torch.arange(24.0, requires_grad=True).reshape(4, 6)
    views = [base.T, base[::2, 1::2], base.expand(2, 4, 6), torch.nn.Parameter(base[0])]
    conjugate = torch.complex(torch.arange(3.0), torch.arange(3.0)).conj()
    views += [conjugate.imag, conjugate.real]
    for one, other in zip(views, again(views), strict=True):
        same(one.detach().resolve_neg().clone().as_subclass(torch.Tensor), other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_their_rows():
    rows = [torch.arange(3.0), torch.arange(0.0), torch.arange(5.0)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    spare = torch.nested.nested_tensor_from_jagged(
        torch.cat([*rows, torch.full((7,), -1.0)]), torch.tensor([0, 3, 3, 8])
    )
    narrowed = torch.nested.narrow(
        torch.arange(40.0).reshape(4, 10), 1, torch.tensor([0, 1, 2, 3]),
        torch.tensor([2, 3, 1, 4]), layout=torch.jagged,
    )  # fmt: skip
    for nested in (jagged, spare, narrowed, torch.nested.nested_tensor(rows)):
        there = rows if nested is spare else nested.unbind()
        for one, other in zip(there, again(nested), strict=True):
            same(one, other)
        for values in ([nested], [nested, nested], [nested, torch.ones(3)]):
            with pytest.raises(EncodeError, match="nested"):
                stored(values)


def test_what_msgpack_holds_comes_back():
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    values = [None, True, -1, 2**64 - 1, 0.5, "ü", b"\xff\x00", [1, [2]], {"a": [None]}, {}, at]
    assert again(values) == values
    array = np.empty(2, object)
    array[:] = [{"a": 1}, np.arange(3)]
    found = again(array)
    assert found[0] == {"a": 1}
    same(found[1], np.arange(3))
    assert again([np.float32(0.5), np.int64(3), np.bool_(1)]) == [0.5, 3, True]


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        {1: 2},
        [{(1, 2): 3}],
        2**64,
        "\ud800",
        {1, 2},
        [np.float64(1)],
        np.array([1], ">i4"),
        np.array(["a"]),
        np.array(1, "M8[s]"),
        np.ma.masked_array([1, 2], [0, 1]),
        torch.zeros(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.zeros((1,) * 9),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_others_are_refused_with_the_name_of_the_column(value):
    for values in ([value], [value, value], [value, 1]):
        with pytest.raises(EncodeError, match="'x'"):
            stored(values)


@pytest.mark.parametrize(
    "value", [torch.ones(2, 2), np.arange(2), "ab", {"a": 1}, {1, 2, 3}, 5, None]
)
def test_a_column_is_one_value_for_each_row(value):
    with pytest.raises(EncodeError, match="'x'"):
        PLAIN.encode_column("x", value, ["a", "b", "c"])


def test_with_a_secret_other_objects_are_pickled():
    values = [(1, 2), {1: 2}, {3}, 2**70, np.ma.masked_array([1, 2], [0, 1])]
    assert again(values[:4], SIGNED) == values[:4]
    assert again(values[4:], SIGNED)[0].mask.tolist() == [False, True]
    for bad in (lambda: 1, (value for value in [1])):
        with pytest.raises(EncodeError, match="cannot be pickled"):
            stored([bad], SIGNED)


class Labelled(torch.Tensor):
    """A tensor with an attribute."""

    label = ""


def labelled(view: torch.Tensor) -> Labelled:
    made = view.as_subclass(Labelled)
    made.label = "kept"
    return made


BIG = torch.arange(400_000.0).reshape(400, 1000)
VIEWS: dict[str, Any] = {
    "row": BIG[0],
    "last row": BIG[-1],
    "element": BIG[3, 4],
    "nothing": BIG[:0],
    "steps": BIG[::100, ::7],
    "column": BIG[:, 1],
    "transposed": BIG[:3, :4].T,
    "row for each": BIG[1].expand(64, 1000),
    "rows that overlap": BIG[2].unfold(0, 100, 1),
    "number for each": BIG[1, 1].expand(3, 3),
    "whole seen from its middle": torch.arange(2000)[1000:],
    "with a gradient": BIG[0].clone().requires_grad_()[:3],
    "leaf": BIG[5].detach().requires_grad_(),
    "parameter": torch.nn.Parameter(BIG[0]),
    "of a class": labelled(BIG[0]),
    "bools": (BIG > 5)[0],
    "bytes": BIG.view(torch.uint8)[0],
    "conjugate": torch.view_as_complex(BIG.reshape(-1, 2))[:5].conj(),
    "array": BIG.numpy()[0],
    "column of an array": BIG.numpy()[:, 1],
    "jagged": torch.nested.nested_tensor_from_jagged(BIG[0], torch.tensor([0, 3, 1000])),
}


@dataclasses.dataclass
class Holder:
    held: Any


INSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda view: (view,), lambda found: found[0]),
    "deep": (lambda view: {"a": [{"b": (1, view)}]}, lambda found: found["a"][0]["b"][1]),
    "object": (lambda view: ({1}, Holder([view])), lambda found: found[1].held[0]),
    "array of objects": (
        lambda view: np.array([None, {"c": (view,)}], object), lambda found: found[1]["c"][0]
    ),
    "TensorDict": (
        lambda view: TensorDict({"a": NonTensorData((view,))}), lambda found: found["a"][0]
    ),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_pickled_without_the_rest_of_its_memory(view):
    one = VIEWS[view]
    numbers = one.numel() if isinstance(one, torch.Tensor) else one.size
    for put_in, take_out in INSIDE.values():
        [cell] = stored([put_in(one)], SIGNED)
        assert len(cell) < min(numbers, 1000) * 8 + 3000
        other = take_out(SIGNED.decode("x", "r0", cell))
        if isinstance(one, np.ndarray):
            same(one, other)
            continue
        for name in ("dtype", "requires_grad", "label"):
            assert getattr(one, name, None) == getattr(other, name, None)
        assert type(one) is type(other)
        for left, right in zip(parts(one), parts(other), strict=True):
            assert torch.equal(left.resolve_conj(), right.resolve_conj())


def parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.unbind() if tensor.is_nested else [tensor]


def test_a_tensor_that_is_there_twice_is_pickled_once():
    view = BIG[0]
    [cell] = stored([(view, {"again": view})], SIGNED)
    assert len(cell) < 8000
    found = SIGNED.decode("x", "r0", cell)
    assert found[0] is found[1]["again"]


def test_arrays_of_texts_and_objects_are_columns_of_their_values():
    assert again(np.array(["a", "bc"])) == ["a", "bc"]
    assert again(np.array([b"a", b"bc"])) == [b"a", b"bc"]
    for reader in (PLAIN, SIGNED):
        assert again(np.array([1, "a", None], object), reader) == [1, "a", None]
    dates = np.array(["2026-01-01", "2026-01-02"], "M8[ns]")
    for values in (dates, list(dates), dates - dates[0], [np.void(b"ab")]):
        with pytest.raises(EncodeError, match="'x'"):
            stored(values)
    assert again(dates, SIGNED) == list(dates)
    [found] = again([np.array([["a", "b"]])], SIGNED)
    assert found.tolist() == [["a", "b"]]


class Trap:
    """An object whose pickle notes that it was loaded."""

    loaded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Trap, "loaded", True)


def test_a_pickle_that_was_not_signed_so_is_never_loaded(monkeypatch):
    monkeypatch.setattr(Trap, "loaded", False)
    [cell] = stored([Trap()], SIGNED)
    raw = bytes(cell)
    altered = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(1, len(raw))]
    unsigned = bytes([PICKLE]) + bytes(32) + raw[33:]
    bad = [*altered, unsigned, raw[:33], raw[:20], raw[:1], raw + b"."]
    bad.append(bytes([PICKLE]) + pickle.dumps(Trap()))
    tries = [(SIGNED, "x", "r0", memoryview(one)) for one in bad]
    tries += [(SIGNED, "y", "r0", cell), (SIGNED, "x", "r1", cell), (SIGNED, "xr", "0", cell)]
    tries += [(Values("another"), "x", "r0", cell), (PLAIN, "x", "r0", cell)]
    for reader, column, key, one in tries:
        with pytest.raises(DecodeError, match=f"'{column}'"):
            reader.decode(column, key, one)
    assert not Trap.loaded
    SIGNED.decode("x", "r0", cell)
    assert Trap.loaded


class Fails:
    """An object whose own code fails as it is pickled, or as it is loaded."""

    def __init__(self, *, when: str) -> None:
        self.when = when

    def __getstate__(self) -> dict[str, str]:
        if self.when == "pickled":
            raise RuntimeError("no state")
        return vars(self)

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("no device")


def test_an_error_of_an_objects_own_code_is_one_of_redrb():
    with pytest.raises(EncodeError, match="Fails cannot be pickled: no state"):
        stored([Fails(when="pickled")], SIGNED)
    cells = stored([Fails(when="loaded")], SIGNED)
    with pytest.raises(DecodeError, match="cannot be loaded here: no device"):
        SIGNED.decode("x", "r0", cells[0])


def test_a_pickle_that_cannot_be_loaded_says_why():
    pickled = b"cno_such_module\nThing\n."
    cell = bytes([PICKLE]) + SIGNED._sign("x", "r0", pickled) + pickled
    with pytest.raises(DecodeError, match="no_such_module"):
        SIGNED.decode("x", "r0", memoryview(cell))


def head(kind: int, code: int, *shape: int) -> bytes:
    return struct.pack(f"<BBB{len(shape)}I", kind, code, len(shape), *shape)


@pytest.mark.parametrize(
    "cell",
    [
        b"",
        b"\x09x",
        bytes([OBJECT]),
        bytes([OBJECT, 0xC1]),
        bytes([OBJECT]) + b"\xdd\xff\xff\xff\xff",
        bytes([OBJECT]) + b"\x91" * 5000 + b"\xc0",
        bytes([OBJECT]) + msgpack.packb(1) + b"x",
        *(
            one
            for kind in (TENSOR, ARRAY)
            for one in (
                bytes([kind]),
                bytes([kind, 1]),
                head(kind, 200, 1) + b"x",
                head(kind, 1, 2) + b"x",
                head(kind, 1)[:2] + b"\x09" + bytes(36),
                head(kind, 1, *[2**32 - 1] * 8),
                head(kind, 10, 2**32 - 1, 2**32 - 1, 0),
                head(kind, 10, *[2**32 - 1] * 7, 0),
            )
        ),
        head(ARRAY, 12, 1) + b"xx",
    ],
    ids=lambda cell: repr(cell[:12]),
)
def test_hostile_bytes_are_refused_or_empty(cell):
    rows = rows_of([cell, cell], SIGNED)
    for read in (
        lambda: [SIGNED.decode("x", "r0", memoryview(cell))],
        lambda: rows["x"],
        lambda: list(rows.stacked("x")),
        lambda: list(rows.batch().values()),
    ):
        with suppress(DecodeError, RecordError):
            assert all(0 in each.shape for each in read())


def test_a_nested_tensor_is_the_one_that_torch_makes():
    values = [torch.rand(2, 3), torch.rand(5, 3), torch.rand(1, 3)]
    found = rows_of(stored(values)).stacked("x")
    made = torch.nested.nested_tensor(values, layout=torch.jagged)
    assert type(found) is type(made)
    assert torch.equal(found.values(), made.values())
    assert torch.equal(found.offsets(), made.offsets())
    assert (found._min_seqlen, found._max_seqlen) == (1, 5)
    assert torch.equal(found.to_padded_tensor(0.0), made.to_padded_tensor(0.0))
    assert [tuple(each.shape) for each in (found * 2).unbind()] == [(2, 3), (5, 3), (1, 3)]
    weight = torch.rand(3, 4, requires_grad=True)
    (found @ weight).values().sum().backward()
    assert torch.allclose(weight.grad, torch.cat(values).sum(0)[:, None].expand(3, 4))


@given(
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=5),
    ragged=st.sets(st.integers(0, 3), min_size=1, max_size=2),
    name=st.sampled_from(NAMES),
)
def test_rows_that_are_ragged_in_one_dimension_are_stacked(shape, sizes, ragged, name):
    """In any dimension, as `as_nested_tensor` makes them; in several, they are a list."""
    ragged = {dim % len(shape) for dim in ragged}
    of_rows = [
        tuple(size if dim in ragged else fixed for dim, fixed in enumerate(shape)) for size in sizes
    ]
    rows = [of_dtype(name, *each) for each in of_rows]
    found = rows_of(stored(rows)).stacked("x")
    if len(set(of_rows)) == 1:
        assert found.shape == (len(rows), *of_rows[0])
        return
    assert isinstance(found, list) == (len(ragged) > 1)
    if len(ragged) == 1:
        made = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        assert found._ragged_idx == made._ragged_idx == min(ragged) + 1
        same(found.values(), made.values())
        same(found.offsets(), made.offsets())
        assert (found._min_seqlen, found._max_seqlen) == (min(sizes), max(sizes))
    for one, other in zip(rows, found if isinstance(found, list) else found.unbind(), strict=True):
        same(one, other.contiguous())
    for one, other in zip(rows, again(found), strict=True):  # what was read can be put
        same(one, other)


def test_a_nested_tensor_whose_parts_contradict_it_is_refused():
    broken = torch.nested.as_nested_tensor(
        [torch.ones(4, 5), torch.ones(4, 5)], layout=torch.jagged
    )
    broken._ragged_idx = 2
    with pytest.raises(EncodeError, match="'x' is a nested tensor"):
        PLAIN.encode_column("x", broken, ["r0", "r1"])


def test_columns_of_the_same_lengths_share_their_offsets():
    one, other = (stored([torch.rand(2), torch.rand(3)]) for _ in range(2))
    first, second = rows_of(one)._columns["x"], rows_of(other)._columns["x"]
    rows = Rows(("r0", "r1"), {"x": first, "y": second}, PLAIN)
    assert (rows.stacked("x") + rows.stacked("y")).values().shape == (5,)


def test_a_column_is_gathered_only_if_its_cells_are_alike():
    gather = kernels.kernel.gather
    one, two = (bytes(cell) for cell in stored([torch.ones(2), torch.ones(3)]))
    assert gather((one, two), (0, 0), (len(one), len(two))) == (
        TENSOR, one[1], bytearray(one[7:] + two[7:]), [(2,), (3,)],
    )  # fmt: skip
    other = bytes(stored([torch.ones(2, dtype=torch.int8)])[0])
    array = bytes([ARRAY]) + one[1:]
    for cell in (other, array, one[:-1], bytes([OBJECT]) + b"x", b""):
        assert gather((one, cell), (0, 0), (len(one), len(cell))) is None
    assert gather((), (), ()) is None
    for begin, length in ((-1, 3), (0, len(one) + 1), (len(one) + 1, 0), (3, -1)):
        with pytest.raises(ValueError, match="beyond its part"):
            gather((one,), (begin,), (length,))
    with pytest.raises(ValueError, match=r"argument|cell"):
        gather((one,), (), (1,))


def test_ragged_rows_without_elements_are_stacked():
    cells = stored([torch.zeros(2, 0), torch.zeros(3, 0)])
    nested = rows_of(cells).stacked("x")
    assert [tuple(each.shape) for each in nested.unbind()] == [(2, 0), (3, 0)]


def test_tags_that_could_not_be_read_again_are_refused():
    for bad in ({1: 2}, {"a": {1: 2}}, {"a": (1,)}, {"": 1}, {"a": 2**64}, {"\ud800": 1}):
        with pytest.raises(EncodeError, match="'k'"):
            pack_tags("k", bad)
    tags = {"ü": None, "b": b"\xff", "c": [1, {"d": 0.5}], "e": np.int64(3)}
    assert TagReader().read(pack_tags("ké", tags)) == ("ké", tags)


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc0", b"\x80", b"\x81\xa0\x01", b"\x82\xa0\xa1k\xa1a\x05",
     b"\x82\xa0\xa1k\xa1a\xa1\xc1",
     b"\x82\xa0\xa1k\xa1\xff\xa1\x01", b"\x81\xa0\xa1\xff", b"\x82\xa0\xa1k\xa1a\x90",
     b"\x82\xa0\xa1k\xa1a\xa5\xdd\xff\xff\xff\xff"],
)  # fmt: skip
def test_hostile_tags_are_refused(packed):
    with pytest.raises(DecodeError):
        TagReader().read(packed)
