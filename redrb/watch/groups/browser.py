"""`Browser`: reads the groups of a task that somebody wants to see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import DecodeError
from redrb.experience.status import Status
from redrb.keys import TaskKeys, check_name
from redrb.stream.saving.records import declared_tags
from redrb.stream.task.dead_letters import letters_in
from redrb.stream.task.lookup import existing_task
from redrb.stream.task.queries import parse_where
from redrb.stream.task.store import TaskStore
from redrb.unpacking import Reading
from redrb.watch.groups.calls import letter_view
from redrb.watch.groups.choice import LIMITS, MOST_LOOKED, Choice, Limits
from redrb.watch.groups.records import GroupView, Page
from redrb.watch.groups.samples import Samples
from redrb.watch.groups.tokens import Tokenizer
from redrb.watch.groups.values import mean_of
from redrb.watch.groups.walk import Walk
from redrb.words import agreeing, counted

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
            group: Consumer group whose view of the groups is shown.
            tokenizer: Decodes token ids; None: samples are shown without text.
            limits: How much of each group is decoded.
            timeout_s: Seconds after which no further request of a call is sent.
        """
        check_name("consumer group", group)
        TaskKeys.of(namespace, task)  # checks the names
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
            full: Whether to decode their samples; else only the rewards.

        Raises:
            ConfigError: The choice is not possible, or its query names an unknown tag.
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        choice.check()
        with Deadline(at_most=self._timeout_s):
            store = existing_task(self._client, self.task, namespace=self._namespace)
            if choice.status == "dead":
                looked = _Counter(choice.most_looked)
                letters = islice(self._letters(store, looked, None, full=full), choice.count)
                views = tuple(letters)
                total = int(store.client.execute("XLEN", store.keys.dead))
                return Page(self.task, self._group, None, views, looked.count, total)
            return self._look(store, choice, full=full)

    def group(self, group: int) -> GroupView | None:
        """Return everything of a group, or of its dead letter; None if there is neither.

        Raises:
            ConfigError: The id is out of range.
            UnknownTask: There is no such task.
            StoreUnavailable: Redis did not answer in time.
        """
        (view,) = self.look(Choice(ids=(group,)), full=True).groups
        return None if view.state == "gone" else view

    def _look(self, store: TaskStore, choice: Choice, *, full: bool) -> Page:
        where = ""
        if choice.where is not None:
            stored = store.client.execute("HGET", store.keys.task, "tags")
            with Reading(f"the tags of task {self.task!r}"):
                declared = declared_tags({"tags": (stored or b"").decode()})
            where = parse_where(choice.where, declared)
        page = choice.most_ranked if choice.rank else choice.count
        walk = Walk(store, self._group, where=where, looks=choice.most_looked, page=page)
        notes: list[str] = []
        if choice.ids:
            views = self._given(walk, choice.ids, full=full)
        elif choice.rank in ("best", "worst"):
            views = self._by_reward(walk, choice, notes, full=full)
        else:
            stalest = choice.rank == "stalest"
            found = self._stalest(walk, choice) if stalest else _chosen(walk, choice)
            views = self._read(walk, islice(found, choice.count), full=full)
        if walk.cut:
            seen = f"{walk.looked:,} of {walk.total:,}"
            notes.insert(0, f"only the first {seen} groups were looked at")
        return self._page(walk, views, notes)

    def _page(self, walk: Walk, views: Sequence[GroupView], notes: Sequence[str]) -> Page:
        newest = walk.version
        groups = tuple(
            view
            if newest is None or view.oldest_version is None or view.letter is not None
            else replace(view, staleness=newest - view.oldest_version)
            for view in views
        )
        total = walk.total
        return Page(self.task, self._group, newest, groups, walk.looked, total, tuple(notes))

    def _given(self, walk: Walk, ids: Sequence[int], *, full: bool) -> list[GroupView]:
        found = walk.given(ids)
        stored = [view for view in found.values() if view.state not in ("gone", "dead")]
        found |= {view.id: view for view in self._read(walk, stored, full=full)}
        dead = {view.id for view in found.values() if view.state == "dead"}
        if dead:
            letters = self._letters(walk.store, _Counter(MOST_LOOKED), dead, full=full)
            for view in islice(letters, len(dead)):
                found[view.id] = view
        return [found.get(each) or GroupView(each, "gone") for each in ids]

    def _stalest(self, walk: Walk, choice: Choice) -> Iterator[GroupView]:
        """Return the stalest groups first: by the index of versions, or by looking at groups."""
        if choice.status in (None, Status.COMPLETED.value):
            found = walk.indexed("stalest")
            if found is not None:
                return found
        ranked = [
            ((view.oldest_version, view.id), view)
            for view in walk.through(choice.status or Status.COMPLETED.value)
            if view.oldest_version is not None
        ]
        return (view for _, view in sorted(ranked, key=lambda pair: pair[0]))

    def _by_reward(
        self, walk: Walk, choice: Choice, notes: list[str], *, full: bool
    ) -> list[GroupView]:
        sign = -1.0 if choice.rank == "best" else 1.0
        most = self._limits.group_bytes
        read, nbytes = [], 0
        for view in islice(_chosen(walk, choice), choice.most_ranked):
            nbytes += view.size if view.size <= most else 0
            if nbytes > RANKED_BYTES:
                break
            read.append(view)
        ranked: list[tuple[float, GroupView]] = []
        gone = 0
        for view, blob in walk.payloads(read, most):
            gone += blob is None and view.size <= most and not view.damaged
            mean = mean_of(_rewards(blob))
            if mean is not None:
                ranked.append((sign * mean, view))
        ranked.sort(key=lambda pair: pair[0])
        if len(read) < walk.total:
            notes.append(f"only the first {len(read):,} of {walk.total:,} groups were ranked")
        if gone:
            notes.append(f"{counted(gone, 'group', 'were')} trained or removed during this look")
        without = len(read) - len(ranked) - gone
        if without:
            are = agreeing(without, "are")
            notes.append(f"{counted(without, 'group')} without a reward {are} left out")
        return self._read(walk, [view for _, view in ranked[: choice.count]], full=full)

    def _read(self, walk: Walk, chosen: Iterable[GroupView], *, full: bool) -> list[GroupView]:
        """Return groups with what their payloads say; those deleted meanwhile are left out."""
        views: list[GroupView] = []
        room, most = _Room(SHOWN_BYTES), self._limits.group_bytes
        for view, blob in walk.payloads(chosen, most):
            if blob is not None:
                views.append(self._shown(view, blob, room, full=full))
            elif view.size > most:
                views.append(replace(view, notes=(f"it has {view.size:,} bytes and was not read",)))
            elif view.damaged:
                views.append(view)
        return views

    def _shown(self, view: GroupView, blob: bytes, room: _Room, *, full: bool) -> GroupView:
        """Return a view with what its payload says, and samples if the page has room for them."""
        no_room = full and not room.takes(len(blob))
        try:
            samples = Samples(blob, self._limits)
            rewards = samples.rewards()
            shown = samples.views(self._tokenizer) if full and not no_room else ()
        except DecodeError as error:
            view, notes = replace(view, damaged=str(error), size=len(blob)), view.notes
        else:
            notes = (*view.notes, *samples.notes)
            view = replace(
                view,
                size=len(blob),
                samples_total=samples.count,
                group_id=samples.group_id,
                tags=view.tags or samples.common_tags(),
                rewards=rewards[: self._limits.samples],
                reward=mean_of(rewards),
                samples=shown,
            )
        return replace(view, notes=(*notes, _UNSHOWN) if no_room else notes)

    def _letters(
        self, store: TaskStore, looked: _Counter, ids: set[int] | None, *, full: bool
    ) -> Iterator[GroupView]:
        """Yield dead letters, the newest first; of those with these ids, the newest of each."""
        room, most = _Room(SHOWN_BYTES), self._limits.group_bytes
        for letter, fields in letters_in(store):
            if not looked():
                return
            if letter.group not in (self._group, "") or (ids is not None and letter.id not in ids):
                continue
            if ids is not None:
                ids = ids - {letter.id}
            view, blob = letter_view(letter, fields), fields.get(b"g")
            if blob is None:
                yield replace(view, notes=("its samples are gone",))
            elif len(blob) > most:
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


def _chosen(walk: Walk, choice: Choice) -> Iterator[GroupView]:
    return walk.through(choice.status or "newest")


def _rewards(blob: bytes | None) -> tuple[float | None, ...]:
    try:
        return () if blob is None else Samples(blob, LIMITS).rewards()
    except DecodeError:
        return ()
