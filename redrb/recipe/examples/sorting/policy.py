"""The demo's networks: a small transformer as actor, a second one as critic; how they start.

Prompts are padded on the left, so positions and attention follow the mask and not the index: a
padded row gives the same numbers as the row alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from redrb.recipe.examples.sorting.digits import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    PAD,
    VOCABULARY_SIZE,
    sample_prompts,
    target,
)
from redrb.recipe.prompts import padded

WIDTH, LAYERS, HEADS, HIDDEN = 64, 2, 4, 128
"""Residual stream, transformer blocks, attention heads, and the hidden layer of a block's MLP."""


class KeyValues:
    """One block's keys and values of the tokens so far, float32 `[B, heads, S, width / heads]`."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of the newest tokens; return those of all tokens."""
        if self._held is not None:
            key = torch.cat([self._held[0], key], 2)
            value = torch.cat([self._held[1], value], 2)
        self._held = (key, value)
        return key, value


class Block(nn.Module):
    """Pre-norm attention and MLP on the residual stream (Radford et al. 2019, GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, HIDDEN)
        self.mlp_out = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: Tensor, allowed: Tensor, past: KeyValues | None = None) -> Tensor:
        """Return the new residual stream, float32 `[B, T, width]`.

        Args:
            hidden: Residual stream of the newest T tokens, float32 `[B, T, width]`.
            allowed: True where a query may look at a key, bool `[B, 1, T, S]`.
        """
        batch, tokens, width = hidden.shape
        projected: Tensor = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, tokens, 3, HEADS, width // HEADS).permute(
            2, 0, 3, 1, 4
        )
        if past is not None:
            key, value = past.add(key, value)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        added: Tensor = self.mlp_out(functional.relu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + added


class Decoder(nn.Module):
    """Embeddings and causal blocks: tokens to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, WIDTH)
        self.position_embedding = nn.Embedding(MAX_PROMPT_TOKENS + MAX_NEW_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, past: list[KeyValues] | None = None
    ) -> Tensor:
        """Return hidden states, float32 `[B, T, width]`; they have no meaning at padding.

        Args:
            tokens: Token ids, int64 `[B, T]`: the whole sequence, or its tokens after `past`.
            attention_mask: 1 where a token of the whole sequence counts, int64 or bool `[B, S]`.
        """
        newest = tokens.shape[1]
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -newest:]
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        causal = attention_mask.new_ones(attention_mask.shape[1], attention_mask.shape[1]).tril()
        # every position sees itself, padding too, so that no row of the softmax is empty
        allowed = (causal * attention_mask[:, None] + torch.eye(len(causal)).to(causal)).bool()
        allowed = allowed[:, None, -newest:]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, allowed, None if past is None else past[index])
        normed: Tensor = self.norm(hidden)
        return normed


class Actor(nn.Module):
    """Policy: the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY_SIZE)

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        actions: int | None = None,
        *,
        use_cache: bool = False,
        past_key_values: list[KeyValues] | None = None,
    ) -> Any:
        """Return the logits that chose each of the last `actions` tokens, `[B, A, vocabulary]`.

        Action t of A stands at position S - A + t; what chose it is the output one before. None
        gives the output of every position, `[B, S, vocabulary]`. `redrb.algorithms.generation` says
        what happens with `use_cache`.
        """
        past = past_key_values
        if use_cache and past is None:
            past = [KeyValues() for _ in self.decoder.blocks]
        logits = self.head(_before(self.decoder(sequences, attention_mask, past), actions))
        return SimpleNamespace(logits=logits, past_key_values=past) if use_cache else logits


class Critic(nn.Module):
    """Value function: the expected return of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, 1)

    def forward(
        self, sequences: Tensor, attention_mask: Tensor, actions: int | None = None
    ) -> Tensor:
        """Return the value of the state before each of the last `actions` tokens, `[B, A]`.

        None gives the value of the state after every token, `[B, S]`.
        """
        hidden: Tensor = self.decoder(sequences, attention_mask)
        values: Tensor = self.head(_before(hidden, actions))
        return values.squeeze(-1)


def _before(hidden: Tensor, actions: int | None) -> Tensor:
    """Return the hidden states one before each of the last `actions` tokens; None: all."""
    return hidden if actions is None else hidden[:, -actions - 1 : -1]


STEPS = 42

_BATCH, _LEARNING_RATE, _RAMP_STEPS = 64, 5e-3, 10
"""Prompts a step; Adam's highest rate; steps until it is reached: from then on it falls to 0."""


def warm_start(actor: Actor, critic: Critic, seed: int, *, steps: int = STEPS) -> None:
    """Train an actor a little on right answers, and let a critic start from it.

    The same weights and seed give the same result in every process of one machine (with as many
    threads). The critic takes over the actor's decoder, as RLHF starts critics from a trained model
    (Ouyang et al. 2022, arXiv:2203.02155), and starts with value 0 everywhere. The global random
    state is neither read nor changed.
    """
    generator, device = torch.Generator().manual_seed(seed), next(actor.parameters()).device
    optimizer = torch.optim.Adam(actor.parameters(), lr=_LEARNING_RATE, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            left = (steps - step) / (steps - _RAMP_STEPS)
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _RAMP_STEPS, left)
        prompts = sample_prompts(generator, _BATCH)
        answers = [target(prompt) for prompt in prompts]
        batch = padded(prompts, PAD)
        right = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=PAD)
        right = right.to(device)
        real = right != PAD
        logits = actor(
            torch.cat([batch["input_ids"].to(device), right], 1),
            torch.cat([batch["attention_mask"].to(device), real], 1),
            right.shape[1],
        )
        loss = functional.cross_entropy(logits[real], right[real])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    critic.decoder.load_state_dict(actor.decoder.state_dict())
    torch.nn.init.zeros_(critic.head.weight)
    torch.nn.init.zeros_(critic.head.bias)
