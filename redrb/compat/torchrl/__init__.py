"""torchrl's `ReplayBuffer` on a task, TensorDict in and out. Needs the extra `torchrl`.

`task_buffer(stream, batch_size)` returns the buffer. For other buffers and options there are its
parts: `TaskStorage`, `TaskSampler` and `TaskWriter`. Public names stand in `__init__.pyi`.
"""

import lazy_loader

from redrb.checks import require_package

require_package("torchrl", extra="torchrl")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
