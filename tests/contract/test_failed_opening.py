"""Whatever opens streams or clients, and fails at one of its requests, leaves none of them open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import redrb
from redrb import ShardedStream, Table
from redrb.compat.sample_groups import job
from redrb.compat.xtuner.tasks import BufferSettings, Tasks
from redrb.connection import Client
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from tests import framework_stand_ins

Opens = Callable[[], object]


def sharded(client: Client, _: Path) -> Opens:
    return lambda: ShardedStream(client, "math", shards=3)


def claims(client: Client, _: Path) -> Opens:
    return partial(Table(client, "rows").register, "math", ["prompt"])


def replay(client: Client, _: Path) -> Opens:
    return partial(Tasks(client, BufferSettings(run="one")).open, "math")


def groups_of_a_job(client: Client, folder: Path) -> Opens:
    framework_stand_ins.install()
    arguments = framework_stand_ins.arguments(client.url, "default", folder)
    return lambda: job.JobGroups(arguments, "slime")


@pytest.mark.parametrize(
    "error", [StoreDenied("no right"), StoreUnavailable("away", where="there")]
)
@pytest.mark.parametrize("prepare", [sharded, claims, replay, groups_of_a_job])
def test_what_fails_at_any_of_its_requests_leaves_nothing_open(
    prepare: Callable[[Client, Path], Opens],
    error: StoreError,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    once, clients = Client.once, list[Client]()

    def connect(url: str) -> Client:
        clients.append(redrb.connect(url))
        return clients[-1]

    def opened() -> set[object]:
        """Return the streams that are open, and the clients."""
        streams = {each for client in clients for each in client.before_close}
        return {each for each in streams if not each._closed} | {
            client for client in clients if not client._lender.closed
        }

    monkeypatch.setattr(job, "connect", connect)
    for requests in count():
        client = connect(f"fake://{uuid4().hex}")
        opens, sent = prepare(client, tmp_path), count()
        before = opened()

        def fails(self: Client, *arguments: Any, sent: Any = sent, last: int = requests) -> Any:
            if next(sent) == last:
                raise error
            return once(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Client, "once", fails)
            failure: StoreError | None = None
            try:
                opens()
            except StoreError as raised:  # its frames keep what is left; others are logged
                failure = raised
        if failure:
            assert opened() == before, (requests, failure)
        elif next(sent) <= requests:
            break
    assert requests > 2
    for client in clients:
        client.close()
