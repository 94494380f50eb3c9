"""`VLLMEngine`: an OpenAI-style server of vLLM, 0.16 or newer.

Sampling needs `vllm serve MODEL`; weight updates need vLLM 0.32 and VLLM_SERVER_DEV_MODE=1. vLLM's
log-probabilities are those before the temperature, unless it is started with
`--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from redrb.errors import (
    ConfigError,
    DecodeError,
    EngineError,
    StoreUnavailable,
    WeightCorrupt,
    WeightsTorn,
)
from redrb.train.engines.adapters import FOLDER, KEPT, Adapter, place
from redrb.train.engines.completions import Sampled
from redrb.train.engines.engine import (
    Engine,
    Published,
    WeightsKeptError,
    WeightsMixedError,
    WeightsReplacedError,
    WeightsUnreachableError,
)
from redrb.train.engines.labels import Named
from redrb.train.engines.routing import Routing, decoded

Pause: TypeAlias = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight when weights change."""

BACKEND = "redrb "
"""Begins the messages of errors of redrb's backend in vLLM; the class of the error follows."""

_OF_BACKEND = re.compile(
    rf"({BACKEND}[A-Z]\w*: .*?)(', please check the stack trace above.*)?\Z", re.DOTALL
)
"""Such an error, and how vLLM ends its own message around that of a worker process."""

PASSED = "this server has a later version"
"""In the message of an error of that backend."""

NO_URL = "the server has no REDRB_URL"
"""In the message of an error of that backend."""

NOT_TOLD = "call init_weight_transfer_engine first"
"""In the message of an error of that backend: the server was started again since it was told."""

NO_LORA = "the server takes no adapters"
"""In the message of an error of that backend."""

_log = logging.getLogger("redrb")


