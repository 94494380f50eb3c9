"""Trainers, makers and stages on Redis, each in a separate process.

Public names stand in `__init__.pyi` and load at their first use, so that a worker can handle
signals before torch is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
