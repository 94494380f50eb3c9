"""All that redrb's commands and classes do with Redis is within the role that is made for them."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import redrb
from redrb import ExperienceStream
from redrb.cli.__main__ import main
from redrb.compat.slime import RedrbDataSource
from redrb.environment import PREFIX, child_environment
from redrb.errors import StoreDenied
from redrb.gateway.store import SessionStore
from redrb.keys import registry_key
from redrb.stream.mixture import Mixture
from redrb.stream.task.lookup import task_stats
from redrb.train.engines import Generation, Trajectory
from redrb.train.episodes import EpisodeMaker
from tests import warm
from tests.contract.test_maker_holder import Holder, Linear, Trainer, prompts
from tests.engine_server import EngineServer
from tests.faults.episode_maker import GROUP_SIZE, engine_of, episode, opened
from tests.faults.episode_maker import prompts as episode_prompts
from tests.framework_stand_ins import arguments, stand_ins
from tests.gateway_turns import turn
from tests.samples import numbered, numbers

pytestmark = pytest.mark.timeout(300)  # whole jobs, as processes

RECIPE = str(Path(__file__).parents[1] / "counting_recipe.py")
JOB = {"tasks": ("counting",), "weights": "counting"}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def refused(store, namespace):
    """Return what was refused to users of this test, but for what only messages need.

    They read the registry, and after ten seconds search for weights in other namespaces.
    """

    def found():
        texts = [
            {key.decode(): value for key, value in zip(entry[::2], entry[1::2], strict=True)}
            for entry in store.execute("ACL", "LOG", 128)
        ]
        mine = [each for each in texts if each["username"].endswith(namespace.encode())]
        names = {f"{each['reason'].decode()} {each['object'].decode()}" for each in mine}
        return names - {f"key {registry_key(namespace)}", "command scan"}

    return found


@pytest.fixture
def start(namespace):
    """Start a command as a client's user; all are ended with the test."""
    with ExitStack() as scope:

        def begin(client, module, *words):
            process = warm.Popen(
                [sys.executable, "-m", module, *words, "--namespace", namespace],
                env=child_environment(without=PREFIX, REDRB_URL=client.url),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            scope.enter_context(process)
            scope.callback(process.kill)
            return process

        yield begin


def test_trainer_and_maker(log_in, start, namespace, refused, tmp_path):
    trainer, maker = log_in("trainer", **JOB), log_in("maker", **JOB)
    for target in ("4", "8"):  # the second trainer goes on from the first one's checkpoint
        flags = ["--target-reward", target, "--checkpoints", str(tmp_path)]
        training = start(trainer, "redrb.cli.processes.trainer", RECIPE, *flags)
        making = start(maker, "redrb.cli.processes.maker", RECIPE, "--worker", "maker-1")
        said = training.communicate(timeout=280)[0]
        assert f"has reached the target {target}" in said, said
        assert making.communicate(timeout=60) is not None
        assert (training.returncode, making.returncode) == (0, 0)
    assert refused() == set()


def test_a_maker_of_episodes(log_in, namespace, refused):
    client = log_in("episode-maker")
    with EngineServer() as server, opened(client.url, namespace) as stream:
        stream.join_group()
        stream.advance(0)
        begun = Trajectory([1, 2])
        begun.sampled(Generation([4, 5], [-1.0, -2.0], [0, 0], "abort"))
        item = begun.item(extras={"prompt": {"input_ids": [1, 2], "number": -1}})
        with stream.admit(1) as right:
            stream.put([item, item], admission=right)
        maker = EpisodeMaker(stream, episode, engine_of(server.url), group_size=GROUP_SIZE)
        maker.run(episode_prompts(0, 2))
        assert (stream.count("aborted"), len(stream)) == (0, 3)
    assert refused() == set()


def test_a_gateway(log_in, store, namespace, refused):
    options = {"namespace": namespace, "max_staleness": 1, "groups_per_version": 2}
    stream = ExperienceStream(log_in("gateway"), "math", weights="policy", **options)
    stream.advance(7)
    with SessionStore(stream, timeout_s=60) as sessions:
        opened = [sessions.open("p", size=2, wait_s=5) for _ in range(3)]
        found = [sessions.read(each.name) for each in opened]
        for session in found[:2]:
            sessions.append(session, turn())
            sessions.reward(session.name, 1.0)
        sessions.drop(found[2].name)
    assert task_stats(store, "math", namespace=namespace, group="default").ledger.put == 1
    assert refused() == set()


@pytest.mark.parametrize(
    ("role", "flags"), [pytest.param("trainer", [], marks=pytest.mark.slow), ("admin", ["--fresh"])]
)
def test_a_run(role, flags, log_in, start, store, namespace, refused, tmp_path):
    folder = ["--makers", "1", "--target-reward", "4", "--out", str(tmp_path)]
    run = start(log_in(role, **JOB), "redrb.cli", "run", RECIPE, *folder, *flags)
    said = run.communicate(timeout=280)[0]
    assert (run.returncode, "has reached the target 4" in said) == (0, True), said
    assert task_stats(store, "counting", namespace=namespace, group="default").ledger.balanced
    assert refused() == set()


def test_a_data_source_of_slime(log_in, store, namespace, refused, tmp_path, monkeypatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    tasks = ("math", "math.prompts", "math.returned")
    client = log_in("trainer", tasks=tasks, weights="math")
    source = RedrbDataSource(arguments(client.url, namespace, tmp_path, redrb_timeout=5))
    source.load(-1)
    finished, aborted = source.get_samples(2)
    source.put([finished])
    source.add_samples([aborted])
    assert source.get_samples(1) == [aborted]
    source.close()
    assert refused() == set()


def test_a_stage(log_in, start, store, namespace, refused):
    client = log_in("trainer", "--to", "scored")
    with (
        ExperienceStream(store, "math", namespace=namespace) as source,
        ExperienceStream(store, "scored", namespace=namespace) as target,
    ):
        source.put_many([[numbered(number)] for number in range(3)])
        function = "tests.contract.test_stage:score"
        stage = start(
            client, "redrb.cli.processes.stage", function, "--from", "math", "--to", "scored"
        )
        assert numbers(target.take(3, timeout=60)) == [0, 1, 2]
        stage.send_signal(signal.SIGTERM)
        assert stage.wait(30) == 0, stage.communicate()
        ledger = source.stats().ledger
        assert (ledger.acked, ledger.leased) == (3, 0)
    assert refused() == set()


def test_a_mixture(log_in, store, namespace, refused):
    client = log_in("trainer", tasks=("math", "code"))
    with (
        Mixture(client, {"math": 3, "code": 1}, namespace=namespace) as mixture,
        ExperienceStream(store, "math", namespace=namespace) as math,
        ExperienceStream(store, "code", namespace=namespace) as code,
    ):
        code.put(numbered(0))
        later = threading.Timer(0.3, math.put_many, ([[numbered(n)] for n in range(3)],))
        later.start()
        with mixture.take(4, timeout=20) as lease:
            assert sorted(lease.sample_tasks) == ["code", "math", "math", "math"]
        later.join()
        assert mixture.taken() == {"math": 3, "code": 1}
    assert refused() == set()


def test_a_replay_buffer(log_in, namespace, refused, tmp_path):
    client = log_in("replay", tasks=("math", "code"))

    def rollouts(number):
        return [{"rollout_id": number, "status": "completed", "prompt_ids": [1], "tokens": [1, 2]}]

    async def scenario():
        options = {"order": "stalest", "namespace": namespace, "tags": ["hard"], "limit": 8}
        async with redrb.ReplayBuffer(client, **options) as buffer:
            for number in range(4):
                task = "math" if number % 2 else "code"
                await buffer.put(rollouts(number), task, model_step=number, current_train_step=4)
            assert await buffer.size() == 4
            await buffer.save(tmp_path / "saved")
            groups, consumed = await buffer.take_batch({"math": 2, "code": 1})
            assert (len(groups["math"]), consumed) == (2, {"math": 2, "code": 1})
            await buffer.refresh_staleness({"code": 9}, current_train_step=5)
            assert len(await buffer.get(1, "code", "completed")) == 1
            await buffer.resume(tmp_path / "saved")
            assert await buffer.size() == 4
        async with redrb.ReplayBuffer(client, **options, run="exp7") as buffer:
            assert len(buffer) == 0  # the run takes the groups over, and goes on with them
            assert len(buffer) == 4
            await buffer.save(tmp_path / "saved")
            await buffer.resume(tmp_path / "saved")
        with pytest.raises(StoreDenied):
            async with redrb.ReplayBuffer(client, namespace=namespace) as buffer:
                await buffer.put(rollouts(1), "secret")

    asyncio.run(scenario())


def test_colossalais_trainer_and_maker(log_in, namespace, refused, tmp_path):
    names = {"tasks": ("trainer_0",), "weights": "trainer_0"}
    for round_ in range(2):  # a trainer takes the weights and groups of the one before over
        with (
            Trainer(
                ["maker_0"],
                client=log_in("trainer", **names),
                namespace=namespace,
                timeout=20,
                train_batch_size=2,
                checkpoint_dir=str(tmp_path),
            ) as trainer,
            Holder(
                ["trainer_0"],
                redrb.Strategy,
                lambda: (Linear(), Linear(), None, None),
                client=log_in("maker", **names),
                namespace=namespace,
                sync_models_from_trainers=True,
            ) as holder,
        ):
            trainer.actor.frozen.requires_grad_(False)
            trainer.sync_models_to_remote_makers()
            trainer.set(float(round_ + 2))
            trainer._update_remote_makers()  # a partial update
            holder.workingloop(lambda: [prompts(1), prompts(2)], num_steps=2)
            trainer.fit(1, 1)
    assert refused() == set()


def test_an_admin_uses_all_that_changes(log_in, store, namespace, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRB_URL", log_in("admin").url)
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(number)] for number in range(4)])
        for _ in range(2):
            stream.take(1, timeout=0).reject("nan")
        redrb.WeightPublisher(store, "policy", namespace=namespace).publish({"a": torch.ones(2)})
        weights = str(tmp_path / "weights.safetensors")
        for words in (
            ["set", "math", "limit=8"],
            ["dead", "ls", "math"],
            ["dead", "requeue", "math", "1"],
            ["dead", "drop", "math", "--all", "--yes"],
            ["export", "math", str(tmp_path / "math.jsonl")],
            ["weights", "show", "policy"],
            ["weights", "get", "policy", weights],
            ["weights", "put", "policy", weights],
            ["weights", "rm", "policy"],
        ):
            assert main([*words, "--namespace", namespace]) == 0, words
    assert main(["rm", "math", "--yes", "--namespace", namespace]) == 0
    assert refused() == set()
