"""The checks of a put that users may switch off, and the errors of the groups that they refuse."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from redrb.codec import (
    EncodedGroup,
    decode_items,
    difference,
    encode_groups,
    parse_group,
)
from redrb.codec.collecting import known_versions
from redrb.errors import ConfigError, RecordError, RedrbError
from redrb.experience import BufferItem, Status
from redrb.experience.faults import Fault, fault_extra

_log = logging.getLogger("redrb")

Check: TypeAlias = Literal["values", "fields", "versions"]
"""A check of each put; see `ExperienceStream`."""

CHECKS: tuple[Check, ...] = get_args(Check)

DEFAULT_CHECKS = CHECKS

_COMPLETED = Status.COMPLETED
"""The status of groups to train on: unfinished rollouts may lack fields."""

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


def name_row(error: RedrbError, row: int) -> None:
    """Let the error for a group name the row of the Experience that the group is."""
    text = re.sub(rf"(sample 0 (of|in) )?group {row}\b", f"row {row}", str(error))
    error.args = (text, *error.args[1:])


def check_versions(group: Sequence[BufferItem], at: int) -> None:
    """Raise RecordError for a sample without a weight version: its group would never expire."""
    if None not in [item.policy_version for item in group]:
        return
    for place, item in enumerate(group):
        if item.policy_version is None and (
            item.token_versions is None or known_versions([item.token_versions])[0] is None
        ):
            raise RecordError(
                f"sample {place} of group {at} has no policy_version, and the task has a bound of "
                "staleness, by which it would never expire: give put(policy_version=), or open "
                'the stream without the check "versions".',
                field="policy_version",
                group=at,
                sample=place,
            )


def unpublished_error(
    group: Sequence[BufferItem], default: int | None, newest: int, weights: str, at: int
) -> RecordError:
    """Return the error for a group of weights that are not published: it would expire too late."""
    samples = encode_groups([[item] for item in group], policy_version=default)
    versions = [-1 if sample.newest is None else sample.newest for sample in samples]
    version = max(versions)
    place = versions.index(version)
    return RecordError(
        f"sample {place} of group {at} has policy_version {version}, and the newest version of "
        f"weights {weights!r} that is published is {newest}: give the version of the weights that "
        "made the samples, which is `version` of the WeightSubscriber that loaded them, or of what "
        "publish returned. The number of an optimizer step is another one, and by it the group "
        'would not expire. Or open the stream without the check "versions".',
        field="policy_version",
        group=at,
        sample=place,
    )


def unversioned_errors(
    places: Iterable[int], groups: Iterable[EncodedGroup]
) -> dict[int, RecordError]:
    """Return the error for each group with such a sample, by its index in the put."""
    found: dict[int, RecordError] = {}
    for place, group in zip(places, groups, strict=True):
        try:
            check_versions(decode_items(parse_group(group.blob)), place)
        except RecordError as error:
            found[place] = error
    return found


def common_kind(groups: Iterable[EncodedGroup]) -> str:
    """Return the kind that most completed groups have; "" if there are none."""
    kinds = Counter(group.kind for group in groups if group.status is _COMPLETED)
    return kinds.most_common(1)[0][0] if kinds else ""


def misfit_errors(
    places: Sequence[int], groups: Sequence[EncodedGroup], kind: str
) -> dict[int, RecordError]:
    """Return the error for each completed group of another kind, by its index in the put."""
    return {
        place: _misfit_error(group, kind, place)
        for place, group in zip(places, groups, strict=True)
        if group.kind != kind and group.status is _COMPLETED
    }


def _misfit_error(group: EncodedGroup, kind: str, at: int) -> RecordError:
    field, why = difference(group.kind, kind)
    return RecordError(
        f"{field} of group {at} {why} of the task: there is no batch of them. The task keeps the "
        "fields and dtypes of the completed groups that were put first. Give all samples these "
        "fields; if they are to be others from now on, use another task, or clear() this one, "
        'which deletes its groups. Or open the stream without the check "fields".',
        field=field,
        group=at,
        sample=0,
    )


def log_dropped(task: str, errors: Iterable[Exception]) -> None:
    """Log why groups are dropped; `errors` has the error of each."""
    kinds: defaultdict[tuple[str, str | None], list[Exception]] = defaultdict(list)
    for error in errors:
        field = error.field if isinstance(error, RecordError) else None
        kinds[type(error).__name__, field].append(error)
    for (name, field), found in kinds.items():
        count, error = len(found), found[0]
        # a message may advise to drop such groups, which is done already
        problem = error.problem if isinstance(error, RecordError) else str(error)
        fault = Fault("a group", f"cannot be stored: {problem}", f"{name} {field}")
        # makers count a reward that is no number themselves, with the line of the code
        extra = None if field == "reward" else fault_extra(fault, count)
        dropped = "a group is dropped" if count == 1 else f"{count} groups are dropped, the first"
        _log.error("task %r: %s: %s", task, dropped, problem, extra=extra)
