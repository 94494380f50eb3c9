"""Requests of three protocols, checked; digests of the histories that they show.

The server checks what is rendered and sampled; here is what it would take and a sample could not
tell, such as images, or choices that are forced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from redrb.errors import RedrbError

Json: TypeAlias = dict[str, Any]
Protocol: TypeAlias = Literal["chat", "text", "messages"]

T = TypeVar("T")

MOST_BYTES = 32 * 2**20
"""Largest body of a request."""

MOST_DEPTH = 64
"""Most levels of lists and objects in a body."""

MOST_STOPS = 64
"""Most stop words of a request."""

TEXT_TOKENS = 16
"""Most tokens of `/v1/completions` where the request does not say."""


class Refused(RedrbError):
    """A request that the gateway does not serve; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        self.status = status
        super().__init__(message)


class Edited(Refused):
    """A history that does not go on from the newest turn, where that is refused."""

    def __init__(self) -> None:
        super().__init__(
            "this history is not what was sampled: it was edited, goes on from an earlier turn, or "
            "is another conversation. Send the messages as they were answered, open another "
            "session for it, or start the gateway with --on-edited branch.",
            409,
        )


_Count: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
_Words: TypeAlias = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(max_length=MOST_STOPS)
]


class Ask(msgspec.Struct, kw_only=True):
    """A checked request for one turn: the fields of its body that the gateway itself uses.

    Attributes:
        messages: The history as the protocol has it; [] for text.
        prompt: Of `/v1/completions`; "" for messages.
        max_tokens: Most tokens, of all protocols; None: as many as fit.
        temperature: More than 0: at 0 no log-probability is true.
        stop: Words that end the reply, which does not have them, of all protocols.
        return_token_ids: Whether the reply has its tokens, with log-probabilities and versions.
        request: Digest of the whole request, but for whether the reply is streamed.
        template: Further fields for the chat template, such as `tools`.
        sampling: Parameters of sampling, which the engine gets as they are.
    """

    model: str
    messages: list[Json] = []
    prompt: str = ""
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    stop: _Words | str = []
    stop_sequences: _Words = []
    stop_token_ids: list[int] = []
    stream: bool = False
    stream_options: Json = {}
    return_token_ids: bool = False
    protocol: Protocol = "chat"
    request: bytes = b""
    template: Json = {}
    sampling: Json = {}


_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("chat text messages", "", "model max_tokens stream metadata service_tier"),
    ("chat text messages", "sampling", "temperature top_p top_k"),
    ("chat text", "sampling", "min_p seed stop_token_ids"),
    ("chat text", "", "stop stream_options return_token_ids"),
    ("chat text", "", "user safety_identifier prompt_cache_key"),
    ("chat text", "", "n best_of repetition_penalty presence_penalty frequency_penalty"),
    ("chat text", "", "top_logprobs echo store logprobs parallel_tool_calls logit_bias suffix"),
    ("chat text", "", "response_format"),
    ("chat messages", "template", "tools tool_choice"),
    ("chat", "template", "chat_template_kwargs reasoning_effort"),
    ("messages", "template", "system thinking"),
    ("chat messages", "", "messages"),
    ("chat", "", "max_completion_tokens"),
    ("messages", "", "stop_sequences"),
    ("text", "", "prompt"),
)
"""Fields of bodies: the protocols that have them, and who gets them as they are."""

_TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("echo", "store", "logprobs"), (False,)),
    "parallel_tool_calls": (True,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "adaptive"}, {"type": "disabled"}),
    "service_tier": ("auto", "default", "standard_only"),
}
"""Fields with the values that change neither what is sampled nor how much; others are refused."""

_APART = {"role", "content", "tool_calls"}
_WITHOUT_EFFECT = {"reasoning", "reasoning_content", "refusal", "annotations", "audio"}
"""Fields of messages that a history may have or not: SDKs add some, templates drop reasoning."""


_BILLING = "x-anthropic-billing-header"
"""Begins a text that Claude Code writes in another way in each request, and vLLM leaves out."""


def parsed(data: bytes) -> Json:
    """Return the object in a body, or raise `Refused`."""
    try:
        body = msgspec.json.decode(data, type=Json)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON object: {error}.") from error
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH):
        nested = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in nested for each in values if isinstance(each, dict | list)]
    if level:
        raise Refused(f"the body has more than {MOST_DEPTH} levels.")
    return {name: value for name, value in body.items() if value is not None}


def known_in(body: Json, kind: type[T]) -> T:
    """Return the fields of a body that a class names, or raise `Refused`."""
    try:
        return msgspec.convert(body, kind)
    except ValueError as error:
        raise Refused(f"{error}.") from error


