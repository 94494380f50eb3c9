"""Connections to Redis: URLs, retries, the embedded server, the fake one."""

from redrb.connection.client import Client
from redrb.connection.connecting import connect

__all__ = ["Client", "connect"]
