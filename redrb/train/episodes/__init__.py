"""Makers of episodes: coroutines that sample from an engine, hundreds of them in one process."""

from redrb.train.episodes.maker import EpisodeMaker

__all__ = ["EpisodeMaker"]
