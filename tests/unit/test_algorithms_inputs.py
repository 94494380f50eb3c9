"""Extra tensors, such as images, on their way to the models: in makers, batches and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from redrb.algorithms import (
    GAE,
    GRPOExperienceMaker,
    GRPOStep,
    NaiveExperienceMaker,
    PPOStep,
    ValueHead,
    generate,
    group_relative_advantages,
)
from redrb.algorithms.models import ModelInputs
from redrb.algorithms.prompts import prompt_inputs
from redrb.codec import decode_batch, encode_groups, parse_groups
from redrb.errors import ConfigError, RecordError
from redrb.experience import (
    BufferItem,
    Experience,
    make_experience_batch,
    split_experience_batch,
)
from tests.networks import VOCABULARY, WIDTH, PlainActor, seeded

PATCH = 5
COUNTS = [3, 1, 2, 2]
"""Patches of each sample's image."""


class Seeing(PlainActor):
    """An actor that adds the mean of a sample's patches, marked where its tokens are images."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Linear(PATCH, WIDTH)
        self.seen: list[dict[str, Tensor]] = []

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        patch_counts: Tensor,
        kinds: Tensor,
    ) -> Tensor:
        self.seen.append({"pixel_values": pixel_values, "kinds": kinds})
        parts = pixel_values.split(patch_counts.tolist())
        image = torch.stack([self.eyes(part).mean(0) for part in parts])
        hidden = self.trunk(sequences, attention_mask)
        return self.head(hidden + image[:, None] * (1 + kinds[..., None]))


class SeeingCritic(nn.Module):
    """Values from the hidden states of a seeing trunk."""

    def __init__(self) -> None:
        super().__init__()
        trunk = Seeing()
        trunk.head = nn.Identity()
        self.values = ValueHead(trunk, hidden_size=WIDTH)

    def forward(self, sequences: Tensor, attention_mask: Tensor, inputs: ModelInputs) -> Tensor:
        return self.values(sequences, attention_mask, inputs)


def images() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(count, PATCH, generator=draw) for count in COUNTS]


def prompts(rows: int = 4) -> dict[str, Tensor]:
    """Prompts with ragged patches, padded on the left as a batch of redrb is."""
    longest = max(COUNTS[:rows])
    pixels = torch.zeros(rows, longest, PATCH)
    for row, image in enumerate(images()[:rows]):
        pixels[row, longest - len(image) :] = image
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCABULARY, (rows, 3), generator=draw)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1]])[:rows]
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "pixel_values": pixels,
        "pixel_values_lengths": torch.tensor(COUNTS[:rows]),
        "patch_counts": torch.tensor(COUNTS[:rows]),
        "kinds": torch.tensor([[2, 0, 1], [1, 2, 0], [0, 2, 0], [2, 1, 2]])[:rows],
    }


def share(completions: Any) -> Tensor:
    return torch.stack([(row == 7).float().mean() for row in completions.sequences])


def options(**changes: Any) -> dict[str, Any]:
    return {
        "max_new_tokens": 4,
        "eos_token_id": 3,
        "generator": torch.Generator().manual_seed(0),
        **changes,
    }


def test_generation_joins_inputs_and_keeps_them_aligned():
    actor = seeded(Seeing)
    done = generate(actor, prompts(), **options())
    joined = torch.cat(images())
    for number, seen in enumerate(actor.seen):
        assert torch.equal(seen["pixel_values"], joined)
        # the second prompt was padded on the right; new tokens have kind 0
        expected = torch.tensor([[2, 0, 1], [0, 1, 2], [0, 2, 0], [2, 1, 2]])
        assert torch.equal(seen["kinds"][:, :3], expected)
        assert seen["kinds"].shape[1] == 3 + number
        assert not seen["kinds"][:, 3:].any()
    assert done.inputs.aligned["kinds"].shape == done.sequences.shape


def grpo_experience() -> Experience:
    maker = GRPOExperienceMaker(seeded(Seeing), share, seeded(Seeing, 2), group_size=2)
    return maker.make_experience(prompts(), **options())


def test_steps_see_what_the_maker_saw():
    """The ratio of fresh experience is 1, however it was split, padded and cut into parts."""
    whole = grpo_experience()
    items = split_experience_batch(whole)
    assert [len(item.tensors["pixel_values"]) for item in items] == [3, 3, 1, 1, 2, 2, 2, 2]
    assert "pixel_values_lengths" not in items[0].tensors
    some = [items[place] for place in (6, 0, 3)]
    for batch in (whole, make_experience_batch(some)):
        for limit in ({}, {"micro_batch_size": 2}):
            actor = seeded(Seeing)
            step = GRPOStep(actor, torch.optim.SGD(actor.parameters()), beta=0.1, **limit)
            metrics = step(batch)
            assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
            assert metrics["actor_grad_norm"] > 0
    even = make_experience_batch([items[4], items[6]])
    assert "pixel_values_lengths" not in even.tensors


def test_critics_see_them_too():
    actor, critic = seeded(Seeing), seeded(SeeingCritic, 1)
    maker = NaiveExperienceMaker(actor, critic, share, seeded(Seeing, 2), gae=GAE())
    with torch.no_grad():
        critic.values.head.weight.fill_(1)
    batch = make_experience_batch(
        split_experience_batch(maker.make_experience(prompts(), **options()))
    )
    step = PPOStep(actor, critic, *(torch.optim.SGD(each.parameters()) for each in (actor, critic)))
    values = step.critic_loss(step.batch(batch, critic))[0]
    batch.tensors["pixel_values"] = batch.tensors["pixel_values"] * 2
    assert step.critic_loss(step.batch(batch, critic))[0] != values
    assert step(batch)["ratio_max"] != pytest.approx(1, abs=1e-5)


def test_inputs_may_be_lists_of_ragged_tensors():
    actor, given = seeded(Seeing), prompts()
    rows = zip(given["kinds"], given["attention_mask"], strict=True)
    listed = {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "answer": ["text"] * 4,
        "pixel_values": images(),
        "patch_counts": list(given["patch_counts"]),
        "kinds": [kinds[mask.bool()] for kinds, mask in rows],
    }
    expected, found = prompt_inputs(actor, given), prompt_inputs(actor, listed)
    assert found.tensors().keys() == expected.tensors().keys()
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1]])
    assert torch.equal(found.aligned["kinds"], expected.aligned["kinds"] * mask)
    for name in ("pixel_values", "patch_counts"):
        assert torch.equal(found.others[name], expected.others[name])
    assert found.lengths["pixel_values"].tolist() == COUNTS
    with pytest.raises(RecordError, match="'pixel_values' have several dtypes"):
        prompt_inputs(actor, {**listed, "pixel_values": [*images()[:3], torch.ones(1, 5).half()]})
    del given["attention_mask"]
    with pytest.raises(RecordError, match="padded on the right need an attention_mask"):
        prompt_inputs(actor, given, pad_token_id=0)


def test_prompts_may_be_without_an_image():
    class Maybe(PlainActor):
        def forward(self, sequences, attention_mask, patches=None):
            self.patches = None if patches is None else patches.shape
            return super().forward(sequences, attention_mask)

    given = {"input_ids": torch.full((3, 2), 5), "patches": [images()[0].numpy(), None, None]}
    actor = seeded(Maybe)
    maker = GRPOExperienceMaker(actor, share, group_size=1)
    batch = maker.make_experience(given, **options())
    assert actor.patches == (3, PATCH)
    assert batch.tensors["patches_lengths"].tolist() == [3, 0, 0]
    items = split_experience_batch(batch)
    assert [len(item.tensors["patches"]) for item in items] == [3, 0, 0]
    step = GRPOStep(actor, torch.optim.SGD(actor.parameters(), lr=0.0))
    step(make_experience_batch(items))
    assert actor.patches == (3, PATCH)
    step(make_experience_batch(items[1:]))
    assert actor.patches is None
    with pytest.raises(RecordError, match="some prompts have no 'patches'"):
        generate(actor, {**given, "patches": [torch.ones(2), None, None]}, **options())


def test_models_of_transformers_with_images_see_them():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "rope_theta": 1e4,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "patch_size": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    grids = [[1, 2, 4], [1, 4, 4]]  # 8 and 16 patches of 3 * 2 * 2 numbers: 2 and 4 tokens
    tokens = torch.tensor([[0, 0, 9, 7, 5, 5, 8, 9], [9, 7, 5, 5, 5, 5, 8, 9]])
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 16, 12, generator=draw)
    given = {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "pixel_values": pixels,
        "pixel_values_lengths": torch.tensor([8, 16]),
        "image_grid_thw": torch.tensor(grids)[:, None],
        "mm_token_type_ids": (tokens == 5).long(),
    }
    maker = GRPOExperienceMaker(model, share, model, group_size=2)
    batch = maker.make_experience(given, **options(eos_token_id=None))
    assert float(batch.kl.abs().max()) < 1e-5
    items = split_experience_batch(batch)
    for rows in ([0, 3], [3], [2, 1, 0]):
        chosen = make_experience_batch([items[row] for row in rows])
        step = GRPOStep(model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=1)
        metrics = step(chosen)
        assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    chosen.tensors["pixel_values"] = -chosen.tensors["pixel_values"]
    assert step(chosen)["ratio_max"] > 1 + 1e-4


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
)
@settings(deadline=None)
def test_an_input_is_aligned_only_if_each_sample_has_one_entry_a_token(lengths, side):
    """Whatever the padded shapes are, and however the batch was made and split."""
    items = [
        make(torch.ones(tokens).long(), torch.arange(1, entries + 1), torch.ones(tokens) * 2)
        for tokens, entries in lengths
    ]
    (layout,) = parse_groups([group.blob for group in encode_groups([items])])
    made = make_experience_batch(items, side=side)
    again = make_experience_batch(split_experience_batch(made), side=side)
    for batch in (made, decode_batch([layout], side=side), again):
        inputs = ModelInputs.of(batch.tensors, batch.sequences)
        assert torch.equal(inputs.aligned["kinds"], batch.sequences * 2)
        assert ("crops" in inputs.aligned) == all(tokens == entries for tokens, entries in lengths)
        assert inputs.tensors().keys() == batch.tensors.keys()
        if side == "left" and "crops" in inputs.others:
            joined = inputs.for_forward(frozenset(["crops"]), torch.device("cpu"))
            expected = torch.cat([each.tensors["crops"] for each in items])
            assert joined.get("crops", expected[:0]).tolist() == expected.tolist()
        for got, expected in zip(split_experience_batch(batch), items, strict=True):
            for name, tensor in expected.tensors.items():
                assert torch.equal(got.tensors[name], tensor)


def make(sequences: Tensor, crops: Tensor, kinds: Tensor) -> BufferItem:
    return BufferItem(sequences, None, tensors={"crops": crops, "kinds": kinds})


@pytest.mark.parametrize("crops", [[4, 4], [2, 4], [3, 4], [3, 1], [8, 8], [5, 8]])
def test_prompts_join_what_is_no_entry_a_token(crops):
    class Cropped(PlainActor):
        def forward(self, sequences, attention_mask, crops):
            self.crops = crops
            return super().forward(sequences, attention_mask)

    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    rows = [torch.arange(1, count + 1) for count in crops]
    actor = seeded(Cropped)
    maker = GRPOExperienceMaker(actor, share, group_size=2)
    given = {"input_ids": mask * 5, "attention_mask": mask, "crops": rows}
    batch = maker.make_experience(given, **options())
    aligned = crops == [3, 4]
    doubled = [row for row in rows for _ in range(2)]
    assert ("crops" in ModelInputs.of(batch.tensors, batch.sequences).aligned) == aligned
    items = split_experience_batch(batch)
    if not aligned:
        assert [each.tensors["crops"].tolist() for each in items] == [d.tolist() for d in doubled]
    step = GRPOStep(actor, torch.optim.SGD(actor.parameters(), lr=0.0), micro_batch_size=3)
    for whole in (batch, make_experience_batch(items)):
        assert step(whole)["ratio_max"] == pytest.approx(1, abs=1e-5)
        if not aligned:
            assert actor.crops.dim() == 1


def test_lengths_that_do_not_fit_are_refused():
    batch = grpo_experience()
    batch.tensors["pixel_values_lengths"] = torch.full((8,), 4)
    with pytest.raises(RecordError, match=r"pixel_values_lengths has .* room for 3"):
        split_experience_batch(batch)
    items = split_experience_batch(grpo_experience())
    for item in items:
        item.tensors["pixel_values_lengths"] = torch.tensor(1)
    with pytest.raises(RecordError, match="rename it"):
        make_experience_batch(items)


def test_advantages_by_the_index_of_groups():
    reward = torch.tensor([1.0, 5.0, 3.0, 6.0])
    index = torch.tensor([4, 0, 4, 0])
    found = group_relative_advantages(reward, group_index=index, scale_by_std=False)
    assert found.tolist() == [-1.0, -0.5, 1.0, 0.5]
    with pytest.raises(ConfigError, match="group_index"):
        group_relative_advantages(reward, group_index=index, group_size=2)
    with pytest.raises(RecordError, match="group_index has shape"):
        group_relative_advantages(reward, group_index=index[:2])
