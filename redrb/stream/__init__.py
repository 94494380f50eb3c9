"""The experience stream of a task."""

from redrb.stream.lease import Lease
from redrb.stream.ledger import Ledger, StreamStats
from redrb.stream.stream import DeadLetter, ExperienceStream

__all__ = ["DeadLetter", "ExperienceStream", "Lease", "Ledger", "StreamStats"]
