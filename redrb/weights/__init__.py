"""Weights on their way from a trainer to makers: versioned, checked, loaded in place."""

from redrb.weights.manifest import WeightVersion
from redrb.weights.publisher import WeightPublisher
from redrb.weights.subscriber import WeightSubscriber

__all__ = ["WeightPublisher", "WeightSubscriber", "WeightVersion"]
