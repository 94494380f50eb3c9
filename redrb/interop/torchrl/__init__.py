"""torchrl's `ReplayBuffer` on a task, TensorDict in and out. Needs `pip install 'redrb[torchrl]'`.

`task_buffer(stream)` returns the buffer. For other buffers and options there are its parts:
`TaskStorage`, `TaskSampler` and `TaskWriter`.
"""

from redrb.interop.torchrl.buffer import TaskSampler, TaskWriter, task_buffer
from redrb.interop.torchrl.storage import TaskStorage

__all__ = ["TaskSampler", "TaskStorage", "TaskWriter", "task_buffer"]
