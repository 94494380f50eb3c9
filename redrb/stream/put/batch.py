"""`PutBatch`: the encoded groups of one put, with the values that the task indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import msgpack
import msgspec
from msgspec.structs import replace

from redrb.codec import EncodedGroup
from redrb.errors import ConfigError, RedrbError
from redrb.experience import Status
from redrb.stream.orders import Fifo, GroupFacts, checked_score
from redrb.stream.put.options import NO_OPTIONS, NO_SOURCES, PutOptions, Sources
from redrb.stream.put.rights import NO_RIGHTS, Rights
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.tags import TagValue, tag_values

if TYPE_CHECKING:
    from redrb.experience import BufferItem


@dataclass(frozen=True, slots=True)
class IndexValues:
    """Values of groups, for the settings that a task had when they were prepared.

    Attributes:
        newest: Version of each group's newest token; None if no rule of the task looks at it.
        tag_names: Tags that the task declares.
        tags: Values of these tags for each group.
    """

    newest: Sequence[int | None] | None = None
    tag_names: Sequence[str] = ()
    tags: Sequence[Sequence[TagValue]] = ()

    def part(self, start: int, end: int) -> Self:
        """Return the values of some of the groups."""
        newest = None if self.newest is None else self.newest[start:end]
        return type(self)(newest, self.tag_names, self.tags[start:end])


NO_VALUES = IndexValues()


def reads_samples(description: TaskDescription, options: PutOptions) -> bool:
    """Return whether `index_values` must look at the samples of groups."""
    by_token = description.staleness.max_token_staleness is not None
    return bool(description.tags or options.tags or by_token)


def index_values(
    description: TaskDescription, groups: Sequence[Sequence[BufferItem]], options: PutOptions
) -> IndexValues:
    """Return the values that a task indexes.

    Raises:
        ConfigError: `options` have a tag that the task does not declare.
        RecordError: A tag of the samples cannot be indexed.
    """
    newest, names = None, description.tags
    tags: list[list[TagValue]] = []
    if description.staleness.max_token_staleness is not None:
        newest = [_newest_version(group, options.policy_version) for group in groups]
    if names or options.tags:
        tags = [tag_values(names, group, options.tags) for group in groups]
    return IndexValues(newest, names, tags)


def _newest_version(group: Sequence[BufferItem], default: int | None) -> int | None:
    """Return the version of the newest token of the sample in which that version is oldest."""
    # A group expires by its tokens when all tokens of one sample are too stale. Only tokens that
    # the action mask counts are looked at; a sample without such tokens never expires by them.
    newest = [_newest_token(item, default) for item in group]
    known = [version for version in newest if version is not None]
    return min(known) if known else None


def _newest_token(item: BufferItem, default: int | None) -> int | None:
    versions, mask = item.token_versions, item.action_mask
    if versions is None or not versions.numel():
        return item.policy_version if item.policy_version is not None else default
    versions = versions.long()
    counted = versions if mask is None else versions.masked_fill(mask == 0, -1)
    newest = int(counted.max())
    return None if newest == -1 else newest  # below -1 are tokens that are older than all others


class Claim(msgspec.Struct, frozen=True):
    """Says which parts are to become a group, or to be removed.

    Attributes:
        key: Key of the group.
        count: Number of its parts; a claim is refused if others came.
        outcome: The counter of the task that counts the group.
    """

    key: str
    count: int
    outcome: Literal["completed", "delivered", "dropped", "dead"]


class PutBatch(msgspec.Struct, frozen=True):
    """Encoded groups, with the facts that a task may keep beside their bytes.

    Attributes:
        revision: The task's settings that the groups were prepared for.
        filtered: Groups of the same put that a filter dropped.
        expired: Groups that their producer found too stale, and keeps back.
        refused: The error of each group that cannot be stored, by its index in the put; in
            `groups` are the others.
        kind: Kind of the completed groups, see `EncodedGroup.kind`; "" if that is not checked.
        versions: Whether each sample needs a weight version, if the task has a bound of staleness.
        rights: The rights of admission of the groups, and of those that are not stored.
        sources: The sources of forwarded groups, and of those that are not stored.
        parts: Claim on the parts that the put's one group is made of; None if it is made of none.
    """

    groups: Sequence[EncodedGroup]
    revision: str = ""
    options: PutOptions = NO_OPTIONS
    values: IndexValues = NO_VALUES
    filtered: int = 0
    expired: int = 0
    refused: Mapping[int, RedrbError] = {}
    kind: str = ""
    versions: bool = False
    rights: Rights = NO_RIGHTS
    sources: Sources = NO_SOURCES
    parts: Claim | None = None

    def __bool__(self) -> bool:
        """Return whether there are groups to store or to count."""
        return bool(self.groups) or self.filtered + self.expired > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum([group.nbytes for group in self.groups])

    def raise_refused(self) -> None:
        """Raise the error of the first group that cannot be stored; its notes name the others.

        The put is over then, and its rights return to their source.
        """
        error = self.refusal()
        if error is not None:
            self.rights.end(0, counted=False)
            raise error

    def refusal(self) -> RedrbError | None:
        """Return the error that `raise_refused` raises; None if no group is refused."""
        if not self.refused:
            return None
        first, *others = self.refused.values()
        first.bad_groups = tuple(self.refused)
        for error in others:
            first.add_note(f"also refused: {error}")
        return first

    def part(self, start: int, end: int) -> Self:
        """Return some of the groups; the counts of dropped groups go with the first part."""
        if start == 0 and end >= len(self.groups):
            return self
        return replace(
            self,
            groups=self.groups[start:end],
            values=self.values.part(start, end),
            filtered=self.filtered if start == 0 else 0,
            expired=self.expired if start == 0 else 0,
            rights=self.rights.part(start, end),
            sources=self.sources.part(start, end),
        )


def packed_facts(description: TaskDescription, batch: PutBatch) -> list[bytes]:
    """Return the facts of each group, packed as the script `put/put` reads them.

    Raises:
        ConfigError: This process was not given the `Order` object of the task.
    """
    order = description.order
    if order is None:
        raise ConfigError(
            "this task has an order that is not built in: open the stream with the same Order "
            "object as order= to put here."
        )
    priority, values, pack = batch.options.priority, batch.values, msgpack.Packer().pack
    newest = values.newest or [None] * len(batch.groups)
    tags = values.tags or [()] * len(batch.groups)
    rights = batch.rights.numbers or [None] * len(batch.groups)
    by_arrival = isinstance(order, Fifo)
    packed = []
    for group, token, group_tags, right in zip(batch.groups, newest, tags, rights, strict=True):
        version, status = group.policy_version, group.status
        facts: dict[str, Any] = {"size": len(group.blob), "samples": group.samples}
        if status is not Status.COMPLETED:
            facts["status"] = status.value
        if not by_arrival:
            seen = GroupFacts(version, priority, group.samples, group.nbytes, status, right)
            score = checked_score(order, seen)
            if score != "arrival":
                facts["score"] = score if isinstance(score, str) else float(score)
        if priority is not None:
            facts["priority"] = float(priority)
        if version is not None:
            facts["version"] = version
        if token is not None:
            facts["newest"] = token
        if group_tags:
            named = zip(values.tag_names, group_tags, strict=True)
            if indexed := {name: value for name, value in named if value is not None}:
                facts["tags"] = indexed  # left out when empty, because Lua packs {} as a list
        packed.append(pack(facts))
    return packed
