"""Options with which redis-cli reaches a server as a client of redrb does; never a password."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redis.connection import SSLConnection

from redrb.connection.client import Client
from redrb.connection.url import Address, parse_address
from redrb.environment import variable

_FILES = {
    "ssl_ca_certs": "--cacert",
    "ssl_ca_path": "--cacertdir",
    "ssl_certfile": "--cert",
    "ssl_keyfile": "--key",
}


def cli_options(client: Client) -> tuple[str, ...]:
    """Return the options for the server of a client: of a cluster, a client of one node.

    If there is a password, redis-cli reads it from REDISCLI_AUTH, or asks for it where this is not
    set. With Sentinels the server is the primary at the moment, so its connection must have been
    used before.
    """
    address = parse_address(client.url)
    options = address.options
    if address.sentinels:
        host, port = client.retrying(lambda: _primary(client))
        options = {**options, "host": host, "port": port}
    elif address.nodes:
        host, _, number = client.where.partition(",")[0].rpartition(":")
        options = {**options, "host": host, "port": number}
    return tuple(_words(options))


def cli_words(url: str, *words: str) -> tuple[str, ...]:
    """Return options and a command for the server of a URL, which may not answer.

    For a cluster this is the first node of the URL. Of Sentinels the first one is asked for the
    primary instead. (): redis-cli cannot reach the server, as redrb starts it.
    """
    address = parse_address(url)
    if address.sentinels:
        return (*_words(address.sentinels[0].options), "SENTINEL", "MASTER", address.service)
    first: Address = address.node(address.nodes[0]) if address.nodes else address
    return (*_words(first.options), *words) if first.options else ()


def _primary(client: Client) -> tuple[str, int]:
    with client.connection() as connection:
        return connection.host, connection.port


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    if "path" in options:
        yield from ("-s", options["path"])
    elif "host" in options:
        yield from ("-h", str(options["host"]), "-p", str(options["port"]))
    if options.get("username"):
        yield from ("--user", options["username"])
    if options.get("password") and not variable("REDISCLI_AUTH"):
        yield "--askpass"
    if issubclass(options.get("connection_class", object), SSLConnection):
        yield from _tls(options)


def _tls(options: Mapping[str, Any]) -> Iterator[str]:
    yield "--tls"
    if options.get("ssl_cert_reqs") == "none":
        yield "--insecure"
    if options.get("ssl_certfile"):  # redis-cli needs both, also where one file has both
        options = {"ssl_keyfile": options["ssl_certfile"], **options}
    for name, flag in _FILES.items():
        if options.get(name):
            yield from (flag, str(options[name]))
    if options.get("ssl_ca_data"):
        yield from ("--cacert", "CA_FILE")  # the certificate itself is in the URL
