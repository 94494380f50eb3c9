"""The recipe `vision`: its pixels go through a stream to the training step."""

from __future__ import annotations

import uuid
from itertools import islice

import pytest
import torch

import redrb
from redrb.experience import make_experience_batch, split_experience_batch
from redrb.recipe.examples.vision import Vision
from redrb.stream import ExperienceStream


def test_makers_and_steps_see_the_same_pixels() -> None:
    recipe = Vision(worker="maker", group_size=4, prompts_per_step=3, width=8)
    torch.manual_seed(0)
    models = recipe.models()
    maker = recipe.experience_maker(models, None)
    prompts = list(islice(recipe.prompts(), 3))
    made = maker.make_experience(prompts, **recipe.generation(torch.Generator().manual_seed(0)))
    samples = split_experience_batch(made)
    with (
        redrb.connect(f"fake://{uuid.uuid4().hex}") as client,
        ExperienceStream(client, "vision") as stream,
    ):
        for first in range(0, 12, 4):
            stream.put(samples[first : first + 4])
        lease = stream.take(3, timeout=5)
        items = lease.items()
        lease.ack()
    assert len(items) == 12
    for place, item in enumerate(items):
        assert torch.equal(item.tensors["pixel_values"], prompts[place // 4]["pixel_values"])
        assert item.tensors["pixel_values"].dtype == torch.uint8
    batch = make_experience_batch(items)
    optimizers = recipe.optimizers(models)
    assert recipe.step(models, optimizers, batch)["ratio_max"] == pytest.approx(1, abs=1e-5)
    batch.tensors["pixel_values"] = 255 - batch.tensors["pixel_values"]
    assert recipe.step(models, optimizers, batch)["ratio_max"] > 1 + 1e-3


def test_it_learns_what_is_in_the_image() -> None:
    recipe = Vision(worker="maker", prompts_per_step=16, learning_rate=3e-3, held_out_images=64)
    torch.manual_seed(0)
    models, generator = recipe.models(), torch.Generator().manual_seed(0)
    optimizers, maker = recipe.optimizers(models), recipe.experience_maker(models, None)
    prompts = iter(recipe.prompts())
    for _ in range(60):
        drawn = list(islice(prompts, recipe.prompts_per_step))
        recipe.step(
            models, optimizers, maker.make_experience(drawn, **recipe.generation(generator))
        )
    found = recipe.evaluate(models)
    assert found["reward"] > 0.55  # without the image, at most 5 / 12
