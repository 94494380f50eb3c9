"""Batches from several tasks at once, in ratios that hold exactly."""

from redrb.stream.mixture.lease import MixtureLease
from redrb.stream.mixture.mixture import Mixture

__all__ = ["Mixture", "MixtureLease"]
