"""The trainer's end of a stream: batches that are ready when the step ends."""

from redrb.stream.feeding.loader import ExperienceLoader

__all__ = ["ExperienceLoader"]
