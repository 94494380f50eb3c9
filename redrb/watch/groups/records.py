"""The records that people look at: pages, groups, samples, tokens. Pure data that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

State: TypeAlias = Literal["waiting", "leased", "done", "dead", "parts", "gone", "damaged"]
"""waiting: for this consumer group; leased: by a consumer of it; done: this consumer group has
ended with it, and others need it; dead: a dead letter; parts: a dead letter of a group of which
parts were missing; gone: deleted, or never there; damaged: Redis' record of it cannot be read."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The lease of a group.

    Attributes:
        pid: Its process; None if its name does not tell.
        age_s: Seconds since it was delivered.
    """

    consumer: str
    host: str
    pid: int | None
    age_s: float


@dataclass(frozen=True, slots=True)
class LetterView:
    """Why a group is a dead letter.

    Attributes:
        exception: Class of the exception; "" without one.
        time: When, in ISO 8601, UTC.
        failed_deliveries: Those that ended without acknowledgement, release or rejection.
    """

    group: str
    reason: str
    exception: str
    message: str
    consumer: str
    time: str
    deliveries: int
    failed_deliveries: int


@dataclass(frozen=True, slots=True)
class FieldView:
    """One tensor of a sample.

    Attributes:
        low: Smallest finite element; None if there is none, or it was not read.
        value: Its value if it is a scalar; None for others, and where it is not finite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    not_finite: int = 0
    value: float | None = None


@dataclass(frozen=True, slots=True)
class TokensView:
    """The tokens of a sample, padding left out.

    The lists of the response have one entry for each of its tokens, and are empty where the sample
    has no such field. None stands for a number that is not finite.

    Attributes:
        response_pieces: The text of each token of the response; none without a tokenizer. A
            character of several tokens is in the piece of the last one.
        trained: Whether each token of the response counts, by the action mask.
        versions: Weight version that made it; -1 if that is not known.
    """

    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    response_text: str | None = None
    response_pieces: tuple[str, ...] = ()
    trained: tuple[bool, ...] = ()
    log_probs: tuple[float | None, ...] = ()
    advantages: tuple[float | None, ...] = ()
    values: tuple[float | None, ...] = ()
    kl: tuple[float | None, ...] = ()
    versions: tuple[int, ...] = ()
    prompt_tokens: int = 0
    response_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image among the tensors of a sample.

    Attributes:
        name: Name of the tensor, with a number if it holds several images.
        width: Width of the PNG in pixels; large images are made smaller.
    """

    name: str
    width: int
    height: int
    png: bytes


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a group.

    Attributes:
        policy_version: Weight version that made it; the oldest, if several did.
        reward: Its reward; None without one, and where it is not finite.
        extras: Its extras as JSON can hold them; long ones are cut.
        tokens: Its tokens; None if it has no sequences.
    """

    index: int
    status: str
    policy_version: int | None
    reward: float | None
    tags: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    fields: tuple[FieldView, ...] = ()
    tokens: TokensView | None = None
    images: tuple[ImageView, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group.

    Attributes:
        state: Where it stands for the consumer group.
        status: Status of its rollouts, in which it waits or was put.
        newest_version: Version of its newest token, if it is known.
        staleness: Newest weight version of the task minus its oldest policy version.
        tags: Its values of declared tags; without these, the tags that all of its samples share.
        reads: How often it was acknowledged.
        rewards: Reward of each sample; None for samples without.
        reward: Mean of the finite rewards; None if there is none.
        samples: Its samples; none in a summary.
        damaged: Why it cannot be decoded; "" if it was, or was not read.
    """

    id: int
    state: State
    status: str = ""
    size: int = 0
    samples_total: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    staleness: int | None = None
    priority: float | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    reads: int = 0
    failed_deliveries: int = 0
    group_id: str | None = None
    lease: LeaseView | None = None
    letter: LetterView | None = None
    rewards: tuple[float | None, ...] = ()
    reward: float | None = None
    samples: tuple[SampleView, ...] = ()
    damaged: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """The groups that were chosen.

    Attributes:
        group: Consumer group whose view this is.
        total: Groups among which was chosen; -1 if it is not known.
    """

    task: str
    group: str
    version: int | None
    groups: tuple[GroupView, ...]
    looked: int
    total: int
    notes: tuple[str, ...] = ()


def as_json(view: Any) -> Any:
    """Return a record as `json.dumps` takes it: lists, dicts, and images as base64."""
    return msgspec.to_builtins(view)
