"""Settings that contradict each other are refused, whichever way they come together in a task."""

from __future__ import annotations

from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from redrb import ConfigError, ExperienceStream
from redrb.connection import Client
from redrb.stream import TaskSettings
from redrb.stream.task.settings import SETTINGS
from tests.samples import numbered

VALUES: dict[str, list[Any]] = {
    "limit": [0, 10, 4],
    "max_reads": [0, 1, 4],
    "max_waiting": [0, 4],
    "max_staleness": [1],
    "groups_per_version": [2],
    "order": ["lifo", "stalest"],
}

WAYS = ["opened", "implied", "configured", "resumed", "resumed whole"]

_names = count()


def fits(given: dict[str, Any]) -> bool:
    """Return whether a task may have exactly these settings."""
    try:
        TaskSettings(**given).as_stored()
    except ConfigError:
        return False
    return True


def stored(client: Client, stream: ExperienceStream) -> dict[bytes, bytes]:
    keys = stream._task.store.keys
    fields = client.at(keys.task).execute("HGETALL", keys.task)
    return dict(zip(fields[::2], fields[1::2], strict=True))


def bring_together(
    way: str,
    client: Client,
    namespace: str,
    path: Path,
    first: dict[str, Any],
    then: dict[str, Any],
) -> ExperienceStream:
    """Give a task its first settings, and the others in some way; returns a stream of it."""
    task = f"t{next(_names)}"

    def opened(name: str, **given: Any) -> ExperienceStream:
        return ExperienceStream(client, name, namespace=namespace, **given)

    if way.startswith("resumed"):
        saved, given = opened(f"{task}-saved", **first), then
        if way == "resumed whole":  # several processes of an older redrb have given them
            key, given = saved._task.store.keys.task, {}
            for name, value in then.items():
                text = SETTINGS[name].stored(name, value)
                client.at(key).execute("HSET", key, name, text)
        saved.put(numbered(1), policy_version=1)
        saved.save(path / task)
        stream = opened(task, **given)
        before = stored(client, stream)
        try:
            stream.resume(path / task)
        except ConfigError:
            assert stored(client, stream) == before
            assert len(stream) == 0
            raise
        return stream
    stream = opened(task, **first)
    before = stored(client, stream)
    try:
        if way == "configured":
            stream.configure(**then)
        elif way == "implied":
            opened(task, implied=TaskSettings(**then))
        else:
            opened(task, **then)
    except ConfigError:
        assert stored(client, stream) == before
        raise
    return stream


def check(
    way: str,
    client: Client,
    namespace: str,
    path: Path,
    first: dict[str, Any],
    then: dict[str, Any],
) -> bool:
    """Compare a way with a new task that is given all; False if it cannot be tried."""
    fixed = {"configured": {"max_reads"}, "resumed": {"order"}}.get(way, set())
    first = first | {name: then[name] for name in fixed & then.keys()}
    then = {name: value for name, value in then.items() if name not in first}
    # by themselves they fit: where another process gives more, or in the task that is resumed into
    alone = then if way == "resumed" else {"max_staleness": 1, **then}
    if not then or not fits(first) or (way != "resumed whole" and not fits(alone)):
        return False
    try:
        bring_together(way, client, namespace, path, first, then)
    except ConfigError:
        assert not fits(first | then), (first, then)
    else:
        assert fits(first | then), (first, then)
    return True


@pytest.mark.long
@pytest.mark.usefixtures("no_heartbeats")
@pytest.mark.parametrize("way", WAYS)
def test_each_pair_of_settings_is_refused_where_a_new_task_with_both_is(
    client: Client, namespace: str, tmp_path: Path, way: str
) -> None:
    each = [{name: VALUES[name][-1]} for name in VALUES] + [{"limit": 4, "max_reads": 4}]
    tried = [
        check(way, client, namespace, tmp_path, first, then)
        for first, then in permutations(each, 2)
        if not first.keys() & then.keys()
    ]
    assert tried.count(True) > 20


@pytest.mark.long
@pytest.mark.usefixtures("no_heartbeats")
@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_any_settings_are_refused_where_a_new_task_with_all_of_them_is(
    client: Client, namespace: str, tmp_path: Path, way: str, data: st.DataObject
) -> None:
    names = data.draw(
        st.lists(st.sampled_from(sorted(VALUES)), min_size=3, max_size=5, unique=True)
    )
    whole = {name: data.draw(st.sampled_from(VALUES[name])) for name in names}
    cut = data.draw(st.integers(0, len(names)))
    first, then = ({name: whole[name] for name in part} for part in (names[:cut], names[cut:]))
    assume(check(way, client, namespace, tmp_path, first, then))
