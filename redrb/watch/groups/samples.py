"""`Samples`: decodes the samples of a group, within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from redrb.codec.layout import GroupLayout, parse_group
from redrb.watch.groups.choice import Limits
from redrb.watch.groups.records import FieldView, SampleView
from redrb.watch.groups.tokens import Tokenizer, text_notes, tokens_of
from redrb.watch.groups.values import Array, PlainValues, described, images_of, read_array


class Samples:
    """The samples of one group, whose bytes were checked in full."""

    def __init__(self, blob: bytes, limits: Limits) -> None:
        """Check the bytes of a group; raises DecodeError where they are none."""
        self._layout: GroupLayout = parse_group(blob)
        self._limits = limits
        self._left = limits.decoded_bytes
        self.count = self._layout.samples
        self.group_id = self._layout.group_id
        self.notes: list[str] = []

    def common_tags(self) -> dict[str, Any]:
        """Return the tags that are the same in all samples."""
        first, *others = self._layout.tags
        same = {
            name: value
            for name, value in first.items()
            if all(each.get(name) == value for each in others)
        }
        plain: dict[str, Any] = PlainValues(self._limits).of(same)
        return plain

    def rewards(self) -> tuple[float | None, ...]:
        """Return the reward of each sample; None where it has none, or it is not finite."""
        place = [field.name for field in self._layout.fields]
        if "reward" not in place:
            return (None,) * self.count
        column = place.index("reward")
        return tuple(self._reward(column, row) for row in range(self.count))

    def views(self, tokenizer: Tokenizer | None) -> tuple[SampleView, ...]:
        """Return the samples, as many as the limits allow."""
        shown = min(self.count, self._limits.samples)
        plain = PlainValues(self._limits)
        rewards = self.rewards()
        views = tuple(self._view(row, rewards[row], plain, tokenizer) for row in range(shown))
        if shown < self.count:
            self.notes.append(f"only {shown} of {self.count} samples are shown")
        if tokenizer is not None:
            self.notes += text_notes([view.tokens for view in views], tokenizer)
        if plain.cut:
            self.notes.append(f"{plain.cut} long texts and lists of extras are cut")
        return views

    def _reward(self, column: int, row: int) -> float | None:
        shape = self._layout.shapes(column)[row]
        if shape is None or math.prod(shape) != 1:
            return None
        field = self._layout.fields[column]
        value = float(read_array(self._layout.group, column, row, field, shape).reshape(-1)[0])
        return value if math.isfinite(value) else None

    def _view(
        self, row: int, reward: float | None, plain: PlainValues, tokenizer: Tokenizer | None
    ) -> SampleView:
        layout, arrays = self._layout, {}
        fields: list[FieldView] = []
        for view, array in self._arrays(row):
            fields.append(view)
            if array is not None:
                arrays[view.name] = array
        images = [
            image
            for name, array in arrays.items()
            for image in images_of(name, array, self._limits)
        ]
        tokens = tokens_of(arrays, self._limits, tokenizer)
        if tokens is not None:
            shown = len(tokens.prompt_ids) + len(tokens.response_ids)
            total = tokens.prompt_tokens + tokens.response_tokens
            if shown < total:
                self.notes.append(f"sample {row}: only {shown:,} of {total:,} tokens are shown")
        return SampleView(
            index=row,
            status=layout.statuses[row].value,
            policy_version=layout.policy_versions[row],
            reward=reward,
            tags=plain.of(layout.tags[row]),
            extras=plain.of(layout.extras[row]),
            fields=tuple(fields),
            tokens=tokens,
            images=tuple(images[: self._limits.images]),
        )

    def _arrays(self, row: int) -> Iterator[tuple[FieldView, Array | None]]:
        for column, field in enumerate(self._layout.fields):
            shape = self._layout.shapes(column)[row]
            if shape is None:
                continue
            name, dtype = field.name, field.dtype.name
            nbytes = math.prod(shape) * field.dtype.itemsize
            if nbytes > min(self._limits.tensor_bytes, self._left):
                self.notes.append(f"sample {row}: {name} is too large to be shown")
                yield FieldView(name, dtype, shape), None
                continue
            self._left -= nbytes
            array = read_array(self._layout.group, column, row, field, shape)
            yield described(name, dtype, array), array
