"""`Table`: rows by key, whose columns arrive at different times."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeAlias, TypeVar, cast

from redrb.checks import check_choice, checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline, here
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    EncodeError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    UnknownTask,
)
from redrb.experience.records import Side
from redrb.keys import check_name
from redrb.stream import StreamStats
from redrb.table.calls import (
    Clear,
    Count,
    Counts,
    Delete,
    Mark,
    Produced,
    Restore,
    RestoredPage,
    Sweep,
    Tags,
)
from redrb.table.claims import Claim, Claims
from redrb.table.index import MOST_CELLS, MOST_ROWS, ROWS_OF_A_CALL, Index, Writing
from redrb.table.reading import Reader, checked_columns
from redrb.table.removal import empty_trash, remove
from redrb.table.rows import Rows
from redrb.table.upload import Upload
from redrb.table.values import TagReader, Values, pack_tags
from redrb.unpacking import Reading
from redrb.words import agreeing, counted

MOST_KEY_BYTES = 512

Later: TypeAlias = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class TagChanges:
    """What a look at a table has found.

    Attributes:
        rows: Key -> all tags of each row that has changed; with `whole`, of every row.
        gone: Keys that were removed and have not come back.
        change: The newest change that this look has seen: give it as `since` next time.
        whole: Whether `rows` are all rows of the table. Forget what was known before.
    """

    rows: dict[str, dict[str, Any]]
    gone: tuple[str, ...]
    change: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` has done.

    Attributes:
        back: Cleared rows that are there again.
        dropped: Rows that were put after the mark and are gone, and cleared rows that did not come
            back because a newer row has their key.
        newest: The newest row at the mark: those with larger `numbers` were put later.
    """

    back: int
    dropped: int
    newest: int


F = TypeVar("F", bound=Callable[..., Any])


def _needs(role: str, what: str) -> Callable[[F], F]:
    """Name the role that a method needs where the user of Redis may not do what it does."""

    def decorated(method: F) -> F:
        @wraps(method)
        def call(table: Table, *arguments: Any, **options: Any) -> Any:
            try:
                return method(table, *arguments, **options)
            except StoreDenied as error:
                place = f"--table {table.name} --namespace {table.namespace}"
                raise StoreDenied(
                    f"table {table.name!r}: this user of Redis may not {what}, which needs the "
                    f"role {role} for this table. `redrb acl --role {role} {place}` prints the "
                    f"permissions of this role, and gives them to a user with --apply: {error}"
                ) from error

        return cast("F", call)

    return decorated


