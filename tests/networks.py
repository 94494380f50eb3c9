"""Small causal networks that notice order, but neither padding nor where a row begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 12
WIDTH = 16


class Trunk(nn.Module):
    """Hidden states `[B, S, WIDTH]`: each token's own, and the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.embedding.weight.dtype)
        own = self.embedding(sequences) * mask
        mean = own.cumsum(1) / mask.cumsum(1).clamp(min=1)
        return torch.tanh(self.mix(torch.cat([own, mean], -1)))


class PlainActor(nn.Module):
    """Logits `[B, S, V]`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.trunk(sequences, attention_mask))


class PlainCritic(nn.Module):
    """Values `[B, S, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.trunk(sequences, attention_mask))


class SampleCritic(PlainCritic):
    """One value a sample, `[B]`: the mean over what counts."""

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        values = super().forward(sequences, attention_mask).squeeze(-1)
        return (values * attention_mask).sum(1) / attention_mask.sum(1)


class TokenNetwork(nn.Module):
    """Numbers `[B, S, outputs]` for each token, from the token alone."""

    def __init__(self, outputs: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.read = nn.Linear(WIDTH, outputs)

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return self.read(self.embed(sequences)) * attention_mask[..., None]


class LoraLinear(nn.Linear):
    """A layer of which only A and B are trained, as ColossalAI's."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.r, self.lora_alpha, self.lora_dropout = 2, 4.0, 0.0
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = (x @ self.lora_A.T @ self.lora_B.T) * (self.lora_alpha / self.r)
        return super().forward(x) + added


class Answering(nn.Module):
    """Returns the same output for every input."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, _sequences: Tensor, _attention_mask: Tensor) -> object:
        return self.answer


def seeded(network: type[nn.Module], seed: int = 0) -> nn.Module:
    """Build a network whose weights follow the seed; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network()
