"""Every page is tried at its size and far beyond it, with a rest of one: each mechanism ends, once.

`TRIALS` names the trials of each page of `redrb/lua/pages.py`, and `CLIENT_PAGES` those of each
constant of a module that bounds the groups of one request. The pages are made small, so that the
trials stay cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TypeAlias

import pytest

import redrb
from redrb.lua.pages import PAGES
from tests.page_trials import doctor, groups, leases, reports, tables, waiting
from tests.page_trials.bench import Bench

Trial: TypeAlias = Callable[[Bench, int], None]

SMALL = {
    "arguments": 4,
    "candidates_window": 4,
    "browsed_least": 2,
    "woken_at_end": 6,
}
"""Small sizes of pages that cannot be 3: pairs of arguments stay together, for instance."""

TRIALS: Mapping[str, tuple[Trial, ...]] = {
    "arguments": (
        leases.acknowledged,
        leases.needed_by_another,
        groups.matched,
        groups.joined_late,
        groups.counted_unjoined,
        groups.consumer_group_removed,
        waiting.rights_used,
    ),
    "taken_over": (
        leases.dead_with_many_leases,
        leases.dead_with_one_lease,
        leases.many_dead,
        leases.closed_with_many_leases,
        leases.closed_with_one_lease,
        leases.dismissed,
        leases.taken_and_lost,
        leases.step_acknowledged,
        doctor.lost_behind_living,
    ),
    "ended": (
        leases.acknowledged,
        leases.released,
        leases.step_acknowledged,
    ),
    "failed": (leases.released, leases.rejected_at_last),
    "dead_consumers": (leases.many_dead, leases.many_dead_without_leases),
    "slots": (
        leases.dead_with_many_leases,
        leases.closed_with_many_leases,
        leases.dismissed,
    ),
    "unnoted": (leases.names_without_slots,),
    "copied_bytes": (
        leases.buried_at_takeover,
        groups.orphans_of_a_repair,
        groups.requeued_by_bytes,
        groups.letters_shed_by_bytes,
    ),
    "pending": (leases.acknowledged, leases.released, reports.versions_counted),
    "pending_between": (leases.needed_by_another, groups.evicted_behind_leased),
    "expired": (groups.expired_by_takes, groups.moved_by_expiry),
    "orphans": (groups.orphans_of_a_put, groups.orphans_of_a_repair),
    "candidates": (groups.evicted_behind_gap,),
    "candidates_leased": (groups.evicted_behind_leased,),
    "candidates_window": (
        groups.evicted_behind_leased,
        groups.evicted_behind_gap,
    ),
    "sorted": (groups.sorted_again, groups.sorted_beyond_a_gap),
    "sorting_looks": (groups.sorted_again, groups.sorted_beyond_a_gap),
    "filled": (groups.index_filled,),
    "joined": (groups.joined_late,),
    "ended_of_group": (groups.consumer_group_removed,),
    "old_letters": (groups.letters_shed,),
    "buried_ids": (groups.letters_below_the_floor,),
    "sources_trimmed": (groups.sources_forgotten,),
    "matched": (groups.matched, groups.counted_unjoined),
    "changes": (reports.changes_remembered,),
    "waiters": (waiting.takes_woken, waiting.dead_takes_dropped),
    "first_waiters": (waiting.takes_woken, waiting.dead_takes_dropped),
    "next_waiters": (waiting.takes_woken, waiting.dead_takes_dropped),
    "queries": (waiting.queries_woken,),
    "woken_at_end": (waiting.woken_at_the_end,),
    "dead_makers": (waiting.dead_makers,),
    "late": (waiting.ended_makers,),
    "rights_lost": (waiting.dead_makers, waiting.dead_maker, waiting.held_too_long),
    "rights_returned": (waiting.rights_returned,),
    "parts_dropped": (waiting.parts_dropped,),
    "part_ends": (waiting.part_ends_bounded,),
    "part_ends_forgotten": (waiting.part_ends_forgotten,),
    "sessions_forgotten": (waiting.sessions_forgotten,),
    "records": (waiting.records_removed,),
    "announcements_removed": (waiting.announcements_removed,),
    "counted_versions": (reports.versions_counted,),
    "browsed": (reports.browsed,),
    "browsed_least": (reports.browsed,),
    "reported_makers": (waiting.makers_reported,),
    "observed_consumer_groups": (reports.consumer_groups_observed,),
    "observed_groups": (reports.groups_observed,),
    "observed_workers": (reports.workers_observed,),
    "examined_groups": (doctor.consumer_groups_examined,),
    "examined_waiters": (doctor.waiters_examined,),
    "table_rows": (tables.rows_live_and_go, tables.a_table_is_deleted),
    "put_rows": (tables.rows_put_and_found,),
    "columns": (tables.columns_added,),
    "claims": (tables.tasks_registered,),
    "claim_size": (tables.groups_claimed,),
    "gone_kept": (tables.removals_remembered,),
    "versions": (reports.versions_trimmed, reports.versions_removed),
    "old_pins": (reports.pins_removed,),
}

TOGETHER = {
    "first_waiters": ("next_waiters",),
    "next_waiters": ("first_waiters",),
}
"""Pages that are reached only if others are small, too."""

CLIENT_PAGES: Mapping[str, tuple[Trial, ...]] = {
    "redrb.watch.groups.follower.NEWEST": (reports.followed,),
    "redrb.watch.groups.walk._REQUEST_GROUPS": (reports.browsed,),
    "redrb.watch.doctor.examination._PAGE": (
        doctor.many_unknown,
        doctor.late_rights_repaired,
        doctor.dead_consumers_repaired,
        doctor.dead_makers_repaired,
    ),
    "redrb.watch.doctor.checkup.MOST_NAMES": (doctor.tasks_unread,),
    "redrb.watch.doctor.registry_names.MOST_NAMES": (doctor.names_left,),
    "redrb.registry.NAMES_OF_A_CALL": (doctor.names_left,),
    "redrb.stream.put.pending.CHUNK_BYTES": (groups.put_in_chunks,),
    "redrb.stream.put.pending.CHUNK_GROUPS": (groups.put_in_chunks,),
    "redrb.stream.put.receiver.MOST_GROUPS": (groups.sources_forgotten,),
    "redrb.stream.put.calls.MOST_EVICTED": (groups.evicted_for_a_put,),
    "redrb.connection.client._SCANNED": (reports.saved_and_resumed,),
    "redrb.stream.saving.resuming.PAGE_GROUPS": (reports.saved_and_resumed,),
    "redrb.stream.saving.snapshot.PAGE_BYTES": (reports.saved_and_resumed,),
    "redrb.stream.saving.snapshot.PAGE_GROUPS": (reports.saved_and_resumed,),
    "redrb.stream.task.dead_letters.LETTERS_OF_A_PAGE": (reports.found_letters, reports.browsed),
    "redrb.stream.task.dead_letters.PAGE_BYTES": (reports.found_letters, reports.browsed),
    "redrb.stream.task.expiration.CALLBACK_GROUPS": (groups.expired_on_call,),
    "redrb.stream.task.expiration.EXPIRE_GROUPS": (groups.expired_on_call,),
    "redrb.stream.task.groups.PAGE_GROUPS": (reports.read_by_id,),
    "redrb.stream.task.groups.GROUPS_OF_A_CALL": (
        groups.priorities_changed,
        groups.moved,
        groups.settled,
    ),
    "redrb.stream.task.dead_letters.LETTERS_OF_A_CALL": (
        groups.requeued,
        groups.letters_dropped,
    ),
    "redrb.table.removal.PAGE": (tables.a_table_is_deleted,),
    "redrb.table.payload.AT_ONCE": (tables.values_in_requests,),
    "redrb.table.payload.CHUNK_BYTES": (tables.values_in_requests,),
    "redrb.weights.wire.stored_keys._AT_ONCE": (reports.chunks_published,),
}


NO_PAGES = {
    "redrb.watch.groups.choice.MOST_GROUPS": "what a user may ask for",
    "redrb.watch.groups.choice.MOST_LOOKED": "where a look says that it ends",
    "redrb.watch.groups.choice.MOST_RANKED": "what a user may ask for",
    "redrb.watch.groups.tokens._MOST_BYTES": "the size of a file",
    "redrb.watch.groups.tokens._MOST_PENDING": "bytes of one character",
    "redrb.watch.doctor.repairs._MOST_PAGES": "calls after which a repair says that there is more",
    "redrb.watch.doctor.repairs._MOST_PINS": "calls after which a repair says that there is more",
    "redrb.stream.announcement.MOST_ADDRESS": "characters of a text",
    "redrb.stream.announcement.MOST_FAULT": "characters of a text",
    "redrb.watch.state.weights._MOST_SHOWN": "characters of one key",
    "redrb.watch.state.workers.MOST_WORKERS": "a figure is of so many workers, and says so",
    "redrb.watch.state.history.MOST_POINTS": "points of a curve",
    "redrb.watch.state.reader.MOST_NAMES": "a finding counts the tasks that are not read",
    "redrb.watch.state.tasks._MOST_SENT": "requests under way at a time",
    "redrb.watch.state.weights._MOST_READ": "versions and readers that are counted",
    "redrb.watch.state.workers._MOST_NAME": "the length of a text",
    "redrb.stream.admission.admitter.MOST_RIGHTS": "what a user may ask for",
    "redrb.stream.assembly.calls.MOST_KEY_BYTES": "the length of a key",
    "redrb.stream.assembly.calls.MOST_PARTS": "what a user may ask for",
    "redrb.keys.MOST_SHARDS": "what a user may ask for",
    "redrb.stream.ranks.calls.MOST_RANKS": "what a user may ask for",
    "redrb.stream.saving.records.MAX_GROUPS": "consumer groups of a file that is accepted",
    "redrb.stream.task.entries.MAX_COUNT": "the size of a number",
    "redrb.stream.saving.file.MAX_HEAD_BYTES": "the size of a part of a file",
    "redrb.stream.saving.file._CHUNK_BYTES": "how a file is read",
    "redrb.stream.put.room.MOST_NAMED": "names in an error",
    "redrb.stream.sending.sender.MAX_GROUPS": "groups that are sent together, of those that wait",
    "redrb.stream.take.cause.MOST_CHARACTERS": "the length of a text",
    "redrb.stream.task.expiration.MOST_STALENESS": "the largest staleness that is counted",
    "redrb.stream.task.queries.MOST_CONDITIONS": "the size of a query",
    "redrb.stream.task.queries.MOST_DEPTH": "the size of a query",
    "redrb.stream.task.queries.MOST_VALUES": "the size of a query",
    "redrb.stream.task.lookup.MOST_NAMES": "names in an error",
    "redrb.stream.task.lookup.NAMES_COMPARED": "names of which similar ones are found",
    "redrb.stream.task.tags.MOST_BYTES": "the size of a tag",
    "redrb.stream.task.tags.MOST_INTEGER": "the size of a number",
    "redrb.stream.task.tags.MOST_TAGS": "what a user may ask for",
    "redrb.stream.task.store.MOST_REFUSALS": "refusals after which a call fails",
    "redrb.stream.announcement.MOST_BYTES": "the size of an announcement",
    "redrb.stream.announcement.MOST_METRICS": "the size of an announcement",
    "redrb.stream.announcement.MOST_NAME": "the length of a text",
    "redrb.table.index.MOST_CELLS": "what a user may ask for",
    "redrb.table.index.MOST_ROWS": "the page put_rows",
    "redrb.table.reading.MOST_LOOKS": "looks after which a call fails",
    "redrb.table.table.MOST_KEY_BYTES": "the length of a key",
    "redrb.table.upload.MOST_TAGS": "the size of the tags of a row",
}
"""Constants named like pages that are none, and what they are."""

_PAGE_NAME = re.compile(
    r"^(?!DEFAULT_|.*_(?:S|MS)$).*(?:PAGE|GROUPS|LETTERS|NAMES|PINS|CHUNK|AT_ONCE|MOST|MAX|SCAN|EVICTED)"
)


def cases(trials: Mapping[str, tuple[Trial, ...]]) -> list[object]:
    """Return each page with each of its trials and each count.

    The first trial of each page runs far beyond it on one backend; the others on one server.
    """
    found: list[object] = []
    for page, of_page in trials.items():
        small = SMALL.get(page, 3)
        for trial, count in product(of_page, (3 * small + 1, small)):
            everywhere = trial is of_page[0] and count > small
            name = f"{page.rpartition('.')[2]}-{trial.__name__}-{count}"
            marks = () if everywhere else pytest.mark.long
            found.append(pytest.param(page, trial, count, id=name, marks=marks))
    return found


@pytest.fixture
def bench(client, namespace, open_stream, pages, monkeypatch, tmp_path):
    return Bench(client, namespace, open_stream, pages, monkeypatch, tmp_path)


@pytest.mark.parametrize(("page", "trial", "count"), cases(TRIALS))
def test_a_page_of_a_script(bench, page, trial, count):
    small = SMALL.get(page, 3)
    bench.pages(**dict.fromkeys((page, *TOGETHER.get(page, ())), small))
    trial(bench, count)


@pytest.mark.parametrize(("page", "trial", "count"), cases(CLIENT_PAGES))
def test_a_page_of_the_client(bench, page, trial, count):
    bench.patch.setattr(page, SMALL.get(page, 3))
    trial(bench, count)


def test_every_page_has_a_trial():
    assert set(TRIALS) == set(PAGES)
    assert PAGES["arguments"] % 2 == 0


def test_every_page_of_the_client_has_a_trial():
    root = Path(redrb.__file__).parent
    packages = ("stream", "table", "watch/groups", "watch/doctor", "watch/state")
    found = set()
    for path in [
        root / "registry.py",
        root / "keys.py",
        *(p for each in packages for p in (root / each).rglob("*.py")),
    ]:
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for name, value in vars(import_module(module.removesuffix(".__init__"))).items():
            own = re.search(rf"^{name}\b[^=]*= ", path.read_text("utf-8"), re.M)
            if own and type(value) is int and name.isupper() and _PAGE_NAME.match(name):
                found.add(f"{module}.{name}")
    assert found - set(CLIENT_PAGES) == set(NO_PAGES)
