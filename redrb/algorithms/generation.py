"""Sampling completions of a batch of prompts from any causal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redrb.algorithms.decoding import decoder_of
from redrb.algorithms.models import device_of
from redrb.algorithms.sampling import Sampler
from redrb.errors import ConfigError, RecordError


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts with sampled completions: prompts end, and completions start, at S - A.

    Attributes:
        sequences: Prompt padded on the left, completion padded on the right, int64 `[B, S]`.
        attention_mask: 1 on prompt and completion, int64 `[B, S]`.
        action_mask: True on the completion, its EOS included, bool `[B, A]`.
        action_log_probs: Log-probability of each chosen token, 0 on padding, float32 `[B, A]`.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor

    def __len__(self) -> int:
        """Return B."""
        return self.sequences.shape[0]

    def prompt(self, row: int) -> Tensor:
        """Return the prompt's tokens in `row`, int64 `[its own length]`."""
        end = self.sequences.shape[1] - self.action_mask.shape[1]
        return self.sequences[row, :end][self.attention_mask[row, :end].bool()]

    def completion(self, row: int) -> Tensor:
        """Return the tokens that were sampled in `row`, int64 `[its own length]`."""
        actions = self.action_mask.shape[1]
        return self.sequences[row, -actions:][self.action_mask[row]]


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
) -> Completions:
    """Sample one completion a prompt, until EOS or the longest length.

    The noted log-probabilities are those of the model's whole distribution at `temperature`. What
    `top_k`, `top_p` and `do_sample=False` change is not in them, so that a trainer that knows no
    more than the temperature computes the same numbers, and the ratio of fresh experience is 1.

    The model is used in the mode that it is in: dropout is the caller's to turn off (makers do).

    Args:
        model: A causal model; `redrb.algorithms.models` says how it is called,
            `redrb.algorithms.decoding` how it may bring a cache.
        prompts: Token ids padded on the left, int64 `[B, P]`, or a mapping with `input_ids` and
            `attention_mask`. Without a mask, the tokens `pad_token_id` that a row starts with are
            padding. They are moved to the model's device.
        max_length: Longest sequence, the padded prompt included; or
        max_new_tokens: longest completion, EOS included. The shorter counts where both are given.
        do_sample: False takes the likeliest token each time.
        temperature: Divides the logits, > 0.
        top_k: Only the k likeliest tokens are sampled; None or 0: all.
        top_p: Only the likeliest tokens that together reach this probability; None or 1: all.
        eos_token_id: Token, or tokens, that end a completion; None: only its length does.
        pad_token_id: What completions are padded with; None: 0.
        generator: Source of randomness; the same state gives the same completions.

    Raises:
        ConfigError: An option is out of range, or no longest length is given.
        RecordError: The prompts are nothing of the kind, or the model answers with another shape.
    """
    sampler = Sampler(
        do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    tokens, mask = read_prompts(prompts, pad_token_id=pad_token_id)
    device = device_of(model) or tokens.device
    room = _room(tokens.shape[1], max_length, max_new_tokens)
    return _sample(
        model,
        tokens.to(device),
        mask.to(device),
        room=room,
        sampler=sampler,
        ends=_tokens(eos_token_id, device),
        filler=0 if pad_token_id is None else pad_token_id,
    )


def _sample(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor,
    *,
    room: int,
    sampler: Sampler,
    ends: Tensor,
    filler: int,
) -> Completions:
    batch, start = tokens.shape
    next_token = decoder_of(model)
    sequences = torch.cat([tokens, tokens.new_full((batch, room), filler)], 1)
    attention_mask = torch.cat([mask, mask.new_zeros(batch, room)], 1)
    noted = torch.zeros(batch, room, device=tokens.device)
    running = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    newest, end = tokens, start
    while end < start + room and running.any():
        chosen, log_probs = sampler.choose(next_token(newest, attention_mask[:, :end]))
        sequences[:, end] = chosen.masked_fill(~running, filler)
        attention_mask[:, end] = running
        noted[:, end - start] = log_probs.masked_fill(~running, 0.0)
        running = running & ~torch.isin(sequences[:, end], ends)
        newest, end = sequences[:, end : end + 1], end + 1
    return Completions(
        sequences[:, :end],
        attention_mask[:, :end],
        attention_mask[:, start:end].bool(),
        noted[:, : end - start],
    )


def read_prompts(prompts: object, *, pad_token_id: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of a batch of prompts, int64 `[B, P]` each.

    Raises:
        RecordError: It is neither a tensor nor a mapping of tensors, or not padded on the left.
    """
    if isinstance(prompts, Mapping):
        unknown = sorted(str(key) for key in prompts if key not in ("input_ids", "attention_mask"))
        if unknown or "input_ids" not in prompts:
            raise RecordError(
                f"prompts came as a mapping with {', '.join(map(str, prompts)) or 'nothing'}: it "
                "has input_ids, and attention_mask where there is padding, and nothing else."
            )
        tokens, mask = prompts["input_ids"], prompts.get("attention_mask")
    else:
        tokens, mask = prompts, None
    tokens = _matrix(tokens, "prompts" if tokens is prompts else "input_ids")
    if mask is None:
        mask = torch.ones_like(tokens)
        if pad_token_id is not None:
            mask = (tokens != pad_token_id).cummax(1).values.long()
    mask = _matrix(mask, "attention_mask")
    if mask.shape != tokens.shape:
        raise RecordError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(tokens.shape)}.",
            field="attention_mask",
        )
    if not bool((mask[:, 1:] >= mask[:, :-1]).all() & (mask[:, -1] == 1).all()):
        raise RecordError(
            "prompts must be padded on the left, and have a token each, so that completions follow "
            'at once: use padding_side="left".',
            field="attention_mask",
        )
    return tokens, mask


def _matrix(tensor: object, name: str) -> Tensor:
    """Return integers `[B, P]` as int64, or say what else came."""
    if not isinstance(tensor, Tensor):
        raise RecordError(
            f"{name} came as a {type(tensor).__name__}: give a tensor of token ids [B, P], or a "
            "mapping of tensors with input_ids and attention_mask.",
            field=name,
        )
    if tensor.dim() != 2 or tensor.numel() == 0 or tensor.is_floating_point():
        raise RecordError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}: it must hold integers, "
            "[B, P], and not be empty.",
            field=name,
        )
    return tensor.long()


def _room(start: int, max_length: int | None, max_new_tokens: int | None) -> int:
    """Return the most tokens that a completion may have."""
    rooms = []
    if max_new_tokens is not None:
        rooms.append(max_new_tokens)
    if max_length is not None:
        rooms.append(max_length - start)
    if not rooms:
        raise ConfigError("say how long completions may be: max_new_tokens or max_length.")
    if min(rooms) < 1:
        raise ConfigError(
            f"max_new_tokens {max_new_tokens} must be positive, and max_length {max_length} more "
            f"than the {start} tokens of the padded prompts."
        )
    return min(rooms)


def _tokens(ids: int | Sequence[int] | None, device: torch.device) -> Tensor:
    """Return token ids as a tensor, which is empty for None."""
    listed = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return torch.tensor(listed, dtype=torch.int64, device=device)
