"""`ModelWeights`: published weights for the models of a maker of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from redrb.connection import Client
from redrb.recipe.agreed_settings import agreed_settings
from redrb.runtime.maker_settings import WeightSettings
from redrb.runtime.maker_weights import MakerWeights
from redrb.runtime.stopping import StopRequest

if TYPE_CHECKING:
    from redrb.recipe.episodes import EpisodeRecipe

UPDATE_TIMEOUT_S = 60.0
"""Seconds for which the models may be locked by an update."""


class ModelWeights:
    """Waits for the first weights, and fetches the later ones beside the episodes.

    Attributes:
        client: Connection to Redis.
        namespace: Namespace of the trainer.
        updates: The models with their weights; whoever samples loads new ones there.
    """

    def __init__(
        self,
        client: Client,
        recipe: EpisodeRecipe,
        models: Mapping[str, nn.Module],
        stop: StopRequest,
    ) -> None:
        self.client, self.namespace = client, recipe.namespace
        settings = WeightSettings(
            follow=recipe.weights_name,
            wait_for_first=True,
            first_timeout=recipe.weights_timeout,
            update_timeout=UPDATE_TIMEOUT_S,
            in_flight=recipe.in_flight_updates,
            agree=agreed_settings(recipe),
        )
        self.updates = MakerWeights(
            *(client, recipe.namespace, recipe.worker, models, settings, stop)
        )

    @property
    def name(self) -> str:
        """Name of the trainer whose weights are followed."""
        return self.updates.trainer

    async def update(self) -> None:
        """Wait for the first weights, or until the maker is asked to end.

        Raises:
            WeightTimeout: None were published in time.
            WeightMismatch: They do not fit the models.
            ConfigError: The trainer has other settings than the maker.
        """
        await asyncio.to_thread(self.updates.wait_until_initialised)

    async def follow(self) -> None:
        """With in-flight updates, fetch weights beside sampling until the task is cancelled."""
        with self.updates.prefetching():
            await asyncio.Event().wait()
