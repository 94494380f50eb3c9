"""The programs and commands of docs/tutorials, as they are printed, with kills and users."""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import redis
import torch
from torch.distributed.run import get_args_parser

import redrb
from redrb.cli import __main__ as cli
from redrb.environment import PREFIX, child_environment
from redrb.recipe import GRPORecipe
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load
from redrb.recipe.prompts import endless
from redrb.watch.state.observer import Observer
from tests import warm
from tests.servers import Server, await_server, free_port, programs
from tests.tools import need

ROOT = Path(__file__).parents[2]
ONE_SERVER = pytest.mark.parametrize("own_server", list(programs())[-1:], indirect=True)
ACCESS = r"REDRB_USER_PASSWORD=\$\(cat (\w+)-password\)\n(redrb acl .*)"


def page(name: str) -> str:
    """Return the text of a tutorial."""
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()


def write_files(name: str, folder: Path) -> None:
    """Write the blocks of a tutorial that have a title."""
    for title, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page(name), re.DOTALL):
        (folder / title).write_text(text)


def output_after(name: str, command: str) -> list[str]:
    """Return the lines that a tutorial prints after a block that ends with a command."""
    pattern = re.escape(command) + r"\n```\n\n```text\n(.*?)```"
    (found,) = re.findall(pattern, page(name), re.DOTALL)
    return str(found).splitlines()


class Terminal:
    """Starts programs of a tutorial in its folder; ends those that run yet."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.environment = child_environment(
            without=PREFIX, PYTHONPATH=str(ROOT), REDRB_URL=url, PYTHONUNBUFFERED="1"
        )
        self.started: list[subprocess.Popen[str]] = []

    def start(self, program: str) -> subprocess.Popen[str]:
        self.started.append(
            warm.Popen(
                [sys.executable, program],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def run(self, program: str) -> tuple[int, str]:
        """Run a program to its end; returns its status and output."""
        process = self.start(program)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def terminal(
    own_server: Callable[..., Server], tmp_path: Path
) -> Iterator[tuple[Terminal, Server]]:
    server = own_server("--appendonly", "yes")
    terminal = Terminal(tmp_path, server.url)
    yield terminal, server
    terminal.close()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Read a process's output until a line has a text."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the process has ended before it printed {text!r}")


@ONE_SERVER
def test_a_first_stream(terminal: tuple[Terminal, Server], tmp_path: Path) -> None:
    shell, _ = terminal
    write_files("first-stream", tmp_path)
    assert shell.run("first.py") == (
        0,
        "".join(f"{line}\n" for line in output_after("first-stream", "python first.py")),
    )
    held, _killed, *rest = output_after("first-stream", "python crash.py\npython again.py")
    assert shell.run("crash.py") == (-signal.SIGKILL, f"{held}\n")
    assert shell.run("again.py") == (0, "".join(f"{line}\n" for line in rest))


@pytest.mark.slow
@ONE_SERVER
def test_an_own_loop_with_kills_and_a_restart(
    terminal: tuple[Terminal, Server], tmp_path: Path
) -> None:
    shell, server = terminal
    write_files("own-loop", tmp_path)
    trainer_file = tmp_path / "trainer.py"
    text = trainer_file.read_text()
    assert "time.sleep(0.5)" in text
    assert "step < 200" in text
    trainer_file.write_text(
        text.replace("time.sleep(0.5)", "time.sleep(0.02)").replace("step < 200", "step < 60")
    )
    makers = [shell.start("maker.py") for _ in range(2)]
    trainer = shell.start("trainer.py")
    line_with(trainer, "step 20")
    makers[0].kill()
    line_with(trainer, "step 30")
    trainer.kill()
    makers.append(shell.start("maker.py"))
    trainer = shell.start("trainer.py")
    gone_on = int(line_with(trainer, "goes on after step").split()[-1])
    assert gone_on >= 30
    line_with(trainer, "step 40")
    server.kill()
    server.start()
    rest, _ = trainer.communicate(timeout=200)
    assert trainer.returncode == 0
    rewards = re.findall(r"step \d+: reward (\d\.\d\d)", rest)
    assert float(rewards[-1]) > 0.35
    ledger = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", rest.splitlines()[-1])}
    assert ledger["acked"] >= 60 * 16 - 16
    assert ledger.pop("put") == sum(ledger.values())
    for maker, number in zip(makers[1:], (signal.SIGINT, signal.SIGTERM), strict=True):
        maker.send_signal(number)
        maker.communicate(timeout=60)
        assert maker.returncode == 0


@pytest.mark.parametrize("program", ["maker.py", "trainer.py"])
@ONE_SERVER
def test_a_program_of_an_own_loop_that_gets_sigterm_ends_in_order(
    program: str, terminal: tuple[Terminal, Server], tmp_path: Path
) -> None:
    shell, server = terminal
    write_files("own-loop", tmp_path)
    process = shell.start(program)
    with redrb.connect(server.url) as client, Observer(client, "default", every_s=0.1) as observer:

        def await_life(*lives: str) -> None:
            view, end = observer.newest(), time.monotonic() + 60
            while time.monotonic() < end:
                tasks = view.state.tasks if view.state else ()
                if any(worker.life in lives for task in tasks for worker in task.workers):
                    return
                view = observer.wait(view.number, 5)
            raise AssertionError(view.state)

        await_life("live")
        process.terminate()
        process.communicate(timeout=30)
        await_life("ended")


def test_the_recipe_of_a_first_job_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files("first-job", tmp_path)
    (make_data,) = re.findall(r"^for d in .*$", page("first-job"), re.MULTILINE)
    subprocess.run(["sh", "-c", make_data], check=True, timeout=20)
    assert cli.main(["settings", "digits.py", "--groups", "8", "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["target_reward"], rows["groups"], rows["group_size"]) == (0.95, 8, 16)

    torch.manual_seed(0)
    recipe = load("digits.py")[0]()
    assert isinstance(recipe, GRPORecipe)
    models = recipe.models()
    optimizers = recipe.optimizers(models)
    maker = recipe.experience_maker(models, None)
    prompts = endless(recipe, random.Random(0))
    options = recipe.generation(torch.Generator().manual_seed(0))
    for _ in range(60):
        batch = list(islice(prompts, recipe.prompts_per_step))
        metrics = recipe.step(models, optimizers, maker.make_experience(batch, **options))
    assert metrics["reward"] > 0.8


def test_the_workers_of_a_first_job_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_workers.py and test_recipe_ranks.py run the same commands with other recipes."""
    monkeypatch.chdir(tmp_path)
    write_files("first-job", tmp_path)
    Path("digits.toml").unlink()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (block,) = re.findall(r"```sh\n(export REDRB_URL=redis://host.*?)```", page("first-job"), re.S)
    groups = []
    for line in block.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "export":
            monkeypatch.setenv(*words[0].split("=", 1))
            continue
        if program == "torchrun":
            launch = get_args_parser().parse_args(words)
            assert (launch.nproc_per_node, launch.module) == ("2", True)
            program, words = launch.training_script, launch.training_script_args
            assert f"{program}:run" == scripts["redrb-trainer"]
        else:
            assert program in scripts
        recipe = parse(program, None, words).recipe
        assert recipe.url == "redis://host:6379/0"
        groups.append(recipe.groups)
    assert groups == [32, 32, 16, 32]


