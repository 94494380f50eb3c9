"""The experience stream of a task."""

from redrb.stream.deadletters import DeadLetter
from redrb.stream.expiration import Staleness, StalenessReport
from redrb.stream.filters import finite_rewards, reward_variance
from redrb.stream.history import StoredGroup
from redrb.stream.lease import Expiry, Lease
from redrb.stream.ledger import Ledger, StreamStats
from redrb.stream.rate import RateLimit
from redrb.stream.saving import SavedTask
from redrb.stream.stream import ExperienceStream

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
