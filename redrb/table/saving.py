"""`save_table` writes a table to a file; `resume_table` builds it anew, as a whole or not at all.

The frames are those of a saved task's file (`redrb/stream/saving/file.py`,
docs/reference/saved-files.md): rows with their values, then the settings and counters.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from redrb.connection import Client
from redrb.connection.client import scan_hash
from redrb.connection.transport import Pipeline, without_errors
from redrb.errors import ConfigError, DecodeError, StoreError, StoreUnavailable
from redrb.keys import TableKeys, bucket_of
from redrb.lua.pages import PAGES
from redrb.lua.records import (
    CHANGE,
    PLACE,
    Segment,
    columns_of,
    read_record,
    sizes_of,
    value_of,
)
from redrb.registry import Registry
from redrb.stream.saving.checking import open_saved
from redrb.stream.saving.file import Kind, SaveReader, SaveWriter
from redrb.stream.saving.saving import replaced
from redrb.stream.task.entries import Count
from redrb.table.calls import BeginResume, EndResume
from redrb.table.payload import StoredValue, Wanted, read, store, unlink
from redrb.table.removal import empty_trash, forget, remove_left
from redrb.table.table import Table
from redrb.table.values import TagReader
from redrb.unpacking import Reading, unpack, whole
from redrb.words import counted

FRAME_BYTES: Final = 4 << 20
"""Bytes of a frame to aim at; a single row may be larger."""

AREA_TTL_MS: Final = 3_600_000
"""Time after which Redis deletes the index of a resume that was killed."""

_ATTEMPTS: Final = 10
_FIELDS: Final = "limit max_bytes retain change number run cleared dropped kept_from".split()

Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._/@+-]{1,128}\Z")]
Changes: TypeAlias = dict[Name, Count]

T = TypeVar("T")


class SavedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One row; its values follow each other in the payload of the frame.

    Attributes:
        record, tags: As the index holds them.
        change, cleared: The change at which it was changed last, or cleared; the other one is 0.
        consumed, spent: Changes at which tasks have acknowledged it, as scripts name them.
    """

    number: Count
    record: bytes
    tags: bytes
    change: Count
    cleared: Count
    consumed: Changes
    spent: Changes

    @property
    def segments(self) -> list[Segment]:
        """What each put has stored of it."""
        with Reading("the record of a row"):
            segments = read_record(self.record)[1]
            return [[*each[:PLACE], *map(int, each[PLACE:])] for each in segments]

    @property
    def nbytes(self) -> int:
        """Bytes of its values, its tags and its record."""
        of_values = sum(sum(sizes_of(each)) for each in self.segments)
        return of_values + len(self.tags) + len(self.record)

    @property
    def head(self) -> str:
        """The head of the record, with the columns of its segments: `include/records.lua`."""
        with Reading("the record of a row"):
            first = whole(read_record(self.record)[0].partition(" ")[0])
            ids = {column for each in self.segments for column in columns_of(each)} - {0}
            if first < 0 or (ids and not 0 < min(ids) <= max(ids) <= PAGES["columns"]):
                raise ValueError("impossible numbers")
            columns = sum(1 << column for column in ids)
        bits = (columns >> shift & 63 for shift in range(0, columns.bit_length(), 6))
        return f"{first} {''.join(chr(48 + each) for each in bits)}"

    @property
    def key(self) -> bytes:
        """The key, which its tags hold."""
        with Reading("the tags of a row"):
            return bytes(unpack(self.tags, "tags of a row", raw=True)[b""])


class SavedClaim(msgspec.Struct, frozen=True):
    """A task that claims rows."""

    columns: list[Name]
    size: Annotated[int, Meta(ge=1, le=1024)]


class TableHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table without its rows, when the last row had been read."""

    fields: dict[Name, Annotated[str, Meta(pattern=r"\A(-1|[0-9]{1,16}|checkpoint)\Z")]]
    columns: dict[Name, Count]
    marks: dict[Name, Annotated[str, Meta(pattern=r"\A[0-9]{1,16} [0-9]{1,16}\Z")]]
    claims: dict[Name, SavedClaim]


class TableEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last record of a file: the number of its rows, and of those that are retained."""

    rows: Count = 0
    retained: Count = 0


@dataclass(frozen=True, slots=True)
class SavedTable:
    """The contents of a saved table's file, in numbers."""

    path: Path
    rows: int
    retained: int
    nbytes: int


