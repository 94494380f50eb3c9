"""The commands of makers and trainers in this process: wrong settings, waits, ends, samples."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import redrb
from redrb.cli.processes import maker, trainer
from redrb.cli.processes.lifetime import exit_status
from redrb.errors import CheckpointFailed, ConfigError, StoreDenied, StoreUnavailable
from redrb.experience.records import STANDARD_FIELDS
from redrb.recipe.examples.sorting import Sorting
from redrb.recipe.examples.sorting.policy import Actor, Critic
from redrb.recipe.trainer import RecipeTrainer
from redrb.stream.sending.write_behind import WriteBehind
from redrb.train.broadcast import Broadcast

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
def random_state():
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
def test_one_process_cannot_shard(recipe, capsys):
    said = refusal(capsys, recipe, "--shard", "--gradient-checkpointing")
    assert "--shard needs several ranks: start the trainer by torchrun" in said


def test_a_model_without_checkpointing(capsys):
    said = refusal(capsys, "sorting", "--gradient-checkpointing")
    assert "Actor has no method activation_checkpointing_enable" in said
    assert "leave it out, or use torch.utils.checkpoint in the model" in said


def test_a_model_of_transformers_that_does_not_support_it(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "unable_recipe.py"
    file.write_text(UNABLE)
    said = refusal(capsys, str(file), "--gradient-checkpointing")
    assert "gradient_checkpointing: CTRLLMHeadModel does not support" in said
    assert "Leave it out, or use torch.utils.checkpoint in the model" in said


@pytest.mark.parametrize(
    ("command", "words", "flag"),
    [
        (trainer.main, ["--publish-every", "0"], "--publish-every"),
        (maker.main, ["--task", "a b"], "--task"),
        (maker.main, ["--metrics", "/dev/null/none"], "/dev/null/none"),
    ],
)
def test_a_setting_that_cannot_be_is_named(command, words, flag, capsys):
    assert command(["sorting", "--url", "fake://settings", *words]) == 2
    said, errors = capsys.readouterr()
    assert (said, errors.count("\n")) == ("", 1)
    assert flag in errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (maker.main, ("--url", "--group-size", "REDRB_KL_COEF")),
        (trainer.main, ("--groups", "--clip", "REDRB_TARGET_REWARD")),
    ],
)
def test_help_is_complete(command, words, capsys):
    with pytest.raises(SystemExit):
        command(["sorting", "--help"])
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("command", "words", "status", "said"),
    [
        (
            maker.main,
            ["--weights-timeout", "0.3"],
            1,
            r"weights 'of sort for maker .*': no version.* within \d+\.\d s; none is published yet",
        ),
        (
            trainer.main,
            ["--idle-timeout", "0.5"],
            1,
            r"0 of 32 groups were waiting after \d+\.\d s",
        ),
        (
            trainer.main,
            ["--max-seconds", "0.5"],
            0,
            "ends: 0.5 s are over, at weight version 1",
        ),
    ],
)
def test_a_worker_alone_says_what_it_waited_for(command, words, status, said, namespace, capsys):
    target = ["--target-reward", "2"] if command is trainer.main else []
    assert command(["sorting", "--url", f"fake://{namespace}", *words, *target]) == status
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("command", "words", "how"),
    [
        (maker.main, ["--weights-timeout", "0.3"], ""),
        (trainer.main, ["--max-seconds", "0.3"], ", after 0 steps, with weight version 1"),
    ],
)
@pytest.mark.parametrize("metrics", ["-", "file"])
def test_a_worker_says_once_where_it_begins(
    command, words, how, metrics, namespace, capsys, tmp_path
):
    place = metrics if metrics == "-" else str(tmp_path / metrics)
    flags = ["--url", f"fake://{namespace}", "--metrics", place, "--target-reward", "2"]
    command(["sorting", *words, *flags])
    out, err = capsys.readouterr()
    line = rf"redrb-\w+ \S+ begins: task 'sort' of namespace 'default' at \S+{re.escape(how)}\n"
    assert len(re.findall(line, err)) == (metrics != "-")
    assert out.count('"event": "start"') == (metrics == "-")


def test_missing_rights_and_wrong_settings_need_no_restart():
    for error, status in (
        (StoreDenied("no"), 2),
        (ConfigError("no"), 2),
        (StoreUnavailable("away", where="here"), 1),
        (CheckpointFailed("full"), 1),
    ):
        assert exit_status(error) == status


def test_an_error_of_a_sender_that_drops_nothing_does_not_count(caplog):
    for dropped, said in ((0, "a sender cannot put: no"), (3, "a sender drops 3 groups: no")):
        WriteBehind([], None, None).fail(StoreDenied("no"), dropped)
        assert caplog.messages[-1] == said


def test_every_sample_carries_what_training_needs(namespace, capsys):
    url = f"fake://{namespace}"
    with redrb.connect(url) as client:
        with RecipeTrainer(client, Sorting(), lambda *_, **__: None) as training:
            training.begin()
        assert maker.main(["sorting", "--url", url, "--maker-steps", "1", "--worker", "m-x"]) == 0
        assert (
            capsys.readouterr().err.splitlines()[-1]
            == "redrb-maker m-x ends: 1 step is done (--maker-steps)"
        )
        with redrb.ExperienceStream(client, "sort") as stream:
            lease = stream.take(len(stream), timeout=10)
            groups, batch = lease.groups(), lease.batch()
            lease.ack()
    items = [item for group in groups for item in group]
    assert len({len(item.sequences) for item in items}) > 1
    assert len({int(item.action_mask.sum()) for item in items}) > 1
    for group in groups:
        assert len(group) == 4
        assert len({item.group_id for item in group}) == 1
        for item in group:
            assert item.policy_version is not None
            assert item.tags["maker"] == "m-x"
            assert item.extras["text"]
            assert [name for name in STANDARD_FIELDS if getattr(item, name) is None] == []
    assert batch.advantages.shape == batch.action_mask.shape
    assert set(batch.reward.tolist()) <= {0.0, 1.0}


def test_a_maker_changes_weights_in_mid_generation(namespace):
    url, ended = f"fake://{namespace}", threading.Event()
    with redrb.connect(url) as client:
        actor, critic = Actor(), Critic()
        redrb.WeightPublisher(client, "sort-reference").publish(actor)
        training = Broadcast(client, "default", "sort", [])

        def publish():
            while not ended.is_set():
                training.push({"actor": actor, "critic": critic}, fully=True)

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            words = ["--in-flight-updates", "--maker-steps", "3", "--prompts", "16"]
            # no trainer says how many groups it trains
            assert maker.main(["sorting", "--url", url, *words, "--max-staleness", "-1"]) == 0
        finally:
            ended.set()
            publishing.join(20)
        with redrb.ExperienceStream(client, "sort") as stream:
            items = stream.take(48, timeout=10).items()
    mixed = 0
    for item in items:
        versions = item.token_versions[item.action_mask.bool()].tolist()
        assert versions == sorted(versions)
        assert item.policy_version == versions[0] >= 1
        mixed += versions[0] < versions[-1]
    assert mixed > len(items) / 10
