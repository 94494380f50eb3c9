"""The calls of the scripts in `redrb/lua/task`, which concern a task as a whole.

Every call may be repeated as it is when a connection breaks, and is. Ids of groups go as texts:
formatting numbers takes Lua ten times as long.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from redrb.experience import Status
from redrb.lua.calls import Call, Found, Page
from redrb.stream.orders import Score
from redrb.stream.task.description import StalenessRules

ExpireMode: TypeAlias = Literal["keep", "discard", "look"]


class SettingsReply(msgspec.Struct, frozen=True):
    """The settings of a task, or which of them do not fit together.

    Attributes:
        settings: Value of each setting, "" for none.
        epoch: Of the producers' records.
        generation: Number of changes of the settings.
        version: Newest weight version that the task knows; 0: none.
        configured: Names of settings that `Configure` has changed.
        held: Those of them that the caller gave another value.
        removed: The incarnation that was removed last, and by whom; "" for none.
        unfinished: Whether work is left: call `Fill` until it is done.
        value: The `max_reads` that is excluded.
        groups: Groups that are stored, for which it cannot.
    """

    settings: dict[str, str] = msgspec.field(default_factory=dict)
    epoch: int = 0
    generation: int = 0
    version: int = 0
    configured: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    removed: str = ""
    unfinished: bool = False
    value: str = ""
    groups: int = 0


class OpenReply(SettingsReply, frozen=True, kw_only=True):
    """The reply to `Open`.

    Attributes:
        outcome: "ok"; "unknown": there is no such task, and it is not to be created; "differs": it
            has others of the settings given, those in `settings`; "excluded": it
            cannot have this `max_reads` beside groups_per_version.
    """

    outcome: Literal["ok", "unknown", "differs", "excluded"]


class Open(Call[OpenReply], frozen=True):
    """Create the task, or compare its settings; settings that it was not given yet are added.

    Attributes:
        revision: Random name of the settings, if this call changes them, and of the incarnation, if
            it creates the task.
        who: The caller, for the record of changes.
        create: Whether to create the task when it does not exist.
        incarnation: Of the task as the caller has opened it, in which nothing is compared, because
            others may have changed settings since.
        generation: Changes of settings that the caller knows of; None at its first open. In a task
            that was created anew the settings of the caller that knows of most hold.
        given: Settings that the task must have; "" for one that was removed.
        implied: Settings that no user gave, which replace only such ones; "" for none.
        defaults: Values of settings until they are given, kept from the first call.
        configured: Names of settings that `Configure` has changed, as the caller has learned.
    """

    script: ClassVar = "task/open"
    revision: str
    who: str
    create: bool = True
    incarnation: str = ""
    generation: int | None = None
    given: dict[str, str] = msgspec.field(default_factory=dict)
    implied: dict[str, str] = msgspec.field(default_factory=dict)
    defaults: dict[str, str] = msgspec.field(default_factory=dict)
    configured: frozenset[str] = frozenset()


class ConfigureReply(SettingsReply, frozen=True, kw_only=True):
    """The reply to `Configure`.

    Attributes:
        outcome: As that of `Open`; "changed": the task has other settings than the caller has seen,
            or does not exist; "holds": the order is to change, and groups are stored.
    """

    outcome: Literal["ok", "changed", "holds", "excluded"]


class Configure(Call[ConfigureReply], frozen=True):
    """Change settings of the task.

    Attributes:
        revision: Random name of the changed settings.
        expected: Revision for which the changes were checked.
        who: The caller, for the record of changes.
        changes: Settings as Redis keeps them; "" removes one.
    """

    script: ClassVar = "task/configure"
    revision: str
    expected: str
    who: str
    changes: dict[str, str]


class Fill(Call[Page], frozen=True):
    """Do a page of the work that a change of settings has left."""

    script: ClassVar = "task/fill"


class Joined(Page, frozen=True):
    """Whether a consumer group has joined; False with all pages done: there is no such task."""

    joined: bool = False


class Join(Call[Joined], frozen=True):
    """Register a consumer group: no group is deleted from now on before it is done with it.

    Attributes:
        newest: Whether it sees only groups that are put later.
    """

    script: ClassVar = "task/join"
    group: str
    newest: bool = False


class Counted(msgspec.Struct, frozen=True):
    """Groups of a page; the next page begins at `place`, "0" at the end."""

    found: int
    place: str = "0"


class Count(Call[Counted], frozen=True):
    """Count the groups that wait in a status; for a new consumer group all stored ones.

    With a query, and for a new consumer group, they are counted in pages.

    Attributes:
        where: Query that the groups match, as Redis reads it; "" for any.
        place: The place that the last call has returned.
    """

    script: ClassVar = "task/count"
    group: str
    status: Status
    where: str = ""
    place: str = "0"


class Move(Call[Found], frozen=True):
    """Move waiting groups to another status; found: how many of the groups wait there now."""

    script: ClassVar = "task/move"
    group: str
    status: Status
    seqs: list[str]


class Rescore(Call[int | None], frozen=True):
    """Change priority and score of groups; returns how many of them are stored.

    None: the task was deleted, or has another order.

    Attributes:
        order: Name of the order that the scores are for.
        changes: Id, priority and score of each group.
    """

    script: ClassVar = "task/rescore"
    order: str
    changes: list[tuple[str, float, Score]]


class ExpireReply(Page, frozen=True):
    """The reply to `Expire`.

    Attributes:
        indexed: False: the task has no index of versions for such a rule.
        due: Ids of those that would, with the mode "look".
    """

    indexed: bool = True
    expired: int = 0
    due: list[int] = msgspec.field(default_factory=list)


class Expire(Call[ExpireReply], frozen=True):
    """Expire groups that are too stale.

    Attributes:
        limit: Most groups that expire.
        mode: "keep": they get the status EXPIRED; "look": nothing is changed.
        number: Noted with each group that is kept: `Expiry.number`.
    """

    script: ClassVar = "task/expire"
    group: str
    limit: int
    mode: ExpireMode
    version: int
    rules: StalenessRules
    statuses: list[Status]
    number: int = 0


class Discard(Call[int], frozen=True):
    """Discard groups as expired if they wait; returns how many did."""

    script: ClassVar = "task/discard"
    group: str
    seqs: list[str]


class Announce(Call[None], frozen=True):
    """Announce a worker to those who look at the task; its announcement goes beside the call."""

    script: ClassVar = "task/announce"
    worker: str
    ended: bool


class Requeued(Page, frozen=True):
    """Dead letters that were put again; there are more if their bytes were a page.

    Attributes:
        ids: The id that each group had, and its new one.
        unsortable: The task's order, and that in which a letter was given up, "" if that is not
            known: Redis cannot compute the letter's score. None of the letters waits again then.
    """

    ids: list[tuple[int, int]] = msgspec.field(default_factory=list)
    unsortable: tuple[str, str] | None = None


class Requeue(Call[Requeued], frozen=True):
    """Put dead letters of a consumer group again."""

    script: ClassVar = "task/requeue"
    group: str
    seqs: list[str]


class DropLetters(Call[int], frozen=True):
    """Delete dead letters of a consumer group, which still count as dead; returns how many.

    Attributes:
        group: "": those of groups in parts; `seqs` are the ids of their entries.
    """

    script: ClassVar = "task/drop_letters"
    group: str
    seqs: list[str]


class Settled(msgspec.Struct, frozen=True):
    """Groups that were acknowledged, and groups refused: their ids may be those of others now."""

    acknowledged: int
    refused: int


class Settle(Call[Settled], frozen=True):
    """Acknowledge groups, leased or waiting, that a checkpoint has trained.

    In a task whose groups are read several times nothing is done, as they come again anyway.

    Attributes:
        incarnation: Incarnation of the task in which they were leased.
        trained: Id of each, and how many of its samples were trained.
    """

    script: ClassVar = "task/settle"
    group: str
    incarnation: str
    trained: list[tuple[str, int]]


class VersionCounts(msgspec.Struct, frozen=True):
    """A page of counts.

    Attributes:
        place: Where the next page begins; "" at the end.
        counts: Kind, version and groups. A kind may come several times with the same version: they
            are added up. Its first letter says w(aiting), l(eased) or t(aken), the second one by
            o(ldest) or n(ewest) token; the version of taken groups is their staleness then, of
            which the kinds "tf" and "tq" are the parts that arose in flight and in the queue.
    """

    place: str
    counts: list[tuple[str, int, int]]


class Versions(Call[VersionCounts], frozen=True):
    """Count the groups of each weight version; those that move meanwhile may count twice, or not.

    Attributes:
        place: The place that the last call has returned.
    """

    script: ClassVar = "task/versions"
    group: str
    place: str = ""


class DropGroup(Call[Found], frozen=True):
    """Remove a consumer group; found: groups that were deleted with it."""

    script: ClassVar = "task/drop_group"
    group: str


class Clear(Call[int | None], frozen=True):
    """Delete the task; returns how many groups were stored, None if it has another incarnation.

    The incarnation of the task to delete goes beside the call, which may be damaged. Repeated, the
    call deletes no task that was created since.

    Attributes:
        ttl_ms: How long processes that used the task learn who has removed it.
    """

    script: ClassVar = "task/clear"
    who: str
    ttl_ms: int


class Stats(Call[dict[str, int] | None], frozen=True):
    """Read the counters of the task and of one consumer group, consistently, by name.

    `redrb/lua/include/counters.lua` has the names. None: there is no such task.
    """

    script: ClassVar = "task/stats"
    group: str
