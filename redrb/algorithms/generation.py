"""`generate`: samples completions of a batch of prompts from any causal model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redrb.algorithms.completions import Completions
from redrb.algorithms.models import (
    GRIDS,
    NO_INPUTS,
    ModelInputs,
    call,
    device_of,
    forward_names,
    output_tensor,
    positions,
)
from redrb.algorithms.prompts import further_keys, prompt_inputs, read_prompts
from redrb.errors import ConfigError, RecordError

NextToken: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`(newest [B, T], attention_mask [B, S]) -> logits [B, V]`, called in the order of the tokens."""


def decoder_of(
    model: nn.Module, *, use_cache: bool = True, inputs: ModelInputs = NO_INPUTS
) -> NextToken:
    """Return a function that gives the next logits of one new batch, one call a token."""
    names = forward_names(model)
    cache = next((name for name in ("cache", "past_key_values") if name in names), None)
    if not use_cache or cache is None or "use_cache" not in names:
        return _whole(model, names, inputs)
    if names & inputs.others.keys() & GRIDS:  # positions are not those of the mask
        return _whole(model, names, inputs)
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in names:
        options["logits_to_keep"] = 1

    def next_token(newest: Tensor, attention_mask: Tensor) -> Tensor:
        nonlocal inputs
        if "position_ids" in names:
            options["position_ids"] = positions(attention_mask)[:, -newest.shape[1] :]
        output = call(model, newest, attention_mask, inputs=inputs, **options)
        inputs = NO_INPUTS  # later calls find them in the cache
        options[cache] = getattr(output, cache, None)
        if options[cache] is None:
            raise RecordError(
                f"{type(model).__name__} returned no {cache} with use_cache=True: put it into eval "
                "mode, or turn its gradient checkpointing off to sample."
            )
        return _last(output, model, newest.shape[0])

    return next_token


def _whole(model: nn.Module, names: frozenset[str], inputs: ModelInputs) -> NextToken:
    """Return a function that computes all tokens so far at each call."""
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    if "actions" in names:
        options["actions"] = None
    seen: Tensor | None = None

    def next_token(newest: Tensor, attention_mask: Tensor) -> Tensor:
        nonlocal seen, inputs
        if seen is not None:
            inputs = inputs.extended(newest.shape[1])
        seen = newest if seen is None else torch.cat([seen, newest], 1)
        output = call(model, seen, attention_mask, inputs=inputs, **options)
        return _last(output, model, newest.shape[0])

    return next_token


def _last(output: object, model: nn.Module, batch: int) -> Tensor:
    logits = output_tensor(output, ("logits",), f"the actor {type(model).__name__}")
    if logits.dim() != 3 or logits.shape[0] != batch:
        raise RecordError(
            f"the actor {type(model).__name__} answered with shape {list(logits.shape)}, not "
            f"[{batch}, S, V]."
        )
    return logits[:, -1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Settings of sampling.

    Attributes:
        do_sample: False takes the likeliest token each time.
        temperature: Divides the logits, > 0.
        top_k: Sample only among the k likeliest tokens; None or 0: all.
        top_p: Sample only among the likeliest tokens that together reach this probability, with
            the token that reaches it (Holtzman et al. 2020, arXiv:1904.09751); None or 1: all.
        generator: Source of randomness, on any device; the same state gives the same completions.
            None: torch's global generator.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not (0 < self.temperature < math.inf):
            raise ConfigError(f"temperature {self.temperature} must be positive and finite.")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} must be at least 1, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0 and at most 1.")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose one token for each row.

        Args:
            logits: Any float dtype, `[B, V]`.

        Returns:
            Token ids, int64 `[B]`, and their log-probabilities at the temperature, float32 `[B]`,
            without the effect of `top_k` and `top_p`.
        """
        log_probs = (logits.float() / self.temperature).log_softmax(-1)
        if self.do_sample:
            chosen = self._draw(self._cut(log_probs).exp())
        else:
            chosen = log_probs.argmax(-1, keepdim=True)
        return chosen.squeeze(-1), log_probs.gather(-1, chosen).squeeze(-1)

    def _draw(self, weights: Tensor) -> Tensor:
        """Draw from unnormalised probabilities `[B, V]` on the generator's device."""
        generator = self.generator
        device = weights.device if generator is None else generator.device
        drawn = torch.multinomial(weights.to(device), 1, generator=generator)
        return drawn.to(weights.device)

    def _cut(self, log_probs: Tensor) -> Tensor:
        """Return `log_probs` with -inf for tokens that `top_k`, then `top_p`, exclude."""
        vocabulary = log_probs.shape[-1]
        if self.top_k and self.top_k < vocabulary:
            least = log_probs.topk(self.top_k).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = log_probs.softmax(-1).sort(descending=True)
            cut = ordered.cumsum(-1) - ordered >= self.top_p
            cut[:, 0] = False
            log_probs = log_probs.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
        return log_probs