def save_table(client: Client, name: str, path: Path, *, namespace: str) -> SavedTable:
    """Write a table to a file, page by page; puts may go on meanwhile.

    A row that is there from the beginning to the end is in the file, as it was at one moment. Of a
    key that is cleared and put again meanwhile, the file has one row.

    Raises:
        UnknownTask: There is no such table.
        ConfigError: The file cannot be written.
        StoreError: Values of a row are gone.
    """
    table = Table(client, name, namespace=namespace, create=False)
    keys, counted = TableKeys.of(namespace, name), Counter[bool]()
    node = client.at(keys.stream)

    def texts(key: str) -> dict[str, str]:
        flat = [each.decode() for each in node.execute("HGETALL", f"{keys.prefix}{key}")]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    with replaced(path) as file:
        writer = SaveWriter(file)
        for rows, payload in _frames(client, node, keys):
            writer.write(Kind.ROWS, rows, payload)
            counted.update(row.change > 0 for row in rows)
        header = TableHeader(
            fields={each: value for each, value in texts("task").items() if each in _FIELDS},
            columns={each: int(at) for each, at in texts("columns").items()},
            marks=texts("marks"),
            claims={
                task: SavedClaim(claim.columns, claim.size)
                for task, claim in table.stats().counts.claims.items()
            },
        )
        writer.write(Kind.TABLE, header)
        writer.end(TableEnd(counted[True], counted[False]))
    return SavedTable(path, counted[True], counted[False], path.stat().st_size)


def _frames(
    client: Client, node: Client, keys: TableKeys
) -> Iterator[tuple[list[SavedRow], bytes]]:
    """Yield rows, some at a time, with their values; each row once.

    A key that is cleared and put again has a new row, while the file may have the old one: it was
    there at the moment for which the file has it, so that the new one is left out.
    """
    done: set[int] = set()
    live: set[bytes] = set()  # keys
    for page in scan_hash(node, keys.rows):
        numbers = [number for number in (int(field) for field, _ in page) if number not in done]
        done.update(numbers)
        for _ in range(_ATTEMPTS):
            rows, numbers = _rows(node, keys, numbers) if numbers else [], []
            while rows:
                part = [rows.pop()]
                nbytes = part[0].nbytes
                while rows and (nbytes := nbytes + rows[-1].nbytes) <= FRAME_BYTES:
                    part.append(rows.pop())
                wanted = [
                    Wanted(value_of(keys, each), 0, sum(sizes_of(each)), whole=True)
                    for row in part
                    for each in row.segments
                ]
                values = iter(read(client, wanted))
                found = [(row, [next(values) for _ in row.segments]) for row in part]
                whole = [(row, all_of) for row, all_of in found if None not in all_of]
                # those of the others were replaced, or cleared, meanwhile
                numbers += [row.number for row, all_of in found if None in all_of]
                whole = [each for each in whole if not each[0].change or each[0].key not in live]
                live.update(row.key for row, _ in whole if row.change)
                yield (
                    [row for row, _ in whole],
                    b"".join(v or b"" for _, each in whole for v in each),
                )
        if numbers:
            raise StoreError(
                f"values are gone of {counted(len(numbers), 'row')} that the table still has: "
                "`redrb doctor` names them. Clear these rows."
            )


def _rows(node: Client, keys: TableKeys, numbers: Sequence[int]) -> list[SavedRow]:
    """Return rows as they are at one moment, without those that are gone."""
    tasks = sorted(name.decode() for name in node.execute("HKEYS", keys.claims))
    scored = [
        "changes",
        "cleared",
        *(f"{kind}:{t}" for kind in ("consumed", "spent") for t in tasks),
    ]
    pipeline = node.transaction(f"{keys.prefix}none")
    for command, name in (("HMGET", "rows"), ("HMGET", "tags"), *(("ZMSCORE", n) for n in scored)):
        pipeline.add(command, f"{keys.prefix}{name}", *numbers)
    pipeline.add("EXEC")
    replies = without_errors(node.retrying(lambda: without_errors(node.exchange(pipeline)))[-1])
    found, count = [], len(tasks)
    for number, record, tags, *scores in zip(numbers, *replies[-2 - len(scored) :], strict=True):
        change, cleared, *acked = (int(each or 0) for each in scores)
        if record and tags and (change or cleared):
            consumed, spent = (
                {task: at for task, at in zip(tasks, part, strict=True) if at}
                for part in (acked[:count], acked[count:])
            )
            row = SavedRow(number, record, tags, change, 0 if change else cleared, consumed, spent)
            found.append(row)
    return found


