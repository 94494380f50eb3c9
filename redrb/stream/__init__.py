"""The experience stream of a task: `ExperienceStream`, its settings, and the types it returns.

Public names stand in `__init__.pyi` and load at their first use, so that commands which only look
at a task start without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
