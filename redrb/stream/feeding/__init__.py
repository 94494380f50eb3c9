"""What trainers need so that data is there when the step ends."""

from redrb.stream.feeding.dataset import ExperienceDataset
from redrb.stream.feeding.lease_ref import LeasedExperience, Ticket
from redrb.stream.feeding.loader import ExperienceLoader

__all__ = ["ExperienceDataset", "ExperienceLoader", "LeasedExperience", "Ticket"]
