from .holder import ExperienceMakerHolder as ExperienceMakerHolder
from .holder import GRPOMakerHolder as GRPOMakerHolder
