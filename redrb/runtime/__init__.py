"""ColossalAI's detached runtime on Redis: trainers and makers in processes of their own."""

from redrb.runtime.buffer import DetachedReplayBuffer
from redrb.runtime.callbacks import MakerCallback, TrainerCallback
from redrb.runtime.grpo import DetachedGRPOTrainer, GRPOMakerHolder
from redrb.runtime.maker import ExperienceMakerHolder
from redrb.runtime.performance import (
    ExperienceMakerPerformanceEvaluator,
    TrainerPerformanceEvaluator,
)
from redrb.runtime.ppo import DetachedPPOTrainer
from redrb.runtime.strategy import DDPStrategy, Strategy
from redrb.runtime.trainer import DetachedTrainer
from redrb.weights.lora import LoraConfig

__all__ = [
    "DDPStrategy",
    "DetachedGRPOTrainer",
    "DetachedPPOTrainer",
    "DetachedReplayBuffer",
    "DetachedTrainer",
    "ExperienceMakerHolder",
    "ExperienceMakerPerformanceEvaluator",
    "GRPOMakerHolder",
    "LoraConfig",
    "MakerCallback",
    "Strategy",
    "TrainerCallback",
    "TrainerPerformanceEvaluator",
]
