"""Connections to Redis: URLs, retries, the embedded server, the fake one."""

from redrb.connection.client import Client, check_client
from redrb.connection.connecting import connect

__all__ = ["Client", "check_client", "connect"]
