"""Samples, batches, padding and statuses: pure data, no Redis.

Names stand in `__init__.pyi` and load at their first use, so that commands which need a status
only start without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
