"""A trainer's side of weight updates: published once, and announced to all its makers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.keys import maker_key, partial_weights, trainer_key
from redrb.runtime.announcements import (
    MAX_REASON,
    Announcement,
    AnnouncementReader,
    announce,
)
from redrb.weights import WeightPublisher, WeightSubscriber, WeightVersion
from redrb.weights.lora.layers import lora_of
from redrb.weights.tensors.dtypes import published_dtype
from redrb.weights.tensors.names import models_tensors
from redrb.weights.tensors.wrapping import unwrapped
from redrb.weights.wire.lora_config import LoraConfig

LoraAdapter: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, LoraConfig]]


class Broadcast:
    """Publishes the models of one trainer as one version, so that no maker mixes versions of them.

    Full updates are published as weights `<trainer>`. Updates of the trained tensors, and LoRA
    adapters, are published as `<trainer>.partial`. Versions count up through both. Tensors and
    layers are named `<model>.<name>`.

    Attributes:
        version: The newest version, 0 before the first.
        published: The versions that the last `push` published.
        reward_at_end: The reward at which the job was over with the newest version; None: unknown.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        trainer: str,
        makers: Sequence[str],
        *,
        dtype: str | torch.dtype | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        published_dtype(dtype)  # checked before anything is sent
        self._client = client
        self._dtype = dtype
        self.published: tuple[WeightVersion, ...] = ()
        self._namespace = namespace
        self._trainer = trainer
        self._names = (trainer, partial_weights(trainer))
        self._keys = [maker_key(namespace, maker) for maker in makers]
        self._publishers: dict[str, WeightPublisher] = {}
        self._uncertain = False
        self._run = uuid.uuid4().hex  # as in Announcement
        self._announcement = Announcement(trainer, 0, run=self._run, settings=settings or {})
        self.version = self._newest_version()  # of an earlier run
        # before there are weights, so that named makers follow no other trainer
        self._trainer_key = trainer_key(namespace, trainer)
        newest = self._newest_announcement()
        at_newest = self.version == max(newest.full, newest.partial)
        changed = bool(settings) and newest.settings != settings
        self.reward_at_end = newest.reward if at_newest and not changed else None
        if newest.ended or changed:  # the job goes on: a trainer of this name has started again
            newest = replace(
                newest,
                ended="",
                reward=None if changed else newest.reward,
                settings=settings or newest.settings,
            )
            announce(client, [*self._keys, self._trainer_key], newest)
        elif makers:
            announce(client, self._keys, newest)
        self._keys.append(self._trainer_key)

    def take_over(self, models: Mapping[str, nn.Module], *, fence: bool) -> int:
        """Load the newest published update; with `fence`, also fence earlier trainers of this name.

        Returns:
            Its version, 0 if nothing is published.

        Raises:
            WeightMismatch: The update does not fit the models, which keep their weights.
        """
        for name in self._names if fence else ():
            self._publisher(name)
        full, partial = map(self._subscriber, self._names)
        inner = {name: unwrapped(model) for name, model in models.items()}
        if full.poll(inner) is None:
            return 0
        newest = partial.latest()
        if newest is not None and newest.version > (full.version or 0):
            partial.poll(inner, strict=False)
        if fence and self._newest_announcement().full < (
            full.version or 0
        ):  # the earlier trainer died before it announced it
            announce(self._client, self._keys, replace(self._announcement, full=full.version or 0))
        return max(full.version or 0, partial.version or 0)

    def push(
        self,
        models: Mapping[str, nn.Module],
        *,
        tensors: Mapping[str, Tensor] | None = None,
        fully: bool,
        lora_only: bool = False,
    ) -> int:
        """Publish the models' weights and announce them to makers; return the version.

        Args:
            tensors: Their whole tensors, as `whole_tensors` returns them; default: the live ones.

        Raises:
            ConfigError: `lora_only`, and no model has LoRA layers.
            PublisherFenced: Another trainer of this name was started after this one.
        """
        inner = {name: unwrapped(model) for name, model in models.items()}
        tensors = models_tensors(inner) if tensors is None else tensors
        fully = fully or not self._announcement.full
        trained = tensors if fully else _trained(inner, tensors)
        if lora_only and any(
            hasattr(tensor, "full_tensor") for tensor in models_tensors(inner).values()
        ):
            raise ConfigError("update_lora_weights cannot send LoRA weights of sharded models.")
        adapter = _adapter(inner) if lora_only else None
        self.published = ()
        if trained.keys() == tensors.keys() and not (lora_only and not fully):
            self._publish(self._trainer, tensors)
            self._announcement = replace(self._announcement, full=self.version, partial=0)
        if adapter is not None:  # after a full update too: makers without LoRA layers merge it
            self._publish_adapter(adapter, _trained(inner, tensors))
            self._announcement = replace(self._announcement, partial=self.version)
        elif trained.keys() != tensors.keys():
            self._publish(partial_weights(self._trainer), trained)
            self._announcement = replace(self._announcement, partial=self.version)
        announce(self._client, self._keys, self._announcement)
        return self.version

    def end_job(self, why: str, reward: float | None = None) -> None:
        """Announce that the job is over, with the newest versions and the last reward.

        Raises:
            StoreUnavailable: Redis stayed away; some makers may have the announcement.
        """
        newest = self._newest_announcement()
        newest = replace(newest, ended=why[:MAX_REASON] or "it is over", reward=reward)
        announce(self._client, self._keys, newest)

    def _publish_adapter(self, adapter: LoraAdapter, trained: Mapping[str, Tensor]) -> None:
        name = partial_weights(self._trainer)
        before = self._subscriber(name).latest()
        part = 0 if before is None else before.base if before.kind == "lora" else before.version
        if (
            0 < part < self._announcement.full
        ):  # readers would merge into a part from before the full update
            self._publish(name, trained)
        self._publish(name, adapter)

    def _publish(self, name: str, state: Mapping[str, Tensor] | LoraAdapter) -> None:
        publisher = self._publisher(name)
        if self._uncertain:  # an update that was not announced may have been published
            self.version = max(self.version, self._newest_version())
        self._uncertain = True
        publish = publisher.publish_lora if isinstance(state, tuple) else publisher.publish
        published = publish(state, version=self.version + 1)  # type: ignore[arg-type]
        self.version = published.version
        self.published += (published,)
        self._uncertain = False

    def _publisher(self, name: str) -> WeightPublisher:
        """Return the publisher of `name`; creating it fences an earlier one."""
        if name not in self._publishers:
            self._publishers[name] = WeightPublisher(
                self._client, name, namespace=self._namespace, dtype=self._dtype
            )
            self.version = max(
                self.version, self._newest_version()
            )  # the earlier one may just have published
        return self._publishers[name]

    def _newest_announcement(self) -> Announcement:
        """Return the newest announcement of a trainer of this name."""
        newest = AnnouncementReader(self._client, self._trainer_key).newest()
        return newest or Announcement(self._trainer, 0, run=self._run)

    def _subscriber(self, name: str) -> WeightSubscriber:
        return WeightSubscriber(self._client, name, namespace=self._namespace)

    def _newest_version(self) -> int:
        found = (self._subscriber(name).latest() for name in self._names)
        return max((newest.version for newest in found if newest), default=0)


def _trained(
    models: Mapping[str, nn.Module], everything: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of all models that training changes."""
    return {
        name: everything[name]
        for name, tensor in models_tensors(models).items()
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def _adapter(models: Mapping[str, nn.Module]) -> LoraAdapter:
    tensors: dict[str, Tensor] = {}
    configs: dict[str, LoraConfig] = {}
    for model, module in models.items():
        layers, settings = lora_of(module)
        tensors.update({f"{model}.{name}": tensor for name, tensor in layers.items()})
        configs.update({f"{model}.{layer}": config for layer, config in settings.items()})
    if not tensors:
        raise ConfigError(
            "update_lora_weights sends only LoRA weights, but no model has LoRA layers (lora_A and "
            "lora_B): leave update_lora_weights out."
        )
    return tensors, configs
