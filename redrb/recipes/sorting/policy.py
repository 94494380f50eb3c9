"""The demo's networks: a small decoder transformer as actor, a second one as critic.

Prompts are padded on the left, so positions and attention follow the mask and not the index: a
padded row gives the same numbers as the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from redrb.recipes.sorting.digits import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, VOCABULARY_SIZE


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Size of actor and critic, each.

    Attributes:
        width: Size of the residual stream; a multiple of `heads`.
        layers: Transformer blocks.
        heads: Attention heads.
        mlp_ratio: Width of the hidden layer of a block's MLP, in widths.
        max_positions: Longest sequence in tokens, padding not counted.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    mlp_ratio: int = 2
    max_positions: int = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS


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

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, settings.mlp_ratio * width)
        self.mlp_out = nn.Linear(settings.mlp_ratio * width, width)

    def forward(self, hidden: Tensor, allowed: Tensor, past: KeyValues | None = None) -> Tensor:
        """Return the new residual stream, float32 `[B, T, width]`.

        Args:
            hidden: Residual stream of the newest T tokens, float32 `[B, T, width]`.
            allowed: True where a query may look at a key, bool `[B, 1, T, S]`.
            past: What earlier tokens left; these tokens' keys and values are added to it.
        """
        batch, tokens, width = hidden.shape
        projected: Tensor = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(
            batch, tokens, 3, self.heads, width // self.heads
        ).permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = past.add(key, value)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        added: Tensor = self.mlp_out(functional.relu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + added


class Decoder(nn.Module):
    """Embeddings and causal blocks: tokens to hidden states."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, settings.width)
        self.position_embedding = nn.Embedding(settings.max_positions, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, past: list[KeyValues] | None = None
    ) -> Tensor:
        """Return hidden states, float32 `[B, T, width]`; they have no meaning at padding.

        Args:
            tokens: Token ids, int64 `[B, T]`: the whole sequence, or its tokens after `past`.
            attention_mask: 1 where a token of the whole sequence counts, int64 or bool `[B, S]`.
            past: One for each block, empty before the first call with it.
        """
        newest = tokens.shape[1]
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -newest:]
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        allowed = attend_to(attention_mask)[:, :, -newest:]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, allowed, None if past is None else past[index])
        normed: Tensor = self.norm(hidden)
        return normed


class Actor(nn.Module):
    """Policy: the logits of the next token."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        self.decoder = Decoder(settings)
        self.head = nn.Linear(settings.width, VOCABULARY_SIZE)

    def forward(
        self, sequences: Tensor, attention_mask: Tensor, actions: int | None = None
    ) -> Tensor:
        """Return the logits that chose each of the last `actions` tokens, `[B, A, vocabulary]`.

        Action t of A stands at position S - A + t; what chose it is the output one before. None
        gives the output of every position, `[B, S, vocabulary]`.
        """
        hidden: Tensor = self.decoder(sequences, attention_mask)
        logits: Tensor = self.head(_before(hidden, actions))
        return logits

    def next_token(self, newest: Tensor, attention_mask: Tensor, past: list[KeyValues]) -> Tensor:
        """Return the logits of the token after the newest, float32 `[B, vocabulary]`.

        Args:
            newest: Token ids that `past` does not hold yet, int64 `[B, T]`.
            attention_mask: 1 where a token counts, tokens in `past` included, int64 `[B, S]`.
            past: From `no_past`, and from then on the same at each call.
        """
        logits: Tensor = self.head(self.decoder(newest, attention_mask, past)[:, -1])
        return logits

    def no_past(self) -> list[KeyValues]:
        """Return the empty cache that `next_token` starts from."""
        return [KeyValues() for _ in self.decoder.blocks]


class Critic(nn.Module):
    """Value function: the expected return of each state."""

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__()
        self.decoder = Decoder(settings)
        self.head = nn.Linear(settings.width, 1)

    def forward(
        self, sequences: Tensor, attention_mask: Tensor, actions: int | None = None
    ) -> Tensor:
        """Return the value of the state before each of the last `actions` tokens, `[B, A]`.

        None gives the value of the state after every token, `[B, S]`.
        """
        hidden: Tensor = self.decoder(sequences, attention_mask)
        values: Tensor = self.head(_before(hidden, actions))
        return values.squeeze(-1)


class ActorCritic(nn.Module):
    """Actor and critic under one state dict, so that both are published as one weight version."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__()
        self.settings = settings or PolicySettings()
        self.actor = Actor(self.settings)
        self.critic = Critic(self.settings)


def attend_to(attention_mask: Tensor) -> Tensor:
    """Return where queries may look, bool `[B, 1, S, S]`: back, at tokens that count.

    Every position sees itself as well, padding too, so that no row of the softmax is empty.
    """
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return ((causal & attention_mask.bool()[:, None, :]) | itself)[:, None]


def _before(hidden: Tensor, actions: int | None) -> Tensor:
    """Return the hidden states one before each of the last `actions` tokens; None: all."""
    return hidden if actions is None else hidden[:, -actions - 1 : -1]
