"""Experience on its way to Redis while its maker goes on."""

from redrb.stream.put.items import GroupedRows
from redrb.stream.sending.sender import ExperienceSender

__all__ = ["ExperienceSender", "GroupedRows"]
