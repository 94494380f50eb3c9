"""`ExperienceMaker`: turns prompts into experience, in the loop of a maker."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from redrb.errors import ConfigError
from redrb.experience import Experience


class ExperienceMaker(Protocol):
    """Turns prompts into experience.

    With a method `check_options(options)`, which raises ConfigError, options of generation are
    checked when the maker is made. With a method `count_groups(inputs)`, which returns how many
    groups a batch of prompts becomes, that is asked before; default: its number of rows. If its
    attribute `makes_parts` is true, `make_parts` is called in place of `make_experience`, with the
    same arguments: it yields the groups of a batch in several parts, which are sent one by one, or
    none. Weights may change after the first part; while later ones are made they stay only if its
    attribute `parts_use_models` is true.
    """

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> Experience:
        """Return the experience of a batch of prompts."""


def check_options(experience_maker: ExperienceMaker, options: Mapping[str, Any]) -> None:
    """Refuse options that the experience maker does not know, if it can say so now."""
    signature = inspect.signature(experience_maker.make_experience)
    try:
        signature.bind_partial(**options)
    except TypeError as error:
        raise ConfigError(
            f"{type(experience_maker).__name__}.make_experience: {error}; it takes {signature}."
        ) from error
    check = getattr(experience_maker, "check_options", None)
    if check is not None:
        check(options)
