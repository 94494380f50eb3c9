"""Encodes groups of samples to bytes and decodes them (`docs/reference/wire-format.md`).

Names stand in `__init__.pyi` and load at their first use, so that `redrb --version` can name the
kernel without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
