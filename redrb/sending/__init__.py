"""Experience on its way to Redis while its maker goes on."""

from redrb.sending.sender import ExperienceSender
from redrb.stream.intake import GroupedRows

__all__ = ["ExperienceSender", "GroupedRows"]
