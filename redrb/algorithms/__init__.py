"""PPO and GRPO for trainers and makers: training steps, losses, advantages, experience makers.

Pure torch, for any `nn.Module` and for causal models of Hugging Face, without importing
transformers. `redrb.algorithms.models` says how networks are called.

Public names stand in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
