"""`RedrbWeightTransferEngine`: a worker of vLLM loads published weights from Redis by itself."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import vllm.envs as server_environment  # type: ignore[import-not-found]
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.parallel_state import get_world_group  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found]
    get_layerwise_info,
)

from redrb import environment
from redrb.connection import Client, connect
from redrb.errors import ConfigError, RedrbError, WeightError, WeightMismatch, WeightsTorn
from redrb.train.engines.adapters import FOLDER, KEPT, place, remove_unused
from redrb.train.engines.labels import parsed
from redrb.train.engines.vllm import BACKEND, NO_LORA, NO_URL, NOT_TOLD, PASSED
from redrb.weights.files.adapter_folder import save_adapter
from redrb.weights.host.locks import FileLock
from redrb.weights.reading.catalogue import Catalogue, Pin, fetching
from redrb.weights.reading.checkpoint import Checkpoint
from redrb.weights.reading.shared_copy import SharedCopy
from redrb.weights.reading.state_copies import FetchedVersion, PrivateCopy
from redrb.weights.tensors.state import StateBytes

T = TypeVar("T")

_ATTEMPTS = 3

_WRITE_S = 60.0
"""Longest wait for another worker of this machine that fetches an adapter."""


@dataclass
class RedrbInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the weights are.

    Attributes:
        name: Name of the weights: that of the trainer.
        namespace: Namespace of the trainer.
        model: Which of the trainer's models the server has; "": weights of one model, whose names
            have no prefix.
        url: As of `redrb.connect`; default: the variable REDRB_URL of the server, which keeps the
            password out of requests. A user that may only read weights suffices.
        host_cache: Share one copy in /dev/shm among all workers of this host.
        adapter: Label of an adapter to be fetched into its folder; "": none.
    """

    name: str
    namespace: str = "default"
    model: str = "actor"
    url: str | None = field(default=None, repr=False)
    host_cache: bool = True
    adapter: str = field(default="", compare=False)


