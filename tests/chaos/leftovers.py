"""What a run may leave: the documented keys, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import redis

from tests.chaos import stored

_OF_TASKS = (
    "stream|task|puts|changes|dead|letters:default|groups|group:default|facts|behind|none"
    "|ready:default|staleness:default|clock:default|mass:default"
    "|admission|parts|part_ends|part_ended|sources|sources:.*|workers|announcements"
)
_EXPIRING = (
    "ranks:default|rank_steps:default|spared:default|replies:.*|needs:.*|queue:.*|queries:.*"
    "|chunk:.*|delta:.*"
    "|(claims:.*:)?(removed|wake:.*)"
)
_OF_WEIGHTS = (
    r"versions|manifests|fence|pins|followers|loads|fulls|attempts|trash"
    r"|chunk:\d+:\d+|delta:\d+:\d+"
)

AFTER_RUN = re.compile(f"({_OF_TASKS}|{_OF_WEIGHTS})")
"""Keys that stay when all workers have ended: no lease, no consumer, no place in a queue."""

AFTER_CLEAR = re.compile("fence")
"""Keys that stay when tasks and weights are deleted."""


def keys(client: redis.Redis, namespace: str, allowed: re.Pattern[str], when: str) -> list[str]:
    """Return findings about keys that stay and are not among the allowed ones."""
    findings = []
    for key, expires_ms in stored.keys_of(client, namespace).items():
        if allowed is AFTER_RUN and ":table:" in key:  # tests.chaos.tables looks at these
            continue
        name = key.partition("}:")[2]
        stays = allowed.fullmatch(name) or (expires_ms >= 0 and re.fullmatch(_EXPIRING, name))
        content = stored.content(client, key)
        if _is_of_letters(client, key, name):
            continue
        if not stays:
            findings.append(f"key {key} is left {when}: {content!s:.200}")
    return findings


def _is_of_letters(client: redis.Redis, key: str, name: str) -> bool:
    """Return whether a key holds the first ids of dead letters, each of a letter that is there."""
    if name != "buried":
        return False
    letters: Any = client.xrange(key.removesuffix(name) + "dead")
    return set(client.zrange(key, 0, -1)) <= {letter for letter, _ in letters}


def files(*directories: Path) -> list[str]:
    """Return findings about files below directories that must be empty."""
    return [
        f"file {path} is left"
        for directory in directories
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
