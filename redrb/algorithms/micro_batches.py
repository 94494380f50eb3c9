"""Micro-batches: parts of a batch that are trained one after the other in one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from redrb.algorithms.batches import TrainingBatch
from redrb.checks import checked_int_or_none


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
        """Yield the rows of each part."""
        rows: list[int] = []
        for row in sorted(range(len(spans)), key=lambda row: _length(spans[row]), reverse=True):
            if rows and self._exceeds([spans[each] for each in (*rows, row)]):
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _exceeds(self, spans: list[_Span]) -> bool:
        if self.size is not None and len(spans) > self.size:
            return True
        return self.tokens is not None and len(spans) * _length(_joint(spans)) > self.tokens


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
