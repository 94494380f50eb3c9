"""`SharedCopy`: a state in the host's shared memory; one process fetches it, the others map it."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace

from redrb.connection import stopping
from redrb.errors import WeightCorrupt
from redrb.weights.host.buffer_reading import HeldBuffer
from redrb.weights.host.buffer_writing import BufferWriter, CacheLeader
from redrb.weights.host.cache import HostCache
from redrb.weights.reading.catalogue import Catalogue, Pin, Step
from redrb.weights.reading.replica import Replica, Transfer
from redrb.weights.reading.state_copies import (
    FetchedVersion,
    Needed,
    PrivateCopy,
    fetch_adapter,
    split_adapter,
)
from redrb.weights.tensors.state import State
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import Manifest, Source
from redrb.weights.wire.manifest_codec import encode_manifest

_log = logging.getLogger("redrb")

_LEADER_S = 60.0
"""How long this process waits for the leader's fetch before it fetches into private memory."""

_HEAD_START_S = 0.01
"""Delay for processes that never led. A process that has led before should lead again, because the
first mapping of a buffer for writing takes as long as filling the buffer."""

_ATTEMPTS = 100


class SharedCopy:
    """The state that all readers of these weights on this host share.

    A reader that finds the newest version missing, and no leader, leads: it fetches the version
    into the older buffer, by deltas if that buffer or the newer one has an earlier version. The
    other readers wait. A buffer that readers still use is left to them, and a new file replaces it.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._key = b""
        self._cache = HostCache("")
        self._private: PrivateCopy | None = None
        self._damaged = False
        self._used: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def fetch_newest(
        self, pin: Pin, *, used: int, needed: Needed
    ) -> AbstractContextManager[FetchedVersion | None]:
        """Return the newest version unless it is `used`; nobody writes to it inside the `with`."""
        return self._fetch_newest(pin, used, needed)

    def forget(self) -> None:
        """Treat the shared buffers as damaged, so that the next version is fetched in full."""
        self._damaged = True
        if self._private is not None:
            self._private.forget()

    def _find_cache(self) -> None:
        """Use the cache of the server's data; several servers may have one address."""
        key = self._catalogue.data()
        if key != self._key:
            self._cache.close()
            self._key, self._cache = key, HostCache(f"{key!r} {self._catalogue.keys.prefix}")

    @contextmanager
    def _fetch_newest(self, pin: Pin, used: int, needed: Needed) -> Iterator[FetchedVersion | None]:
        for attempt in range(_ATTEMPTS):
            newest = self._catalogue.other_than(used)
            if newest is None:
                yield None
                return
            state = newest.base if newest.kind == "lora" else newest.version
            self._find_cache()
            held = self._cache.newest()
            if held is not None and held.version < state:
                held.close()
            elif held is not None:
                with held:
                    # if versions come faster than they are fetched, accept one that was the newest
                    # when this call began
                    accept_older = attempt > 1 and newest.kind != "lora"
                    fetched = self._use_held(held, pin, used, needed, accept_older=accept_older)
                    if fetched is not None:
                        before = list(self._used)
                        self._used.add(held.mapped)
                        yield fetched
                        _unmap_in_thread(before)
                        return
            if not attempt and held is not None and not self._cache.has_led:
                stopping.pause(_HEAD_START_S)
            leader = self._cache.lead()
            if leader is not None:
                with leader:
                    found = self._fetch_as_leader(leader, pin, used, needed)
                if found is not None:
                    yield found
                    return
            elif not self._cache.wait(_LEADER_S):
                break
        _log.warning(
            "weights %r: another process on this host has not finished its fetch; this process "
            "fetches the version into private memory",
            self._catalogue.name,
        )
        with self._private_copy().fetch_newest(pin, used=used, needed=needed) as fetched:
            yield fetched

    def _private_copy(self) -> PrivateCopy:
        self._private = self._private or PrivateCopy(self._catalogue)
        return self._private

    def _use_held(
        self, held: HeldBuffer, pin: Pin, used: int, needed: Needed, *, accept_older: bool
    ) -> FetchedVersion | None:
        """Return the held buffer's version if it is the newest, or may be used instead of it."""
        manifest = self._catalogue.decode(held.meta)
        steps = pin.route(have=manifest.version, used=used)
        states, adapter = split_adapter(steps)
        if accept_older and states and not adapter and not self._damaged:
            older = pin.route(have=manifest.version, wanted=manifest.version)
            if older and _is_version_of(manifest, older[-1]):
                layout = _layout(manifest)
                needed(layout)
                state = State(layout, memory=held.lend())
                return FetchedVersion(older[-1].described, state, None, shared=True)
        if self._damaged or len(states) != 1 or not _is_version_of(manifest, states[0]):
            return None
        layout = _layout(manifest)
        needed(layout)
        return self._fetched_version(State(layout, memory=held.lend()), steps, adapter, pin)

    def _fetched_version(
        self, state: State | None, steps: Sequence[Step], adapter: Step | None, pin: Pin
    ) -> FetchedVersion:
        transfer = Transfer(self._catalogue.everywhere, self._catalogue.keys, pin.renew)
        fetched = fetch_adapter(adapter, transfer) if adapter is not None else None
        return FetchedVersion(steps[-1].described, state, fetched, shared=state is not None)

    def _fetch_as_leader(
        self, leader: CacheLeader, pin: Pin, used: int, needed: Needed
    ) -> FetchedVersion | None:
        """Write the newest version into a buffer; return it only if it has no state to share."""
        steps = pin.route(have=0, used=used)
        states, adapter = split_adapter(steps)
        if not states:  # an adapter without published base weights, or nothing newer
            return self._fetched_version(None, steps, adapter, pin) if steps else None
        layout = _layout(states[0].manifest)
        needed(layout)
        with ExitStack() as scope:
            base = self._base(leader, scope, states[-1].manifest)
            if base is not None and _is_version_of(self._catalogue.decode(base.meta), states[-1]):
                return None  # another process has led meanwhile
            writer = leader.buffer(layout.nbytes)
            in_buffer, known = self._delta_start(writer, base, layout)
            if known is not None:
                states, _ = split_adapter(pin.route(have=known.version, used=used))
            if not states or (states[0].how == "full" and _layout(states[0].manifest) != layout):
                return None  # versions have changed meanwhile: try again
            writer.begin()
            replica = Replica(State(layout, memory=writer.data), None)
            if known is not None and states[0].how != "full":
                if base is not None and not in_buffer:
                    writer.data[:] = base.data
                replica.adopt(known)
            transfer = Transfer(self._catalogue.everywhere, self._catalogue.keys, pin.renew)
            for step in states:
                replica.follow(step, transfer)
            self._damaged = False
            last = states[-1].manifest
            writer.commit(last.version, _meta(last, layout))
        return None

    def _base(self, leader: CacheLeader, scope: ExitStack, newest: Manifest) -> HeldBuffer | None:
        """Return the newest buffer if a delta can start from it; forget outdated buffers."""
        while (held := self._cache.newest()) is not None:
            manifest = self._catalogue.decode(held.meta)
            another = manifest.version == newest.version and manifest.checksums != newest.checksums
            if manifest.version <= newest.version and not another and not self._damaged:
                return scope.enter_context(held)
            held.close()
            leader.forget(manifest.version)
        return None

    def _delta_start(
        self, writer: BufferWriter, base: HeldBuffer | None, layout: Layout
    ) -> tuple[bool, Manifest | None]:
        """Return the version that deltas can start from, and whether it is in the buffer itself."""
        in_buffer = self._catalogue.decode(writer.meta) if writer.version else None
        if in_buffer is not None and in_buffer.layout == layout and not self._damaged:
            return True, in_buffer
        newer = self._catalogue.decode(base.meta) if base is not None else None
        return False, newer if newer is not None and newer.layout == layout else None


def _unmap_in_thread(used: list[mmap.mmap]) -> None:
    """Unmap old buffers in a thread, if no array uses them.

    Unmapping takes 0.03 s a GB, and would otherwise happen when the last tensor leaves the buffer,
    while the tensors' lock is held.
    """
    if used:
        threading.Thread(target=_unmap, args=(used,), name="redrb-unmap", daemon=True).start()


def _unmap(used: list[mmap.mmap]) -> None:
    while used:
        with suppress(BufferError):  # an array still uses it, and unmaps it when it is freed
            used.pop().close()


def _is_version_of(manifest: Manifest, step: Step) -> bool:
    there = step.manifest
    return (manifest.version, manifest.checksums) == (there.version, there.checksums)


def _layout(manifest: Manifest) -> Layout:
    if manifest.layout is None:
        raise WeightCorrupt(f"version {manifest.version} lists no tensors.")
    return manifest.layout


def _meta(manifest: Manifest, layout: Layout) -> bytes:
    """Return the manifest of the whole state in a buffer, in the form that buffers keep."""
    whole = replace(
        manifest,
        kind="full",
        layout=layout,
        sources=(Source(1, 0, layout.chunks),),
        delta=None,
    )
    return encode_manifest(whole)
