"""The recipe `vision`: GRPO on a small model that answers questions about images."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from redrb.recipe import GRPORecipe, Prompt, option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from redrb.algorithms import Completion

COLOURS = ("red", "green", "blue")
SIDES = ("left", "right")
WORDS = ("<pad>", "<eos>", "colour?", "side?", *COLOURS, *SIDES)
"""Each word is one token."""

HELD_OUT_SEED = 20_000


class Vision(GRPORecipe):
    """Says which colour a square in an image of 8 x 8 pixels has, or on which side it is.

    The pixels are a key of each prompt. They reach the model while makers sample and while the
    trainer computes its loss, because the model's `forward` names them.
    """

    group_size = 16
    max_new_tokens = 2
    learning_rate = 2e-3
    target_reward = 0.95
    device = "cpu"

    extras = ("answer",)
    tags = ("question",)
    eos_token_id = WORDS.index("<eos>")
    pad_token_id = WORDS.index("<pad>")

    width: int = option(32, "width of the model", least=8)
    noise: int = option(32, "brightest noise of the background", least=0, most=255)
    held_out_images: int = option(256, "images for evaluation", least=1, agree=False)

    def model(self) -> nn.Module:
        """Return a model with random weights."""
        from redrb.recipe.examples.vision.model import SeeingDecoder

        return SeeingDecoder(len(WORDS), self.width)

    def prompts(self) -> Iterator[Prompt]:
        """Yield prompts without end, other ones for each maker."""
        yield from self._drawn(self.worker_seed)

    def held_out(self) -> list[Prompt]:
        """Return prompts that are the same for each trainer."""
        return list(islice(self._drawn(HELD_OUT_SEED), self.held_out_images))

    def reward(self, completion: Completion) -> float:
        """Return 1.0 for the answer and EOS, 0.5 if another word follows the answer, else 0.0."""
        if completion.text == completion["answer"]:
            return 1.0
        return 0.5 * (completion.text.split()[:1] == [completion["answer"]])

    def encode(self, prompt: Prompt) -> Tensor:
        """Return the question as a token, int64 `[1]`."""
        import torch

        return torch.tensor([WORDS.index(prompt["question"])])

    def decode(self, tokens: Tensor) -> str:
        """Return the words, without EOS."""
        return " ".join(WORDS[token] for token in tokens.tolist() if token != self.eos_token_id)

    def _drawn(self, seed: int) -> Iterator[Prompt]:
        from redrb.recipe.examples.vision.model import draw

        numbers = random.Random(seed)  # noqa: S311
        while True:
            colour, side = numbers.choice(COLOURS), numbers.choice(SIDES)
            question, answer = numbers.choice((("colour?", colour), ("side?", side)))
            image = draw(COLOURS.index(colour), SIDES.index(side), numbers, noise=self.noise)
            yield {"question": question, "answer": answer, "pixel_values": image}
