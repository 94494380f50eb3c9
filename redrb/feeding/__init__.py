"""What trainers need so that data is there when the step ends."""

from redrb.feeding.dataset import ExperienceDataset
from redrb.feeding.loader import ExperienceLoader
from redrb.feeding.ticket import LeasedExperience, Ticket

__all__ = ["ExperienceDataset", "ExperienceLoader", "LeasedExperience", "Ticket"]
