"""The settings of a recipe in which all workers of a job must agree."""

from __future__ import annotations

import hashlib
import json

from redrb.options import has_password
from redrb.recipe.job_settings import JobSettings, MakerSettings, TrainerSettings
from redrb.recipe.settings import RecipeSettings, settings_of
from redrb.recipe.step_settings import StepSettings

_MOST = 64
"""Longest text of a value that is announced; of longer ones the digest is."""

_OF_ONE_SIDE = (JobSettings, MakerSettings, TrainerSettings, StepSettings)
"""Classes with settings that only makers, only the trainer, or the process use."""


def agreed_settings(recipe: RecipeSettings) -> dict[str, str]:
    """Return the text of each setting in which makers and trainer of a recipe must agree.

    They are those of the recipe itself, such as the size of its tasks, and of sampling; not those
    that are declared with `agree=False`, such as a learning rate.
    """
    others = {name for each in _OF_ONE_SIDE for name in settings_of(each)}
    return {
        name: _text(getattr(recipe, name))
        for name, item in settings_of(type(recipe)).items()
        if name not in others and item.metadata["agree"]
    }


def _text(value: float | str) -> str:
    text = json.dumps(value)
    if len(text) > _MOST or (isinstance(value, str) and has_password(value)):
        return f"a text with the digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return text
