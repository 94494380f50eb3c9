"""Reading: find the newest version, fetch and check all of it, then load it."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor, nn

from redrb.checks import checked_int, checked_int_or_none, checked_timeout
from redrb.connection import Client, check_client
from redrb.connection.transport import Pipeline, read_reply
from redrb.errors import (
    ConfigError,
    DecodeError,
    RedrbError,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
    WeightsTorn,
    WeightTimeout,
)
from redrb.keys import WeightKeys
from redrb.weights.reading.adapter_loading import AdapterLoader
from redrb.weights.reading.catalogue import Catalogue, Pin
from redrb.weights.reading.load_target import LoadTarget, named_tensors
from redrb.weights.reading.prepared_load import PreparedLoad, SubscriberAccess, taken
from redrb.weights.reading.shared_copy import SharedCopy
from redrb.weights.reading.standby import WeightStandby
from redrb.weights.reading.state_copies import (
    Adapter,
    FetchedVersion,
    InPlaceCopy,
    PrivateCopy,
    StateCopy,
)
from redrb.weights.tensors.fitting import Strict, checked_strict, target_shards
from redrb.weights.tensors.names import Target
from redrb.weights.wire.chunks import ChunkGoneError
from redrb.weights.wire.manifest import MAX_VERSION, WeightVersion

T = TypeVar("T")

_ATTEMPTS = 3
_BLOCK_S = 5.0  # one blocking read; far below the connection's timeout
_BUSY_S = 60.0  # for another thread's call on the same subscriber


class WeightSubscriber:
    """Follows the weights `name` for one model.

    Keeps a copy of the weights on the host, so that a new version costs what changed: as much
    memory as a version. `poll(in_place=True)` keeps none.

    Args:
        client: From `redrb.connect`.
        name: Name of the weights.
        namespace: That of the publisher.
        lock: Held while tensors change; default: one of its own, a re-entrant one. One that is not,
            and any where several threads call this subscriber, must not be held by who calls it.
        host_cache: Keep the copy in shared memory (`/dev/shm`), one for all subscribers on this
            host that ask for it: one fetches, the others map what it fetched. Parameters and
            buffers of modules on the CPU, if they have the published dtype, are not copied: their
            `data` are in that memory from then on, and pages that someone writes to become that
            process' own.

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
            raise ConfigError(f"lock={lock!r}: it is a lock, such as threading.RLock().")
        self._catalogue = Catalogue(client, keys, name)
        self._name = name
        self._version: int | None = None
        self._copy: StateCopy = (
            SharedCopy(self._catalogue) if host_cache else PrivateCopy(self._catalogue)
        )
        self._live: InPlaceCopy | None = None
        self._adapters = AdapterLoader()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._reading = threading.Lock()
        self._epoch = 0
        self._is_lent = False
        self.lock: AbstractContextManager[object] = threading.RLock() if lock is None else lock

    def __repr__(self) -> str:
        return f"<redrb.WeightSubscriber {self._name!r} at version {self._version}>"

    @property
    def version(self) -> int | None:
        """The version that was loaded last, None before the first."""
        return self._version

    def latest(self) -> WeightVersion | None:
        """Return the newest version, None when nothing is published."""
        return self._catalogue.newer_than(0)

    def versions(self) -> list[WeightVersion]:
        """Return all versions that are kept, the newest last."""
        return self._catalogue.kept()

    def poll(
        self, target: Target, *, strict: Strict = True, in_place: bool = False
    ) -> WeightVersion | None:
        """Load the newest version, unless it is loaded already.

        All of it is fetched and checked before the first tensor changes, under `lock`. A delta is
        applied where what it stands on is there, bit for bit; on any doubt, all is fetched anew.
        An adapter (`publish_lora`) is loaded into the model's LoRA layers, or merged into the
        weights that it belongs to. float16, bfloat16, float32 and float64 are cast into each other;
        other dtypes, and shapes, must be equal.

        Args:
            target: A module (its parameters and persistent buffers), several by name, or a dict
                of tensors, `DTensor`s and `TensorShard`s. Into other modules than those of the last
                call all is loaded; a dict must always be of the same tensors.
            strict: Demand the same names on both sides; "model": all names of the target, whatever
                else is published; False: load those that both have.
            in_place: Receive straight into the tensors, while `lock` is held: no memory beside
                them, but when it breaks off, they hold a mixture until the next call succeeds.

        Returns:
            What was loaded, or None when nothing is newer.

        Raises:
            WeightMismatch: Names, shapes or dtypes differ; nothing was loaded.
            WeightCorrupt: A chunk does not match its checksum; nothing was loaded.
            DecodeError: A manifest is damaged; nothing was loaded.
            WeightError: Chunks were evicted again and again while they were fetched.
            WeightsTorn: `in_place` broke off.
            StoreUnavailable: Redis stayed away.
            ConfigError: `target` or `strict` is none, or a `standby` of this subscriber is open.
        """
        wanted = LoadTarget(target_shards(target), checked_strict(strict))
        with self._own_copy():
            self._meet(target)
            if not in_place:
                return self._trying(self._copy, lambda pin: self._poll(pin, target, wanted))
            live = self._live = self._live or InPlaceCopy(self._catalogue, wanted)
            live.wanted = wanted
            if not live.torn and self._catalogue.other_than(self._version or 0) is None:
                return None  # without waiting for the lock
            with self.lock:
                try:
                    found = self._trying(live, lambda pin: self._poll_live(live, pin, target))
                except BaseException as error:
                    if live.torn:
                        self._version = None
                    if self._version is None and live.written and isinstance(error, RedrbError):
                        raise self._torn(str(error)) from error
                    raise
                if live.torn:  # and what would mend it is gone
                    self._version = None
                    raise self._torn("Nothing is published any more.")
                return found

    def standby(self, target: Target, *, strict: Strict = True) -> WeightStandby:
        """Return what fetches new versions in a thread, and swaps them in when it is asked to.

        Until it is closed, it alone loads what this subscriber follows.

        Args:
            target: As in `poll`.
            strict: As in `poll`.

        Raises:
            ConfigError: There is one already.
        """
        return WeightStandby(self.ahead(target, strict=strict))

    def ahead(self, target: Target, *, strict: Strict = True) -> PreparedLoad:
        """Return the two steps of which `poll` consists, for who brings a thread of its own.

        Until it is closed, it alone loads what this subscriber follows.

        Args:
            target: As in `poll`.
            strict: As in `poll`.

        Raises:
            ConfigError: There is one already, or a standby.
        """
        wanted = LoadTarget(target_shards(target), checked_strict(strict))
        return PreparedLoad(self._lend(target), target, wanted)

    def fetch(self, version: int | None = None) -> dict[str, Tensor]:
        """Return a whole state dict on the CPU, in memory of its own; tied tensors stay tied.

        Of an adapter, its `lora_A` and `lora_B`.

        Args:
            version: One that is kept; default: the newest.

        Raises:
            WeightError: There is no such version.
            WeightCorrupt: A chunk does not match its checksum.
            DecodeError: A manifest is damaged.
            StoreUnavailable: Redis stayed away.
        """
        version = checked_int_or_none("version", version, 1, MAX_VERSION)
        copy = PrivateCopy(self._catalogue)
        current = self._trying(copy, lambda pin: self._fetch(copy, pin, version))
        if current.adapter is not None:
            return current.adapter.tensors
        return dict(named_tensors(current.state)) if current.state is not None else {}

    def adapter(self, version: int | None = None) -> Adapter:
        """Return an adapter's tensors and settings, for `save_adapter`; default: the newest.

        Raises:
            WeightError: There is no such version, or it is no adapter.
        """
        copy = PrivateCopy(self._catalogue)
        current = self._trying(copy, lambda pin: self._fetch(copy, pin, version, only_adapter=True))
        if current.adapter is None:
            raise DecodeError(f"weights {self._name!r}: what was fetched is no adapter.")
        return current.adapter

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the newest version by name, if it is newer than the last one loaded.

        This is what inference engines take, such as vLLM's `model.load_weights(...)`. Tensors are
        on the CPU and share memory with this subscriber: copy them, and do not change them. When
        the last was taken, `version` is the version.

        Raises:
            WeightError: The newest version is an adapter: engines load these from a folder, see
                `adapter`.
            WeightCorrupt, DecodeError, StoreUnavailable: As `poll` does.
        """
        with self._own_copy(), Pin(self._catalogue) as pin:
            epoch = self._epoch
            current, held = self._again(self._copy, lambda: self._held(pin))
            with held:
                if current is None:
                    return
                if current.state is None or current.adapter is not None:
                    raise WeightError(
                        f"version {current.described.version} of weights {self._name!r} is an "
                        "adapter: save it with redrb.save_adapter, and let the engine load it."
                    )
                found = named_tensors(current.state)
        # without the lock: whoever takes the tensors may stop in the middle
        for name, tensor in found:
            if self._epoch != epoch:
                raise self._used_meanwhile()
            yield name, tensor
        if self._epoch != epoch:  # the last one was not used before that
            raise self._used_meanwhile()
        self._note(current.described.version)

    def wait(self, newer_than: int | None = None, *, timeout: float | None = None) -> WeightVersion:
        """Wait until a version is published, without polling; nothing is loaded.

        Args:
            newer_than: Wait for a version larger than this; default: for another one than was
                loaded last (a smaller one, too: a server that lost its data counts from 1 again).
            timeout: Seconds; None waits for ever.

        Returns:
            The newest version.

        Raises:
            WeightTimeout: None came in time.
            StoreUnavailable: Redis stayed away.
        """
        after = (self._version or 0) if newer_than is None else newer_than
        after = checked_int("newer_than", after, 0, MAX_VERSION)
        timeout = checked_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            patience_s = min(left, self._catalogue.client.retry_s)
            look = self._catalogue.newer_than
            if newer_than is None:
                look = self._catalogue.other_than
            found = look(after, retry_s=patience_s)
            if found is not None:
                return found
            if not left:
                raise self._timeout(after, timeout or 0.0)
            self._block(after, min(left, _BLOCK_S), retry_s=patience_s)

    @contextmanager
    def _own_copy(self) -> Iterator[None]:
        """Hold the copy, unless it is lent."""
        if self._is_lent:  # without waiting for what is being fetched
            raise taken(self._name)
        if not self._reading.acquire(timeout=_BUSY_S):
            raise ConfigError(
                f"another thread uses this subscriber of weights {self._name!r} since {_BUSY_S:g} "
                "s: its fetch is slow, or it waits for the lock, which this thread must not hold "
                "while it calls."
            )
        try:
            if self._is_lent:
                raise taken(self._name)
            self._epoch += 1
            yield
        finally:
            self._reading.release()

    def _lend(self, target: Target) -> SubscriberAccess:
        with self._own_copy():
            self._meet(target)
            self._is_lent = True
        return SubscriberAccess(
            self._catalogue,
            self._copy,
            self.lock,
            self._reading,
            version=lambda: self._version,
            loaded=self._loaded,
            wait=self._wait,
            trying=self._trying,
            plan=self._plan,
            ended=self._end_lending,
        )

    def _end_lending(self) -> None:
        self._is_lent = False

    def _loaded(self, version: int | None) -> None:
        """Note what the target has from now on; None: a mixture."""
        self._note(version)
        if version is not None and self._live is not None:
            self._live.settle()

    def _note(self, version: int | None) -> None:
        self._version = version
        if version is not None:
            self._catalogue.loaded(version)

    def _torn(self, why: str) -> WeightsTorn:
        return WeightsTorn(
            f"weights {self._name!r}: an update in place broke off, so the model holds a mixture "
            f"of versions: poll again before it is used. {why}"
        )

    def _used_meanwhile(self) -> WeightError:
        return WeightError(
            f"the tensors of weights {self._name!r} were not all taken before this subscriber was "
            "used again: take them from the beginning."
        )

    def _held(self, pin: Pin) -> tuple[FetchedVersion | None, ExitStack]:
        """Return the newest version for `named_tensors`, and what lets go of it."""
        with ExitStack() as scope:
            used = self._version or 0
            context = self._copy.current(pin, used=used, needed=lambda _: None)
            return scope.enter_context(context), scope.pop_all()

    def _wait(self, version: int, seconds: float) -> WeightVersion | None:
        """Return the newest version if it is another, after waiting for one so long at most."""
        patience_s = min(seconds, self._catalogue.client.retry_s)
        found = self._catalogue.other_than(version, retry_s=patience_s)
        if found is None:
            self._block(version, seconds, retry_s=patience_s)
        return found or self._catalogue.other_than(version, retry_s=patience_s)

    def _meet(self, target: Target) -> None:
        """Forget what was loaded, if it was loaded into other modules."""
        modules = _modules(target)
        before, self._modules = self._modules, [weakref.ref(module) for module in modules]
        if before and modules != [reference() for reference in before]:
            self._version = self._live = None
            self._adapters = AdapterLoader()

    def _poll(self, pin: Pin, target: Target, wanted: LoadTarget) -> WeightVersion | None:
        used = self._version or 0
        with self._copy.current(pin, used=used, needed=wanted.chunks) as current:
            if current is None:
                return None
            load = self._plan(target, wanted, current)
            with self.lock:
                self._loading(load, current)
            return current.described

    def _loading(self, load: Callable[[], None], current: FetchedVersion) -> None:
        """Load, and note the version; when it breaks off, that there is none."""
        self._version, before = None, self._version
        try:
            load()
        except WeightMismatch:  # is found before anything changes
            self._version = before
            raise
        self._loaded(current.described.version)

    def _plan(
        self, target: Target, wanted: LoadTarget, current: FetchedVersion
    ) -> Callable[[], None]:
        """Check what is to be loaded, and return what does it; the caller of that holds `lock`."""
        changes = self._adapters.plan(target, wanted, current)

        def load() -> None:
            if current.state is not None:
                wanted.load(current.state, adopt=current.shared and _is_models(target))
            changes()

        return load

    def _poll_live(self, live: InPlaceCopy, pin: Pin, target: Target) -> WeightVersion | None:
        used = self._version or 0
        with live.current(pin, used=used, needed=live.wanted.chunks) as current:
            if current is None:
                return None
            self._version, before = None, self._version
            changes = self._adapters.plan(target, live.wanted, current)
            if current.state is None:
                self._version = before  # nothing has changed yet
            else:
                live.wanted.load(current.state)
            changes()
            self._loaded(current.described.version)
            return current.described

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
            told = f"the newest is {newest.version}" if newest else "nothing is published yet"
            what = "" if version is None else f"version {version} of "
            raise WeightError(f"no {what}weights {self._name!r} to fetch: {told}.")
        if steps[-1].how == "lora" or only_adapter:
            steps = steps[-1:]
        return copy.follow(pin, steps, lambda _: None)

    def _trying(self, copy: StateCopy, attempt: Callable[[Pin], T]) -> T:
        """Run an attempt, and again from the newest version when something is gone or damaged."""
        with Pin(self._catalogue) as pin:
            return self._again(copy, lambda: attempt(pin))

    def _again(self, copy: StateCopy, attempt: Callable[[], T]) -> T:
        for _ in range(_ATTEMPTS - 1):
            try:
                return attempt()
            except (ChunkGoneError, WeightCorrupt):
                copy.forget()
        try:
            return attempt()
        except ChunkGoneError as error:
            copy.forget()
            raise WeightError(
                f"weights {self._name!r}: chunks were gone {_ATTEMPTS} times while they were "
                "fetched. Let the publisher keep more versions (keep=), and check that the "
                "server's maxmemory-policy is noeviction."
            ) from error
        except WeightCorrupt:
            copy.forget()
            raise

    def _block(self, version: int, seconds: float, *, retry_s: float) -> None:
        """Wait until there may be a version larger than `version`, at most `seconds`."""
        client, versions = self._catalogue.client, self._catalogue.keys.versions

        def attempt() -> None:
            with client.connection() as connection:
                silence = connection.socket_timeout
                block_s = seconds if silence is None else min(seconds, silence / 2)
                block_ms = max(1, round(block_s * 1000))
                pipeline = Pipeline()
                pipeline.add("XREAD", "BLOCK", block_ms, "STREAMS", versions, f"{version}-0")
                pipeline.send(connection)
                reply = read_reply(connection)
            if isinstance(reply, Exception):
                raise reply

        client.retrying(attempt, retry_s=retry_s)

    def _timeout(self, version: int, waited_s: float) -> WeightTimeout:
        newest = self._catalogue.newer_than(0, retry_s=0)
        return WeightTimeout(
            name=self._name,
            newer_than=version,
            newest=newest.version if newest else None,
            waited_s=waited_s,
        )


def _modules(target: Target) -> list[nn.Module]:
    parts = [target] if isinstance(target, nn.Module) else target.values()
    return [part for part in parts if isinstance(part, nn.Module)]


def _is_models(target: Target) -> bool:
    return isinstance(target, nn.Module) or len(_modules(target)) == len(target)
