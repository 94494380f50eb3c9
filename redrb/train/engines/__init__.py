"""Inference servers: sampling over HTTP with log-probabilities, and weight updates.

They need aiohttp (extra `engines`).
"""

from redrb.train.engines.completions import Generation
from redrb.train.engines.engine import Engine
from redrb.train.engines.sglang import SGLangEngine
from redrb.train.engines.trajectory import Trajectory
from redrb.train.engines.vllm import VLLMEngine
from redrb.train.engines.weights import EngineWeights

__all__ = ["Engine", "EngineWeights", "Generation", "SGLangEngine", "Trajectory", "VLLMEngine"]
