"""The calls of the scripts in `redrb/lua/weights`, and the error where a key is not redrb's.

Every call may be repeated as it is when a connection breaks, and is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final, Literal, TypeAlias, TypeVar

import msgspec

from redrb.connection import Client
from redrb.errors import StoreDenied, StoreError, StoreUnavailable
from redrb.keys import WeightKeys
from redrb.lua.calls import Call, Page
from redrb.weights.wire.manifest import Kind

R = TypeVar("R")

How: TypeAlias = Literal["full", "delta", "lora", "same", "gone"]

KEYS: Final = {
    "versions": b"stream",
    "manifests": b"hash",
    "fence": b"hash",
    "pins": b"hash",
    "attempts": b"hash",
    "loads": b"zset",
    "fulls": b"zset",
    "trash": b"set",
    "followers": b"set",
    "asked": b"stream",
}
"""The type of each key of some weights, apart from their chunks and deltas."""


def run(node: Client, keys: WeightKeys, call: Call[R], *beside: bytes) -> R:
    """Run the script of a call on the node that has the keys of some weights."""
    with foreign_keys_named(node, keys):
        return call.run(node, [keys.versions], *beside)


@contextmanager
def foreign_keys_named(client: Client, keys: WeightKeys) -> Iterator[None]:
    """Let an error about a key that is not of redrb's type name the key."""
    try:
        yield
    except (StoreUnavailable, StoreDenied):
        raise
    except StoreError as error:
        if "WRONGTYPE" not in str(error):
            raise
        names: dict[str, str] = {}
        for name, kind in KEYS.items():
            key = f"{keys.prefix}{name}"
            held: bytes = client.execute("TYPE", key)
            if held not in (kind, b"none"):
                names[key] = f"{key} holds a {held.decode()} and not a {kind.decode()}"
        if not names:  # the key was deleted meanwhile
            raise
        raise StoreError(
            f"{' and '.join(names.values())}: another program has written there. Delete it, and "
            f"try again: redis-cli DEL {' '.join(map(repr, names))}"
        ) from error


class Advance(Call[int], frozen=True):
    """Tell a task the newest weight version; returns the one that it knows now, -1 without a task.

    Makers that may begin groups now are woken.
    """

    script: ClassVar = "task/advance"
    version: int


class TakeOver(Call[str], frozen=True):
    """Make a publisher the owner; returns the owner, as other calls are to name it.

    Publishers that were owners before can commit nothing more.
    """

    script: ClassVar = "weights/take_over"
    name: str


class Begun(msgspec.Struct, frozen=True):
    """The reply to the beginning of an attempt.

    Attributes:
        outcome: "fenced": another publisher is the owner.
        token: Of the attempt.
        newest: Newest version, 0 for none.
        newest_state: Newest version that is no adapter, 0 for none.
        trash: Whether the trash has keys, which the caller deletes.
        asked: Whether a reader has found a state damaged and waits for a full version.
    """

    outcome: Literal["ok", "fenced"]
    token: int = 0
    newest: int = 0
    newest_state: int = 0
    trash: bool = False
    asked: bool = False


class Begin(Call[Begun], frozen=True):
    """Begin an attempt to publish; those before can be committed no more.

    Attributes:
        owner: As `TakeOver` returned it.
        token: The last that this publisher had: the new one is larger.
    """

    script: ClassVar = "weights/begin"
    owner: str
    token: int


class Prepare(Call[Literal["ok", "fenced", "gone"]], frozen=True):
    """Note the ranges of keys of an attempt; "gone": a newer one has begun."""

    script: ClassVar = "weights/prepare"
    owner: str
    token: str
    uploaded: str


class Kept(Page, frozen=True, kw_only=True):
    """A page of the versions that are no longer kept, which were deleted.

    Attributes:
        after: Entry after which the next page begins.
        trash: Whether the trash has keys, which the caller deletes.
    """

    after: str = "0-0"
    trash: bool = False


class Committed(Kept, frozen=True, kw_only=True):
    """The reply to a commit, and the first page of versions that are no longer kept.

    Attributes:
        outcome: "fenced": another publisher is the owner; "stale": `newest` is not below the
            version; "base": the delta or adapter starts from another version than the newest;
            "gone": a newer attempt has begun, or this one was dropped.
        newest: The newest version.
    """

    outcome: Literal["ok", "fenced", "stale", "base", "gone"]
    created_ms: int = 0
    newest: int = 0


class Commit(Call[Committed], frozen=True, kw_only=True):
    """Make a prepared version the newest; its manifest goes beside it.

    Attributes:
        keep, max_bytes: Which versions are kept: `redrb/lua/include/retention.lua`.
        kind, base, nbytes, stored, delta, names, full, pieces: Fields of the version's entry:
            `redrb/lua/include/weights.lua`; those that the script only stores are texts.
    """

    script: ClassVar = "weights/commit"
    owner: str
    token: str
    version: int
    keep: int
    max_bytes: int
    kind: Kind
    base: int
    nbytes: str
    stored: int
    delta: str
    names: str
    full: str
    pieces: str


class Trim(Call[Kept], frozen=True):
    """Go on to delete versions behind a page, if the publisher is the owner yet."""

    script: ClassVar = "weights/trim"
    owner: str
    keep: int
    max_bytes: int
    after: str


class Discarded(msgspec.Struct, frozen=True):
    """The reply to the end of an attempt that failed.

    Attributes:
        committed: Whether its version was committed after all; else the caller deletes its keys.
        trash: Whether the trash has keys, which the caller deletes.
    """

    committed: bool
    trash: bool = False


class Discard(Call[Discarded], frozen=True):
    """Refuse an attempt that failed, unless its version was committed after all."""

    script: ClassVar = "weights/discard"
    token: str
    version: int


class FoundStep(msgspec.Struct, frozen=True):
    """One version on the way to the wanted version.

    Attributes:
        how: What to fetch: "full", the whole state; "delta", the delta to it; "lora", an adapter;
            "same", nothing, since the reader has the version. "gone": there is no way, because
            this version was lost.
        created_ms: As the version's entry has it.
    """

    version: int
    how: How
    created_ms: str


class FindSteps(Call[list[FoundStep]], frozen=True):
    """Find a reader's steps to a version, and pin the versions that they need.

    The reply is empty if there is no way or no such version. The manifests stand behind it.

    Attributes:
        have: Version of the state that the reader has, 0 for none.
        wanted: Version that it wants; 0: the newest, unless that is `used`.
        used, created_ms: Version that it uses, and when that was created; 0: unknown.
        ttl_ms: How long the pin lasts.
    """

    script: ClassVar = "weights/pin"
    reader: str
    have: int
    wanted: int
    used: int
    created_ms: int
    ttl_ms: int


class Ask(Call[bool], frozen=True):
    """Ask the publisher for a full version, as this one is damaged; returns whether it is asked."""

    script: ClassVar = "weights/ask"
    version: int
    key: str


class RenewPin(Call[bool], frozen=True):
    """Renew a reader's pin for `ttl_ms`, or remove it with 0; returns whether it had one."""

    script: ClassVar = "weights/renew_pin"
    reader: str
    ttl_ms: int


class RemovedPage(Page, frozen=True, kw_only=True):
    """A page of versions that were deleted.

    Attributes:
        token: Last token that was given to an attempt.
        entries: Ids of their entries.
    """

    token: int
    entries: list[str]


class RemoveVersions(Call[RemovedPage], frozen=True):
    """Delete a page of versions, and fence the publisher by a new name, the same for each page."""

    script: ClassVar = "weights/remove"
    name: str
