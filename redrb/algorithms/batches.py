"""`TrainingBatch`: a batch that is checked, on one device, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from redrb.algorithms.losses import Totals
from redrb.algorithms.models import ModelInputs
from redrb.checks import checked_int_or_none
from redrb.errors import RecordError
from redrb.experience import Experience

IMPORTANCE_WEIGHTS = "importance_weights"
"""Key in `Experience.tensors` of weights of the loss, for each sample or each action."""

REFERENCE_LOG_PROBS = "reference_log_probs"
"""Key in `Experience.tensors` of the reference policy's log-probabilities, float32 `[B, A]`."""

PROXIMAL_LOG_PROBS = "proximal_log_probs"
"""Key in `Experience.tensors` of the log-probabilities of the trainer's policy before it trained on
the batch, float32 `[B, A]`: with truncated importance sampling, a step adds them if they are
missing, so that later epochs over the batch use the same."""


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Fields of an `Experience`, aligned so that action t of A is at position S - A + t.

    Attributes:
        sequences: Token ids, int64 `[B, S]`.
        attention_mask: 1 where a token counts, int64 `[B, S]`.
        action_mask: True where an action counts, bool `[B, A]`.
        old_log_probs: Log-probabilities below the ratio, float32 `[B, A]`: of the policy that
            sampled; with truncated importance sampling, of the trainer's policy before the batch.
        weights: Importance weights of the loss, float32 `[B, 1]` or `[B, A]`; None: no weights.
        algorithm: Name of the algorithm, for error messages.
        totals: Actions and samples that count in the whole batch, where this is a part of it.
        inputs: Extra tensors that networks take, such as images.
        policy_weights: Weights of the policy loss alone, float32 `[B, A]`; None: no weights.
        place: Place in the whole batch, where this is a part of it.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    old_log_probs: Tensor
    weights: Tensor | None
    algorithm: str
    totals: Totals
    inputs: ModelInputs
    _experience: Experience
    _padding: Tensor
    policy_weights: Tensor | None = None
    place: Place | None = None

    @classmethod
    def of(
        cls, experience: Experience, *, algorithm: str, device: torch.device | None = None
    ) -> Self:
        """Check and align the fields of a batch; without a mask everything counts.

        Raises:
            RecordError: `sequences` or `action_log_probs` is None, fields do not fit each other, or
                the batch is padded on the right.
        """
        if experience.padding_side == "right":
            raise RecordError(
                f"{algorithm} trains batches that are padded on the left: make them without "
                'side="right".'
            )
        sequences = _present(experience.sequences, "sequences", algorithm)
        log_probs = _present(experience.action_log_probs, "action_log_probs", algorithm)
        device = device or sequences.device
        sequences, log_probs = sequences.to(device), log_probs.to(device)
        actions, attention = experience.action_mask, experience.attention_mask
        action_mask = torch.ones_like(log_probs) if actions is None else actions.to(device)
        attention_mask = torch.ones_like(sequences) if attention is None else attention.to(device)
        for name, tensor, like in (
            ("action_log_probs", log_probs, sequences[:, : log_probs.shape[-1]]),
            ("action_mask", action_mask, log_probs),
            ("attention_mask", attention_mask, sequences),
        ):
            if tensor.dim() != 2 or tensor.shape != like.shape:
                raise RecordError(
                    f"{name} has shape {list(tensor.shape)}, which does not fit sequences "
                    f"{list(sequences.shape)} and action_log_probs {list(log_probs.shape)}.",
                    field=name,
                )
        mask = action_mask.bool()
        batch = cls(
            sequences=sequences,
            attention_mask=attention_mask.long(),
            action_mask=mask,
            old_log_probs=log_probs.float(),
            weights=None,
            algorithm=algorithm,
            totals=Totals.of(mask),
            inputs=ModelInputs.of(experience.tensors, sequences),
            _experience=experience,
            _padding=~mask & (log_probs == 0),
        )
        if IMPORTANCE_WEIGHTS not in experience.tensors:
            return batch
        weights = batch.field(IMPORTANCE_WEIGHTS)
        object.__setattr__(batch, "weights", weights[:, None] if weights.dim() == 1 else weights)
        return batch

    @property
    def actions(self) -> int:
        """Number of action positions, A."""
        return self.action_mask.shape[1]

    def field(self, name: str, *, on_padding: float | None = 0.0) -> Tensor:
        """Return a field, or a tensor of `Experience.tensors`, as float32 `[B]` or `[B, A]`.

        Args:
            on_padding: Value where no action counts; None keeps the stored values.

        Raises:
            RecordError: The field is None or missing, or has another shape.
        """
        if self.place is not None:
            return self.place.of(self.place.whole.field(name, on_padding=on_padding))
        stored = self._experience.tensors.get(name, getattr(self._experience, name, None))
        tensor = _present(stored, name, self.algorithm).to(self.sequences.device).float()
        rows, actions = self.action_mask.shape
        if tensor.shape == (rows,) or (tensor.shape == (rows, 1) and actions > 1):
            return tensor.reshape(rows)
        if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] < actions:
            raise RecordError(
                f"{name} has shape {list(tensor.shape)}, not [{rows}] or [{rows}, {actions}].",
                field=name,
            )
        # Experience.tensors may keep the padding of an earlier, longer batch
        beyond, tensor = tensor[:, :-actions], tensor[:, -actions:]
        if beyond.numel() and bool((beyond != 0).any()):
            raise RecordError(
                f"{name} holds numbers beyond the {actions} actions: pad it as the actions are.",
                field=name,
            )
        return tensor if on_padding is None else tensor.masked_fill(~self.action_mask, on_padding)

    def padded_as_actions(self, name: str) -> Tensor:
        """Return a tensor of `Experience.tensors`, `[B, A]`, checked to be padded as the actions.

        `split_experience_batch` strips the padding of standard fields only. A tensor that kept its
        padding while its row was padded on the other side does not fit the actions any more.

        Raises:
            RecordError: The tensor is missing, has another shape, or is not 0 on padding.
        """
        tensor = self.field(name, on_padding=None)
        if tensor.dim() == 2 and bool(((tensor != 0) & self._padding).any()):
            raise RecordError(
                f"tensors[{name!r}] is not 0 where action_log_probs is padding: it was padded on "
                "another side. Pad both on the same side, with 0.",
                field=name,
            )
        return self.per_action(name)

    def per_action(self, name: str) -> Tensor:
        """Return a field as float32 `[B, A]`; one number a sample is repeated for its actions.

        Raises:
            RecordError: The field is None or missing, or has another shape.
        """
        tensor = self.field(name)
        if tensor.dim() == 1:
            tensor = tensor[:, None].expand(self.action_mask.shape)
        return tensor.masked_fill(~self.action_mask, 0.0)

    def part(self, rows: Sequence[int], first: int, action: int, last: int) -> Self:
        """Return some rows, of each the tokens at positions `first` to `last` - 1.

        The first action is at position `action`. `totals` stay those of this batch, so losses of
        parts add up.
        """
        index = torch.tensor(rows, dtype=torch.int64, device=self.sequences.device)
        start = self.sequences.shape[1] - self.actions
        place = Place(self, index, slice(action - start, last - start))
        return replace(
            self,
            sequences=self.sequences[index, first:last],
            attention_mask=self.attention_mask[index, first:last],
            action_mask=place.of(self.action_mask),
            old_log_probs=place.of(self.old_log_probs),
            _padding=place.of(self._padding),
            weights=None if self.weights is None else place.of(self.weights),
            policy_weights=None if self.policy_weights is None else place.of(self.policy_weights),
            inputs=self.inputs.rows(index).columns(first, last),
            place=place,
        )

    def without_actions(self) -> Self:
        """Return the batch with no action that counts: its losses and gradients are 0."""
        return replace(self, action_mask=torch.zeros_like(self.action_mask))

    def joined(self, parts: Sequence[TrainingBatch], values: Sequence[Tensor]) -> Tensor:
        """Return values `[N, A]` of parts of this batch as `[B, A]`, 0 where no action counts."""
        found = values[0].new_zeros(self.action_mask.shape)
        columns = torch.arange(found.shape[1], device=found.device)[None]
        for part, value in zip(parts, values, strict=True):
            value = value.masked_fill(~part.action_mask, 0.0)
            if part.place is None:
                return value
            found[part.place.rows[:, None], columns[:, part.place.columns]] += value
        return found