class Table:
    """Rows by key, whose columns arrive at different times, from any number of processes.

    A row is added by the first `put` of its key; later ones add or replace columns, and merge tags:
    small values that a look at the whole table shows. Each `put` is done once, and is visible as a
    whole. Several tasks may claim the rows that have the columns they need, each independently.
    Rows stay until they are cleared. Threads may share one table object.

    Examples:
        >>> table = Table(client, "train")
        >>> table.put(["a", "b"], {"tokens": [t0, t1]}, tags=[{"status": "done"}] * 2)
        >>> table.get(["b"], ["tokens"])["tokens"][0]
    """

    @_needs("observer", "open it")
    def __init__(
        self,
        client: Client,
        name: str,
        *,
        namespace: str = "default",
        limit: int | None = None,
        max_bytes: int | None = None,
        retain: Literal["checkpoint"] | None = None,
        secret: str | bytes | None = None,
        create: bool = True,
    ) -> None:
        """Open a table, and create it when it is new.

        Args:
            client: The client that `redrb.connect` returned.
            namespace: Keeps experiments on one server apart.
            limit: Most rows; a put that adds rows waits for room. Retained rows do not count.
            max_bytes: Most bytes of values, likewise. Puts that add columns to rows which are there
                never wait, since others may wait for these columns; so the table may exceed it.
            retain: "checkpoint": cleared rows stay, unseen, until they are older than the mark
                before the newest one, so that `restore` can bring them back; none before the
                first mark.
            secret: With it Python objects that msgpack does not hold are pickled and signed. All
                processes need the same. Who knows it can run code in those that read.
            create: False: a table that is not there is an error.

        Raises:
            ConfigError: A name or setting is not usable, or the table has other settings.
            UnknownTask: The table does not exist, and `create` is False.
            StoreUnavailable: Redis stayed away.
        """
        check_client(client)
        self.name, self.namespace = check_name("table", name), check_name("namespace", namespace)
        given = {
            "limit": checked_int_or_none("limit", limit, 1),
            "max_bytes": checked_int_or_none("max_bytes", max_bytes, 1),
            "retain": retain,
        }
        if retain is not None and retain != "checkpoint":
            raise ConfigError(f'retain={retain!r:.80}: use "checkpoint" or None.')
        stored = {setting: str(value) for setting, value in given.items() if value is not None}
        self._client = client
        values = Values(secret)
        self._index = Index(client, self.name, self.namespace, stored, create=create)
        self._reader = Reader(client, self._index, values)
        self._claims = Claims(client, self._index, self._reader)

    def __repr__(self) -> str:
        return f"<redrb.Table {self.namespace}:{self.name} at {self._index.client.where}>"

    @property
    def run(self) -> int:
        """The run in which this object was opened, or that it has begun; 0: none was begun."""
        return self._index.opened.run

    @_needs("maker", "put rows")
    def put(
        self,
        keys: Sequence[str],
        columns: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Add columns to rows, and merge tags into theirs; add the rows that are not there.

        Args:
            keys: Keys of the rows, each once; at most 2,048, and 65,536 values in all.
            columns: For each column one value per row: a tensor or array `[rows, ...]`, a nested
                tensor, or a sequence of tensors, arrays, and what msgpack holds. A column that a
                row has already is replaced.
            tags: Tags of each row; those that are not named stay as they are.
            timeout: Seconds to wait for room; None waits for ever, and logs every half minute.

        Returns:
            The number of the table's newest change, as `tags` and `watch` take it.

        Raises:
            EncodeError: A value cannot be stored; nothing was changed.
            StoreFull: There was no room in time, or the server is at its memory limit.
            StaleRun: A newer run has begun: nothing was changed.
            StoreUnavailable: Redis stayed away; `uncertain` says whether the put may have landed.
                Put it again.
            OutcomeUnknown: The connection broke, and more than an hour passed before Redis was
                reached again.
            ConfigError: An argument is wrong, or the rows are more than the limits.
        """
        rows = _checked_keys(keys)
        if len(rows) > MOST_ROWS:
            raise ConfigError(f"{len(rows)} rows in one put: give at most {MOST_ROWS}.")
        given = {} if columns is None else columns
        if not isinstance(given, Mapping):
            raise ConfigError(f"columns={columns!r:.80}: give a mapping of names to values.")
        if len(rows) * len(given) > MOST_CELLS:
            raise ConfigError(
                f"{len(rows)} rows of {len(given)} columns in one put: give at most "
                f"{MOST_CELLS} values, rows times columns."
            )
        packed: list[bytes] = []
        if tags is not None:
            each = _checked_list("tags", tags, "mappings, one for each row")
            if len(each) != len(rows):
                raise EncodeError(f"tags: give one mapping for each of the {len(rows)} rows.")
            packed = list(map(pack_tags, rows, each))
        names = checked_columns(given)
        cells = [self._reader.values.encode_column(name, given[name], rows) for name in names]
        if not rows:
            return self._index.newest_change()
        upload = Upload(self._client, self._index, rows, names, cells, packed)
        with Deadline(timeout):
            try:
                done = self._index.change(upload.request, upload.refused)
            except StoreUnavailable:
                raise
            except (StoreError, EncodeError):  # the server takes no value of this size
                with suppress(StoreError):  # the error of the put says more
                    upload.drop()
                raise
            if done.trash:
                self._empty_trash(pages=len(rows) // ROWS_OF_A_CALL + 1)  # more than it adds
        return done.change

    def get(self, keys: Sequence[str], columns: Sequence[str] | None = None) -> Rows:
        """Return columns of rows, in the order of `keys`.

        Args:
            columns: Names of columns; None: those that all of these rows have.

        Raises:
            MissingRows: There is no row of a key, or it lacks a column.
            DecodeError: A value is none that redrb has stored, or is signed with another secret.
            StoreError: The values of a row are gone, although the table has the row.
        """
        return self._reader.get(_checked_keys(keys), columns)

    def batch(
        self,
        keys: Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        side: Side = "left",
        device: str = "cpu",
        pin_memory: bool = False,
    ) -> dict[str, Any]:
        """Return columns of tensors, each zero-padded to `[rows, longest, ...]`.

        Raises:
            RecordError: A column holds other values than tensors of one dtype and rank.
            MissingRows: There is no row of a key, or it lacks a column.
        """
        return self.get(keys, columns).batch(side, device, pin_memory=pin_memory)

    def tags(self, since: int | None = None) -> TagChanges:
        """Return the tags of the rows that changed after a change, and the keys that went.

        A look costs what has changed, not what the table holds. A row whose columns alone have
        changed is among them, too.

        Args:
            since: `change` of an earlier look; None: all rows. All rows are listed also where the
                table does not remember any more what was removed since.
        """
        after = -1 if since is None else checked_int("since", since)
        rows: dict[str, dict[str, Any]] = {}
        removed: dict[str, None] = {}
        reader = TagReader()
        ask = Tags(after)
        while True:
            page, stored = ask.run_with_bytes(self._index.client, [self._index.keys.stream])
            if page.begins:
                rows.clear()
                removed.clear()
            for key in page.gone:
                rows.pop(key, None)
                removed[key] = None
            for key, tags in map(reader.read, filter(None, stored)):
                rows[key] = tags
                removed.pop(key, None)
            if not page.more:
                return TagChanges(rows, () if page.whole else (*removed,), page.after, page.whole)
            ask = Tags(page.after, page.seen, page.whole)

    @_needs("maker", "wait for changes")
    def watch(self, since: int, timeout: float | None = None) -> int:
        """Wait until the table has a change after `since`; returns the newest one.

        Args:
            since: `change` of a look, or what `put` or `watch` has returned.
            timeout: Seconds to wait, None for ever; returns `since` when they are over.

        A table that was deleted, or that Redis has lost, is created anew, as by a put.

        Raises:
            UnknownTask: It was deleted, and opened with `create=False`.
        """
        waiter, after = uuid.uuid4().hex, checked_int("since", since)
        with Deadline(timeout):
            while True:
                last = here().over
                newest = self._index.newest_change(waiter, after, self._index.ttl_ms)
                if newest != after or last:
                    return newest
                self._index.wait(waiter)

    @Reading("the index of a table")
    def columns(self, keys: Sequence[str]) -> list[dict[str, int] | None]:
        """Return the bytes of each column of rows, by name; None where there is no row."""
        return [
            {name: place.length for name, place in row.places.items()} if row else None
            for row in self._index.find(_checked_keys(keys))
        ]

    def numbers(self, keys: Sequence[str]) -> list[int | None]:
        """Return the number of each row; None where there is none.

        A row gets its number when it is added: they count up, and none is given twice.
        """
        return [row.number if row else None for row in self._index.find(_checked_keys(keys))]

    def keys_of(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the key of each row by its number; None where there is no such row."""
        found: list[str | None] = []
        reader = TagReader()
        client, stored = self._index.client, f"{self._index.keys.prefix}tags"
        wanted = [checked_int("number", number, 1) for number in numbers]
        for first in range(0, len(wanted), ROWS_OF_A_CALL):
            page = client.execute("HMGET", stored, *wanted[first : first + ROWS_OF_A_CALL])
            found += [packed and reader.read(packed)[0] for packed in page]
        now = self.numbers(list(dict.fromkeys(key for key in found if key is not None)))
        present = set(now)
        return [
            key if number in present else None for key, number in zip(found, wanted, strict=True)
        ]

    @_needs("trainer", "clear rows")
    def clear(self, keys: Sequence[str] | None = None) -> int:
        """Remove rows; groups of claims that name them end, waiting or leased, as evicted.

        Args:
            keys: Keys of the rows; those without a row are left out. None: all rows that are there
                when the call begins, and are not changed until they are removed.

        Returns:
            How many rows there were.

        Raises:
            StaleRun: A newer run has begun.
            StoreUnavailable: Redis stayed away; the same call goes on.
        """
        cleared = 0
        if keys is None:
            until = self._index.newest_change()
            more = True
            while more:
                done = self._index.do(Clear, keys=[], all_until=until)
                cleared, more = cleared + done.count, done.more or done.outcome == "again"
        else:
            row_keys = _checked_keys(keys)
            for first in range(0, len(row_keys), ROWS_OF_A_CALL):
                page = list(row_keys[first : first + ROWS_OF_A_CALL])
                cleared += self._index.do(Clear, keys=page, all_until=-1).count
        self._empty_trash()
        return cleared

    def _empty_trash(self, pages: int | None = None) -> None:
        empty_trash(self._client, self._index.keys, pages)

    @_needs("trainer", "register tasks")
    def register(self, task: str, columns: Sequence[str], group_size: int | None = None) -> None:
        """Let a task claim the rows that have some columns; those that are there count.

        Args:
            task: Name of the task. Its stream is the task `TABLE:TASK` for `redrb inspect` and the
                other commands.
            columns: Columns that a row needs before the task can claim it.
            group_size: Rows that are claimed together: those with the numbers 1 to `group_size`,
                and so on. Default: each row by itself.

        Raises:
            ConfigError: The task is registered with others.
        """
        self._claims.register(task, columns, group_size)

    @_needs("trainer", "unregister tasks")
    def unregister(self, task: str) -> int:
        """Forget a task with all that it has claimed and consumed; rows stay as they are.

        End the processes that claim for it first: a claim that waits registers its task anew.

        Returns:
            How many groups of rows waited or were leased.

        Raises:
            UnknownTask: There is no such task.
        """
        return self._claims.unregister(task)

    @_needs("trainer", "claim rows")
    def claim(
        self,
        task: str,
        columns: Sequence[str] | None = None,
        count: int = 1,
        *,
        group_size: int | None = None,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> Claim:
        """Lease rows that have all columns of a task, and that it has not consumed.

        Each row is claimed at least once by each task, until it is acknowledged; rows of a process
        that died are claimed by others. Those that were complete first come first; rows that were
        complete before the task was registered, about in the order in which they were added.

        Args:
            task: Name of the task; it is registered if `columns` are given.
            count: Rows; a multiple of the group size.
            at_least: Fewest rows to accept when the time is up; default: all.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            BatchTimeout: Too few rows were complete in time; none was claimed.
            StaleRun: A newer run of the table has begun.
            ConfigError: The task is not registered, or is with other columns or group sizes.
        """
        with Deadline(timeout):
            claims = self._claims.open(task, columns, group_size)
            try:
                return claims.take(count, at_least, timeout)
            except BatchTimeout as error:
                counts = self._counts()
                lacking = [name for name in claims.columns if name not in counts.columns]
                if lacking:
                    error.add_note(
                        f"No row of table {self.name!r} ever had the columns "
                        f"{', '.join(lacking)}; its columns are {', '.join(counts.columns)}."
                    )
                if counts.rows < error.wanted and counts.cleared:
                    error.add_note(
                        f"Table {self.name!r} has {counted(counts.rows, 'row')}; "
                        f"{counts.cleared} more {agreeing(counts.cleared, 'were')} cleared."
                    )
                raise

    def consumed(self, task: str) -> int:
        """Return how many rows that are there a task has acknowledged."""
        task = check_name("task", task)
        counts = self._counts()
        if task not in counts.claims:
            raise ConfigError(
                f"table {self.name!r} has no task {task!r}: call table.register({task!r}, columns)."
            )
        return counts.claims[task].consumed

    def produced(self, columns: Sequence[str]) -> int:
        """Return how many rows have all of these columns; all rows are looked at, in pages."""
        names = checked_columns(columns)
        total, after = 0, 0
        while True:
            page = self._index.call(Produced(names, after))
            total, after = total + page.found, page.after
            if not page.more:
                return total

    @_needs("trainer", "begin runs")
    def begin_run(self) -> int:
        """Begin a run: objects opened before are refused when they write; returns its number.

        The driver of a job calls it once, before its workers open the table.
        """
        return self._index.begin_run()

    @_needs("trainer", "set marks")
    def mark(self, name: str) -> int:
        """Name this moment, to which `restore` returns; returns its change.

        The newest two marks stay. Call it right after the model's checkpoint was saved.
        """
        done = self._index.do(Mark, name=check_name("mark", name))
        while self._index.do(Sweep).more:
            pass
        self._empty_trash()
        return done.change

    def marks(self) -> dict[str, int]:
        """Return the marks to which the table can be restored, and their changes."""
        return dict(self._counts().marks)

    @_needs("trainer", "restore rows")
    def restore(self, name: str, later: Later = "keep") -> Restored:
        """Return to a mark: what was consumed after it can be consumed again.

        Rows that were cleared after the mark come back, if the table retains them; what tasks have
        acknowledged after it can be claimed again. Later marks are deleted: what was consumed
        before these is there again. A call that breaks off can be repeated. Other processes should
        not use the table meanwhile.

        Args:
            later: Rows and columns that were put after the mark: "keep" them, or "drop" them. A
                column that a dropped one has replaced is gone; tags are as they were set last.

        Raises:
            ConfigError: There is no such mark.
            StaleRun: A newer run has begun.
        """
        name = check_name("mark", name)
        check_choice("later", later, ("keep", "drop"))
        asked = {"token": uuid.uuid4().hex, "name": name, "later": later}

        def refused(_: Writing, reply: RestoredPage) -> None:
            if reply.outcome == "unknown":
                known = ", ".join(reply.names) or "none"
                raise ConfigError(
                    f"table {self.name!r} has no mark {name!r}: the newest two stay, and these "
                    f"are {known}."
                )

        while (page := self._index.do(Restore, refused=refused, **asked)).more:
            pass
        for task, claim in self._counts().claims.items():
            self._claims.fill(task, claim.columns, claim.size)
        self._empty_trash()
        return Restored(page.back, page.dropped, page.newest)

    def stats(self) -> TableStats:
        """Return counters of the table, and of each task that claims rows."""
        counts = self._counts()
        return TableStats(counts, {task: self._claims.stats(task) for task in counts.claims})

    @_needs("admin", "change limits")
    def configure(self, *, limit: int | None = None, max_bytes: int | None = None) -> None:
        """Change limits of the table, for all processes; None leaves one as it is, 0 removes it."""
        given = {"limit": limit, "max_bytes": max_bytes}
        changes = {
            name: checked_int(name, value) for name, value in given.items() if value is not None
        }
        self._counts()
        self._index.refuse_stale()
        if changes:
            settings = [word for pair in changes.items() for word in pair]
            self._index.client.execute("HSET", self._index.keys.task, *settings)

    @_needs("admin", "delete it")
    def delete(self, *, everywhere: bool = False) -> int:
        """Delete the table and what its tasks have claimed; returns the number of its rows.

        If the process dies meanwhile, `redrb rm` goes on.

        Args:
            everywhere: Delete also the values that no row has, of processes that were killed in the
                middle of a put: all keys of the servers are looked through. `redrb rm` does so, and
                this call by itself where the table was created beside values of an earlier one,
                whose delete or resume was killed.
        """
        self._index.refuse_stale()
        counts = self._counts()
        for task in counts.claims:
            with suppress(UnknownTask):  # Redis has lost what it has claimed
                self._claims.delete(task)
        remove(
            self._client,
            self._index.keys,
            lambda token: self._index.do(Delete, token=token),
            everywhere=everywhere,
        )
        return counts.rows

    def _counts(self) -> Counts:
        found = self._index.call(Count())
        if found is None or found.left:
            raise self._index.unknown()
        return found


@dataclass(frozen=True, slots=True)
class TableStats:
    """Counters of a table from one moment, and those of the tasks that claim its rows.

    The ledger balances: `counts.made == counts.rows + counts.cleared + counts.dropped`.

    Attributes:
        counts: `rows` and `bytes` that are there, `retained` cleared rows and `retained_bytes`;
            `made`, `cleared` and `dropped`: rows that were ever added, removed, and given up by
            `restore`; the newest `change`, the `run`, settings, names of columns, marks.
        tasks: Ledger of each task, in groups of rows.
    """

    counts: Counts
    tasks: dict[str, StreamStats]


def _checked_keys(keys: object) -> tuple[str, ...]:
    """Return keys of rows; raises ConfigError for others than distinct texts."""
    keys = _checked_list("keys", keys, "keys, which are texts")
    sizes = set(map(len, keys)) if set(map(type, keys)) <= {str} else {0}
    plain = all(0 < size <= MOST_KEY_BYTES for size in sizes) and all(map(str.isascii, keys))
    for key in () if plain else keys:
        usable = isinstance(key, str) and 0 < len(key) <= MOST_KEY_BYTES
        if usable and not key.isascii():
            try:
                usable = len(key.encode()) <= MOST_KEY_BYTES
            except UnicodeEncodeError:
                usable = False
        if not usable:
            raise ConfigError(f"key {key!r:.80}: give texts of 1 to {MOST_KEY_BYTES} bytes.")
    if len(set(keys)) != len(keys):
        raise ConfigError("keys: a key is there twice; name each row once.")
    return tuple(keys if plain else map(str.__str__, keys))


def _checked_list(name: str, values: object, what: str) -> Sequence[Any]:
    """Return a list or another sequence; raises ConfigError for others, and for a text."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ConfigError(f"{name}={values!r:.80}: give a list of {what}.")
    return values
