"""Inference servers: sampling over HTTP with log-probabilities, and weight updates.

They need httpx (extra `engines`).
"""

from redrb.engines.engine import Engine, Generation
from redrb.engines.sglang import SGLangEngine
from redrb.engines.trajectory import Trajectory
from redrb.engines.vllm import VLLMEngine
from redrb.engines.weights import EngineWeights

__all__ = ["Engine", "EngineWeights", "Generation", "SGLangEngine", "Trajectory", "VLLMEngine"]
