"""Recipes: a whole job, of models, prompts and reward, in one class, which workers run.

Public names stand in `__init__.pyi` and load at their first use: to read the settings of a recipe,
commands need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
