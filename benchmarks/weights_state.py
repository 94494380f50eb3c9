"""Models for the benchmark of weights: a large one to transfer, a small one to train."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 20
LAYER_TENSORS = 9
VOCABULARY = 4096
LENGTH = 64
ROWS = 2


class Layer(nn.Module):
    """The tensors of a transformer's layer; nothing is computed with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            self.register_parameter(name, _parameter(width, width))
        for name, shape in (("gate", (4, 1)), ("up", (4, 1)), ("down", (1, 4))):
            self.register_parameter(name, _parameter(width * shape[0], width * shape[1]))
        for name in ("norm_1", "norm_2"):
            self.register_parameter(name, _parameter(width))


def large_model(megabytes: int) -> nn.Module:
    """Return 180 bfloat16 tensors, all zeros in memory that is there."""
    width = round(math.sqrt(megabytes * 1e6 / 2 / LAYERS / 16) / 4) * 4
    return nn.ModuleList(Layer(width) for _ in range(LAYERS))


def state_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def memories(model: nn.Module) -> list[memoryview]:
    """Return the live bytes of all tensors."""
    return [
        tensor.detach().view(-1).view(torch.uint8).numpy().data for tensor in model.parameters()
    ]


def content_of(model: nn.Module) -> int:
    """Read all of a model; returns a hash."""
    hashed = xxhash.xxh3_64()
    for memory in memories(model):
        hashed.update(memory)
    return int(hashed.intdigest())


class Changing:
    """A model with random weights of which `next` changes 0.85 %, as a step at lr 1e-6 does."""

    def __init__(self, model: nn.Module, density: float = 0.0085) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = model
        self._places: list[Tensor] = []
        for tensor in model.parameters():
            with torch.no_grad():
                tensor.normal_(0.0, 0.02, generator=generator)
            count = max(1, round(tensor.numel() * density))
            self._places.append(torch.randint(tensor.numel(), (count,), generator=generator))

    def next(self) -> nn.Module:
        """Change the model in place."""
        for tensor, places in zip(self.model.parameters(), self._places, strict=True):
            bits = tensor.detach().view(-1).view(torch.int16)
            bits[places] += 1
        return self.model


class Transformer(nn.Module):
    """A language model of 23 million parameters."""

    def __init__(self, width: int = 384, layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(hidden), self.tokens.weight)


class Training:
    """A transformer that is trained with AdamW in float32, on text with a rule and some noise."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, weight_decay=0.01, fused=True
        )
        self._texts = _texts()

    def run(self, steps: int, lr: float = 3e-4) -> list[float]:
        """Train with a warm-up; returns the losses."""
        return [self.step(lr * min(1.0, number / 20)) for number in range(1, steps + 1)]

    def step(self, lr: float) -> float:
        """Make one step; returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        text = next(self._texts)
        logits = self.model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())


def _texts() -> Iterator[Tensor]:
    """Yield batches in which a token follows from the one before, but for one in ten."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randperm(VOCABULARY, generator=generator) // 16
    while True:
        text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        noise = torch.rand(ROWS, LENGTH + 1, generator=generator) < 0.1
        for at in range(1, LENGTH + 1):
            text[:, at] = torch.where(noise[:, at], text[:, at], rule[text[:, at - 1]])
        yield text


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16).fill_(0.0), requires_grad=False)
