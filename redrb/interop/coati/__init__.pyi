from .algorithm_trainers import AlgorithmTrainer as AlgorithmTrainer
from .algorithm_trainers import DetachedGRPOTrainer as DetachedGRPOTrainer
from .algorithm_trainers import DetachedPPOTrainer as DetachedPPOTrainer
from .buffer import DetachedReplayBuffer as DetachedReplayBuffer
from .holder import ExperienceMakerHolder as ExperienceMakerHolder
from .holder import GRPOMakerHolder as GRPOMakerHolder
from .trainer import DetachedTrainer as DetachedTrainer
