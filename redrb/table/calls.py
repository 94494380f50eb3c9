"""The calls of the scripts of a table, in `redrb/lua/table`."""

from __future__ import annotations

from typing import ClassVar, Generic, Literal

import msgspec

from redrb.lua.calls import Call, Found, Page, R


class Opened(msgspec.Struct, frozen=True):
    """Reply to `Open`.

    Attributes:
        settings: Those that the table has; of "differs", those that differ.
        reads_only: Whether this user may only read, so that nothing was written.
    """

    outcome: Literal["ok", "differs", "unknown"]
    incarnation: str = ""
    run: int = 0
    epoch: int = 0
    settings: dict[str, str] = {}
    reads_only: bool = False


class Open(Call[Opened], frozen=True):
    """Create a table, or check that it has these settings."""

    script: ClassVar = "table/open"
    incarnation: str
    create: bool
    in_run: int
    given: dict[str, str]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a call that `Index.change` does.

    Attributes:
        outcome: "ok"; "again": it was done before; "gone": this incarnation of the table is not
            there; "stale": a newer run has begun; "forgotten": nobody knows whether it was done
            before; or a word of the call's own.
        run: The run of now, of "stale".
        epoch: The epoch of now, of "forgotten".
        change: The newest change of the call.
        count: Rows of the call.
        more: Whether there is more to do: do the call again.
        trash: Whether values are to be deleted.
    """

    outcome: str
    run: int = 0
    epoch: int = 0
    change: int = 0
    count: int = 0
    more: bool = False
    trash: bool = False


class Done(Answer, frozen=True, kw_only=True):
    """Reply to `Sweep`."""

    outcome: Literal["ok", "gone", "stale"]


class Changed(Answer, frozen=True, kw_only=True):
    """Reply to `Clear` and `Mark`."""

    outcome: Literal["ok", "again", "gone", "stale", "forgotten"]


class Stored(Answer, frozen=True, kw_only=True):
    """Reply to `Put`.

    Attributes:
        nbytes: Of "tags", bytes of the largest merged tags, those of the row at the place `count`.
    """

    outcome: Literal[
        "ok", "again", "gone", "stale", "forgotten", "full", "never", "columns", "tags"
    ]
    nbytes: int = 0


class _OfRun(Call[R], Generic[R], frozen=True):
    """A call that an incarnation of the table does, in its current run alone."""

    incarnation: str
    in_run: int


class _Change(_OfRun[R], Generic[R], frozen=True):
    """A call that changes rows.

    Attributes:
        writer, operation: Name the call, so that a repetition changes nothing more.
    """

    writer: str
    operation: int
    epoch: int


class Put(_Change[Stored], frozen=True):
    """Add columns and tags to rows.

    Attributes:
        token: Names the values of the call.
        buckets: Group of each row, in the keys of its value.
        sizes: Bytes of each column of each row, row after row.
        most_tags: Bytes that the tags of a row may have, with those that it has.
        ttl_ms: Time for which the writer stays in the queue for room; 0: it leaves.
    """

    script: ClassVar = "table/put"
    token: str
    keys: list[str]
    buckets: list[int]
    columns: list[str]
    sizes: list[int]
    nbytes: int
    most_tags: int
    ttl_ms: int


class Clear(_Change[Changed], frozen=True):
    """Remove rows by key, or all whose last change is not after `all_until`; -1: by key."""

    script: ClassVar = "table/clear"
    keys: list[str]
    all_until: int


class Mark(_Change[Changed], frozen=True):
    """Name this moment."""

    script: ClassVar = "table/mark"
    name: str


class Sweep(_OfRun[Done], frozen=True):
    """Delete cleared rows that no mark needs any more."""

    script: ClassVar = "table/sweep"


class RestoredPage(Answer, frozen=True, kw_only=True):
    """Reply to `Restore`, a page.

    Attributes:
        back, dropped: Rows of all pages so far.
        newest: Number of the newest row at the mark.
        names: The marks that there are, of "unknown".
    """

    outcome: Literal["ok", "gone", "stale", "unknown"]
    back: int = 0
    dropped: int = 0
    newest: int = 0
    names: list[str] = []


class Restore(_OfRun[RestoredPage], frozen=True):
    """Return to a mark; the token names one call of `Table.restore`, which Redis carries on."""

    script: ClassVar = "table/restore"
    token: str
    name: str
    later: str


class TagsPage(Page, frozen=True):
    """Reply to `Tags`.

    Attributes:
        after: Last change of the page; the next page, or look, begins after it.
        seen: The newest change when it was read.
        begins: Whether the pages before it do not count, as nobody knows what was removed since.
        whole: Whether all rows are listed, as nobody knows which have changed.
        gone: Keys that were removed after the page before it.
    """

    after: int = 0
    seen: int = 0
    begins: bool = False
    whole: bool = False
    gone: tuple[str, ...] = ()


class Tags(Call[TagsPage], frozen=True):
    """List the rows that changed; `seen` is that of the page before, -1 for the first one."""

    script: ClassVar = "table/tags"
    after: int
    seen: int = -1
    whole: bool = False


class Watch(Call[int], frozen=True):
    """Queue for a change after another one; returns the newest, -1 where the table is gone."""

    script: ClassVar = "table/watch"
    incarnation: str
    waiter: str
    after: int
    ttl_ms: int


class Registered(Answer, frozen=True, kw_only=True):
    """Reply to `Register`: the columns and the size with which the task is registered."""

    outcome: Literal["ok", "gone", "stale", "claims", "differs"]
    columns: tuple[str, ...] = ()
    size: int = 1


class Register(_OfRun[Registered], frozen=True):
    """Register a task that claims rows in groups of `size`."""

    script: ClassVar = "table/register"
    task: str
    columns: list[str]
    size: int


class Counted(Found, frozen=True):
    """Reply to `Produced`: rows of this page, and its last change."""

    after: int = 0


class Produced(Call[Counted], frozen=True):
    """Count rows that have all of some columns."""

    script: ClassVar = "table/produced"
    columns: list[str]
    after: int


class ClaimStats(msgspec.Struct, frozen=True):
    """A task that claims rows: the columns that it needs, rows of a group, rows consumed."""

    columns: list[str]
    size: int
    consumed: int


class Counts(msgspec.Struct, frozen=True):
    """Reply to `Count`; `redrb.table.stats` says what they are.

    Attributes:
        left: Whether there is no table, but values of one that was not deleted, or resumed, to the
            end.
    """

    rows: int
    retained: int
    change: int
    run: int
    bytes: int
    retained_bytes: int
    made: int
    cleared: int
    dropped: int
    limit: int
    max_bytes: int
    retain: str
    trash: int
    columns: list[str] = []
    marks: dict[str, int] = {}
    claims: dict[str, ClaimStats] = {}
    left: bool = False


class Count(Call[Counts | None], frozen=True):
    """Count rows, bytes and changes."""

    script: ClassVar = "table/stats"


class Begun(Answer, frozen=True, kw_only=True):
    """Reply to `BeginRun`: the number of the run."""

    outcome: Literal["ok", "gone"]


class BeginRun(Call[Begun], frozen=True):
    """Begin a run."""

    script: ClassVar = "table/begin_run"
    token: str


class Deleted(Answer, frozen=True, kw_only=True):
    """Reply to `Delete`, a page: at the end, whether further keys may be left beside the table."""

    outcome: Literal["ok", "gone", "stale"]
    beside: bool = False


class Delete(Call[Deleted], frozen=True):
    """Delete a table whose claims were deleted; its values are left, under this token.

    Attributes:
        incarnation: None: whichever there is, and in whichever run.
    """

    script: ClassVar = "table/delete"
    token: str
    incarnation: str | None = None
    in_run: int = 0


class Forget(Call[Found], frozen=True):
    """Forget a table that is left under this token, and whose values are deleted.

    Attributes:
        names: Names of keys, below those of the table, that are deleted first.
    """

    script: ClassVar = "table/forget"
    token: str
    names: tuple[str, ...] = ()


class BeginResume(Call[Literal["new", "left", "used", "resumed"]], frozen=True):
    """Begin to resume a table, which is left under this token until it is complete.

    Attributes:
        resumed: Checksum of the file, and names of the tasks that are registered at the end.
    """

    script: ClassVar = "table/resume_begin"
    token: str
    resumed: str


class EndResume(Call[Literal["ok", "used", "gone"]], frozen=True):
    """Give a table its complete index: "used": there is one; "gone": the index is not complete."""

    script: ClassVar = "table/resume"
    token: str
    area: str
    names: list[str]
    rows: int
    there: int
    fields: dict[str, str]
