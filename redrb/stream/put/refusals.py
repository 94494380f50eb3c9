"""The checks of a put that users may switch off, and the errors of the groups that they refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from redrb.codec import EncodedGroup, difference, kind_of
from redrb.codec.collecting import oldest_version
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem, Status

Check: TypeAlias = Literal["values", "fields", "versions"]
"""A check of each put; see `ExperienceStream`."""

CHECKS: tuple[Check, ...] = get_args(Check)

DEFAULT_CHECKS: tuple[Check, ...] = ("values",)
"""Tasks may hold groups without a version, or with further fields, which never meet in a batch."""

OnBadGroup: TypeAlias = Literal["raise", "drop"]


def checked_checks(checks: object) -> frozenset[str]:
    """Return the names of checks; raises ConfigError where they are none."""
    if (
        isinstance(checks, str)
        or not isinstance(checks, Collection)
        or not all(isinstance(each, str) and each in CHECKS for each in checks)
    ):
        raise ConfigError(
            f"checks={checks!r:.80}: give a list of {', '.join(CHECKS)}; [] for none."
        )
    return frozenset(checks)


def check_versions(group: Sequence[BufferItem], at: int) -> None:
    """Refuse a group with a sample whose weight version is unknown: it would never expire.

    Raises:
        RecordError: The message names group and sample.
    """
    for place, item in enumerate(group):
        if item.policy_version is None and (
            item.token_versions is None or oldest_version([item.token_versions]) is None
        ):
            raise version_error(f"sample {place} of group {at}", at, place)


def version_error(where: str, at: int, place: int) -> RecordError:
    """Return the error for a sample without a weight version."""
    return RecordError(
        f"{where} has no policy_version, and the task has a bound of staleness, by which it would "
        "never expire: give put(policy_version=), or open the stream without the check "
        '"versions".',
        field="policy_version",
        group=at,
        sample=place,
    )


def common_kind(groups: Iterable[EncodedGroup]) -> str:
    """Return the kind that most completed groups have; "" if there are none."""
    kinds = Counter(kind_of(group.blob) for group in groups if _is_complete(group))
    return kinds.most_common(1)[0][0] if kinds else ""


def misfit_error(group: EncodedGroup, kind: str, at: int) -> RecordError | None:
    """Return the error for a completed group of another kind; None where it fits."""
    if not _is_complete(group) or (own := kind_of(group.blob)) == kind:
        return None
    field, why = difference(own, kind)
    return RecordError(
        f"{field} of group {at} {why} of the task: there is no batch of them. Give all samples of "
        "a task the same fields and dtypes, use another task, or open the stream without the "
        'check "fields".',
        field=field,
        group=at,
        sample=0,
    )


def _is_complete(group: EncodedGroup) -> bool:
    """Return whether a group is one to train on: unfinished rollouts may lack fields."""
    return group.status is Status.COMPLETED