def resume_table(client: Client, name: str, path: Path, *, namespace: str) -> SavedTable:
    """Fill a new table from a file of `save_table`; it is there as a whole, or not at all.

    Rows that were claimed and not acknowledged wait again; ledgers of the tasks begin anew. If the
    process dies meanwhile, the same call goes on, and `redrb rm` deletes what there is.

    Raises:
        ConfigError: There is a table of this name.
        DecodeError: The file is damaged, or none of a table.
        StoreUnavailable: Redis stayed away.
    """
    header, ending, checksum = _checked(path)  # all of it is checked first
    keys = TableKeys.of(namespace, name)
    area = _Area(client, keys, header.claims)
    begun = area.begin(checksum)
    if begun == "used":
        raise ConfigError(
            f"there is a table {name!r}: resume into another one, or delete it first."
        )
    try:
        if begun != "resumed":
            area.fill(path, checksum)
            outcome = area.end(header, ending.rows, ending.retained, checksum)
            if outcome == "used":
                raise ConfigError(f"a table {name!r} was created meanwhile: nothing was resumed.")
            if outcome == "gone":
                raise StoreError(
                    f"the resumed rows of table {name!r} are gone, or {path} has some twice, or "
                    "another process resumes or deletes the table: try again, or save anew."
                )
    except BaseException as error:
        if not (isinstance(error, StoreUnavailable) and error.uncertain):
            with suppress(StoreError):
                area.give_up()
        raise
    table = Table(client, name, namespace=namespace)
    for task, claim in header.claims.items():
        table.register(task, claim.columns, claim.size)
    client.at(keys.task).execute("HDEL", keys.task, "resumed")
    return SavedTable(path, ending.rows, ending.retained, path.stat().st_size)


def _checked(path: Path) -> tuple[TableHeader, TableEnd, str]:
    header, ending = TableHeader({}, {}, {}, {}), TableEnd()
    with open_saved(path) as file:
        reader = SaveReader(file, str(path))
        for frame in reader.frames(payloads=False):
            if frame.kind is Kind.ROWS:
                _converted(frame.head, list[SavedRow], path)
            elif frame.kind is Kind.TABLE:
                header = _converted(frame.head, TableHeader, path)
            elif frame.kind is Kind.END:
                ending = _converted(frame.head, TableEnd, path)
            else:
                raise DecodeError(f"{path} is no file of a table.")
    return header, ending, reader.checksum


def _converted(head: Any, kind: type[T], path: Path) -> T:
    try:
        return msgspec.convert(head, kind)
    except msgspec.ValidationError as error:
        raise DecodeError(f"{path} is malformed: {error}.") from error


