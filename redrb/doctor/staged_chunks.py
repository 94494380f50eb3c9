"""Chunks of weights that were staged and that no version has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redrb.connection import Client
from redrb.errors import StoreDenied
from redrb.keys import WeightKeys
from redrb.state.findings.wording import counted, redrb_command
from redrb.state.model import Finding, FindingKind, State
from redrb.weights.wire import stored_keys

MOST_VERSIONS = 100
MOST_ATTEMPTS = 20
"""Attempts before the newest version that one run of doctor looks up."""

_TOKEN = re.compile(rb"(?:^|;)([0-9]{1,16}) ")

STAGED_CHUNKS = FindingKind(
    "staged-chunks",
    "info",
    "A publisher died while it sent a version. Nothing needs to be done: its chunks take "
    "memory until they expire or the next version is published, which deletes them.",
)


def find(client: Client, state: State) -> Iterator[Finding]:
    """Yield the findings about all weights that the user may read."""
    for weights in state.weights:
        if not weights.readable:
            continue
        keys = WeightKeys.of(state.namespace, weights.name)
        try:
            attempts = _failed_attempts(client, keys)
        except StoreDenied:
            continue  # the state has a finding about it
        if attempts:
            text = f"{counted(attempts, 'attempt')} to publish left chunks that no version has."
            command = redrb_command(state, "weights", "show", weights.name)
            yield STAGED_CHUNKS.found(f"weights {weights.name}", text, command)


def _failed_attempts(client: Client, keys: WeightKeys) -> int:
    """Return how many of the attempts before the newest version have left chunks."""
    node, spread = client.at(keys.versions), stored_keys.spread_of(client)
    entries = node.execute("XREVRANGE", keys.versions, "+", "-", "COUNT", MOST_VERSIONS)
    known: set[int] = set()
    newest = 0
    for _, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        tokens = {int(fields[b"token"])} if fields.get(b"token", b"").isdigit() else set()
        for name in (b"full", b"pieces"):
            tokens.update(map(int, _TOKEN.findall(fields.get(name, b""))))
        newest = newest or max(tokens, default=0)
        known |= tokens
    earlier = (token for token in range(newest - 1, 0, -1) if token not in known)
    return sum(
        any(
            client.at(name).execute("EXISTS", name)
            for name in (keys.chunk(token, 0, spread), keys.delta(token, 0, spread))
        )
        for token, _ in zip(earlier, range(MOST_ATTEMPTS), strict=False)
    )
