"""Experience on its way to Redis while its maker goes on."""

from redrb.sending.sender import ExperienceSender

__all__ = ["ExperienceSender"]
