"""ColossalAI's detached runtime on Redis: trainers and makers, each in a process of its own."""

from redrb.runtime.algorithm_trainer import AlgorithmTrainer
from redrb.runtime.buffer import DetachedReplayBuffer
from redrb.runtime.callbacks import MakerCallback, TrainerCallback
from redrb.runtime.checkpoint import Stateful
from redrb.runtime.grpo import DetachedGRPOTrainer, GRPOMakerHolder
from redrb.runtime.maker import ExperienceMaker, ExperienceMakerHolder
from redrb.runtime.performance import (
    ExperienceMakerPerformanceEvaluator,
    TrainerPerformanceEvaluator,
)
from redrb.runtime.ppo import DetachedPPOTrainer
from redrb.runtime.strategy import DDPStrategy, Strategy
from redrb.runtime.trainer import DetachedTrainer
from redrb.weights.lora import LoraConfig

__all__ = [
    "AlgorithmTrainer",
    "DDPStrategy",
    "DetachedGRPOTrainer",
    "DetachedPPOTrainer",
    "DetachedReplayBuffer",
    "DetachedTrainer",
    "ExperienceMaker",
    "ExperienceMakerHolder",
    "ExperienceMakerPerformanceEvaluator",
    "GRPOMakerHolder",
    "LoraConfig",
    "MakerCallback",
    "Stateful",
    "Strategy",
    "TrainerCallback",
    "TrainerPerformanceEvaluator",
]
