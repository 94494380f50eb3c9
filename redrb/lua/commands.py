"""The commands of Redis in the text of a script."""

from __future__ import annotations

import re
from typing import Final

_CONTAINER = re.compile(r"'(MEMORY|XGROUP|XINFO)', '([A-Z]+)'")
_WORD = re.compile(r"'([A-Z]{3,})'")
_OPTIONS = frozenset({"COUNT", "FORCE", "JUSTID", "LIMIT", "SAMPLES", "WITHSCORES", "WITHVALUES"})

_WORDS: Final = {
    name: words
    for words, names in {
        1: "TIME",
        2: "DEL EXISTS GET HGETALL HKEYS HLEN HRANDFIELD HVALS PERSIST SCARD SMEMBERS UNLINK XLEN "
        "ZCARD ZRANDMEMBER",
        3: "EXPIRE HDEL HEXISTS HGET HMGET HSCAN HSTRLEN LPUSH MEMORY|USAGE PEXPIRE PEXPIREAT "
        "RENAME RPUSH SADD SET SISMEMBER SREM XDEL XINFO|GROUPS XINFO|STREAM XPENDING ZMSCORE "
        "ZREM ZSCORE",
        4: "HINCRBY HSET HSETNX LTRIM XACK XGROUP|DESTROY XINFO|CONSUMERS XRANGE XREVRANGE ZADD "
        "ZCOUNT ZLEXCOUNT ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZREMRANGEBYRANK ZREVRANGE "
        "ZREVRANGEBYSCORE",
        5: "XADD XGROUP|CREATE XGROUP|DELCONSUMER",
        6: "XCLAIM",
    }.items()
    for name in names.split()
}
"""Fewest words of each command, its name included: the absolute value of its arity in COMMAND INFO.

`redis.acl_check_cmd` refuses fewer words since Redis 8.2.9, and in older versions with the fixes of
security faults.
"""


def commands_in(text: str) -> frozenset[str]:
    """Return the commands that a script calls, as ACL rules name them.

    Every quoted word in capitals is a command, unless it is an option of one. A container is
    followed by its subcommand: "xgroup|create".
    """
    containers = {f"{name}|{part}" for name, part in _CONTAINER.findall(text)}
    words = set(_WORD.findall(_CONTAINER.sub("", text))) - _OPTIONS
    return frozenset(word.lower() for word in words | containers)


def as_lua(commands: frozenset[str]) -> list[str]:
    """Return a line of a Lua table for each command: {'XGROUP', 'CREATE', words = 5},."""
    lines = []
    for name in sorted(commands):
        quoted = ", ".join(f"'{word}'" for word in name.upper().split("|"))
        lines.append(f"{{{quoted}, words = {_WORDS[name.upper()]}}},")
    return lines
