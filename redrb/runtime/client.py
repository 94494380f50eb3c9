"""Where trainers and makers get their client: given, or opened for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from redrb.connection import Client, connect
from redrb.errors import ConfigError


def client_for(client: Client | str | None) -> tuple[Client, AbstractContextManager[object]]:
    """Return a client, and what closes it where it was opened here.

    Args:
        client: A client, which stays its owner's, a URL, or None for the variable REDRB_URL.

    Raises:
        ConfigError: It is something else, or there is no URL.
        StoreUnavailable: Nothing answers there.
    """
    if isinstance(client, Client):
        return client, nullcontext()
    if client is not None and not isinstance(client, str):
        raise ConfigError(
            f"the client is a {type(client).__name__}: pass what redrb.connect(url) returns, or a "
            "URL."
        )
    opened = connect(client)
    return opened, opened
