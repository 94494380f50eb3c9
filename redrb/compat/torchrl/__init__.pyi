from .buffer import TaskSampler as TaskSampler
from .buffer import TaskWriter as TaskWriter
from .buffer import task_buffer as task_buffer
from .storage import TaskStorage as TaskStorage
