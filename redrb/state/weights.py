"""Reads published weights: a few small commands for each name, sent together."""

from __future__ import annotations

from collections.abc import Iterable

from redis.exceptions import ResponseError

from redrb.connection import Client
from redrb.connection.failures import is_denied, is_transient, translate
from redrb.connection.transport import Pipeline, Reply, first_error
from redrb.errors import DecodeError
from redrb.keys import WeightKeys, is_name
from redrb.registry import ODD_NAME
from redrb.state.model import WeightsState
from redrb.weights.reading.catalogue import Catalogue

_COMMANDS = 3
_PINS = 200


def read_weights(
    client: Client, namespace: str, names: Iterable[str], *, now_s: float
) -> list[WeightsState]:
    """Return the states of weights; names without a version are left out.

    Args:
        client: A client.
        namespace: Namespace of the weights.
        names: Their names.
        now_s: Seconds since 1970 by the server's clock.
    """
    listed = list(names)
    catalogues = [
        Catalogue(client, WeightKeys.of(namespace, name), name) for name in filter(is_name, listed)
    ]
    by_client: dict[int, list[Catalogue]] = {}
    for catalogue in catalogues:
        by_client.setdefault(id(catalogue.client), []).append(catalogue)
    found = [
        WeightsState(name, readable=False, damage=ODD_NAME) for name in listed if not is_name(name)
    ]
    for some in by_client.values():
        replies = _replies(some)
        for number, catalogue in enumerate(some):
            part = replies[number * _COMMANDS : (number + 1) * _COMMANDS]
            state = _weights(catalogue, part, now_s)
            if state is not None:
                found.append(state)
    return sorted(found, key=lambda each: each.name)


def _replies(catalogues: list[Catalogue]) -> list[Reply]:
    pipeline = Pipeline()
    for catalogue in catalogues:
        keys = catalogue.keys
        pipeline.add("XREVRANGE", keys.versions, "+", "-", "COUNT", 1)
        pipeline.add("XLEN", keys.versions)
        pipeline.add("HSCAN", f"{keys.prefix}pins", 0, "COUNT", _PINS)
    client = catalogues[0].client

    def attempt() -> list[Reply]:
        replies = client.exchange(pipeline)
        error = first_error([each for each in replies if not _is_lasting(each)])
        if error is not None:
            raise error
        return replies

    pipeline.freeze()
    return client.retrying(attempt)


def _is_lasting(reply: Reply) -> bool:
    return isinstance(reply, ResponseError) and not is_transient(reply)


def _weights(catalogue: Catalogue, replies: list[Reply], now_s: float) -> WeightsState | None:
    failed = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
    if failed is not None:
        damage = "" if is_denied(failed) else str(translate(failed, catalogue.client.where))
        return WeightsState(catalogue.name, readable=False, damage=damage)
    newest, versions, pins = replies
    if not newest:
        return None
    try:
        described = catalogue.described(newest[0])
    except DecodeError as error:
        return WeightsState(catalogue.name, readable=False, damage=str(error))
    deadlines = [_deadline_ms(value) for value in pins[1][1::2]]
    expired = sum(deadline <= now_s * 1000 for deadline in deadlines)
    return WeightsState(
        name=catalogue.name,
        version=described.version,
        kind=described.kind,
        nbytes=described.nbytes,
        stored_bytes=described.stored_bytes,
        versions=int(versions),
        age_s=max(0.0, now_s - described.created_s),
        pins=len(deadlines) - expired,
        expired_pins=expired,
    )


def _deadline_ms(pin: bytes) -> float:
    parts = pin.split()
    return float(parts[2]) if len(parts) == 4 and parts[2].isdigit() else 0.0
