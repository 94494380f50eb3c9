"""`SGLangEngine`: a server of SGLang, 0.5 or newer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redrb.train.engines.completions import Sampled
from redrb.train.engines.engine import Engine, Published


class SGLangEngine(Engine):
    """Samples by `/generate`; updates by `/pause_generation` and `/update_weights_from_disk`.

    Each reply names the weights by which it was sampled (`weight_version`).
    """

    async def _request(
        self,
        tokens: list[int],
        most: int,
        *,
        routed_tokens: int,  # noqa: ARG002
        **sampling: Any,
    ) -> Sampled:
        parameters = {"max_new_tokens": most, **sampling}
        body = {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True}
        reply = await self._client.request("/generate", body)
        try:
            found = reply["meta_info"]["output_token_logprobs"]
            finish = reply["meta_info"]["finish_reason"]["type"]
            label = reply["meta_info"].get("weight_version")
            tokens, log_probs = [each[1] for each in found], [each[0] for each in found]
            return Sampled(tokens, log_probs, finish, label=label)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error

    async def _weights_label(self) -> str:
        return str((await self._client.request("/get_model_info")).get("weight_version"))

    async def _pause(self, *, abort: bool) -> None:  # noqa: ARG002  (it aborts always)
        await self._client.request("/pause_generation", {"mode": "abort"})

    async def _load(self, source: Path | Published) -> None:
        body = {"model_path": str(source)}
        reply = await self._client.request("/update_weights_from_disk", body)
        if not reply.get("success"):
            why = reply.get("message", reply)
            raise self._error(f"could not load {source}: {why!s:.500}", 200)

    async def _resume(self) -> None:
        await self._client.request("/continue_generation", {})
