"""`WeightSubscriber`: find the newest version, fetch and check all of it, then load it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline
from redrb.errors import (
    ConfigError,
    DecodeError,
    WeightError,
)
from redrb.keys import WeightKeys
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.loading import TargetLoader
from redrb.weights.reading.prepared_load import PreparedLoad, SubscriberAccess, subscriber_in_use
from redrb.weights.reading.retrying import fetch_retrying
from redrb.weights.reading.shared_copy import SharedCopy
from redrb.weights.reading.standby import WeightStandby
from redrb.weights.reading.state_copies import (
    Adapter,
    FetchedVersion,
    PrivateCopy,
    StateCopy,
)
from redrb.weights.reading.targets import LoadTarget, named_tensors
from redrb.weights.reading.version_wait import wait_for_version, wait_once
from redrb.weights.tensors.fitting import Strict, checked_strict, target_shards
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import MAX_VERSION, WeightVersion

T = TypeVar("T")

_BUSY_S = 60.0
"""How long a call waits for another thread's call on the same subscriber."""


class WeightSubscriber:
    """Follows the weights `name` for one model.

    The subscriber keeps a copy of the weights on the host, as large as a version, so that a new
    version costs only its delta. `poll(in_place=True)` keeps no copy.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: Namespace of the publisher.
        lock: Held while tensors change; default: a new re-entrant lock. If the lock is not
            re-entrant, or several threads call this subscriber, callers must not hold it.
        host_cache: Keep the copy in shared memory (`/dev/shm`), one for all subscribers on this
            host that set this: one process fetches, the others map the result. Parameters and
            buffers of modules on the CPU that have the published dtype are not copied: their
            `data` are in that memory from then on. Pages that a process writes to are copied for
            it.

    Attributes:
        lock: Generation takes it, so that it never sees half an update.

    Raises:
        ConfigError: A name is not usable.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        namespace: str = "default",
        lock: AbstractContextManager[object] | None = None,
        host_cache: bool = False,
    ) -> None:
        check_client(client)
        keys = WeightKeys.of(namespace, name)
        if lock is not None and not isinstance(lock, AbstractContextManager):
            raise ConfigError(f"lock={lock!r}: give a lock, such as threading.RLock().")
        self._catalogue = catalogue = Catalogue(client, keys, name)
        self._name = name
        self._copy: StateCopy = SharedCopy(catalogue) if host_cache else PrivateCopy(catalogue)
        self._loader = TargetLoader(catalogue)
        self._reading = threading.Lock()
        self._calls = 0
        self._in_use = False  # by a PreparedLoad
        self.lock: AbstractContextManager[object] = threading.RLock() if lock is None else lock

    def __repr__(self) -> str:
        return f"<redrb.WeightSubscriber {self._name!r} at version {self.version}>"

    @property
    def version(self) -> int | None:
        """The version that was loaded last, None before the first."""
        return self._loader.version

    def latest(self) -> WeightVersion | None:
        """Return the newest version, None if nothing is published."""
        return self._catalogue.newer_than(0)

    def versions(self) -> list[WeightVersion]:
        """Return all kept versions, the newest last."""
        return self._catalogue.kept()

    def poll(
        self, target: Target, *, strict: Strict = True, in_place: bool = False
    ) -> WeightVersion | None:
        """Load the newest version, unless it is loaded already.

        All of it is fetched and checked before the first tensor changes, under `lock`. A delta is
        applied only to its exact base; on any doubt the whole version is fetched. An adapter
        (`publish_lora`) is loaded into the model's LoRA layers, or merged into its base weights.
        float16, bfloat16, float32 and float64 are cast into each other; other dtypes, and shapes,
        must be equal.

        Args:
            target: A module (its parameters and persistent buffers), several by name, or a dict
                of tensors and `DTensor`s. If the modules are others than in the
                last call, all is loaded; a dict must always hold the same tensors.
            strict: True demands the same names on both sides; "model" demands all names of the
                target and ignores other published names; False loads the names that both have.
            in_place: Receive straight into the tensors while `lock` is held. This needs no memory
                beside them, but a fetch that breaks off leaves a mixture until a call succeeds. The
                benchmark of weights loads so (`docs/performance.md`).

        Returns:
            The version that was loaded, or None if nothing is newer.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ; nothing was loaded.
            WeightCorrupt: A chunk does not match its checksum; nothing was loaded.
            DecodeError: A manifest is damaged; nothing was loaded.
            WeightError: Chunks were evicted while they were fetched, at each attempt.
            WeightsTorn: `in_place` broke off.
            StoreUnavailable: Redis stayed away.
            ConfigError: `target` or `strict` is not usable, or a `standby` of this subscriber is
                open.
        """
        selection = LoadTarget(target_shards(target), checked_strict(strict))
        with self._exclusive_copy():
            self._loader.set_target(target)
            if in_place:
                return self._loader.poll_in_place(target, selection, self.lock, self._retrying)
            return self._retrying(self._copy, lambda pin: self._poll(pin, target, selection))

    def standby(self, target: Target, *, strict: Strict = True) -> WeightStandby:
        """Start a thread that fetches new versions; `swap` of the standby loads them.

        Until the standby is closed, calls that load with this subscriber raise `ConfigError`.

        Args:
            target: As in `poll`.
            strict: As in `poll`.

        Raises:
            ConfigError: A standby of this subscriber is open.
        """
        return WeightStandby(self.prepared_load(target, strict=strict))

    def prepared_load(self, target: Target, *, strict: Strict = True) -> PreparedLoad:
        """Return the two steps of `poll`, fetch and load, for callers with their own thread.

        Until it is closed, calls that load with this subscriber raise `ConfigError`.

        Args:
            target: As in `poll`.
            strict: As in `poll`.

        Raises:
            ConfigError: Another one, or a standby, is open.
        """
        selection = LoadTarget(target_shards(target), checked_strict(strict))
        with self._exclusive_copy():
            self._loader.set_target(target)
            self._in_use = True
        access = SubscriberAccess(
            catalogue=self._catalogue,
            copy=self._copy,
            lock=self.lock,
            reading=self._reading,
            version=lambda: self._loader.version,
            loaded=self._loader.loaded,
            wait=lambda version, seconds: wait_once(self._catalogue, version, seconds),
            retrying=self._retrying,
            plan=self._loader.plan,
            release=self._release,
        )
        return PreparedLoad(access, target, selection)

    def fetch(self, version: int | None = None) -> dict[str, Tensor]:
        """Return a whole state dict on the CPU, in new memory; tied tensors stay tied.

        Of an adapter, return its `lora_A` and `lora_B`.

        Args:
            version: A kept version; default: the newest.

        Raises:
            WeightError: There is no such version.
            WeightCorrupt: A chunk does not match its checksum.
            DecodeError: A manifest is damaged.
            StoreUnavailable: Redis stayed away.
        """
        version = checked_int_or_none("version", version, 1, MAX_VERSION)
        copy = PrivateCopy(self._catalogue)
        fetched = self._retrying(copy, lambda pin: self._fetch(copy, pin, version))
        if fetched.adapter is not None:
            return fetched.adapter.tensors
        return dict(named_tensors(fetched.state)) if fetched.state is not None else {}

    def adapter(self, version: int | None = None) -> Adapter:
        """Return an adapter's tensors and settings, for `save_adapter`; default: the newest.

        Raises:
            WeightError: There is no such version, or it is not an adapter.
        """
        copy = PrivateCopy(self._catalogue)
        fetched = self._retrying(
            copy, lambda pin: self._fetch(copy, pin, version, only_adapter=True)
        )
        if fetched.adapter is None:
            raise DecodeError(f"weights {self._name!r}: the fetched version is not an adapter.")
        return fetched.adapter

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the newest version by name, if it is newer than the last one loaded.

        Inference engines take such pairs in their own process, as in `docs/weights.md`, for example
        vLLM's `model.load_weights(...)`. Tensors
        are on the CPU and share memory with this subscriber: copy them, and do not change them.
        After the last tensor, `version` is the yielded version.

        Raises:
            WeightError: The newest version is an adapter; engines load adapters from a folder, see
                `adapter`.
            WeightCorrupt, DecodeError, StoreUnavailable: As `poll` does.
        """
        with self._exclusive_copy(), Pin(self._catalogue) as pin:
            call = self._calls
            fetched, scope = fetch_retrying(
                self._name, lambda: self._fetch_shared(pin), forget=self._copy.forget
            )
            with scope:
                if fetched is None:
                    return
                if fetched.state is None or fetched.adapter is not None:
                    raise WeightError(
                        f"version {fetched.described.version} of weights {self._name!r} is an "
                        "adapter: save it with redrb.weights.save_adapter, and let the engine load "
                        "the folder."
                    )
                found = named_tensors(fetched.state)
        # without the lock: a caller may stop in the middle
        for name, tensor in found:
            self._check_unused_since(call)
            yield name, tensor
        self._check_unused_since(call)
        self._loader.note(fetched.described.version)

    def wait(self, newer_than: int | None = None, *, timeout: float | None = None) -> WeightVersion:
        """Wait until a version is published, without polling; nothing is loaded.

        Args:
            newer_than: Wait for a larger version than this; default: for another version than the
                one that was loaded last, smaller ones included, because a server that lost its
                data counts from 1 again.
            timeout: Seconds; None waits for ever.

        Returns:
            The newest version.

        Raises:
            WeightTimeout: No such version came in time.
            StoreUnavailable: Redis stayed away.
        """
        after = (self.version or 0) if newer_than is None else newer_than
        after = checked_int("newer_than", after, 0, MAX_VERSION)
        with Deadline(timeout):
            return wait_for_version(self._catalogue, after, larger=newer_than is not None)

    @contextmanager
    def _exclusive_copy(self) -> Iterator[None]:
        """Use the copy in this thread alone."""
        if self._in_use:  # checked first: a fetch under way is not waited for
            raise subscriber_in_use(self._name)
        if not self._reading.acquire(timeout=_BUSY_S):
            raise ConfigError(
                f"another thread has used this subscriber of weights {self._name!r} for "
                f"{_BUSY_S:g} s: its fetch is slow, or it waits for the lock, which this thread "
                "must not hold while it calls."
            )
        try:
            if self._in_use:
                raise subscriber_in_use(self._name)
            self._calls += 1
            yield
        finally:
            self._reading.release()

    def _release(self) -> None:
        self._in_use = False

    def _check_unused_since(self, call: int) -> None:
        if self._calls != call:
            raise WeightError(
                f"the tensors of weights {self._name!r} were not all taken before the next call on "
                "this subscriber: take them from the beginning."
            )

    def _poll(self, pin: Pin, target: Target, selection: LoadTarget) -> WeightVersion | None:
        used = self.version or 0
        with self._copy.fetch_newest(pin, used=used, needed=selection.chunks) as fetched:
            if fetched is None:
                return None
            load = self._loader.plan(target, selection, fetched)
            with self.lock:
                self._loader.run(load, fetched)
            return fetched.described

    def _fetch_shared(self, pin: Pin) -> tuple[FetchedVersion | None, ExitStack]:
        """Return the newest version for `named_tensors`, and the scope that releases it."""
        with ExitStack() as scope:
            context = self._copy.fetch_newest(pin, used=self.version or 0, needed=lambda _: None)
            return scope.enter_context(context), scope.pop_all()

    def _fetch(
        self, copy: PrivateCopy, pin: Pin, version: int | None, *, only_adapter: bool = False
    ) -> FetchedVersion:
        steps = pin.route(have=0, wanted=version or 0)
        if only_adapter and steps and steps[-1].how != "lora":
            raise WeightError(
                f"version {steps[-1].described.version} of weights {self._name!r} is no adapter: "
                "publish_lora publishes one."
            )
        if not steps:
            newest = self.latest()
            known = f"the newest is {newest.version}" if newest else "nothing is published yet"
            which = "" if version is None else f"version {version} of "
            raise WeightError(f"no {which}weights {self._name!r} to fetch: {known}.")
        if steps[-1].how == "lora" or only_adapter:
            steps = steps[-1:]
        return copy.follow(pin, steps, lambda _: None)

    def _retrying(self, copy: StateCopy, attempt: Callable[[Pin], T]) -> T:
        """Run an attempt, and repeat it from the newest version if chunks were gone or damaged."""
        with Pin(self._catalogue) as pin:
            return fetch_retrying(self._name, lambda: attempt(pin), forget=copy.forget)
