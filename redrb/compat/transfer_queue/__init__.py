"""The public interface of transfer_queue 0.1.11, with all rows in Redis (docs/how-to/verl.md).

Each partition is a `redrb.Table`. It needs neither Ray nor TransferQueue. `install` puts it in the
place of the module `transfer_queue`; verl does that in each of its processes where the variable
REDRB_TRANSFER_QUEUE is 1. Public names stand in `__init__.pyi`.
"""

import lazy_loader

__version__ = "0.1.11"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
