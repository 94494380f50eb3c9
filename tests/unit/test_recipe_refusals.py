"""`--shard` and `--gradient-checkpointing` where a job cannot have them: what the trainer says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from redrb.workers import trainer

UNABLE = """
from transformers import CTRLConfig

from redrb.recipe import GRPORecipe


class Unable(GRPORecipe):
    def model(self):
        return CTRLConfig(vocab_size=8, n_embd=8, n_layer=1, n_head=2, dff=8)
    def prompts(self): return []
    def reward(self, completion): return 0.0
"""


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """Trainers seed the global generators, and set the number of threads."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the trainer's command says when it refuses to begin."""
    assert trainer.main([*words, "--url", "fake://refusals", "--device", "cpu"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["sorting", "cartpole"])
def test_one_process_cannot_shard(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, recipe, "--shard", "--gradient-checkpointing")
    assert "--shard needs several ranks: start the trainer by torchrun" in said


def test_a_model_without_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "sorting", "--gradient-checkpointing")
    assert "Actor has no method activation_checkpointing_enable" in said
    assert "leave it out, or use torch.utils.checkpoint in the model" in said


def test_a_model_of_transformers_that_does_not_support_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "unable_recipe.py"
    file.write_text(UNABLE)
    said = refusal(capsys, str(file), "--gradient-checkpointing")
    assert "gradient_checkpointing: CTRLLMHeadModel does not support" in said
    assert "Leave it out, or use torch.utils.checkpoint in the model" in said