class _Area:
    """The index of a table that is resumed, under keys that nobody else knows."""

    def __init__(self, client: Client, keys: TableKeys, claims: Mapping[str, SavedClaim]) -> None:
        self._client, self._node = client, client.at(keys.stream)
        self._keys, self._claims = keys, claims
        self._token, self._place = uuid.uuid4().hex[:16], 0
        self._prefix = f"{keys.prefix}restoring:{self._token}:"
        self._read_tags = TagReader().read
        self._parts = {task: Counter[int]() for task, claim in claims.items() if claim.size > 1}
        self._bytes = Counter[bool]()  # of rows that are there, and of others
        self._last = 0
        kinds = ("claimed", "consumed", "parts", "spent")
        self._names = "keys rows tags changes cleared columns marks".split()
        self._names += [f"{kind}:{task}" for kind in kinds for task in claims]

    def begin(self, checksum: str) -> Literal["new", "left", "used", "resumed"]:
        """Let the table be left until it is complete; delete what earlier processes have left."""
        ask = BeginResume(self._token, self._resumed(checksum))
        begun = ask.run(self._node, [self._keys.stream])
        if begun in ("new", "left"):
            registry = Registry(self._client, self._keys.namespace)
            registry.add("table", self._keys.table)  # `redrb ls` lists it
        if begun == "left":
            remove_left(self._client, self._keys, self._token)
            empty_trash(self._client, self._keys)
        return begun

    def _resumed(self, checksum: str) -> str:
        return " ".join([checksum, *sorted(self._claims)])

    def fill(self, path: Path, checksum: str) -> None:
        """Store the rows of a file that was checked."""
        with open_saved(path) as file:
            reader = SaveReader(file, str(path))
            for frame in reader.frames(payloads=True):
                if frame.kind is Kind.ROWS:
                    self.add(_converted(frame.head, list[SavedRow], path), frame.payload)
        if reader.checksum != checksum:
            raise ConfigError(f"{path} was replaced while it was read: resume it again.")

    def add(self, rows: Sequence[SavedRow], payload: bytes) -> None:
        """Store rows with their values."""
        values, view = [], memoryview(payload)
        adding: dict[tuple[str, str], list[Any]] = {}
        for row in rows:
            key = self._read_tags(row.tags)[0]
            bucket = bucket_of(key.encode())
            record: list[Any] = [row.head]
            for segment in row.segments:
                length = sum(sizes_of(segment))
                segment = [self._token, self._place, bucket, *segment[CHANGE:]]
                values.append(StoredValue(value_of(self._keys, segment), [view[:length]], length))
                record.append(segment)
                self._place, view = self._place + 1, view[length:]
                self._bytes[row.change > 0] += length
            self._last = max(self._last, row.number)
            packed = msgspec.msgpack.encode(record)
            for command, name, *words in self._index(row, key, packed):
                adding.setdefault((command, name), []).extend(words)
        if len(view):
            raise DecodeError("the values of saved rows have other lengths than their records say.")
        self._send(
            {("HSET", "rows"): adding.pop(("HSET", "rows"), [])}
        )  # `give_up` finds values by it
        store(self._client, values)
        self._send(adding)

    def _index(self, row: SavedRow, key: str, record: bytes) -> Iterator[tuple[Any, ...]]:
        yield "HSET", "rows", row.number, record
        yield "HSET", "tags", row.number, row.tags
        if row.change:
            yield "HSET", "keys", key, row.number
        yield "ZADD", "changes" if row.change else "cleared", row.change or row.cleared, row.number
        for task in row.consumed.keys() & self._claims.keys():
            yield "ZADD", f"consumed:{task}", row.consumed[task], row.number
            yield "HSET", f"claimed:{task}", row.number, "0"  # it does not arrive again
            if task in self._parts:
                self._parts[task][(row.number - 1) // self._claims[task].size] += 1
        for task in row.spent.keys() & self._claims.keys():
            yield "ZADD", f"spent:{task}", row.spent[task], row.number

    def _send(self, adding: Mapping[tuple[str, str], list[Any]]) -> None:
        pipeline = Pipeline()
        for (command, name), words in adding.items():
            if words:
                pipeline.add(command, f"{self._prefix}{name}", *words)
        if pipeline.commands:
            for name in self._names:  # one that these rows do not add to must not expire earlier
                pipeline.add("PEXPIRE", f"{self._prefix}{name}", AREA_TTL_MS)
            self._node.retrying(lambda: without_errors(self._node.exchange(pipeline)))

    def end(self, header: TableHeader, there: int, retained: int, checksum: str) -> str:
        """Give the table its index, with counters that balance."""
        hashes: dict[str, Mapping[Any, Any]] = {"columns": header.columns, "marks": header.marks}
        hashes |= {f"parts:{task}": counted for task, counted in self._parts.items()}
        self._send(
            {("HSET", n): [w for pair in h.items() for w in pair] for n, h in hashes.items()}
        )
        known = header.fields
        cleared = max(int(known.get("cleared", 0)), retained)
        fields: dict[str, object] = {
            **known,
            "incarnation": uuid.uuid4().hex,
            "number": max(int(known.get("number", 0)), self._last),
            "cleared": cleared,
            "made": there + cleared + int(known.get("dropped", 0)),
            "bytes": self._bytes[True],
            "retained_bytes": self._bytes[False],
            "gone_until": known.get("change", "0"),
            "resumed": self._resumed(checksum),  # until its tasks are registered, too
        }
        texts = {name: str(value) for name, value in fields.items()}
        end = EndResume(self._token, self._prefix, self._names, there + retained, there, texts)
        return end.run(self._node, [self._keys.stream])

    def give_up(self) -> None:
        """Delete the index and its values, and forget that the table is left."""
        for page in scan_hash(self._node, f"{self._prefix}rows"):
            rows = (SavedRow(0, record, b"", 0, 0, {}, {}) for _, record in page)
            segments = (each for row in rows for each in row.segments)
            unlink(self._client, [value_of(self._keys, each) for each in segments])
        self._node.execute("UNLINK", *(f"{self._prefix}{name}" for name in self._names))
        forget(self._client, self._keys, self._token)