def test_the_users_of_a_second_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files("second-machine", tmp_path)
    Path("admin-password").write_text("of-the-admin")
    for line in re.findall(r"^echo .*users\.acl$", page("second-machine"), re.MULTILINE):
        subprocess.run(["sh", "-c", line], check=True, timeout=20)
    settings, port = Path("redis.conf"), free_port()
    settings.write_text(settings.read_text().replace("6380", str(port)))
    server = subprocess.Popen([need("redis-server"), "redis.conf"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            await_server(client)
        place = f"localhost:{port}"
        monkeypatch.setenv("REDRB_URL", f"redis://admin:of-the-admin@{place}")
        for user, command in re.findall(ACCESS, page("second-machine")):
            monkeypatch.setenv("REDRB_USER_PASSWORD", f"of-{user}")
            assert cli.main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out.splitlines() == [
            line.replace("localhost:6380", place)
            for line in output_after("second-machine", "--user colleague --apply")
        ]
        with redrb.connect(f"redis://trainer:of-trainer@{place}") as client:
            redrb.WeightPublisher(client, "digits").publish({"weight": torch.ones(3)})
            stream = redrb.ExperienceStream(client, "digits")
            stream.put([redrb.BufferItem(None, None, reward=torch.tensor(1.0))])
        monkeypatch.setenv("REDRB_URL", f"redis://maker:of-maker@{place}")
        assert cli.main(["weights", "rm", "digits"]) == 1
        refused = output_after("second-machine", "redrb weights rm digits")[0]
        said = capsys.readouterr().err
        assert said.startswith(refused.replace("A:6380", place).removesuffix(" ...")), said
        assert "The login is right, and this user lacks the permission" in said
        changes = re.findall(
            r"^redrb (set digits limit=\w+)  #", page("second-machine"), re.MULTILINE
        )
        assert len(changes) == 2
        for change in changes:
            assert cli.main(change.split()) == 0
            assert "user maker" in capsys.readouterr().out
        monkeypatch.setenv("REDRB_URL", f"redis://colleague:of-colleague@{place}")
        assert cli.main(["ls"]) == 0
        assert cli.main(["set", "digits", "limit=8"]) == 1
        assert "refused a change: this user may only read" in capsys.readouterr().err
    finally:
        server.kill()
        server.wait()
