from .algorithm_trainers import AlgorithmTrainer as AlgorithmTrainer
from .algorithm_trainers import DetachedGRPOTrainer as DetachedGRPOTrainer
from .algorithm_trainers import DetachedPPOTrainer as DetachedPPOTrainer
from .algorithm_trainers import GRPOMakerHolder as GRPOMakerHolder
from .buffer import DetachedReplayBuffer as DetachedReplayBuffer
from .trainer import DetachedTrainer as DetachedTrainer
