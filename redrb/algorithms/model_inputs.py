"""`ModelInputs`: tensors of samples that networks take beside token ids, such as images.

An input is a tensor of `Experience.tensors` that the model's `forward` names, such as
`pixel_values` or `image_grid_thw`. A sample holds what a processor of Hugging Face returns for this
sample alone. In a batch, inputs are joined along their first dimension, as processors do, so models
get `pixel_values` `[patches of all samples, D]`; a model that wants `[B, ...]` gets it from samples
with `[1, ...]`. Where no sample of a batch has an entry, as with prompts without an image, the
argument is left out. There are two exceptions: numbers `[]` are stacked to `[B]`, and a tensor of
the length of `sequences`, such as `mm_token_type_ids`, stays aligned with it, `[B, S]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from redrb.experience.batching import lengths_of
from redrb.experience.padding import lengths_name, row_slice
from redrb.experience.records import Side

NO_INPUT = frozenset(("input_ids", "sequences", "attention_mask", "labels"))
"""Arguments of `forward` that are never taken from `Experience.tensors`."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Extra tensors of B samples.

    Attributes:
        aligned: Tensors of one entry a token, `[B, S]`, by name.
        others: All other tensors, `[B, ...]`, padded to the longest sample.
        lengths: First dimension of each sample's tensor, int64 `[B]`, where they differ.
        side: Side of that padding.
    """

    aligned: Mapping[str, Tensor] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)
    side: Side = "left"

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], sequences: Tensor, *, side: Side = "left") -> Self:
        """Sort the tensors of a batch, `[B, ...]` each.

        Args:
            tensors: As in `Experience.tensors`.
            sequences: Token ids, int64 `[B, S]`.
            side: Side of the padding.
        """
        lengths = {name: tensors[lengths_name(name)] for name in lengths_of(tensors)}
        given = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in NO_INPUT and name not in map(lengths_name, lengths)
        }
        aligned = {name: each for name, each in given.items() if each.shape == sequences.shape}
        others = {name: each for name, each in given.items() if name not in aligned}
        return cls(
            aligned, others, {name: lengths[name] for name in lengths if name in others}, side
        )

    def rows(self, index: Tensor) -> ModelInputs:
        """Return the inputs of some samples.

        Args:
            index: Rows, int64 `[N]`, in any order, also repeated.
        """
        return ModelInputs(
            {name: each[index.to(each.device)] for name, each in self.aligned.items()},
            {name: each[index.to(each.device)] for name, each in self.others.items()},
            {name: each[index.to(each.device)] for name, each in self.lengths.items()},
            self.side,
        )

    def columns(self, first: int, last: int) -> ModelInputs:
        """Return the inputs for the tokens at positions `first` to `last` - 1 of all rows."""
        aligned = {name: each[:, first:last] for name, each in self.aligned.items()}
        return ModelInputs(aligned, self.others, self.lengths, self.side)

    def extended(self, by: int) -> ModelInputs:
        """Return the inputs for sequences with `by` further tokens, whose aligned entries are 0."""
        aligned = {
            name: torch.cat([each, each.new_zeros(each.shape[0], by)], 1)
            for name, each in self.aligned.items()
        }
        return ModelInputs(aligned, self.others, self.lengths, self.side)

    def reordered(self, order: Tensor) -> ModelInputs:
        """Return the inputs for rows whose tokens were reordered by `gather(1, order)`."""
        aligned = {
            name: each.gather(1, order.to(each.device)) for name, each in self.aligned.items()
        }
        return ModelInputs(aligned, self.others, self.lengths, self.side)

    def taken_by(self, names: frozenset[str]) -> frozenset[str]:
        """Return the names of the inputs that a `forward` with these argument names takes."""
        return names & (self.aligned.keys() | self.others.keys())

    def for_forward(self, names: frozenset[str], device: torch.device) -> dict[str, Tensor]:
        """Return the inputs that a `forward` with these argument names takes, on a device."""
        found = {name: each for name, each in self.aligned.items() if name in names}
        joined = {name: self._joined(name) for name in self.others if name in names}
        found |= {name: each for name, each in joined.items() if len(each)}
        return {name: each.to(device) for name, each in found.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as `Experience.tensors` holds them."""
        of_lengths = {lengths_name(name): each for name, each in self.lengths.items()}
        return {**self.aligned, **self.others, **of_lengths}

    def _joined(self, name: str) -> Tensor:
        tensor = self.others[name]
        if tensor.dim() == 1:
            return tensor
        if name not in self.lengths:
            return tensor.flatten(0, 1)
        longest = tensor.shape[1]
        lengths = self.lengths[name].tolist()
        return torch.cat(
            [
                row[row_slice(length, longest, self.side)]
                for row, length in zip(tensor, lengths, strict=True)
            ]
        )


NO_INPUTS = ModelInputs()

GRIDS = frozenset(("image_grid_thw", "video_grid_thw"))
"""Inputs from which models make the positions of tokens, so that no `position_ids` are passed."""
