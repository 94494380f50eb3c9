"""Batches from several tasks at once, in ratios that hold exactly."""

from redrb.mixture.lease import MixtureLease
from redrb.mixture.mixture import Mixture
from redrb.mixture.opened import take_mixture
from redrb.mixture.starvation import Starvation

__all__ = ["Mixture", "MixtureLease", "Starvation", "take_mixture"]
