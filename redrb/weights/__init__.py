"""Weights on their way from a trainer to makers: versioned, checked, loaded in place.

Names are loaded at their first use: looking at what is published needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redrb.weights.publishing.publisher import WeightPublisher
    from redrb.weights.reading.standby import WeightStandby
    from redrb.weights.reading.subscriber import WeightSubscriber
    from redrb.weights.wire.manifest import WeightVersion

__all__ = ["WeightPublisher", "WeightStandby", "WeightSubscriber", "WeightVersion"]

_HOMES = {
    "WeightPublisher": "redrb.weights.publishing.publisher",
    "WeightStandby": "redrb.weights.reading.standby",
    "WeightSubscriber": "redrb.weights.reading.subscriber",
    "WeightVersion": "redrb.weights.wire.manifest",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