@dataclass(frozen=True, eq=False)
class Place:
    """Place of a part in its batch: rows, int64 `[N]`, and columns among the actions."""

    whole: TrainingBatch
    rows: Tensor
    columns: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor `[B]`, `[B, 1]` or `[B, A]`."""
        if tensor.dim() == 1 or tensor.shape[1] != self.whole.actions:
            return tensor[self.rows]
        return tensor[self.rows, self.columns]


def _present(tensor: Tensor | None, name: str, algorithm: str) -> Tensor:
    if tensor is None:
        raise RecordError(f"{algorithm} needs {name}: the maker must fill it.", field=name)
    return tensor


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Splits batches so that the activations of one part fit into memory.

    Rows are sorted by length, the longest first, and each part is trimmed to its longest row. So a
    part that does not fit shows in the first micro-batch, and little is computed on padding.

    Attributes:
        size: Most samples in a part; None: no limit.
        tokens: Most tokens in a part, padding included; a longer row is a part alone. None: no
            limit.

    Raises:
        ConfigError: A limit is below 1.
    """

    size: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        checked_int_or_none("micro_batch_size", self.size, 1)
        checked_int_or_none("micro_batch_tokens", self.tokens, 1)

    def split(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """Return the parts; without a limit the batch itself."""
        if self.size is None and self.tokens is None:
            return [batch]
        spans = _spans(batch)
        return [
            batch.part(rows, *_joint([spans[row] for row in rows])) for rows in self._rows(spans)
        ]

    def _rows(self, spans: list[_Span]) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in sorted(range(len(spans)), key=lambda row: _length(spans[row]), reverse=True):
            joined = [spans[each] for each in (*rows, row)]
            tokens = len(joined) * _length(_joint(joined))
            too_many = self.size is not None and len(joined) > self.size
            if rows and (too_many or (self.tokens is not None and tokens > self.tokens)):
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows


_Span = tuple[int, int, int]
"""Positions of a row: of its first token, of its first action, after its last token."""


def _spans(batch: TrainingBatch) -> list[_Span]:
    length = batch.sequences.shape[1]
    start = length - batch.actions
    acting = batch.action_mask.new_zeros(batch.sequences.shape)
    acting[:, start:] = batch.action_mask
    used = acting | (batch.attention_mask != 0)
    # without any mark, argmax is 0: the row then has its full length
    first, last = used.long().argmax(1), length - used.flip(1).long().argmax(1)
    action = acting.long().argmax(1).clamp(min=start)
    found: list[_Span] = []
    for begin, middle, end in zip(first.tolist(), action.tolist(), last.tolist(), strict=True):
        # at least one action, and the token before it, whose logits choose it
        until = max(end, start + 1)
        at = min(middle, until - 1)
        found.append((max(min(begin, at - 1), 0), at, until))
    return found


def _joint(spans: list[_Span]) -> _Span:
    first, action, last = zip(*spans, strict=True)
    return min(first), min(action), max(last)


def _length(span: _Span) -> int:
    return span[2] - span[0]
