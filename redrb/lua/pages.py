"""The pages of the Lua scripts: how much one call of a script works on, at most.

A server runs nothing else while it runs a script, so every loop of a script ends after a page, and
the caller runs the script again, or the next call of any client goes on. A script names a page as
`PAGE.name`, and `redrb.lua.scripts` puts the number in its place. Every number that bounds a loop
stands here and nowhere else. `tests/contract/test_pages.py` tries each mechanism below its page, at
it, above it and far beyond it.
"""

from __future__ import annotations

PAGES: dict[str, int] = {
    # Arguments of one command, and values that `unpack` returns: Lua's stack holds 8,000. Even, as
    # some arguments are pairs of a field and its value.
    "arguments": 1000,
    # Leases.
    "taken_over": 50,  # groups of dead consumers that one call requeues
    "dead_consumers": 20,  # dead consumers that one call looks at
    "late": 16,  # consumers, or makers, that are late for a heartbeat and are named in a reply
    "slots": 32,  # slots of a consumer that are read together
    "unnoted": 100,  # names without a slot that one call removes when a consumer ends
    "copied_bytes": 1_048_576,  # payload that a script reads, after which a page ends
    "pending": 500,  # entries of a pending list that are read together
    "pending_between": 16,  # the same, where entries that nobody asked for may lie between them
    # Groups that end, arrive or change their place.
    "ended": 256,  # groups of a lease that one request acknowledges or ends
    "failed": 100,  # groups of a lease that one request fails or rejects, up to "copied_bytes"
    "expired": 50,  # groups that expire in one call
    "orphans": 100,  # entries of failed puts that one call finds, up to "copied_bytes"
    "candidates": 1000,  # ids that one call looks at for groups to evict
    "candidates_leased": 50,  # leased groups that one call passes over while it evicts
    "candidates_window": 128,  # ids that are read together to find groups to evict
    "sorted": 50,  # groups of a random order that get new places
    "sorting_looks": 1000,  # ids that one call looks at for such groups
    "filled": 100,  # groups that one call adds to a new index
    "joined": 100,  # groups that one call adds to the pools of a consumer group that joins
    "ended_of_group": 32,  # groups and dead letters of a removed consumer group
    "old_letters": 10,  # dead letters beyond max_dead that one call deletes, up to "copied_bytes"
    "buried_ids": 200,  # ids of groups that may come back, in one reply
    "sources_trimmed": 200,  # records of forwarded groups that one call looks at
    "matched": 500,  # groups that one call looks at to count or to take those that match a query
    "changes": 100,  # changes of settings that a task remembers
    # Waiting takes, puts and makers.
    "waiters": 200,  # waiters that one call looks at; those behind look again by themselves
    "first_waiters": 10,  # waiters that are read together at first
    "next_waiters": 100,  # waiters that are read together after these
    "queries": 100,  # queries of waiting takes that puts match; others look again by themselves
    "woken_at_end": 16,  # waiters that are woken when their queue is deleted
    # Rights, parts, producers and workers.
    "dead_makers": 20,  # dead makers that one call looks at
    "rights_lost": 50,  # rights of dead makers that one call takes back
    "rights_returned": 1000,  # rights that a maker returns in one call
    "parts_dropped": 20,  # unfinished groups that one call drops
    "part_ends": 100_000,  # ends of groups in parts that a task remembers
    "part_ends_forgotten": 20,  # old ends that one call forgets
    "sessions_forgotten": 20,  # expired sessions that one call forgets
    "records": 100,  # records of producers that one call looks at
    "announcements_removed": 100,  # announcements of workers that ended long ago
    # Reports.
    "counted_versions": 100,  # policy versions, and leased groups, that one call counts
    "browsed": 500,  # groups that one call looks at to show some
    "browsed_least": 32,  # groups that such a call reads at least
    "reported_makers": 100,  # makers whose rights are reported
    "observed_consumer_groups": 16,  # consumer groups of a task that are observed
    "observed_groups": 64,  # groups whose staleness is observed
    "observed_workers": 200,  # workers that are observed
    "examined_groups": 16,  # consumer groups that one call of doctor examines
    "examined_waiters": 200,  # waiters of a queue that it examines
    # Tables.
    "table_rows": 1000,  # rows that one call lists, removes or looks through
    "put_rows": 2048,  # rows of one put, and those that one call finds by key
    "columns": 1024,  # columns of a table
    "claims": 8,  # tasks that claim rows of a table
    "claim_size": 1024,  # rows of a group that is claimed as a whole
    "gone_kept": 10_000,  # removed keys that a table remembers
    # Weights.
    "versions": 30,  # versions of weights that one call looks at, to keep or delete them
    "old_pins": 10,  # pins of dead readers that one call looks at
}
