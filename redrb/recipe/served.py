"""The inference server of a recipe's makers, and the weights that it follows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from redrb.algorithms import Completions, Reward
from redrb.connection import Client
from redrb.errors import ConfigError
from redrb.experience import BufferItem
from redrb.keys import trainer_key
from redrb.recipe.job_settings import agreed_settings
from redrb.recipe.pretrained import config_folder
from redrb.train.announcements import Agreement, AnnouncementReader
from redrb.train.engines import Engine, EngineWeights, Generation, SGLangEngine, VLLMEngine

if TYPE_CHECKING:
    from redrb.recipe.language import GRPORecipe

R = TypeVar("R")

_WAIT_S = 1.0
"""Longest wait for an announcement; then the maker looks whether it is to end."""


def engine_of(recipe: GRPORecipe) -> Engine:
    """Return the server of a recipe; raises ConfigError if its model is no folder or name."""
    model = recipe.model()
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"--engine {recipe.engine} needs a model that the server can load: let model() return "
            "a folder or a name of Hugging Face."
        )
    if recipe.engine == "sglang":
        return SGLangEngine(recipe.engine_url)
    return VLLMEngine(recipe.engine_url, model=str(model))


def sampling_of(recipe: GRPORecipe) -> dict[str, Any]:
    """Return how a server samples for a recipe."""
    found: dict[str, Any] = {"temperature": recipe.temperature}
    if recipe.top_p < 1:
        found["top_p"] = recipe.top_p
    if recipe.top_k:
        found["top_k"] = recipe.top_k
    return found


class ServedEngine:
    """The engine of episodes on a server: it samples as the settings of the recipe say.

    Attributes:
        ended: Whether sampling is to end with what there is.
    """

    def __init__(self, recipe: GRPORecipe) -> None:
        """Make an engine; it connects at the first request."""
        self.server, self.ended = engine_of(recipe), False
        self._most, self._ends = recipe.max_new_tokens, recipe.ends
        self._sampling = sampling_of(recipe)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    @property
    def where(self) -> str:
        """URL of the server without user and password."""
        return self.server.where

    @property
    def away_s(self) -> float:
        """Seconds for which requests that are under way have waited for the server; 0: none has."""
        return self.server.away_s

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        routed_tokens: int = 0,
    ) -> Generation:
        """Sample one completion; see `LocalEngine.generate`."""
        return await self.server.generate(
            tokens,
            max_new_tokens=self._most if max_new_tokens is None else max_new_tokens,
            stop_token_ids=[*self._ends, *stop_token_ids],
            routed_tokens=routed_tokens,
            **self._sampling,
        )

    async def call(self, function: Callable[[], R]) -> R:
        """Call a function in a thread."""
        return await asyncio.to_thread(function)

    async def abort(self) -> None:
        """End all requests, also later ones, with what was sampled so far."""
        self.ended = True
        await self.server.abort()


class ServedWeights(EngineWeights):
    """Gives the weights of a recipe's trainer to the server, if the trainer has its settings.

    Attributes:
        fetch_s: 0: completions are sampled while weights are fetched.
    """

    fetch_s = 0.0

    def __init__(
        self, client: Client, recipe: GRPORecipe, engine: Engine, fail: Callable[[Exception], None]
    ) -> None:
        """Make it; `fail` is called if a trainer with other settings starts."""
        name, namespace = recipe.weights_name, recipe.namespace
        shared = Path("/dev/shm")  # noqa: S108 (memory, that a server on this machine reads)
        root = shared if shared.is_dir() else Path(tempfile.gettempdir())
        super().__init__(
            client,
            name,
            engine,
            recipe.engine_folder or root / f"redrb-{namespace}-{name}",
            namespace=namespace,
            config=config_folder(recipe.model()),
        )
        self._reader = AnnouncementReader(client, trainer_key(namespace, name))
        self._agreement = Agreement(recipe.worker, agreed_settings(recipe))
        self._first_timeout, self._fail = recipe.weights_timeout, fail

    @property
    def version(self) -> int | None:
        """Version of the weights that the server has; None before the first."""
        return self._engine.version

    async def update(self, *, timeout: float | None = None) -> int:
        """Wait for another version than the server's, and load it; see `EngineWeights.update`."""
        try:
            self._agreement.accepts(await asyncio.to_thread(self._reader.newest))
            while self._agreement.pending:  # of an earlier run, perhaps: its successor starts
                found = await asyncio.to_thread(self._reader.newest, _WAIT_S)
                self._agreement.accepts(found)
        except ConfigError as error:
            self._fail(error)
            raise
        return await super().update(timeout=self._first_timeout if timeout is None else timeout)


PROMPT_KEYS = "keys of the prompt"
"""Key in the extras of a completion that is not scored yet."""


def scored(items: Sequence[BufferItem], reward: Reward, ends: Sequence[int]) -> None:
    """Set the reward of each sample of a group; nan in one that is to be filtered.

    Args:
        items: Completions of one prompt, whose keys are among their extras.
        ends: Tokens that end a completion.
    """
    samples: list[Any] = [item.sequences for item in items]
    masks: list[Any] = [item.action_mask for item in items]
    sequences = pad_sequence(samples, batch_first=True)
    present = pad_sequence([torch.ones_like(each) for each in samples], batch_first=True)
    actions = pad_sequence(masks, batch_first=True)
    keys = [item.extras.pop(PROMPT_KEYS) for item in items]
    completions = Completions(
        sequences,
        present,
        actions,
        torch.zeros(actions.shape),
        finished=torch.tensor([int(each[-1]) in ends for each in samples]),
        keys={key: [each[key] for each in keys] for key in keys[0]},
    )
    for item, found in zip(items, reward(completions, len(items)), strict=True):
        item.reward = torch.tensor(found)
