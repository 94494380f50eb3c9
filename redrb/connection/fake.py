"""fakeredis behind the same client, for tests without a server."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import msgpack
import redis

from redrb.errors import ConfigError

_servers: dict[str, object] = {}
_lock = threading.Lock()


def fake_pool(name: str) -> redis.ConnectionPool:
    """Return a pool on the fake server `name` of this process, made at its first use."""
    try:
        import fakeredis
    except ImportError as error:
        raise ConfigError("fake:// needs fakeredis: pip install 'fakeredis[lua]'.") from error
    with _lock:
        server, is_new = _servers.get(name), name not in _servers
        if server is None:
            server = _servers[name] = fakeredis.FakeServer(version=(7, 0))
        pool = redis.ConnectionPool(
            connection_class=_connection_class(fakeredis.FakeRedisConnection),
            server=server,
            protocol=2,
            max_connections=10_000,
        )
        if is_new:
            redis.Redis(connection_pool=pool).eval("return 1", 0)  # starts the server's Lua
            _complete_lua(server)
    return pool


def _connection_class(base: type[Any]) -> type[Any]:
    """Return fakeredis' connections, which may be closed while another thread uses them."""

    class Closeable(base):  # type: ignore[misc]
        """A connection whose `disconnect` may come while another thread reads a reply."""

        def disconnect(self, *args: Any, **options: Any) -> None:
            try:
                super().disconnect(*args, **options)
            except ValueError as error:  # a generator of fakeredis runs the other thread's command
                if "already executing" not in str(error):
                    raise
                # the command ends by itself, and the connection is lent to nobody after that

    return Closeable


class _CompiledOnce:
    """A Lua runtime that compiles each script at its first call; fakeredis' does at each call."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._compiled: dict[bytes, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    # Compiling takes longer than most scripts run. fakeredis also asks for a full garbage
    # collection after each script, which would visit all compiled scripts; Lua collects by itself.
    def execute(self, script: bytes | str) -> Any:
        if isinstance(script, str):  # of fakeredis itself
            return None if script == "collectgarbage()" else self._runtime.execute(script)
        if script not in self._compiled:
            self._compiled[script] = self._runtime.compile(_bytecode(script, self._runtime))
        return self._compiled[script]()


_bytecodes: dict[bytes, bytes] = {}
"""Lua bytecode of each script, which the runtimes of all fake servers load."""


def _bytecode(script: bytes, runtime: Any) -> bytes:
    """Return the bytecode of a script, compiled at the first call in this process."""
    if script not in _bytecodes:
        _bytecodes[script] = runtime.eval("string.dump")(runtime.compile(script))
    return _bytecodes[script]


def _complete_lua(server: Any) -> None:
    """Add `cmsgpack` and `redis.sha1hex`, which fakeredis lacks, and compile each script once."""
    lua = server._lua_runtime  # noqa: SLF001 - there is no public way

    def pack(value: Any) -> bytes:
        packed: bytes = msgpack.packb(_from_lua(value), unicode_errors="surrogateescape")
        return packed

    def unpack(packed: bytes) -> Any:
        # as the server's own cmsgpack: without limits, on bytes as they are
        unpacker = msgpack.Unpacker(raw=True, strict_map_key=False)  # noqa: TID251
        unpacker.feed(packed)
        return tuple(
            lua.table_from(value, recursive=True) if isinstance(value, dict | list) else value
            for value in unpacker
        )

    def sha1hex(text: bytes) -> bytes:
        return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    lua.globals()[b"redis"][b"sha1hex"] = sha1hex
    lua.globals()[b"cmsgpack"] = lua.table_from({b"pack": pack, b"unpack": unpack})
    server._lua_expected_globals.add(b"cmsgpack")  # noqa: SLF001
    server._lua_runtime = _CompiledOnce(lua)  # noqa: SLF001


def _text(value: Any) -> Any:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def _from_lua(value: Any) -> Any:
    """Return a Lua value as Python's: a table with the keys 1 to n is a list."""
    if value is None or isinstance(value, bytes | int | float):
        return _text(value)
    table = {key: _from_lua(item) for key, item in value.items()}
    if table.keys() == set(range(1, len(table) + 1)):
        return [table[place] for place in range(1, len(table) + 1)]
    return {_text(key): item for key, item in table.items()}
