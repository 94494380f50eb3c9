"""The maker's end of a stream: experience is sent while the next is made."""

from redrb.stream.sending.job import GroupedRows
from redrb.stream.sending.sender import ExperienceSender

__all__ = ["ExperienceSender", "GroupedRows"]
