"""Columns of a table from a TensorDict, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from redrb.errors import ConfigError
from redrb.table import Rows

Parser = Callable[[dict[str, Any]], Any]


def to_columns(fields: TensorDict, parser: Parser | None, *, pickles: bool) -> dict[str, Any]:
    """Return the values of each column, one for each row.

    Without a secret, numpy's numbers and arrays inside of lists and dicts become Python's numbers
    and lists, and tuples become lists: those are what a table holds. With one they are pickled.

    Args:
        parser: Changes the values in place, as `data_parser` of TransferQueue.
        pickles: Whether the table has a secret.
    """
    columns = {str(name): _values(str(name), fields.get(name)) for name in fields.keys()}  # noqa: SIM118
    if parser is not None:
        for name, values in columns.items():
            if isinstance(values, torch.Tensor) and values.is_nested:
                columns[name] = list(values.unbind())
        parser(columns)
    if pickles:
        return columns
    return {
        name: [_plain(value) for value in values] if isinstance(values, list) else values
        for name, values in columns.items()
    }


def one_row(fields: Mapping[str, Any]) -> TensorDict:
    """Return a TensorDict of one row from values without the dimension of rows."""
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ConfigError(f"column {name!r} is a nested tensor: give it to kv_batch_put.")
    rows = {
        name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
        for name, value in fields.items()
    }
    return TensorDict(rows, batch_size=[1])


def to_tensordict(rows: Rows) -> TensorDict:
    """Return rows as a TensorDict.

    As TransferQueue does: tensors become a nested tensor with layout jagged, also if they are of
    the same length, or with layout strided if they differ in another dimension than the first;
    tensors without dimensions become one dense tensor; other values become a NonTensorStack.
    """
    packed = {name: _packed(rows, name) for name in rows}
    return TensorDict(packed, batch_size=[len(rows.row_keys)])


def _values(name: str, value: Any) -> Any:
    if isinstance(value, NonTensorStack | NonTensorData):
        return value.tolist()
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided:
        return list(value.unbind())
    if isinstance(value, torch.Tensor | np.ndarray | list):
        return value
    raise ConfigError(
        f"column {name!r} is a {type(value).__name__}: give a tensor, a nested tensor or a "
        "NonTensorStack."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(name): _nested(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(each) for each in value]
    return str(value) if isinstance(value, str) else value


def _nested(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else _plain(value)


def _packed(rows: Rows, name: str) -> Any:
    stacked = rows.stacked(name)
    if isinstance(stacked, torch.Tensor):
        return stacked if stacked.is_nested or stacked.dim() == 1 else _jagged(stacked)
    values = rows[name]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values) and len({(each.dim(), each.dtype) for each in tensors}) == 1:
        return torch.nested.as_nested_tensor(tensors, layout=torch.strided)
    return NonTensorStack(*values)


def _jagged(dense: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor with the same elements."""
    count, length = dense.shape[:2]
    offsets = torch.arange(count + 1) * length
    return torch.nested.nested_tensor_from_jagged(
        dense.flatten(0, 1), offsets, min_seqlen=length, max_seqlen=length
    )
