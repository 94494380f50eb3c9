"""`EngineWeights`: gives each published version to an inference server."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import shutil
import socket
import time
from functools import partial
from pathlib import Path

from tenacity import wait_fixed

from redrb.connection import Client, check_client
from redrb.connection.outage import Outage
from redrb.connection.retries import insist_async
from redrb.errors import (
    ConfigError,
    DecodeError,
    RedrbError,
    WeightCorrupt,
    WeightError,
    WeightTimeout,
)
from redrb.staging import check_writable, may_pass
from redrb.train.engines.engine import (
    Engine,
    Published,
    WeightsKeptError,
    WeightsReplacedError,
    WeightsUnreachableError,
)
from redrb.train.engines.labels import Named, weights_label
from redrb.weights import WeightVersion
from redrb.weights.files.safetensors import SINGLE, save_safetensors
from redrb.weights.host.locks import FileLock
from redrb.weights.host.versions import HostVersions
from redrb.weights.reading.catalogue import Catalogue
from redrb.weights.reading.checkpoint import Checkpoint
from redrb.weights.reading.missing import MissingWeights
from redrb.weights.reading.standby import Held, next_move
from redrb.weights.reading.state_copies import PrivateCopy

_PAUSE_S = 1.0
"""Pause before weights that another maker has replaced are loaded again."""

_log = logging.getLogger("redrb")

_WAIT_S = 1.0
"""Longest wait for a version; then `follow` can be cancelled."""

_WRITE_S = 600.0
"""Longest wait for another process that writes a version."""

_LOADINGS = 10
"""Most loadings of one `update`, if the server is started again or gets other weights meanwhile."""

_PASSING = (WeightsReplacedError, WeightCorrupt, DecodeError)
"""Errors after which `update` loads once more: damage passes with the next version."""


class EngineWeights:
    """Lets a server load each published version, from Redis if it can, else from a folder.

    A vLLM with redrb's backend fetches versions by itself, from its own REDRB_URL or else from that
    of `client`; nothing is shared with it. Any number of makers may drive one server: each version
    is loaded once.

    Other servers load a folder of Hugging Face, which must be on a file system that maker and
    server share; /dev/shm is one on one machine. It holds one version, and two during an update;
    makers of one machine share them. A maker that writes a version keeps a copy of the weights in
    memory, so that the next one costs its delta.

    A vLLM with redrb's backend and LoRA loads an adapter beside the weights that it belongs to;
    elsewhere it is merged into them.

    Attributes:
        client: Connection to Redis.
        name: Name of the weights: that of the trainer.
        namespace: Namespace of the trainer.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        engine: Engine,
        folder: str | Path | None = None,
        *,
        namespace: str = "default",
        model: str = "actor",
        config: str | Path | None = None,
    ) -> None:
        """Make it.

        Args:
            client: From `redrb.connect`.
            name: Name of the weights: that of the trainer.
            engine: The server.
            folder: Where versions are written; None: the server must have redrb's backend.
            namespace: Namespace of the trainer.
            model: Which of the trainer's models the server has; "": weights of one model, whose
                names have no prefix.
            config: Folder of the model, whose JSON files and tokenizer are copied to each version.

        Raises:
            ConfigError: `config` is no folder, or `folder` cannot be written.
        """
        check_client(client)
        self._catalogue = Catalogue(client, name, namespace)
        self._copy = PrivateCopy()
        self.client, self.name, self.namespace = client, name, namespace
        self._engine = engine
        self._where = {"name": name, "namespace": namespace, "model": model}
        self._folder = None if folder is None else Path(folder)
        try:
            if self._folder is not None:
                check_writable(self._folder, "version")
        except OSError as error:
            if not may_pass(error):  # else the first version may be written
                raise ConfigError(
                    f"the folder {folder} for weights cannot be written: {error.strerror}."
                ) from error
        # all that the server is given with a version, beside its number
        given = repr((namespace, name, model, str(config)))
        self._family = hashlib.sha256(given.encode()).hexdigest()[:16]
        self._versions: HostVersions | None = None
        self._used: FileLock | None = None
        self._given: WeightVersion | None = None
        self._damaged: WeightVersion | None = None  # the newest version, if that is damaged
        self._missing: MissingWeights | None = None
        self._looked = asyncio.Event()  # set when `follow` has loaded a version, or found none
        self._prefix = f"{model}." if model else ""
        self._config = None if config is None else Path(config)
        if self._config is not None and not self._config.is_dir():
            raise ConfigError(f"config={str(config)!r}: give the folder of the model.")

    async def update(self, *, timeout: float | None = None) -> int:
        """Wait for another version than the server's, and load it.

        After Redis has lost its data, a smaller number is another version. If the server has lost
        its weights, the newest version is loaded again. Damage is logged, and the next version is
        waited for.

        Returns:
            The version.

        Raises:
            WeightTimeout: None was published in time.
            ConfigError: The newest version has no tensors of `model`.
            EngineError: The server could not load it.
            WeightError, StoreUnavailable: As `WeightSubscriber.fetch` does.
        """

        async def load() -> WeightVersion:
            found = await self._newest(timeout)
            label = weights_label(found.version, found.created_s, self._family)
            try:
                source = await self._source(found, label)
                is_later = partial(self._is_later, found)
                await self._engine.update(source, found.version, label, is_later=is_later)
            except (WeightCorrupt, DecodeError, WeightsKeptError) as error:
                if not isinstance(error, WeightsUnreachableError):
                    self._damaged = found
                raise
            self._damaged = None
            return found

        loadings = itertools.count(1)
        self._given = await insist_async(
            load,
            lambda error: _log.warning("%s", error),
            passes=lambda error: isinstance(error, _PASSING) or _is_damage(error),
            over=lambda: next(loadings) >= _LOADINGS,
            pauses=wait_fixed(_PAUSE_S),
        )
        return self._given.version

    async def follow(self) -> None:
        """Give each version to the server, until the task is cancelled; errors are logged."""
        outage = Outage("the server does not get the newest weights")

        async def update() -> None:
            try:
                await self.update(timeout=_WAIT_S)
            except WeightTimeout:
                pass
            except WeightsUnreachableError:
                raise
            except WeightsKeptError as error:
                _log.warning("%s The server goes on with what it has.", error)

        while True:
            await insist_async(
                update,
                outage.failed,
                passes=lambda error: isinstance(error, (RedrbError, OSError)),
            )
            outage.over()
            self._looked.set()
            self._looked = asyncio.Event()

    async def reach(self, version: int) -> None:
        """Wait until `follow`, which runs beside, has given this version to the server.

        Ends also if there is no newer version, as when the weights were deleted.
        """
        while self._given is None or self._given.version < version:
            before = self._given
            await self._looked.wait()
            if self._given is before:
                return

    async def introduce(self) -> Path | None:
        """Tell the server where the weights are; return the folder if it loads folders only.

        Raises:
            ConfigError: It does, and no folder was given.
            EngineError: It cannot reach these weights, or is away.
        """
        if await self._engine.receives(self._where, self.client.url):
            return None
        if self._folder is None:
            raise ConfigError(
                f"{self._engine.where} fetches no weights from Redis: start vLLM with "
                '--weight-transfer-config \'{"backend": "redrb"}\', with redrb beside it, '
                "or give a folder that it can read."
            )
        return self._folder

    def beside(self, engine: Engine) -> EngineWeights:
        """Return the same for another server; both use one copy of the weights in memory."""
        other = EngineWeights(
            self.client, engine=engine, folder=self._folder, config=self._config, **self._where
        )
        other._copy = self._copy
        return other

    def close(self) -> None:
        """Remove the version in the folder, unless another maker of this machine uses it."""
        if self._used is not None and self._versions is not None:
            self._used.release()
            self._used = None
            self._versions.remove_unused()

    async def _newest(self, timeout: float | None) -> WeightVersion:
        """Wait for a version in slices, since a thread that waits cannot be cancelled."""
        began = time.monotonic()
        ends = math.inf if timeout is None else began + timeout
        if self._missing is None:
            self._missing = MissingWeights(self.client, self.namespace, self.name)
        while True:
            left = max(0.0, min(_WAIT_S, ends - time.monotonic()))
            found = await asyncio.to_thread(self._look, left)
            if found is not None:
                return found
            if self._given is None:
                await asyncio.to_thread(self._missing.log)
            if time.monotonic() >= ends:
                have = None if self._given is None else self._given.version
                waited_s = time.monotonic() - began
                raise WeightTimeout(
                    name=self.name, newer_than=have or 0, newest=have, waited_s=waited_s
                )

    def _look(self, seconds: float) -> WeightVersion | None:
        """Return the newest version if the server does not have it; else wait for a larger one."""
        newest = self._catalogue.newer_than(0)
        if newest is not None:
            given = None if self._engine.has_lost_weights else self._given
            held = Held(self._damaged or given)
            if next_move(newest, held) == "fetch":
                return newest
        return self._catalogue.wait_once(newest.version if newest else 0, seconds)

    async def _is_later(self, than: WeightVersion, named: Named) -> bool:
        """Return whether a label names a published version that is later than another one.

        Numbers do not tell: they begin anew after Redis has lost its data, and its clock may too.
        """
        if named.version <= than.version:
            return False
        found = await asyncio.to_thread(self._catalogue.entry, named.version)
        return found is not None and round(found.created_s * 1000) == named.created_ms

    async def _source(self, found: WeightVersion, label: str) -> Path | Published:
        """Return from where the server loads a version."""
        folder = await self.introduce()
        if folder is None:
            return await asyncio.to_thread(self._published, found)
        return await asyncio.to_thread(self._use, folder, label, found)

    def _published(self, found: WeightVersion) -> Published:
        below = self._catalogue.entry(found.base) if found.kind == "lora" else None
        base = None if below is None or below.kind == "lora" else self._published(below)
        label = weights_label(found.version, found.created_s, self._family)
        return Published(self._where, found.version, found.created_s, label, base)

    def _use(self, folder: Path, label: str, found: WeightVersion) -> Path:
        """Return the folder of a version; it stays until the next call, or raise OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._versions is None:
            # of this machine: others on a common file system have their own
            self._versions = HostVersions(folder, f"{socket.gethostname()}.redrb", SINGLE)
        write = partial(self._write, found)
        ends = time.monotonic() + _WRITE_S
        while (lock := self._versions.use(label, write, timeout=ends - time.monotonic())) is None:
            continue  # another process has written another version
        before, self._used = self._used, lock
        if before is not None:
            before.release()
        self._versions.remove_unused()
        return self._versions.path(label)

    def _write(self, found: WeightVersion, path: Path) -> None:
        fetched = self._copy.fetch(self._catalogue, found.version, with_base=True)
        if next_move(found, Held(fetched.described)) != "nothing":
            raise WeightError(f"weights {self.name!r} have changed while they were fetched.")
        found_in = fetched.described, fetched.state, fetched.adapter
        chosen = Checkpoint.of(*found_in, self._prefix)
        path.mkdir()
        for file in self._config.iterdir() if self._config else ():
            if file.is_file() and file.suffix not in (".safetensors", ".bin"):
                shutil.copy2(file, path / file.name)
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        save_safetensors(path / SINGLE, dict(chosen.tensors()))


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, WeightsKeptError) and error.is_damage
