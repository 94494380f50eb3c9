"""What an engine samples, and what is checked in a server's reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from redrb.train.engines.routing import Routing

Finish: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: at a stop token, at the limit of length, or because it was aborted."""

_LEAST, _ROUNDING = -3e38, 1e-4
"""The least log-probability that float32 holds, and what rounding may add to one of 0."""

_TOKENS = 2**31
"""No vocabulary has a token id as large as this."""


@dataclass(slots=True)
class Generation:
    """A sampled completion.

    Attributes:
        tokens: Token ids, the stop token included.
        log_probs: Log-probability of each, as the server computed it.
        versions: Weight version that computed each; -1: not known.
        finish: Why it ended.
        routed_experts: Experts that tokens were routed to, uint8, uint16 or int32 `[tokens, layers,
            experts per token]`: a row for each token of prompt and completion but the last one,
            which has not passed the model yet; without the first `routed_tokens` of the request.
            None: the server does not tell them.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = "abort"
    routed_experts: Routing | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The reply to one request of an engine, as the server sent it.

    Attributes:
        labels: The label of the weights that sampled each token; None: the server does not tell.
        label: Then that of its weights afterwards; None: not asked for.
        routed_experts: Rows of tokens up to the one before the last.
    """

    tokens: list[Any]
    log_probs: list[Any]
    finish: Any
    labels: list[str] | None = None
    label: str | None = None
    routed_experts: Routing | None = None


def missing_in(part: Sampled, most: int) -> str | None:
    """Return what a reply lacks to be a completion of at most `most` tokens; None: nothing."""
    count = len(part.tokens)
    if count != len(part.log_probs):
        return "a log-probability for each token"
    if count > most or (not count and most and part.finish != "abort"):
        return f"at most {most} tokens, and at least one: they were {count}"
    if not all(type(token) is int and 0 <= token < _TOKENS for token in part.tokens):
        return "token ids, which are whole numbers from 0 on"
    if not all(
        type(each) in (int, float) and _LEAST <= each <= _ROUNDING for each in part.log_probs
    ):
        return "log-probabilities, which are numbers up to 0"
    return None
