"""The experience stream of a task: `ExperienceStream`, its settings, and the types it returns."""

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
from redrb.stream.task.settings import TaskSettings

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
    "TaskSettings",
    "finite_rewards",
    "reward_variance",
]
