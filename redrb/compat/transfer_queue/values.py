"""Columns of a table from a TensorDict, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_non_tensor,
    is_tensor_collection,
)

from redrb.errors import ConfigError
from redrb.table import Rows
from redrb.table.values import python_value, rows_of_nested

Parser = Callable[[dict[str, Any]], Any]


def to_columns(fields: TensorDict, parser: Parser | None, *, pickles: bool) -> dict[str, Any]:
    """Return the values of each column, one for each row.

    A tensor, array or list has the values of the rows, also inside of a NonTensorData, and a tuple
    there is refused, as TransferQueue does; any other object in it is the value of each row.

    Without a secret, numpy's numbers and arrays inside of lists and dicts become Python's numbers
    and lists, and tuples and arrays of objects become lists: those are what a table holds. With one
    they are pickled.

    Args:
        parser: Changes the values in place, as `data_parser` of TransferQueue.
        pickles: Whether the table has a secret.
    """
    columns = {str(name): _values(str(name), fields.get(name)) for name in fields.keys()}  # noqa: SIM118
    if parser is not None:
        parser(columns := {name: _copied(name, values) for name, values in columns.items()})
    if pickles:
        return columns
    return {
        name: [_plain(value) for value in values]
        if isinstance(values, list) or _of_objects(values)
        else values
        for name, values in columns.items()
    }


def one_row(fields: Mapping[str, Any]) -> TensorDict:
    """Return a TensorDict of one row from values without the dimension of rows."""
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ConfigError(f"column {name!r} is a nested tensor: give it to kv_batch_put.")
        if is_tensor_collection(value) and not is_non_tensor(value):
            raise ConfigError(
                f"column {name!r} is a {type(value).__name__}: give each of its tensors a column."
            )
    rows = {
        name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
        for name, value in fields.items()
    }
    return TensorDict(rows, batch_size=[1])


def to_tensordict(rows: Rows, *, uniform: torch.layout = torch.jagged) -> TensorDict:
    """Return rows as a TensorDict.

    As TransferQueue does: tensors become a nested tensor, with layout jagged if they differ in one
    dimension alone, else strided; tensors without dimensions become one dense tensor; other values,
    and tensors of several dtypes or numbers of dimensions, become a NonTensorStack. (TransferQueue
    converts tensors of several dtypes to one.)

    Args:
        uniform: Layout of tensors that have the same shape: jagged as well, or strided, which is
            one dense tensor.
    """
    packed = {name: _packed(rows, name, uniform) for name in rows}
    return TensorDict(packed, batch_size=[len(rows.row_keys)])


def _values(name: str, value: Any) -> Any:
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if is_non_tensor(value):
        rows = isinstance(value.data, torch.Tensor | np.ndarray | list | tuple)
        value = value.data if rows else value.tolist()
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided:
        return rows_of_nested(value, f"column {name!r}")
    if isinstance(value, torch.Tensor | np.ndarray | list):
        return value
    raise ConfigError(
        f"column {name!r} is a {type(value).__name__}: give a tensor, a nested tensor or a "
        "NonTensorStack."
    )


def _copied(name: str, values: Any) -> Any:
    """Return values that a parser may change; those of a nested tensor as a list of rows."""
    if not isinstance(values, torch.Tensor):
        return values.copy()
    if values.is_nested:
        return [row.clone() for row in rows_of_nested(values, f"column {name!r}")]
    return values.clone()


def _of_objects(value: Any) -> bool:
    """Return whether a value is an array of objects or texts, which are values of their own."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return False
    return value.dtype.kind in "OSU" and value.ndim > 0


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return python_value(value)
    if isinstance(value, Mapping):
        return {_plain(name): _nested(each) for name, each in value.items()}
    if isinstance(value, list | tuple) or _of_objects(value):
        return [_nested(each) for each in value]
    return str(value) if isinstance(value, str) else value


def _nested(value: Any) -> Any:
    numbers = isinstance(value, np.ndarray) and value.dtype.kind not in "OmM"
    return value.tolist() if numbers else _plain(value)


def _packed(rows: Rows, name: str, uniform: torch.layout) -> Any:
    stacked = rows.stacked(name)
    if isinstance(stacked, torch.Tensor):
        as_it_is = stacked.is_nested or stacked.dim() == 1 or uniform is torch.strided
        return stacked if as_it_is else _jagged(stacked)
    values = rows[name]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values) and len({(each.dim(), each.dtype) for each in tensors}) == 1:
        with suppress(RuntimeError):  # torch has no such tensors of some dtypes
            return torch.nested.as_nested_tensor(tensors, layout=torch.strided)
    return NonTensorStack(*(NonTensorData(data=value) for value in values))


def _jagged(dense: torch.Tensor) -> torch.Tensor:
    count, length = dense.shape[:2]
    offsets = torch.arange(count + 1) * length
    return torch.nested.nested_tensor_from_jagged(
        dense.flatten(0, 1), offsets, min_seqlen=length, max_seqlen=length
    )
