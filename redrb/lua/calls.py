"""`Call`: one way to run one script, declared once for Python and Lua.

A subclass names the script, and its fields are what the script is asked. They go to the script as
one record, which it reads with `local ask = cmsgpack.unpack(ARGV[1])`; None is nil there. The reply
is one record too, `cmsgpack.pack(...)`, which is checked against the type that the class is given::

    class Leave(Call[Found], frozen=True):
        script: ClassVar = "take/leave"
        group: str
        consumer: str

Numbers in records are exact up to 2^53. Texts of a reply that stand for numbers are converted. What
is not UTF-8 goes beside the record, as ARGV[2] and so on, and in a reply behind it, as the servers'
cmsgpack knows no bytes. `tests/unit/test_calls.py` compares the fields of each class, and the words
of the outcomes, with the text of its script.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec
from redis.exceptions import NoScriptError, ResponseError

from redrb.connection import Client
from redrb.connection.client import Request
from redrb.connection.failures import name_scripts
from redrb.connection.transport import Argument, Pipeline, Reply, without_errors
from redrb.lua import scripts
from redrb.unpacking import Reading, unpack

R = TypeVar("R")
T = TypeVar("T")


class Call(msgspec.Struct, Generic[R], frozen=True):
    """What a script is asked; the reply is an `R`.

    Attributes:
        script: Name of the script, such as "take/take".
    """

    script: ClassVar[str]

    def add_to(self, pipeline: Pipeline, keys: list[Argument], *beside: bytes) -> None:
        """Append this call to a pipeline."""
        script, record = scripts.load(self.script), msgspec.msgpack.encode(self)
        pipeline.add_script(script.sha, script.text, len(keys), *keys, record, *beside)

    def as_request(
        self, client: Client, keys: list[Argument], read: Callable[[R], T]
    ) -> Request[T]:
        """Return the request that runs the script; `read` turns its reply into the result."""
        pipeline = Pipeline()
        self.add_to(pipeline, keys)
        return Request(
            client, pipeline, lambda replies: read(self.read(without_errors(replies)[0]))
        )

    def read(self, reply: Reply) -> R:
        """Return the record of a reply; raises ValueError if it is damaged."""
        record = reply[0] if isinstance(reply, list) else reply
        decoder = _decoder(type(self))
        try:
            found: R = decoder.decode(record)
        except UnicodeDecodeError:  # a name or setting that redrb did not write
            texts = unpack(record, f"reply of {self.script}", unicode_errors="replace")
            found = msgspec.convert(texts, decoder.type, strict=False)
        return found

    def run(self, client: Client, keys: list[Argument], *beside: bytes) -> R:
        """Run the script, and repeat it while Redis is unreachable.

        Raises:
            StoreUnavailable: Redis stayed unreachable.
            StoreError: The server or the script answered with an error.
        """
        return self.run_with_bytes(client, keys, *beside)[0]

    def run_with_bytes(
        self, client: Client, keys: list[Argument], *beside: bytes
    ) -> tuple[R, list[bytes]]:
        """Run the script as `run` does; returns also what stands behind the record of its reply."""
        script = scripts.load(self.script)
        arguments = (len(keys), *keys, msgspec.msgpack.encode(self), *beside)

        def attempt() -> Reply:
            try:
                with suppress(NoScriptError):
                    return client.once("EVALSHA", script.sha, *arguments)
                return client.once("EVAL", script.text, *arguments)
            except ResponseError as error:
                name_scripts(error, [script.sha])
                raise

        reply = client.retrying(attempt)
        with Reading(f"the reply of the script {self.script}"):
            return self.read(reply), reply[1:] if isinstance(reply, list) else []


class Page(msgspec.Struct, frozen=True):
    """The reply of a script that does its work in pages.

    Attributes:
        more: Whether there is more to do: run the script again.
    """

    more: bool = False


class Found(Page, frozen=True):
    """A page, and how many groups or entries it has done."""

    found: int = 0


@cache
def _decoder(call: type[Call[Any]]) -> msgspec.msgpack.Decoder[Any]:
    (reply,) = get_args(call.__orig_bases__[0])  # type: ignore[attr-defined]
    return msgspec.msgpack.Decoder(reply, strict=False)
