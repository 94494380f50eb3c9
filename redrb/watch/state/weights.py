"""Reads published weights: a few small commands for each name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_denied, translate
from redrb.connection.transport import Pipeline, Reply
from redrb.errors import RedrbError
from redrb.keys import is_name
from redrb.registry import ODD_NAME
from redrb.watch.state.model import WeightsState
from redrb.watch.state.tasks import exchanged
from redrb.weights.inspection.listing import stored_bytes
from redrb.weights.reading.catalogue import Catalogue

_MOST_READ = 200
"""Most versions, the newest, and pins of one name that are read."""

_MOST_SHOWN = 300
"""Most characters of a damaged key that are shown: a name, its namespace and two numbers."""


def read_weights(
    client: Client, namespace: str, names: Iterable[str], now_s: float
) -> list[WeightsState]:
    """Return the states of weights, by name; names without a version are left out."""
    listed = list(names)
    catalogues = [Catalogue(client, name, namespace) for name in filter(is_name, listed)]

    def add(pipeline: Pipeline, number: int) -> None:
        keys = catalogues[number].keys
        pipeline.add("XREVRANGE", keys.versions, "+", "-", "COUNT", _MOST_READ)
        pipeline.add("XLEN", keys.versions)
        pipeline.add("HSCAN", f"{keys.prefix}pins", 0, "COUNT", _MOST_READ)
        pipeline.add("XREVRANGE", keys.asked, "+", "-", "COUNT", 1)

    replies = exchanged([catalogue.client for catalogue in catalogues], add)
    found = [
        WeightsState(name, readable=False, damage=ODD_NAME) for name in listed if not is_name(name)
    ]
    for catalogue, part in zip(catalogues, replies, strict=True):
        state = _weights(catalogue, part, now_s)
        if state is not None:
            found.append(state)
    return sorted(found, key=lambda each: each.name)


def _weights(catalogue: Catalogue, replies: list[Reply], now_s: float) -> WeightsState | None:
    failed = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
    if failed is not None:
        damage = "" if is_denied(failed) else str(translate(failed, catalogue.client.where))
        return WeightsState(catalogue.name, readable=False, damage=damage)
    entries, versions, pins, asked = replies
    if not entries:
        return None
    try:
        described = catalogue.described(entries[0])
        nbytes = stored_bytes(catalogue.name, entries)
    except RedrbError as error:
        return WeightsState(catalogue.name, readable=False, damage=str(error))
    parts = [value.split() for value in pins[1][1::2]]
    deadlines_ms = [
        float(part[2]) if len(part) == 4 and part[2].isdigit() else 0.0 for part in parts
    ]
    expired = sum(deadline <= now_s * 1000 for deadline in deadlines_ms)
    request = dict(zip(asked[0][1][::2], asked[0][1][1::2], strict=True)) if asked else {}
    damaged = request.get(b"version", b"")
    return WeightsState(
        name=catalogue.name,
        version=described.version,
        kind=described.kind,
        nbytes=described.nbytes,
        stored_bytes=nbytes,
        versions=int(versions),
        age_s=max(0.0, now_s - described.created_s),
        pins=len(deadlines_ms) - expired,
        expired_pins=expired,
        asked_version=int(damaged) if re.fullmatch(rb"[0-9]{1,16}", damaged) else 0,
        asked_key=request.get(b"key", b"").decode(errors="backslashreplace")[:_MOST_SHOWN],
    )
