"""ColossalAI's detached trainers, makers and buffer, as adapters of `redrb.train`.

Public names stand in `__init__.pyi` and load at their first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
