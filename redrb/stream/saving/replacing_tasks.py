"""`replace_tasks`: complete stages take the places of their tasks, all of them in one step."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from redrb.errors import ConfigError
from redrb.lua.scripts import load, run
from redrb.stream.saving.restoring import Restoring


def replace_tasks(all_restoring: Sequence[Restoring]) -> None:
    """Replace tasks on one server, or in one slot of a cluster, by their stages: all or none.

    Raises:
        ConfigError: A task was used meanwhile, or got other settings.
        StoreError: A stage is gone.
        StoreUnavailable: Redis stayed away; `uncertain` is set if the tasks may be replaced.
    """
    first = all_restoring[0].store
    by_stream = {each.store.keys.stream: each for each in all_restoring}
    plans = [
        msgpack.packb({"token": each.token, "put": each.put, "whole": each.whole})
        for each in all_restoring
    ]
    outcome, *details = run(first.client, load("saving/restore_end"), list(by_stream), plans)
    if outcome == b"ok":
        return
    stream, *names = (detail.decode() for detail in details)
    restoring = by_stream[stream]
    if outcome == b"used":
        raise restoring.used()
    if outcome == b"differs":
        raise ConfigError(
            f"task {restoring.store.task!r} got another {', '.join(names)} while it was restored: "
            "nothing was changed; resume it again."
        )
    raise restoring.gone()
