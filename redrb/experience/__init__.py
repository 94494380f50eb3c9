"""Samples, batches, padding and statuses: pure data, no Redis."""

from redrb.experience.batching import make_experience_batch, split_experience_batch
from redrb.experience.records import BufferItem, Experience
from redrb.experience.status import Status

__all__ = [
    "BufferItem",
    "Experience",
    "Status",
    "make_experience_batch",
    "split_experience_batch",
]