@dataclass
class RedrbUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to load.

    Attributes:
        version: Its number; None: the newest.
        created_s: When it was created, if another one may have got its number since.
    """

    version: int | None = None
    created_s: float | None = None


def _naming(method: Callable[..., None]) -> Callable[..., None]:
    """Begin the messages of errors so that who drives the server knows whose they are.

    vLLM passes on messages, and no classes.
    """

    @wraps(method)
    def named(*args: Any) -> None:
        try:
            method(*args)
        except RedrbError as error:
            raise RuntimeError(f"{BACKEND}{type(error).__name__}: {error}") from error

    return named


class _NoCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the shapes and kinds of numbers of all copies, and makes none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if target.shape != source.shape:
            raise ValueError(f"{list(source.shape)} goes into {list(target.shape)}")
        if target.is_floating_point() != source.is_floating_point():
            raise ValueError(f"{source.dtype} goes into {target.dtype}")
        return target


class RedrbWeightTransferEngine(WeightTransferEngine[RedrbInitInfo, RedrbUpdateInfo]):  # type: ignore[misc]
    """Loads a version into the model of one worker, between two requests of its server.

    The version is fetched and checked, and the names and shapes of its tensors are tried on the
    model, before the first weight changes. Then layers are loaded one after another, by vLLM's
    layerwise reloading. If that breaks off, its weights are a mixture until a later update has
    loaded all of them.
    """

    init_info_cls = RedrbInitInfo
    update_info_cls = RedrbUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._info: RedrbInitInfo | None = None
        self._client: Client | None = None
        self._state: StateBytes | None = None
        self._adapters: deque[FileLock] = deque(maxlen=KEPT)
        self._fitting: int | None = None  # hash of names, shapes and dtypes that fit

    @_naming
    def init_transfer_engine(self, init_info: RedrbInitInfo) -> None:
        """Connect to Redis, unless it is connected to these weights; fetch an adapter of them.

        Raises:
            ConfigError, StoreUnavailable, StoreDenied: As `redrb.connect`. ConfigError also if the
                server takes no adapters, or cannot write them.
            WeightError, WeightCorrupt, DecodeError: The adapter cannot be fetched.
        """
        if init_info != self._info:
            self._connect(init_info)
        if init_info.adapter:
            self._of_first(partial(self._fetch_adapter, init_info.adapter))

    def _connect(self, init_info: RedrbInitInfo) -> None:
        url = init_info.url or environment.variable(environment.URL)
        if url is None:
            raise ConfigError(f"{NO_URL}: start it with one, or give url in init_info.")
        self.shutdown()
        self._client = client = connect(url)
        self._catalogue = Catalogue(client, init_info.name, init_info.namespace)
        self._copy = SharedCopy(self._catalogue) if init_info.host_cache else PrivateCopy()
        self._prefix = f"{init_info.model}." if init_info.model else ""
        self._info = init_info

    def start_weight_update(self) -> None:
        """Do nothing: the model stays as it is until a version is fetched and checked."""

    @_naming
    def receive_weights(self, update_info: RedrbUpdateInfo) -> None:
        """Fetch a version, and load all of it.

        Raises:
            WeightError, WeightCorrupt, DecodeError, StoreUnavailable: It cannot be fetched.
            WeightMismatch: Its tensors do not fit the model.
            ConfigError: The weights have no tensors of this model.
            WeightsTorn: Loading broke off; the weights are a mixture.
        """
        version, created_s = update_info.version, update_info.created_s
        if version is None:
            version, created_s = self._of_first(self._newest)
        self._of_first(partial(self._prepare, version, created_s))
        fetched, checkpoint = self._prepared
        described, self._catalogue.used = fetched.described, None
        try:
            with self._reloading():
                self.model.load_weights(checkpoint.tensors())
        except Exception as error:
            raise WeightsTorn(
                f"loading version {version} of weights {described.name!r} broke off: the server "
                "has a mixture of two versions until all of one is loaded. "
                f"{type(error).__name__}: {error}"
            ) from error
        self._catalogue.used = described
        if fetched.loaded is not None:
            fetched.loaded()

    def finish_weight_update(self) -> None:
        """Do nothing: the weights are loaded, or the update has failed."""

    def shutdown(self) -> None:
        """Close the connection to Redis; the weights stay."""
        client, self._client, self._info, self._state = self._client, None, None, None
        self._adapters.clear()
        if client is not None:
            remove_unused()
            del self._copy, self._catalogue
            client.close()

    def _fetch_adapter(self, label: str) -> None:
        """Have an adapter in its folder, of which vLLM loads it by the label as its name."""
        named, allowed = parsed(label), server_environment.VLLM_ALLOW_RUNTIME_LORA_UPDATING
        if self.vllm_config.lora_config is None or not allowed:
            raise ConfigError(
                f"{NO_LORA}: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        if named is None:
            raise ConfigError(f"adapter={label!r:.80} is no label of a version.")

        def write(folder: Path) -> None:
            found = PrivateCopy().fetch(self._catalogue, named.version, only_adapter=True)
            if found.adapter is None or round(found.described.created_s * 1000) != named.created_ms:
                raise WeightError(f"version {named.version} is not the adapter {label} any more.")
            own = found.adapter.of(self._prefix)
            save_adapter(folder, own.tensors, own.configs)

        folder = place(label)
        try:
            used = (folder.use(FOLDER, write, timeout=_WRITE_S) for _ in range(_ATTEMPTS))
            lock = next((each for each in used if each is not None), None)
            if lock is None or folder.path(FOLDER).lstat().st_uid != os.geteuid():
                raise WeightError(f"{folder.path(FOLDER)} is not usable, or of another user.")
        except OSError as error:
            raise WeightError(f"{folder.path(FOLDER)} is not usable: {error}.") from error
        self._adapters.append(lock)
        remove_unused()

    def _of_first(self, step: Callable[[], T]) -> T:
        """Take a step in all workers of this server; return the result of the first.

        If it fails in one of them, all raise an error: then none changes its model alone.
        """
        error: Exception | None = None
        found: Any = None
        try:
            found = step()
        except Exception as failed:  # noqa: BLE001  (the others wait for this worker's word)
            error = failed
        workers = self.parallel_config.world_size
        if workers > 1:
            group = get_world_group().cpu_group
            mine = found, None if error is None else f"{BACKEND}{type(error).__name__}: {error}"
            of_all: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(of_all, mine, group=group)
            found = of_all[0][0]
            failures = [text for _, text in of_all if text is not None]
            if failures and error is None:
                raise WeightError(f"another worker of this server has failed: {failures[0]}")
        if error is not None:
            raise error
        return cast("T", found)

    def _ready(self) -> Catalogue:
        if self._info is None:
            raise ConfigError(f"{NOT_TOLD}, with the weights' name.")
        return self._catalogue

    def _newest(self) -> tuple[int, float]:
        newest = self._ready().newer_than(0)
        if newest is None:
            raise self._catalogue.missing(None)
        return newest.version, newest.created_s

    def _prepare(self, version: int, created_s: float | None) -> None:
        """Fetch a version, and check that it fits the model."""

        def attempt(pin: Pin) -> FetchedVersion:
            found = self._copy.reach(pin, needed=lambda _: None, wanted=version)
            if found is None:
                raise self._catalogue.missing(version)
            return found

        used = self._ready().used
        is_smaller = created_s is not None and used is not None and version < used.version
        if used and is_smaller and self._catalogue.entry(used.version) == used:
            raise WeightError(f"{PASSED}, {used.version}, which another maker has loaded.")
        fetched = fetching(self._catalogue, self._copy.forget, attempt)
        described = fetched.described
        if created_s is not None and described.created_s != created_s:
            raise WeightError(
                f"version {version} of weights {described.name!r} is another one than was asked "
                "for: Redis was emptied meanwhile. Load the newest version."
            )
        self._state = fetched.state or self._state
        checkpoint = Checkpoint.of(described, self._state, fetched.adapter, self._prefix)
        self._check_fits(checkpoint)
        self._prepared = fetched, checkpoint

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        """Load tensors without data, which change nothing, or raise WeightMismatch."""
        shapes = hash(
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in checkpoint.stored.items())
        )
        if shapes == self._fitting or self.model_config.quantization is not None:
            return  # quantised layers look at the data: their loaders check
        expected = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        with self._reloading(is_trial=True), _NoCopies():  # type: ignore[no-untyped-call]
            try:
                loaded = self.model.load_weights(
                    (name, torch.empty_like(tensor, device="meta"))
                    for name, tensor in checkpoint.stored.items()
                )
            except Exception as error:  # loaders raise what they like
                raise WeightMismatch(
                    f"weights {self._catalogue.name!r} do not fit the server's model "
                    f"{self.model_config.model!r}: {type(error).__name__}: {error}"
                ) from error
        missing = expected - set(loaded) if loaded is not None else set()
        if missing:
            raise WeightMismatch(
                f"weights {self._catalogue.name!r} have no tensors for {len(missing)} parameters "
                f"of the server's model {self.model_config.model!r}: "
                f"{', '.join(sorted(missing)[:3])}."
            )
        self._fitting = shapes

    @contextmanager
    def _reloading(self, *, is_trial: bool = False) -> Iterator[None]:
        """Collect the tensors of each layer, which changes once it has all of them.

        In a trial, and after an error, layers that have not changed stay as they are.
        """
        initialize_layerwise_reload(self.model)
        done = False
        try:
            if is_trial:
                self._load_at_once()
            yield
            done = not is_trial
        finally:
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if not done and info.can_load():
                    # nothing was loaded, and nothing was to be
                    info.load_numel, info.load_numel_total = 0, 0
                    info.loaded_weights.clear()
            finalize_layerwise_reload(self.model, self.model_config)

    def _load_at_once(self) -> None:
        """Let tensors go into the model's parameters without data, which stand there now."""
        for layer in self.model.modules():
            own: list[Any] = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            for tensor in own:
                loader: Any = getattr(tensor, "weight_loader", None)
                while getattr(loader, "__name__", "") == "online_process_loader":
                    loader = tensor.weight_loader = loader.__wrapped__
