"""Weights on their way from a trainer to makers: versioned, checked, loaded in place.

Public names stand in `__init__.pyi` and load at their first use, so that commands which only list
published weights start without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
