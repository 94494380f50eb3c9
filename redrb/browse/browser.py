"""`Browser`: reads the groups of a task that somebody wants to see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from redrb.browse.arrays import mean_of
from redrb.browse.choice import LIMITS, MOST_LOOKED, Choice, Limits
from redrb.browse.entries import Entry
from redrb.browse.letters import read_letters, view_of_letter
from redrb.browse.payloads import payloads_of
from redrb.browse.records import GroupView, Page
from redrb.browse.samples import Samples
from redrb.browse.tokenizer import Tokenizer
from redrb.browse.walk import Walk
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.damage import Reading
from redrb.errors import DecodeError
from redrb.experience.status import Status
from redrb.keys import check_name
from redrb.stream.saving.records import declared_tags
from redrb.stream.task.inspection import existing_task
from redrb.stream.task.numbering import Numbering
from redrb.stream.task.queries import parse_where
from redrb.stream.task.store import TaskStore

RANKED_BYTES: Final = 256 << 20
"""Bytes of groups that are read to rank them by reward, at most."""

SHOWN_BYTES: Final = 64 << 20
"""Most bytes of groups whose samples are in a page; the first group may have more."""

_UNSHOWN: Final = "its samples are not shown, as the groups before it are large: name its id"


class Browser:
    """Reads groups of one task without leasing them; safe among threads.

    Each call reads anew, and has a deadline.
    """

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        namespace: str = "default",
        group: str = "default",
        tokenizer: Tokenizer | None = None,
        limits: Limits = LIMITS,
        timeout_s: float = 10.0,
    ) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            client: A client.
            task: Name of the task.
            namespace: Its namespace.
            group: Consumer group whose view of the groups is shown.
            tokenizer: Decodes token ids; None: samples are shown without text.
            limits: How much of each group is decoded.
            timeout_s: Seconds after which no further request of a call is sent.

        Raises:
            ConfigError: A name is not usable.
        """
        check_name("consumer group", group)
        check_name("task", task)
        check_name("namespace", namespace)
        self._client = client
        self.task = task
        self._namespace = namespace
        self._group = group
        self._tokenizer = tokenizer
        self._limits = limits
        self._timeout_s = timeout_s

    def look(self, choice: Choice, *, full: bool = False) -> Page:
        """Return the groups that are chosen.

        Args:
            choice: Which groups.
            full: Whether to decode their samples; else only the rewards.

        Raises:
            ConfigError: The choice is not possible, or its query names an unknown tag.
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        choice.check()
        with Deadline(at_most=self._timeout_s):
            stores = existing_task(self._client, self.task, namespace=self._namespace)
            if choice.status == "dead":
                looked = _Counter(choice.most_looked)
                letters = islice(self._letter_views(stores, looked, full=full), choice.count)
                views = tuple(letters)
                total = sum(int(each.client.execute("XLEN", each.keys.dead)) for each in stores)
                return Page(self.task, self._group, None, views, looked.count, total)
            return self._look(stores, choice, full=full)

    def group(self, group: int) -> GroupView | None:
        """Return everything of a group, or of its dead letter; None if there is neither.

        Raises:
            ConfigError: The id is out of range.
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        (view,) = self.look(Choice(ids=(group,)), full=True).groups
        return None if view.state == "gone" else view

    def _look(self, stores: list[TaskStore], choice: Choice, *, full: bool) -> Page:
        where = ""
        if choice.where is not None:
            stored = stores[0].client.execute("HGET", stores[0].keys.task, "tags")
            with Reading(f"the tags of task {self.task!r}"):
                declared = declared_tags({"tags": (stored or b"").decode()})
            where = parse_where(choice.where, declared)
        page = choice.most_ranked if choice.rank else choice.count
        walk = self._walk(stores, page=page, looks=choice.most_looked, where=where)
        notes: list[str] = []
        if choice.ids:
            views = self._given(walk, choice.ids, full=full)
        elif _by_reward(choice):
            views = self._by_reward(walk, choice, notes, full=full)
        else:
            stalest = choice.rank == "stalest"
            entries = self._stalest(walk, choice) if stalest else walk.through(*_sources(choice))
            views = self._views(walk, entries, choice.count, full=full)
        if walk.cut:
            seen = f"{walk.looked:,} of {walk.total:,}"
            notes.insert(0, f"only the first {seen} groups were looked at")
        return self._page(walk, views, notes)

    def _walk(
        self, stores: list[TaskStore], *, page: int, looks: int = MOST_LOOKED, where: str = ""
    ) -> Walk:
        return Walk(stores, self._group, where=where, looks=looks, page=page)

    def _page(self, walk: Walk, views: Sequence[GroupView], notes: Sequence[str]) -> Page:
        return Page(
            task=self.task,
            group=self._group,
            version=walk.version,
            groups=tuple(views),
            looked=walk.looked,
            total=walk.total,
            notes=tuple(notes),
        )

    def _given(self, walk: Walk, ids: Sequence[int], *, full: bool) -> list[GroupView]:
        numbering = Numbering(len(walk.stores))
        seqs = {
            number: [seq for seq in wanted if seq > 0]
            for number, wanted in numbering.by_partition(ids).items()
        }
        found = walk.given(seqs)
        entries = [entry for entry in found.values() if entry.facts is not None]
        views = {view.id: view for view in self._views(walk, entries, len(ids), full=full)}
        dead = {
            each
            for each in ids
            if (entry := found.get((numbering.partition(each), numbering.seq(each))))
            and entry.state == "dead"
        }
        views |= self._dead_by_id(walk.stores, dead, full=full) if dead else {}
        for entry in found.values():
            (name,) = numbering.ids(entry.place, [entry.seq])
            views.setdefault(name, entry.view(name, newest=walk.version))
        return [views.get(each, GroupView(id=each, state="gone")) for each in ids]

    def _stalest(self, walk: Walk, choice: Choice) -> Iterator[Entry]:
        """Return the stalest groups first: by the index of versions, or by looking at groups."""
        if choice.status in (None, Status.COMPLETED.value):
            found = walk.indexed("stalest")
            if found is not None:
                return found
        sources = _sources(choice) if choice.status else (Status.COMPLETED.value,)
        entries = [entry for entry in walk.through(*sources) if entry.version is not None]
        return iter(sorted(entries, key=lambda entry: (entry.version, entry.seq)))

    def _by_reward(
        self, walk: Walk, choice: Choice, notes: list[str], *, full: bool
    ) -> list[GroupView]:
        """Return the groups with the highest or lowest mean reward among the first ones."""
        sign = -1.0 if choice.rank == "best" else 1.0
        entries = list(islice(walk.through(*_sources(choice)), choice.most_ranked))
        read, nbytes = 0, 0
        ranked: list[tuple[float, Entry]] = []
        for entry in entries:
            nbytes += entry.size if entry.size <= self._limits.group_bytes else 0
            if nbytes > RANKED_BYTES:
                break
            read += 1
        for entry, blob, _ in payloads_of(walk, entries[:read], self._limits):
            mean = mean_of(_rewards(blob))
            if mean is not None:
                ranked.append((sign * mean, entry))
        ranked.sort(key=lambda pair: pair[0])
        if read < walk.total:
            notes.append(f"only the first {read:,} of {walk.total:,} groups were ranked")
        if len(ranked) < read:
            notes.append(f"{read - len(ranked):,} groups without a reward are left out")
        best = [entry for _, entry in ranked[: choice.count]]
        views = {view.id: view for view in self._views(walk, best, len(best), full=full)}
        numbering = Numbering(len(walk.stores))
        names = [numbering.ids(entry.place, [entry.seq])[0] for entry in best]
        return [views[name] for name in names if name in views]

    def _views(
        self, walk: Walk, entries: Iterable[Entry], count: int, *, full: bool
    ) -> list[GroupView]:
        """Return `count` of the groups; those that are deleted meanwhile are left out."""
        numbering = Numbering(len(walk.stores))
        views: list[GroupView] = []
        chosen = islice(entries, count)
        room = _Room(SHOWN_BYTES)
        for entry, blob, why in payloads_of(walk, chosen, self._limits):
            (name,) = numbering.ids(entry.place, [entry.seq])
            view = entry.view(name, newest=walk.version)
            if blob is not None:
                views.append(self._shown(view, blob, room, full=full))
            elif why:
                views.append(replace(view, notes=(why,)))
            elif entry.damaged:
                views.append(view)
        return views

    def _shown(self, view: GroupView, blob: bytes, room: _Room, *, full: bool) -> GroupView:
        """Return a view with the samples of its payload if the page has room for them."""
        if not full or room.takes(len(blob)):
            return self._decoded(view, blob, full=full)
        short = self._decoded(view, blob, full=False)
        return replace(short, notes=(*short.notes, _UNSHOWN))

    def _decoded(self, view: GroupView, blob: bytes, *, full: bool) -> GroupView:
        """Return a view with what its payload says; `full`: with its samples."""
        try:
            samples = Samples(blob, self._limits)
            rewards = samples.rewards()
            shown = samples.views(self._tokenizer) if full else ()
        except DecodeError as error:
            return replace(view, damaged=str(error), size=len(blob))
        return replace(
            view,
            size=len(blob),
            samples_total=samples.count,
            group_id=samples.group_id,
            tags=view.tags or samples.common_tags(),
            rewards=rewards[: self._limits.samples],
            reward=mean_of(rewards),
            samples=shown,
            notes=(*view.notes, *samples.notes),
        )

    def _dead_by_id(
        self, stores: Sequence[TaskStore], ids: set[int], *, full: bool
    ) -> dict[int, GroupView]:
        """Return dead letters by id; it looks through the dead letters, the newest first."""
        found: dict[int, GroupView] = {}
        for view in self._letter_views(stores, _Counter(MOST_LOOKED), full=full, ids=ids):
            found.setdefault(view.id, view)
            if len(found) == len(ids):
                break
        return found

    def _letter_views(
        self,
        stores: Sequence[TaskStore],
        looked: _Counter,
        *,
        full: bool,
        ids: set[int] | None = None,
    ) -> Iterator[GroupView]:
        numbering, room = Numbering(len(stores)), _Room(SHOWN_BYTES)
        for number, letter, entry, blob in read_letters(stores, self._group, looked):
            name = numbering.ids(number, [letter.id])[0] if letter.id else 0
            if ids is not None and name not in ids:
                continue
            view = replace(entry.view(name, newest=None), letter=view_of_letter(letter))
            if blob is None:
                yield replace(view, notes=("its samples are gone",))
            elif len(blob) > self._limits.group_bytes:
                yield replace(view, notes=(f"it has {len(blob):,} bytes and is not decoded",))
            else:
                yield self._shown(view, blob, room, full=full)


class _Room:
    """Bytes of groups that a page may still hold; the first group always finds room."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._first = True

    def takes(self, nbytes: int) -> bool:
        """Return whether there is room for a group, which then has it."""
        fits = self._first or nbytes <= self._nbytes
        self._first = False
        self._nbytes -= nbytes if fits else 0
        return fits


class _Counter:
    """Counts what was looked at; says whether to go on."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most

    def __call__(self) -> bool:
        if self.count >= self._most:
            return False
        self.count += 1
        return True


def _by_reward(choice: Choice) -> bool:
    return choice.rank in ("best", "worst")


def _sources(choice: Choice) -> tuple[str, ...]:
    if choice.status is None:
        return ("newest",)
    if choice.status == Status.ARCHIVED.value:
        return ("history", choice.status)
    return (choice.status,)


def _rewards(blob: bytes | None) -> tuple[float | None, ...]:
    try:
        return () if blob is None else Samples(blob, LIMITS).rewards()
    except DecodeError:
        return ()
