"""Batches from several tasks at once, in ratios that hold exactly."""

from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.mixture import Mixture
from redrb.stream.mixture.starvation import Starvation

__all__ = ["Mixture", "MixtureLease", "Starvation"]