@cache
def _fields(protocol: Protocol, use: str = "") -> set[str]:
    """Return the fields of a protocol, or those of them that have a use."""
    rows = (row for row in _FIELDS if protocol in row[0].split() and use in row[1])
    return {name for row in rows for name in row[2].split()}


def ask_of(protocol: Protocol, data: bytes, *, key: str = "") -> Ask:
    """Return the request in a body, or raise `Refused`.

    Args:
        key: The header Idempotency-Key: with another one, the same body is another request.
    """
    body = parsed(data)
    unknown = sorted(body.keys() - _fields(protocol))
    unknown += [name for name in body.keys() & _TAKEN.keys() if body[name] not in _TAKEN[name]]
    if unknown:
        raise Refused(
            f"{unknown[0]!r:.80} is not supported, or not with this value: leave it out. A sample "
            "is what the policy alone has sampled, once."
        )
    ask = known_in(body, Ask)
    if bool(ask.prompt) != (protocol == "text") or bool(ask.messages) == bool(ask.prompt):
        raise Refused("give one prompt, or messages, as the protocol has it.")
    if body.get("top_k") == 1 or body.get("min_p") == 1:
        raise Refused("top_k and min_p must not be 1: no log-probability is true of greedy turns.")
    if ask.messages and ask.messages[-1].get("role") == "assistant":
        raise Refused("the last message is the model's: a reply cannot be continued.")
    whole = {name: body[name] for name in body.keys() - {"stream", "stream_options"}}
    ask.protocol, ask.request = protocol, _digest(b"", [protocol, key, whole])
    ask.template = {name: body[name] for name in body.keys() & _fields(protocol, "template")}
    ask.sampling = {name: body[name] for name in body.keys() & _fields(protocol, "sampling")}
    default = TEXT_TOKENS if ask.prompt else None
    ask.max_tokens = ask.max_completion_tokens or ask.max_tokens or default
    ask.stop = [ask.stop] if isinstance(ask.stop, str) else ask.stop or ask.stop_sequences
    return ask


def histories(ask: Ask) -> list[bytes]:
    """Return the digest of the history with each number of its messages, from 0 to all."""
    others = {name: ask.template[name] for name in ask.template.keys() - {"system"}}
    system = {"role": "system", "content": ask.template.get("system")}
    found = [extended(_digest(b"", others), system)]
    for message in ask.messages:
        found.append(extended(found[-1], message))
    return found


def extended(history: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a history with one more message, of any of the protocols."""
    try:
        blocks = _blocks(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            blocks.append([call["id"], function["name"], value_of(function["arguments"])])
        others = {
            name: value
            for name, value in message.items()
            if name not in _APART | _WITHOUT_EFFECT and value not in (None, "", [])
        }
        return _digest(history, [message["role"], blocks, others])
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"messages are not those of the protocol: {error!r:.80}") from error


def text_digest(text: str) -> bytes:
    """Return the digest of a text, which tells its length in UTF-8, too."""
    data = text.encode()
    return hashlib.blake2b(data, digest_size=12).digest() + len(data).to_bytes(4, "big")


def beginnings(text: bytes, digests: Iterable[bytes]) -> dict[bytes, int]:
    """Return the digest and the length of each beginning that has the length of one of `digests`.

    The text is hashed once.
    """
    found, done, hashed = dict[bytes, int](), 0, hashlib.blake2b(digest_size=12)
    for length in sorted({int.from_bytes(each[12:], "big") for each in digests}):
        if length <= len(text):
            hashed.update(text[done:length])
            found[hashed.digest() + length.to_bytes(4, "big")] = done = length
    return found


def value_of(arguments: str) -> Any:
    """Return the value of a tool call's arguments, since SDKs write JSON in other ways."""
    try:
        return msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments


def _digest(before: bytes, value: Any) -> bytes:
    try:
        data = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (RecursionError, ValueError) as error:  # arguments of calls are JSON, too
        raise Refused(f"this is more than JSON of {MOST_DEPTH} levels.") from error
    return hashlib.blake2b(before + data.encode(), digest_size=16).digest()


def _blocks(content: Any) -> list[Any]:
    """Return a content without what may be there or not: texts, and calls or results of tools."""
    found: list[Any] = []
    for block in [content] if isinstance(content, str) else content or ():
        match {"type": "text", "text": block} if isinstance(block, str) else block:
            case {"type": "text", "text": str(text)}:
                found += [text] if text and not text.startswith(_BILLING) else []
            case {"type": "tool_use", "id": id_, "name": name, "input": value}:
                found.append([id_, name, value])
            case {"type": "tool_result", "tool_use_id": id_, **others}:
                found.append([id_, _blocks(others.get("content")), others.get("is_error", False)])
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                raise Refused("content: texts and tools; images and others are not supported.")
    return found
