"""Requests of three protocols, checked, in one form; digests of the history that they show.

Requests of `/v1/messages` are converted to the form of `/v1/chat/completions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import msgspec

from redrb.errors import RedrbError

Json: TypeAlias = "dict[str, Any]"
Protocol: TypeAlias = Literal["chat", "text", "messages"]

MOST_BYTES = 32 * 2**20
"""Largest body of a request."""

MOST_MESSAGES = 8192
"""Most messages of a history, and most tools, tool calls of a message, and parts of a content."""

MOST_DEPTH = 64
"""Most levels of lists and objects in a body, and in the arguments of a tool call."""

MOST_NAME = 512
"""Most characters of a name or an id."""


class Refused(RedrbError):
    """A request that the gateway does not serve; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked request for one turn.

    Attributes:
        request: Digest of the whole request, but for whether the reply is streamed.
        messages: The history in OpenAI's form; [] for text.
        text: The prompt of `/v1/completions`.
        template: What the chat template gets beside the messages, such as `tools`.
        sampling: Parameters of sampling that the engine gets as they are.
        most: Most tokens; None: as many as fit.
        stop: Words that end the reply, which does not have them.
        stream, usage: Whether events are sent, and whether the last one counts tokens.
        log_probs, tokens: Whether the reply has them.
    """

    protocol: Protocol
    request: bytes
    model: str
    messages: list[Json] = field(default_factory=list)
    text: str = ""
    template: Json = field(default_factory=dict)
    sampling: Json = field(default_factory=dict)
    most: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    usage: bool = False
    log_probs: bool = False
    tokens: bool = False


_NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.01, 100),
    "top_p": (float, 0.001, 1),
    "min_p": (float, 0, 1),
    "top_k": (int, -1, 2**31),
    "seed": (int, 0, 2**63 - 1),
}
"""Parameters of sampling: at 0, a temperature samples nothing, and no log-probability is true."""

_TAKEN: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "adaptive"}, {"type": "disabled"}),
    "service_tier": ("auto", "default", "standard_only"),
}
"""Fields that are taken with these values only: others change what is sampled, or its number."""

_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "cache_control")

_SHARED = {"model", "stream", "stream_options", "stop", "stop_token_ids", "max_tokens", "logprobs"}
_SHARED |= {"return_token_ids", *_NUMBERS, *_WITHOUT_EFFECT, *_TAKEN} - {"tool_choice", "thinking"}
_TEMPLATE = {"tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"}

_FIELDS: dict[Protocol, set[str]] = {
    "chat": _SHARED | _TEMPLATE | {"messages", "max_completion_tokens"},
    "text": _SHARED | {"prompt"},
    "messages": {"model", "stream", "max_tokens", "temperature", "top_p", "top_k", "metadata"}
    | {"service_tier", "system", "messages", "tools", "tool_choice", "stop_sequences", "thinking"},
}

_OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"}
_OF_SDKS = {"reasoning_content", "refusal", "annotations", "audio", "function_call", "provider"}


def ask_of(protocol: Protocol, data: bytes, *, key: str = "") -> Ask:
    """Return the request in a body, or raise `Refused`.

    Args:
        key: The header Idempotency-Key; a request that is sent with another one is another request.
    """
    body = parsed(data)
    for name in body.keys() - _FIELDS[protocol]:
        raise Refused(f"{_short(name)} is not supported: leave it out.")
    counted = {name: body[name] for name in sorted(body.keys() - {"stream", "stream_options"})}
    request = _digest(b"", [protocol, key, counted])
    for name, values in _TAKEN.items():
        if body.get(name) is not None and body[name] not in values:
            raise Refused(f"{name}={_short(body[name])} is not supported: leave it out.")
    sampling = {name: _number(body, name) for name in _NUMBERS if body.get(name) is not None}
    ids = _list("stop_token_ids", body.get("stop_token_ids") or [], 64)
    _check("stop_token_ids", all(type(each) is int for each in ids))
    if ids:
        sampling["stop_token_ids"] = ids
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    _check("max_tokens", most is None or (type(most) is int and 0 < most < 2**31))
    options = _object("stream_options", body.get("stream_options") or {})
    shared: Json = {
        "protocol": protocol,
        "request": request,
        "model": _name("model", body.get("model")),
        "sampling": sampling,
        "stream": body.get("stream") is True,
        "usage": options.get("include_usage") is True,
        "log_probs": bool(body.get("logprobs")),
        "tokens": body.get("return_token_ids") is True,
    }
    if protocol == "text":
        text = body.get("prompt")
        if not isinstance(text, str) or not text:
            raise Refused("prompt: one text; tokens and several prompts are not supported.")
        return Ask(text=text, stop=_stop(body.get("stop")), most=most or 16, **shared)
    if protocol == "messages":
        body |= _converted(body)
    messages = [_message(each) for each in _list("messages", body.get("messages"))]
    if not messages or messages[-1]["role"] == "assistant":
        raise Refused("messages: the last one must be of a user or a tool.")
    template = {name: body[name] for name in _TEMPLATE if body.get(name) is not None}
    for tool in _list("tools", template.get("tools", [])):
        function = _object("tools", _object("tools", tool).get("function"))
        _name("tools: name", function.get("name"))
    if template.get("tool_choice") == "auto":
        del template["tool_choice"]
    _object("chat_template_kwargs", template.get("chat_template_kwargs", {}))
    stop = _stop(body.get("stop"))
    return Ask(messages=messages, template=template, stop=stop, most=most, **shared)


def parsed(data: bytes) -> Json:
    """Return the object in a body, or raise `Refused`."""
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}.") from error
    _check_depth(body)
    return _object("the body", body)


def histories(ask: Ask) -> list[bytes]:
    """Return the digest of the history with each number of its messages, from 0 to all."""
    found = [_digest(b"", ask.template)]
    for message in ask.messages:
        found.append(extended(found[-1], message))
    return found


def extended(history: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a history with one more message.

    Reasoning does not count: templates drop it from earlier turns, and so do agents.
    """
    calls = [
        [call.get("id"), call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    what = [message["role"], message.get("content") or "", calls]
    return _digest(history, [*what, message.get("tool_call_id"), message.get("name")])


def text_digest(text: str | bytes) -> bytes:
    """Return the digest of a text, which tells its length in UTF-8, too."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=12).digest() + len(data).to_bytes(4, "big")


def rest_of(text: str, digest: bytes) -> str | None:
    """Return what a text has after the one of a digest; None: it does not begin with it."""
    data, length = text.encode(), int.from_bytes(digest[12:], "big")
    begins = length <= len(data) and text_digest(data[:length]) == digest
    return data[length:].decode() if begins else None


def _digest(before: bytes, value: Any) -> bytes:
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(before + data.encode(), digest_size=16).digest()


def _arguments(text: str) -> Any:
    """Return the value of a tool call's arguments, since SDKs write JSON in other ways."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def _check(what: str, holds: object) -> None:
    if not holds:
        raise Refused(f"{what}: missing, or of another form than the protocol has.")


def _short(value: object) -> str:
    return f"{value!r:.80}"


def _object(what: str, value: object) -> Json:
    _check(f"{what}: an object", isinstance(value, dict))
    return cast("Json", value)


def _list(what: str, value: object, most: int = MOST_MESSAGES) -> list[Any]:
    _check(f"{what}: a list of at most {most}", isinstance(value, list) and len(value) <= most)
    return cast("list[Any]", value)


def _name(what: str, value: object) -> str:
    is_name = isinstance(value, str) and 0 < len(value) <= MOST_NAME
    _check(f"{what}: at most {MOST_NAME} characters", is_name)
    return cast("str", value)


def _number(body: Json, name: str) -> Any:
    kind, least, most = _NUMBERS[name]
    value = body[name]
    is_number = type(value) in (int, kind)
    if not is_number or not least <= value <= most:
        raise Refused(f"{name}={_short(value)}: a number from {least} to {most}.")
    return value


def _stop(value: object) -> list[str]:
    words = [value] if isinstance(value, str) else _list("stop", value or [], 64)
    for word in words:
        _name("stop", word)
    return words


def _check_depth(body: object) -> None:
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH):
        found: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                found += each.values()
            elif isinstance(each, list):
                found += each
        level = found
    if any(isinstance(each, (dict, list)) for each in level):
        raise Refused(f"the body has more than {MOST_DEPTH} levels.")


def _text(content: object) -> str:
    """Return a content of text: a string, null, or parts, which are joined as vLLM does."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(each) for each in _list("content", content))


def _part(part: object) -> str:
    found = _object("content", part)
    if found.get("type") != "text" or not isinstance(found.get("text"), str):
        raise Refused("content: texts only; images and others are not supported.")
    return str(found["text"])


def _message(given: object) -> Json:
    """Return a message of the chat protocol as its fields that count."""
    message = _object("messages", given)
    for name in message.keys() - _OF_MESSAGE - _OF_SDKS:
        raise Refused(f"messages: {_short(name)} is not supported.")
    role = message.get("role")
    _check("messages: role", role in ("system", "developer", "user", "assistant", "tool"))
    found: Json = {"role": role, "content": _text(message.get("content"))}
    if message.get("name") is not None:
        found["name"] = _name("messages: name", message["name"])
    if role == "tool":
        found["tool_call_id"] = _name("messages: tool_call_id", message.get("tool_call_id"))
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if isinstance(reasoning, str):
            found["reasoning"] = reasoning
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_call(each) for each in _list("tool_calls", calls)]
    return found


def _call(given: object) -> Json:
    call = _object("tool_calls", given)
    function = _object("tool_calls", call.get("function"))
    text = function.get("arguments")
    _check("tool_calls: arguments", isinstance(text, str))
    _check_depth(_arguments(cast("str", text)))
    named = {"name": _name("tool_calls: name", function.get("name")), "arguments": text}
    id_ = _name("tool_calls: id", call.get("id"))
    return {"id": id_, "type": "function", "function": named}


def _converted(body: Json) -> Json:
    """Return fields of `/v1/messages` as those of `/v1/chat/completions`."""
    system = _text(body.get("system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for given in _list("messages", body.get("messages")):
        message = _object("messages", given)
        role, content = message.get("role"), message.get("content")
        _check("messages: role", role in ("user", "assistant"))
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = [_object("content", each) for each in _list("content", content)]
        messages += _from_assistant(blocks) if role == "assistant" else _from_user(blocks)
    found: Json = {"messages": messages, "stop": body.get("stop_sequences")}
    if tools := _list("tools", body.get("tools") or []):
        found["tools"] = [_tool(each) for each in tools]
    if isinstance(choice := body.get("tool_choice"), dict):
        found["tool_choice"] = choice["type"]
    if (thinking := body.get("thinking")) is not None:
        found["chat_template_kwargs"] = {"enable_thinking": thinking != {"type": "disabled"}}
    return found


def _tool(given: object) -> Json:
    tool = _object("tools", given)
    _check("tools: those of the agent only", tool.get("type") in (None, "custom"))
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _from_assistant(blocks: list[Json]) -> Iterator[Json]:
    message: Json = {"role": "assistant", "content": [], "tool_calls": []}
    for block in blocks:
        if block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input"), ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            message["tool_calls"].append({"id": block.get("id"), "function": function})
        elif block.get("type") == "thinking":
            message["reasoning"] = block.get("thinking")
        elif block.get("type") != "redacted_thinking":
            message["content"].append(block)
    yield message


def _from_user(blocks: list[Json]) -> Iterator[Json]:
    """Yield a message for each result of a tool, and one for the texts between two of them."""
    texts: list[Json] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        id_ = block.get("tool_use_id")
        yield {"role": "tool", "tool_call_id": id_, "content": block.get("content")}
    if texts or not blocks:
        yield {"role": "user", "content": texts}
