"""redrb: a Redis-backed streaming experience store for reinforcement-learning post-training.

Makers put experience in, trainers take full, padded batches and acknowledge them after the
optimizer step, new weights go back to the makers. Public names stand in `__init__.pyi` and load at
their first use, so that `import redrb` is cheap and the commands start without torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
