"""The experience stream of a task."""

from redrb.stream.put.filters import finite_rewards, reward_variance
from redrb.stream.saving.saving import SavedTask
from redrb.stream.stream import ExperienceStream
from redrb.stream.take.lease import Lease
from redrb.stream.take.lease_part import Expiry
from redrb.stream.task.dead_letters import DeadLetter
from redrb.stream.task.expiration import Staleness, StalenessReport
from redrb.stream.task.history import StoredGroup
from redrb.stream.task.ledger import Ledger, StreamStats
from redrb.stream.task.rate import RateLimit

__all__ = [
    "DeadLetter",
    "ExperienceStream",
    "Expiry",
    "Lease",
    "Ledger",
    "RateLimit",
    "SavedTask",
    "Staleness",
    "StalenessReport",
    "StoredGroup",
    "StreamStats",
    "finite_rewards",
    "reward_variance",
]
