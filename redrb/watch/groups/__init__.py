"""Reads groups for people who look at them: without leasing them, and never more than asked.

`redrb inspect` and the live page show what this room returns. It needs numpy, and no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
