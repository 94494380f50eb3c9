"""The client of a trainer, maker or buffer: given by the user, or opened from a URL."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from redrb.connection import Client, connect
from redrb.errors import ConfigError


def client_for(client: Client | str | None) -> tuple[Client, AbstractContextManager[object]]:
    """Return a client, and a context manager that closes it if it was opened here.

    Args:
        client: A client, which the user closes; a URL; or None for the variable REDRB_URL.

    Raises:
        ConfigError: The argument is something else, or there is no URL.
        StoreUnavailable: No server answers at the URL.
    """
    if isinstance(client, Client):
        return client, nullcontext()
    if client is not None and not isinstance(client, str):
        raise ConfigError(
            f"the client is a {type(client).__name__}: pass the result of redrb.connect(url), or a "
            "URL."
        )
    opened = connect(client)
    return opened, opened