class SamplingEnded(Exception):
    """Raised by `before_token`: sampling ends, and the completions hold what was sampled."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: object,
    *,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    do_sample: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    before_token: Callable[[], int | None] | None = None,
    use_cache: bool = True,
    num_beams: int = 1,
    early_stopping: bool = False,  # noqa: ARG001 (an option of coati, as are the next two)
    prepare_inputs_fn: Callable[..., Any] | None = None,  # noqa: ARG001
    update_model_kwargs_fn: Callable[..., Any] | None = None,  # noqa: ARG001
) -> Completions:
    """Sample one completion of each prompt, until EOS or the length limit.

    Log-probabilities are those of the whole distribution at `temperature`, without the effect of
    `top_k`, `top_p` and `do_sample=False`: a trainer that knows only the temperature computes the
    same numbers, so the ratio of fresh experience is 1. The model stays in its mode.

    Args:
        model: A causal model, as in `redrb.algorithms.models` and `redrb.algorithms.generation`.
        prompts: Token ids, int64 `[B, P]`, or a mapping with `input_ids` and `attention_mask`, such
            as a tokenizer returns, padded on either side. Without a mask, `pad_token_id` tokens at
            the beginning and the end are padding. Further keys of the mapping, lists or tensors
            with an entry for each prompt, are in `Completions.keys`; the model gets those that its
            `forward` names (`redrb.algorithms.prompts`).
        max_length: Longest sequence, with the padded prompt; this or `max_new_tokens` is required.
        max_new_tokens: Longest completion, with EOS.
        do_sample, temperature, top_k, top_p, generator: As for `redrb.algorithms.Sampler`.
        eos_token_id: Token, or tokens, that end a completion; None: only the length does.
        pad_token_id: Token for padding; None: 0.
        before_token: Called before each token is computed; it may load new weights into the model,
            and returns their version, None if unknown; or it raises `SamplingEnded`. A cache keeps
            keys and values of earlier tokens, as in PipelineRL (Piché et al. 2025,
            arXiv:2509.19128).
        use_cache: False computes the whole sequence again for each token.
        num_beams: 1: completions are sampled, not searched for.
        early_stopping, prepare_inputs_fn, update_model_kwargs_fn: Accepted as in coati, without
            effect: sampling ends when every completion has ended, and
            `redrb.algorithms.generation` knows how models are called.

    Raises:
        ConfigError: An option is out of range, or no length limit is given.
        RecordError: The prompts are malformed, or the model answers with another shape.
    """
    sampler = Sampler(
        do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    tokens, mask = read_prompts(prompts, pad_token_id=pad_token_id)
    keys = further_keys(prompts)
    _check_beams(num_beams)
    device = device_of(model) or tokens.device
    tokens, mask = tokens.to(device), mask.to(device)
    room = _room(tokens.shape[1], max_length, max_new_tokens)
    listed = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    ends = torch.tensor(listed, dtype=torch.int64, device=device)
    inputs = prompt_inputs(model, prompts, pad_token_id=pad_token_id)
    next_token = decoder_of(model, use_cache=use_cache, inputs=inputs)
    (batch, start), pad = tokens.shape, pad_token_id or 0
    sequences = torch.cat([tokens, tokens.new_full((batch, room), pad)], 1)
    attention_mask = torch.cat([mask, mask.new_zeros(batch, room)], 1)
    noted = torch.zeros(batch, room, device=device)
    versions = torch.full((batch, room), -1, device=device)
    running = torch.ones(batch, dtype=torch.bool, device=device)
    newest, end, known = tokens, start, False
    while end < start + room and running.any():
        try:
            version = None if before_token is None else before_token()
        except SamplingEnded:
            break
        chosen, log_probs = sampler.choose(next_token(newest, attention_mask[:, :end]))
        sequences[:, end] = chosen.masked_fill(~running, pad)
        attention_mask[:, end] = running
        noted[:, end - start] = log_probs.masked_fill(~running, 0.0)
        if version is not None:
            versions[:, end - start], known = torch.where(running, version, -1), True
        running = running & ~torch.isin(sequences[:, end], ends)
        newest, end = sequences[:, end : end + 1], end + 1
    return Completions(
        sequences[:, :end],
        attention_mask[:, :end],
        attention_mask[:, start:end].bool(),
        noted[:, : end - start],
        versions[:, : end - start] if known else None,
        ~running,
        keys,
        inputs.extended(end - start),
    )


def check_options(options: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Check options of `generate` before there are prompts.

    Raises:
        ConfigError: An option is unknown or out of range, or no length limit is given.
    """
    unknown = sorted(options.keys() - _OPTIONS - set(known))
    if unknown:
        raise ConfigError(
            f"generation has no option {', '.join(unknown)}; it has {', '.join(sorted(_OPTIONS))}."
        )
    Sampler(**{name: options[name] for name in _OF_SAMPLER if name in options})
    _check_beams(options.get("num_beams", 1))
    _room(0, options.get("max_length"), options.get("max_new_tokens"))


def _check_beams(num_beams: int) -> None:
    if num_beams != 1:
        raise ConfigError(f"num_beams {num_beams} must be 1: completions are sampled.")


_OPTIONS = frozenset(inspect.signature(generate).parameters) - {"model", "prompts"}
_OF_SAMPLER = [field.name for field in fields(Sampler)]


def _room(start: int, max_length: int | None, max_new_tokens: int | None) -> int:
    limits = (max_new_tokens, None if max_length is None else max_length - start)
    rooms = [each for each in limits if each is not None]
    if not rooms:
        raise ConfigError("give max_new_tokens or max_length: how long completions may be.")
    if min(rooms) < 1:
        raise ConfigError(
            f"max_new_tokens {max_new_tokens} must be positive, and max_length {max_length} more "
            f"than the {start} tokens of the padded prompts."
        )
    return min(rooms)
