from .batching import make_experience_batch as make_experience_batch
from .batching import split_experience_batch as split_experience_batch
from .records import BufferItem as BufferItem
from .records import Experience as Experience
from .status import Status as Status