class VLLMEngine(Engine):
    """Samples by `/inference/v1/generate`, which tells the weights of each token.

    The server has it with `--enable-scale-out`. Without it, `/v1/completions` samples, and `pause`
    is "abort": nothing else tells where in a completion the weights have changed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        pause: Pause = "keep",
        adapters: bool = True,
        **options: Any,
    ) -> None:
        """Make an engine; `model` is the model's name at the server.

        Args:
            model: The model's name at the server.
            pause: What becomes of requests in flight when weights change. "keep": they stay, and
                go on with the new weights, whose prefix is computed again; nothing that was sampled
                is sent twice. "wait": they end first. "abort": they return what they have, and are
                sent again.
            adapters: Whether adapters are loaded as such if the server has LoRA: requests name
                their version, and end with it. Otherwise they are merged into the weights.
            options: Options of `Engine`: `timeout`, `retry_s` and `api_key`.

        Raises:
            ConfigError: An argument is not usable.
        """
        super().__init__(url, **options)
        if pause not in get_args(Pause):
            raise ConfigError(f"pause={pause!r:.40}: give {', '.join(map(repr, get_args(Pause)))}.")
        self._model, self._pause_mode = model, pause
        self._tells_weights, self._needs_url = True, False
        self._takes_adapters = adapters
        self._told: Mapping[str, Any] = {}
        self._adapter: Adapter | None = None
        self._with_adapters = 0  # requests in flight that have one
        self._adapters: deque[str] = deque()  # which this engine has loaded

    @property
    def keeps_requests(self) -> bool:
        """Whether requests in flight stay at the server while weights change.

        Those with an adapter do not: it does not belong to other weights.
        """
        keeps = self._tells_weights and self._pause_mode != "abort"
        return keeps and not self._with_adapters

    async def receives(self, where: Mapping[str, Any], url: str) -> bool:
        """Return whether the server has redrb's backend; if so, tell it where the weights are.

        The URL, which may hold a password, is sent only to a server that has none of its own.
        """
        told = {**where, "url": url} if self._needs_url else where
        try:
            await self._repeated(lambda: self._init(told), self._retry_s)
        except EngineError as error:
            if NO_URL in str(error) and not self._needs_url:
                self._needs_url = True
                return await self.receives(where, url)
            if BACKEND in str(error):
                raise
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.OK):
                return False  # another backend, none, or a server that takes no updates
            raise
        self._told = told
        return True

    async def update(
        self,
        source: Path | Published,
        version: int,
        label: str | None = None,
        *,
        is_later: Callable[[Named], Awaitable[bool]] | None = None,
    ) -> None:
        """Load weights, or an adapter beside its base: then nothing is paused.

        Args and errors are those of `Engine.update`.
        """
        base = source.base if isinstance(source, Published) else None
        if not isinstance(source, Published) or base is None or not await self._fetches(source):
            await self._load_whole(source, version, label, is_later=is_later)
            return
        adapter = Adapter(source.label, base.label)
        found = await self._repeated(self._weights_label_below, self._retry_s)
        if not adapter.fits(found):
            try:
                await self._load_whole(base, base.version, base.label, is_later=is_later)
            except WeightsReplacedError as error:
                if PASSED not in str(error):
                    raise
                # another program merges adapters into the weights of this server
                await self._load_whole(source, version, label, is_later=is_later)
                return
            found = str(self._label)
            if not adapter.fits(found):
                return  # another maker has loaded later weights
            self._open.clear()  # without suspension in between: requests wait for the adapter
        try:
            await self._repeated(partial(self._add, adapter), self._retry_s)
            self._adapter, self._label = adapter, adapter.named(found)
            self.version, self._lost = version, False
        finally:
            if not self._lost:
                self._open.set()
        await self._forget_old(adapter)

    async def _load_whole(self, source: Path | Published, *given: Any, is_later: Any) -> None:
        """Load weights to which no adapter belongs that the server has."""
        before, self._adapter = self._adapter, None
        try:
            await super().update(source, *given, is_later=is_later)
        except WeightsKeptError:
            self._adapter = before
            raise

    async def _fetches(self, source: Published) -> bool:
        """Let the server fetch an adapter, without using it; False if it has no LoRA."""
        if not self._takes_adapters:
            return False
        told = {**self._told, "adapter": source.label}
        try:
            await self._repeated(lambda: self._init(told), self._retry_s)
        except EngineError as error:
            if error.is_outage:
                raise
            if NO_LORA not in str(error):
                raise self._kept(error) from error
            self._takes_adapters = False
            _log.warning("%s. Adapters are merged into the weights.", error)
            return False
        return True

    async def _add(self, adapter: Adapter) -> None:
        """Let requests name an adapter that the server has fetched."""
        path = place(adapter.label).path(FOLDER)
        body = {"lora_name": adapter.label, "lora_path": str(path)}
        try:
            await self._asked("/v1/load_lora_adapter", body)
        except EngineError as error:
            if error.is_outage:
                raise
            if "already been loaded" not in str(error):
                raise self._kept(error) from error

    async def _forget_old(self, adapter: Adapter) -> None:
        """Let no request name the oldest adapter any more; those that do end as they began."""
        if adapter.label not in self._adapters:
            self._adapters.append(adapter.label)
        if len(self._adapters) > KEPT:
            with suppress(EngineError):  # such as that another maker has done it
                await self._asked(
                    "/v1/unload_lora_adapter", {"lora_name": self._adapters.popleft()}
                )

    def _lose(self, adapter: Adapter, why: str) -> EngineError:
        """Let requests wait for an update; return an error after which they are sent again."""
        text = f"has not the adapter {adapter.label} any more: {why}"
        if self._adapter is adapter:
            _log.warning("%s %s", self._client.where, text)
            self._open.clear()
            self._adapter, self.version, self._lost = None, None, True
        return self._error(text)

    async def _init(self, where: Mapping[str, Any]) -> None:
        await self._asked("/init_weight_transfer_engine", {"init_info": dict(where)})

    async def _request(
        self, tokens: list[int], most: int, *, routed_tokens: int, **sampling: Any
    ) -> Sampled:
        if routed_tokens:
            sampling["routed_experts_prompt_start"] = routed_tokens
        sampling, adapter = {"max_tokens": most, **sampling}, self._adapter
        if adapter is None:
            return await self._answered(self._model, tokens, sampling)
        self._with_adapters += 1
        try:
            part = await self._answered(adapter.label, tokens, sampling)
        except EngineError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise self._lose(adapter, str(error)) from error
        finally:
            self._with_adapters -= 1
        known = part.labels if part.labels is not None else [str(part.label)]
        other = next((each for each in known if not adapter.fits(each)), None)
        if other is not None:
            raise self._lose(adapter, f"the weights below it are {other!r}.")
        named = [adapter.named(each) for each in known]
        return (
            replace(part, labels=named)
            if part.labels is not None
            else replace(part, label=named[0])
        )

    async def _answered(
        self, model: str, tokens: list[int], sampling: Mapping[str, Any]
    ) -> Sampled:
        if self._tells_weights:
            try:
                return await self._generated(model, tokens, sampling)
            except EngineError as error:
                is_missing = error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
                if not is_missing or (model != self._model and model in str(error)):
                    raise
            self._tells_weights = False
            _log.info(
                "%s does not tell the weights of each token: start it with --enable-scale-out",
                self._client.where,
            )
        return await self._completed(model, tokens, sampling)

    async def _generated(
        self, model: str, tokens: list[int], sampling: Mapping[str, Any]
    ) -> Sampled:
        body = {
            "model": model,
            "token_ids": tokens,
            "sampling_params": {"logprobs": 0, **sampling},
        }
        reply = await self._client.request("/inference/v1/generate", body)
        try:
            [choice] = reply["choices"]
            found = list(choice["token_ids"])
            log_probs = [each["logprob"] for each in choice["logprobs"]["content"]]
            labels = [""] * len(found)  # of tokens whose weights it does not tell
            for span in choice["weight_versions"] or ():
                for at in range(max(0, span["start"]), min(span["end"], len(found))):
                    labels[at] = str(span["version"])
            routed = self._routed(choice, len(tokens) + len(found) - 1)
            finish = choice["finish_reason"]
            return Sampled(found, log_probs, finish, labels, routed_experts=routed)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error

    async def _completed(
        self, model: str, tokens: list[int], sampling: Mapping[str, Any]
    ) -> Sampled:
        body = {
            "model": model,
            "prompt": tokens,
            "logprobs": 1,
            "return_token_ids": True,
            **sampling,
        }
        reply = await self._client.request("/v1/completions", body)
        try:
            [choice] = reply["choices"]
            found = list(choice["token_ids"])
            log_probs, finish = list(choice["logprobs"]["token_logprobs"]), choice["finish_reason"]
            routed = self._routed(choice, len(tokens) + len(found) - 1)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error
        label = None if self._label is None else await self._weights_label_below()
        return Sampled(found, log_probs, finish, label=label, routed_experts=routed)

    def _routed(self, choice: Mapping[str, Any], most: int) -> Routing | None:
        try:
            return decoded(choice.get("routed_experts"), most)
        except ValueError as error:
            raise self._malformed("routed experts as vLLM 0.32 sends them") from error

    async def _weights_label(self) -> str:
        found, adapter = await self._weights_label_below(), self._adapter
        return adapter.named(found) if adapter is not None and adapter.fits(found) else found

    async def _weights_label_below(self) -> str:
        """Return the label of the weights, without an adapter."""
        return str((await self._client.request("/weight_info")).get("weight_version"))

    async def _pause(self, *, abort: bool) -> None:
        mode = self._pause_mode if self.keeps_requests and not abort else "abort"
        await self._client.request(f"/pause?mode={mode}", {})

    async def _load(self, source: Path | Published) -> None:
        try:
            if isinstance(source, Path):
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
                await self._asked("/collective_rpc", body)
            else:
                await self._receive(source)
        except EngineError as error:
            if error.is_outage:
                raise
            text = self._why(error)
            is_passed = any(each in text for each in (PASSED, NOT_TOLD))
            if isinstance(source, Published) and (BACKEND not in text or is_passed):
                raise WeightsReplacedError(text, where=error.where, status=error.status) from error
            if BACKEND not in text or f"{BACKEND}{WeightsTorn.__name__}" in text:
                raise WeightsMixedError(text, where=error.where, status=error.status) from error
            raise self._kept(error) from error

    def _why(self, error: EngineError) -> str:
        reason = str(error).removeprefix(f"{error.where}: ")
        return f"{self._client.where} could not load weights: {reason}"

    def _kept(self, error: EngineError) -> WeightsKeptError:
        """Return the error that says that the server could not load, and why."""
        text = self._why(error)
        is_unreachable = f"{BACKEND}{StoreUnavailable.__name__}" in text
        kind = WeightsUnreachableError if is_unreachable else WeightsKeptError
        kept = kind(text, where=error.where, status=error.status)
        damage = (WeightCorrupt.__name__, DecodeError.__name__)
        kept.is_damage = any(f"{BACKEND}{name}" in text for name in damage)
        return kept

    async def _receive(self, source: Published) -> None:
        """Load a version by the four calls that begin, make and end an update.

        Other makers may do the same at the same time: an update that they have begun is ended, and
        one that they have ended is begun again. Only the second call changes weights.
        """
        wanted = {"version": source.version, "created_s": source.created_s}
        for last in (False, True):
            try:
                begin = partial(self._asked, "/start_weight_update", {})
                await self._repeated(begin, self._retry_s)
                await self._asked("/update_weights", {"update_info": wanted})
                break
            except EngineError as error:
                if last or error.is_outage or BACKEND in str(error):
                    raise
            with suppress(EngineError):  # there may be none any more
                await self._asked("/finish_weight_update", {})
        with suppress(EngineError):
            await self._asked("/finish_weight_update", {})
        if not (await self._client.request("/is_paused")).get("is_paused"):
            await self._pause(abort=False)  # others have resumed it: what it computed is dropped

    async def _asked(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a control call; an error of the server itself is no outage.

        An error of redrb's backend has its message alone, without that of vLLM around it.
        """
        try:
            await self._client.request(path, body, last=True)
        except EngineError as error:
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            text = str(error)
            if (found := _OF_BACKEND.search(text)) is not None:
                text = f"{error.where}: {found[1]}"
            raise EngineError(text, where=error.where, status=HTTPStatus.OK) from error

    async def _resume(self) -> None:
        await self._client.request("/resume", {})
