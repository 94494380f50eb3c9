"""`SharedCopy`: versions in the host's shared memory, each fetched once and mapped by all."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np

from redrb.connection.deadline import here
from redrb.errors import WeightCorrupt, WeightError
from redrb.forks import in_child
from redrb.weights.host import locks
from redrb.weights.host.versions import HostVersions, make_private
from redrb.weights.reading.catalogue import Catalogue, Pin, Step
from redrb.weights.reading.replica import Replica
from redrb.weights.reading.state_copies import (
    FetchedVersion,
    Needed,
    PrivateCopy,
    fetch_adapter,
    layout_of,
    states_of,
)
from redrb.weights.tensors.state import StateBytes
from redrb.weights.wire.delta import Bytes
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import Manifest, pack_hashes

_log = logging.getLogger("redrb")

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the directory in it is checked before it is used

_FETCH_S = 60.0
"""How long this process waits for another's fetch before it fetches into private memory."""

_HEAD_START_S = 0.01
"""Delay for processes that never fetched. A process that has should do so again, because the first
mapping of memory for writing takes as long as filling it."""

_ATTEMPTS = 100
_KEY = re.compile(r"[0-9a-f]{32}")
_EXIT_S = 2.0
"""How long an ending process waits for another one that fetches, to remove unused versions."""

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it
_POPULATED = 4 << 20


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that this process has mapped; it keeps its lock as long as its map exists."""

    manifest: Manifest
    layout: Layout
    mapped: mmap.mmap

    @property
    def data(self) -> Bytes:
        return np.frombuffer(self.mapped, np.uint8)[: self.layout.nbytes]


class SharedCopy:
    """The versions that all readers of these weights on this host share.

    A reader that finds the newest version missing fetches it, by a delta if an earlier version is
    there; the other readers wait for it. The name of a file is made of the hashes of its bytes, so
    that it is never another version's. The memory of a version that nobody uses any more is used
    for the next one.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._key = hashlib.blake2b(catalogue.keys.prefix.encode(), digest_size=16).hexdigest()
        self._directory = _SHARED_MEMORY / f"redrb-{os.geteuid()}"
        self._versions = HostVersions(self._directory, self._key)
        self._forget()
        in_child(self._forget)
        self._used: _Version | None = None
        self._damaged = False
        self._writable: dict[int, mmap.mmap] = {}  # by the inode of the file
        self._private: PrivateCopy | None = None

    def __del__(self, process_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if process_ends():  # `_leave` has done it, and modules may be empty by now
            return
        self._used = None
        with suppress(OSError):  # such as a directory that was never made
            self._versions.remove_unused()

    def forget(self) -> None:
        """Fetch the next version in full, because a version that it could start from is damaged."""
        self._damaged = True
        if self._private is not None:
            self._private.forget()

    def reach(
        self, pin: Pin, *, needed: Needed, used: int = 0, wanted: int = 0
    ) -> FetchedVersion | None:
        """Return a version, default the newest unless it is `used`."""
        for attempt in range(_ATTEMPTS):
            steps = self._route(pin, used, wanted)
            states, version = states_of(steps), None
            if states:
                layout = layout_of(states, self._used.layout if self._used is not None else None)
                needed(layout)
                try:
                    version = self._use(states, layout, pin, may_wait=not attempt)
                except TimeoutError:
                    break
                except OSError as error:
                    raise WeightError(
                        f"the host cache in {self._directory} is not usable: {error}. Check that "
                        "the directory exists and has room, and that this process may open files; "
                        "or leave host_cache out."
                    ) from error
                if version is None:
                    continue  # another process has written another version, or failed
            if not steps:
                return None
            return FetchedVersion(
                steps[-1].described,
                StateBytes(version.layout, memory=version.data) if version is not None else None,
                fetch_adapter(steps[-1], pin),
                partial(self._loaded, version) if version is not None else None,
            )
        _log.warning(
            "weights %r: another process on this host has not finished its fetch; this process "
            "fetches the version into private memory",
            self._catalogue.name,
        )
        self._private = self._private or PrivateCopy()
        return self._private.reach(pin, needed=needed, used=used, wanted=wanted)

    def _route(self, pin: Pin, used: int, wanted: int) -> list[Step]:
        """Return the steps to a version, from the one that is mapped if they fit it."""
        have = self._used.manifest if self._used is not None else None
        steps = pin.route(have=have.version if have is not None else 0, wanted=wanted, used=used)
        if have is None or not steps or steps[0].how in ("full", "lora"):
            return steps
        first = steps[0].manifest
        if steps[0].how == "same":
            fits = first.checksums == have.checksums
        else:
            fits = first.delta is not None and first.delta.before == have.state_hash
        # after a server has lost its data, other versions have the same numbers
        if fits and first.layout_id == have.layout_id:
            return steps
        return pin.route(have=0, wanted=wanted, used=used)

    def _use(
        self, states: Sequence[Step], layout: Layout, pin: Pin, *, may_wait: bool
    ) -> _Version | None:
        """Map the version that the steps lead to, after it was fetched if it did not exist."""
        manifest = states[-1].manifest
        name = _name(manifest)
        self._begin()
        follows = may_wait and self._used is not None and not self._writable
        if follows and not self._versions.path(name).exists():
            here().pause(_HEAD_START_S)
        write = partial(self._write, states=states, layout=layout, pin=pin)
        lock = self._versions.use(name, write, timeout=_FETCH_S)
        return _Version(manifest, layout, self._mapped(name, lock)) if lock is not None else None

    def _forget(self) -> None:
        self._began = False  # also in a forked child, which has other finalizers

    def _begin(self) -> None:
        make_private(self._directory)
        if not self._began:
            keys = {path.name.partition(".")[0] for path in self._directory.iterdir()}
            for key in keys - {self._key}:
                if _KEY.fullmatch(key):  # left by processes that were killed
                    HostVersions(self._directory, key).remove_unused()
            # not weakref.finalize: children of multiprocessing do not run atexit functions
            Finalize(None, _leave, args=(self._versions,), exitpriority=0)
            self._began = True

    def _write(self, part: Path, *, states: Sequence[Step], layout: Layout, pin: Pin) -> None:
        """Fetch a version into a file: all of it, or what differs from a version on this host."""
        target = states[-1].manifest
        base, rest = self._base(states, layout)
        if base is None and states[0].how != "full":
            rest = states_of(pin.route(have=0, wanted=target.version))
            if not rest or rest[0].how != "full" or _name(rest[-1].manifest) != _name(target):
                raise WeightCorrupt(f"version {target.version} was replaced by another one.")
        memory = self._memory(part, max(layout.nbytes, 1))
        data = np.frombuffer(memory, np.uint8)[: layout.nbytes]
        replica = Replica(StateBytes(layout, memory=data), None)
        if base is not None:
            data[:] = base.data
            replica.manifest = base.manifest
            base = None  # its map and its lock
        for step in rest:
            replica.follow(step, pin)
        self._writable[part.stat().st_ino] = memory
        self._damaged = False

    def _base(
        self, states: Sequence[Step], layout: Layout
    ) -> tuple[_Version | None, Sequence[Step]]:
        """Return the newest version on this host that deltas can start from, and all steps left."""
        for index in reversed(range(len(states))):
            if states[index].how != "delta" or self._damaged:
                break
            used = self._used.manifest if self._used is not None else None
            before = states[index - 1].manifest if index else used
            lock = self._versions.open(_name(before)) if before is not None else None
            if before is not None and lock is not None:
                return _Version(before, layout, self._mapped(_name(before), lock)), states[index:]
        return None, states

    def _mapped(self, name: str, lock: locks.FileLock) -> mmap.mmap:
        """Map a version, locked while it is mapped; pages that this process writes are copied."""
        with self._versions.path(name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        lock.hold_while_alive(mapped)
        return mapped

    def _memory(self, part: Path, nbytes: int) -> mmap.mmap:
        """Return the memory of `part`: that of a version which nobody uses, if one is as large."""
        for path in self._versions.unused():
            if not part.exists() and path.stat().st_size == nbytes:
                path.rename(part)
            else:
                path.unlink()
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # kept, since mapping pages again costs as much as copying them
            memory = self._writable.pop(os.fstat(descriptor).st_ino, None)
            if memory is None:
                _allocate(descriptor, nbytes, self._directory)
                memory = mmap.mmap(descriptor, nbytes)
                _populate(memory)
            return memory
        finally:
            os.close(descriptor)

    def _loaded(self, version: _Version) -> None:
        """Unmap, in a thread, the version that was used before and memory of files that are gone.

        It takes 0.03 s a GB, which would otherwise pass while the tensors' lock is held. Where a
        tensor still uses a map, it is unmapped with that tensor.
        """
        before, self._used = self._used, version
        there = {entry.inode() for entry in os.scandir(self._directory)}
        gone = [self._writable.pop(inode) for inode in [*self._writable] if inode not in there]
        gone += [before.mapped] if before is not None else []
        if gone:
            threading.Thread(target=_close, args=(gone,), name="redrb-unmap", daemon=True).start()


def _name(manifest: Manifest) -> str:
    """Return a name that only versions of the same bytes and tensors have."""
    content = pack_hashes((manifest.layout_id, manifest.nbytes)) + manifest.checksums
    return f"{manifest.version}-{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def _allocate(descriptor: int, nbytes: int, directory: Path) -> None:
    try:
        # without this, a writer dies of SIGBUS when shared memory is full
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        free = os.statvfs(directory.parent)
        raise WeightError(
            f"no room for the host cache: a version of {nbytes:,} bytes does not fit into "
            f"{directory.parent}, where {free.f_bavail * free.f_frsize:,} bytes are free "
            f"({error.strerror}). The cache needs two versions: give the container more shared "
            "memory (--shm-size), or leave host_cache out."
        ) from error


def _populate(memory: mmap.mmap) -> None:
    """Map all pages for writing: one by one at first access takes longer than filling them."""
    for start in range(0, len(memory), _POPULATED):
        try:
            # in parts: the call blocks the other threads of this process
            memory.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATED, len(memory) - start))
        except OSError:  # kernels before 5.14
            return


def _close(maps: list[mmap.mmap]) -> None:
    while maps:
        with suppress(BufferError):  # an array still uses it, and unmaps it when it is freed
            maps.pop().close()


def _leave(versions: HostVersions) -> None:
    """At the end of this process: remove the versions, unless other processes use them."""
    locks.release_memory()
    with suppress(OSError):  # such as a directory that was removed
        versions.remove_unused(timeout=_EXIT_S)
