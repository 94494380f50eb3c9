"""`WeightSubscriber`: find the newest version, fetch and check all of it, then load it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch import Tensor

from redrb.checks import checked_int, checked_int_or_none
from redrb.connection import Client, check_client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError, WeightError
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.loading import TargetLoader
from redrb.weights.reading.shared_copy import SharedCopy
from redrb.weights.reading.standby import PreparedLoad, WeightStandby
from redrb.weights.reading.state_copies import Adapter, PrivateCopy
from redrb.weights.reading.targets import LoadTarget, named_tensors
from redrb.weights.tensors.fitting import Strict
from redrb.weights.tensors.names import Target
from redrb.weights.wire.manifest import WeightVersion


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
        if lock is not None and not isinstance(lock, AbstractContextManager):
            raise ConfigError(f"lock={lock!r}: give a lock, such as threading.RLock().")
        self._catalogue = catalogue = Catalogue(client, name, namespace)
        self._name = name
        self.lock: AbstractContextManager[object] = threading.RLock() if lock is None else lock
        copy = SharedCopy(catalogue) if host_cache else PrivateCopy()
        self._loader = TargetLoader(catalogue, copy, self.lock)

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
                benchmark of weights loads so (`docs/reference/performance.md`).

        Returns:
            The version that was loaded, or None if nothing is newer.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ; nothing was loaded.
            WeightCorrupt: The version is damaged, or parts of it are gone, by each way to it;
                nothing was loaded. The publisher's next version is a full one, which can be loaded.
            DecodeError: The same of a manifest.
            WeightsTorn: `in_place` broke off.
            StoreUnavailable: Redis stayed away.
            ConfigError: `target` or `strict` is not usable, or a `standby` of this subscriber is
                open.
        """
        selection = LoadTarget.of(target, strict)
        with self._loader.used_for(selection):
            load = self._loader.poll_in_place if in_place else self._loader.poll
            return load(selection)

    def standby(self, target: Target, *, strict: Strict = True) -> WeightStandby:
        """Start a thread that fetches new versions; `swap` of the standby loads them.

        Until the standby is closed, calls that load with this subscriber raise `ConfigError`.
        Arguments are those of `poll`.

        Raises:
            ConfigError: A standby of this subscriber is open.
        """
        return WeightStandby(self._loader, LoadTarget.of(target, strict))

    def prepared_load(self, target: Target, *, strict: Strict = True) -> PreparedLoad:
        """Return the two steps of `poll`, fetch and load, for callers with their own thread.

        Until it is closed, calls that load with this subscriber raise `ConfigError`. Arguments are
        those of `poll`.

        Raises:
            ConfigError: Another one, or a standby, is open.
        """
        return PreparedLoad(self._loader, LoadTarget.of(target, strict))

    def fetch(self, version: int | None = None) -> dict[str, Tensor]:
        """Return a whole state dict on the CPU, in new memory; tied tensors stay tied.

        Of an adapter, return its `lora_A` and `lora_B`.

        Args:
            version: A kept version; default: the newest.

        Raises:
            WeightError: There is no such version.
            WeightCorrupt, DecodeError: It is damaged, as of `poll`.
            StoreUnavailable: Redis stayed away.
        """
        version = checked_int_or_none("version", version, 1)
        fetched = PrivateCopy().fetch(self._catalogue, version)
        if fetched.adapter is not None:
            return fetched.adapter.tensors
        return dict(named_tensors(fetched.state)) if fetched.state is not None else {}

    def adapter(self, version: int | None = None) -> Adapter:
        """Return an adapter's tensors and settings, for `save_adapter`; default: the newest.

        Raises:
            WeightError: There is no such version, or it is not an adapter.
        """
        fetched = PrivateCopy().fetch(self._catalogue, version, only_adapter=True)
        if fetched.adapter is None:
            raise WeightError(
                f"version {fetched.described.version} of weights {self._name!r} is no adapter: "
                "publish_lora publishes one."
            )
        return fetched.adapter

    def wait(self, newer_than: int | None = None, *, timeout: float | None = None) -> WeightVersion:
        """Wait until a version is published, without polling; nothing is loaded.

        Streams of the same client that have put and taken nothing announce a wait for the first
        version: `redrb top` and `redrb doctor` show it.

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
        after = checked_int("newer_than", after)
        with Deadline(timeout):
            return self._catalogue.wait(after, larger=newer_than is not None)
