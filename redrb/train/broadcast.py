"""A trainer's side of weight updates: published once, and announced to all its makers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from redrb.connection import Client
from redrb.errors import ConfigError, DecodeError, WeightCorrupt
from redrb.keys import WeightKeys, maker_key, trainer_key
from redrb.scopes import Closing
from redrb.train.announcements import MAX_REASON, Announcement, AnnouncementReader, announce
from redrb.train.republishing import Republishing
from redrb.train.world import whole_tensors
from redrb.weights import WeightPublisher, WeightSubscriber, WeightVersion
from redrb.weights.lora.layers import lora_of
from redrb.weights.tensors.dtypes import published_dtype
from redrb.weights.tensors.names import unwrapped
from redrb.weights.wire.lora_config import LoraConfig

_log = logging.getLogger("redrb")


class Broadcast(Closing):
    """Publishes the models of one trainer as one version, so that no maker mixes versions of them.

    Tensors and layers are named `<model>.<name>`.

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
        publishes: bool = True,
        dtype: str | torch.dtype | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Announce the trainer to its makers; of ranks only the first `publishes`."""
        published_dtype(dtype)  # checked before anything is sent
        self._publishes, self._gathered = publishes, dict[str, Tensor]()
        if not publishes:
            makers, settings = (), None
        self._client, self._namespace, self._trainer = client, namespace, trainer
        self._dtype = dtype
        self._publisher: WeightPublisher | None = None
        self._republishing: Republishing | None = None
        self.published: tuple[WeightVersion, ...] = ()
        self._announcement = Announcement(trainer, settings=dict(settings or {}))
        latest = self._subscriber().latest()  # of an earlier run
        self.version = latest.version if latest else 0
        # before there are weights, so that named makers follow no other trainer
        self._trainer_key = trainer_key(namespace, trainer)
        self._keys = [maker_key(namespace, maker) for maker in makers]
        newest = self._newest_announcement()
        changed = bool(settings) and newest.settings != settings
        self.reward_at_end = None if changed or self.version != newest.version else newest.reward
        if newest.ended or changed:  # the job goes on: a trainer of this name has started again
            newest = replace(
                newest,
                ended="",
                reward=None if changed else newest.reward,
                settings=dict(settings or newest.settings),
            )
            announce(client, [*self._keys, self._trainer_key], newest)
        elif makers:
            announce(client, self._keys, newest)
        self._keys.append(self._trainer_key)

    def take_over(self, models: Mapping[str, nn.Module]) -> int:
        """Load the newest version; the rank that publishes also fences earlier trainers.

        Of a damaged version nothing is loaded; 0 is returned then, as without a version.
        """
        if self._publishes:
            self._fence_others()
        inner = {name: unwrapped(model) for name, model in models.items()}
        try:
            loaded = self._subscriber().poll(inner)
        except (WeightCorrupt, DecodeError) as damage:
            _log.error("trainer %r starts over with the weights it has: %s", self._trainer, damage)
            return 0
        version = loaded.version if loaded else 0
        if self._publishes and self._newest_announcement().version < version:
            # the earlier trainer died before it announced it
            announce(self._client, self._keys, replace(self._announcement, version=version))
        self.version = max(self.version, version)
        return version

    def push(self, models: Mapping[str, nn.Module], *, fully: bool, lora_only: bool = False) -> int:
        """Publish and announce weights; all ranks call it. See `Trainer.push_weights`."""
        tensors = whole_tensors(models, self._gathered)
        if not self._publishes:
            return self.version
        if lora_only and self._gathered:
            raise ConfigError("update_lora_weights cannot send LoRA weights of sharded models.")
        adapter = _adapter(models) if lora_only else None
        publisher = self._fence_others()
        self.published = ()
        if (
            adapter is None
            or fully
            or not self._announcement.version
            or self._subscriber().latest() is None  # Redis has lost what the adapter belongs to
        ):
            self.published += (publisher.publish(tensors),)
        if adapter is not None:
            self.published += (publisher.publish_lora(adapter),)
        self._announce(self.published[-1])
        if self._republishing is None:
            keys = WeightKeys.of(self._namespace, self._trainer)
            self._republishing = Republishing(self._client, keys, publisher, self._announce)
        return self.version

    def close(self) -> None:
        """Publish nothing more for readers that find the newest version damaged."""
        if self._republishing is not None:
            self._republishing.close()

    def end_job(self, why: str, reward: float | None = None) -> None:
        """Announce that the job is over, with the newest version and the last reward."""
        if not self._publishes:
            return
        self.close()
        newest = self._newest_announcement()
        newest = replace(newest, ended=why[:MAX_REASON] or "it is over", reward=reward)
        announce(self._client, self._keys, newest)

    def _announce(self, published: WeightVersion) -> None:
        self.version = published.version
        self._announcement = replace(self._announcement, version=self.version)
        announce(self._client, self._keys, self._announcement)

    def _fence_others(self) -> WeightPublisher:
        """Return the publisher; its creation fences that of an earlier trainer."""
        self._publisher = self._publisher or WeightPublisher(
            self._client, self._trainer, namespace=self._namespace, dtype=self._dtype
        )
        return self._publisher

    def _newest_announcement(self) -> Announcement:
        newest = AnnouncementReader(self._client, self._trainer_key).newest()
        return newest or Announcement(self._trainer)

    def _subscriber(self) -> WeightSubscriber:
        return WeightSubscriber(self._client, self._trainer, namespace=self._namespace)


def _adapter(
    models: Mapping[str, nn.Module],
) -> tuple[Mapping[str, Tensor], Mapping[str, LoraConfig]]:
    tensors: dict[str, Tensor] = {}
    configs: dict[str, LoraConfig] = {}
    for model, module in models.items():
        layers, settings = lora_of(unwrapped(module))
        tensors.update({f"{model}.{name}": tensor for name, tensor in layers.items()})
        configs.update({f"{model}.{layer}": config for layer, config in settings.items()})
    if not tensors:
        raise ConfigError(
            "update_lora_weights sends only LoRA weights, but no model has LoRA layers (lora_A and "
            "lora_B): leave update_lora_weights out."
        )
    return tensors, configs
