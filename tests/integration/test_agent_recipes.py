"""Recipes of agents: their makers serve them a gateway, and the trainer compares their rewards."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import redrb
from redrb import Client, ExperienceStream
from redrb.cli import __main__ as cli
from redrb.environment import PREFIX, child_environment
from redrb.errors import ConfigError, EngineError, StoreDenied
from redrb.gateway.store import SessionStore
from redrb.recipe import AgentRecipe, GRPORecipe, agent_maker, character_tokenizer
from redrb.train.broadcast import Broadcast
from redrb.train.episodes import running
from redrb.watch.state.findings import workers as findings
from redrb.watch.state.observer import Observer
from tests import warm
from tests.chat_server import MODEL, ChatBackend
from tests.engine_server import tiny_model

PROMPTS = [{"question": str(number), "level": number % 2} for number in range(4)]


@pytest.fixture
def server(server_urls: Any) -> Iterator[ChatBackend]:
    with ChatBackend(server_urls("valkey-9.1")) as server:
        yield server


@pytest.fixture
def client(server: ChatBackend) -> Iterator[Client]:
    with redrb.connect(server.redis_url, retry_s=10) as client:
        yield client


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the server's model, by the name that it has there."""
    monkeypatch.chdir(tmp_path)
    tiny_model(1).save_pretrained(MODEL)
    character_tokenizer("0123456789ab").save_pretrained(MODEL)
    return tmp_path


class Agents(AgentRecipe):
    """Asks once, and rewards the digits of the answer."""

    group_size = 3
    prompts_per_step = 2
    maker_steps = 2
    max_new_tokens = 6
    device = "cpu"
    weights_dtype = "float32"
    weights_timeout = 20.0
    max_staleness = -1
    extras = ("question",)
    tags = ("level",)
    shuffle = False

    def model(self) -> str:
        return MODEL

    def prompts(self) -> list[dict[str, Any]]:
        return PROMPTS

    async def agent(self, prompt: dict[str, Any], session: Any) -> float:
        message = await session.chat([{"role": "user", "content": prompt["question"]}])
        return len(message["content"] or "")


class OneFails(Agents):
    """One agent of each group raises."""

    begun: dict[str, int] = {}  # noqa: RUF012

    async def agent(self, prompt: dict[str, Any], session: Any) -> float:
        question = prompt["question"]
        number = self.begun[question] = self.begun.get(question, 0) + 1
        reward = await super().agent(prompt, session)
        if number == 2:
            raise ZeroDivisionError("no verdict")
        return reward


def of(
    kind: type[AgentRecipe], server: ChatBackend, namespace: str, **settings: Any
) -> AgentRecipe:
    return kind(namespace=namespace, worker="maker-1", engine_url=server.url, **settings)


def made(
    client: Client, recipe: AgentRecipe, count: int = 4
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Return so many groups that a maker makes, and its events."""
    trainer = Broadcast(client, recipe.namespace, recipe.weights_name, [])
    trainer.push(recipe.models(), fully=True, lora_only=False)
    events: list[dict[str, Any]] = []

    def write(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})

    with ExperienceStream(client, recipe.task_name, namespace=recipe.namespace) as stream:
        stream.join_group()
        with recipe.maker(client, write) as maker:
            maker.run()
        due = f"{stream._task.store.keys.prefix}part_due"
        for key in client.execute("ZRANGE", due, 0, -1):
            client.execute("ZADD", due, 0, key)  # the half minute for parts on their way is over
        groups = stream.take(count, timeout=30).groups() if count else []
        ledger = stream.stats().ledger
        assert (ledger.balanced, ledger.put) == (True, count)
    return groups, events


def test_the_agents_of_a_prompt_are_a_group_of_sampled_tokens(server, client, namespace):
    groups, events = made(client, of(Agents, server, namespace))
    assert [len(group) for group in groups] == [3] * 4
    assert sorted(group[0].extras["question"] for group in groups) == ["0", "1", "2", "3"]
    sampled = [(each.prompt + each.tokens, each.log_probs) for each in server.samples]
    for item in (item for group in groups for item in group):
        assert item.tags == {"maker": "maker-1", "level": int(item.extras["question"]) % 2}
        assert item.policy_version == 1
        [log_probs] = [found for tokens, found in sampled if tokens == item.sequences.tolist()][:1]
        assert item.action_log_probs.tolist() == pytest.approx(log_probs)
        assert len(item.action_mask) <= 6
        assert item.advantages is None
    puts = [each for each in events if each["event"] == "put"]
    assert [(each["groups"], each["samples"]) for each in puts] == [(2, 6), (2, 6)]
    rewards = [float(item.reward) for group in groups for item in group]
    assert sum(each["reward"] for each in puts) / 2 == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize(("least", "sizes"), [(2, [2] * 4), (0, [])])
def test_an_agent_that_raises_costs_its_session(
    server, client, namespace, caplog, least, sizes, monkeypatch
):
    monkeypatch.setattr(OneFails, "begun", {})
    groups, events = made(client, of(OneFails, server, namespace, least=least), len(sizes))
    assert [len(group) for group in groups] == sizes
    assert "raised ZeroDivisionError: no verdict (test_agent_recipes.py, line" in caplog.text
    assert ("a group is filtered" in caplog.text) == (least == 0)
    assert ("a session is dropped" in caplog.text) == (least == 2)
    assert len([each for each in events if each["event"] == "put"]) == (2 if least else 0)


JOB = """
from redrb.recipe import AgentRecipe, agent_maker

agent_maker.SESSION_S = 3.0


class Job(AgentRecipe):
    group_size = 3
    prompts_per_step = 2
    max_new_tokens = 6
    device = "cpu"
    weights_dtype = "float32"

    def model(self):
        return "tiny"

    def prompts(self):
        return [{"question": str(number)} for number in range(9)]

    async def agent(self, prompt, session):
        messages = [{"role": "user", "content": prompt["question"]}]
        for _ in range(2):
            messages += [await session.chat(messages), {"role": "user", "content": "7"}]
        return float(len(messages[-2]["content"]))
"""

RIGHTS = 8
"""Groups that may be begun at a version: those of two."""


class MakerProcess:
    """The command `redrb-maker`, which can be killed."""

    def __init__(self, server: ChatBackend, namespace: str, worker: str) -> None:
        Path("job.py").write_text(JOB)
        words = ["job.py", "--url", server.redis_url, "--engine-url", server.url]
        words += ["--namespace", namespace, "--worker", worker]
        command = [sys.executable, "-m", "redrb.cli.processes.maker", *words]
        self.popen = warm.Popen(
            command,
            env=child_environment(without=PREFIX),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: signal.Signals) -> str:
        """Send a signal, and return what it has written to stderr."""
        self.popen.send_signal(number)
        return self.popen.communicate(timeout=60)[1]


@pytest.fixture
def stream(client: Client, namespace: str) -> Iterator[ExperienceStream]:
    """The task of the job, with rights for `RIGHTS` groups and the first weights."""
    settings: dict[str, Any] = {"max_staleness": 1, "groups_per_version": RIGHTS // 2}
    trainer = Broadcast(client, namespace, "job", [])
    trainer.push({"actor": tiny_model(1)}, fully=True, lora_only=False)
    with ExperienceStream(client, "job", namespace=namespace, **settings) as stream:
        stream.join_group()
        stream.advance(1)
        yield stream


def test_a_killed_maker_loses_and_repeats_no_group(server, stream, namespace):
    server.stands_from = 2 * 3 * 4 + 1  # after four groups of two turns
    first = MakerProcess(server, namespace, "maker-1")
    try:
        with stream.take(3, timeout=60) as lease:
            lease.release()
        server.until_standing(1)
    finally:
        first.end(signal.SIGKILL)
    server.stands_from = None
    second = MakerProcess(server, namespace, "maker-2")
    try:
        lease = stream.take(RIGHTS, timeout=60)
        groups = lease.groups()
    finally:
        errors = second.end(signal.SIGTERM)  # it has all rights that there are, and waits
    lease.ack()
    assert second.popen.returncode == 0, errors
    assert [len(group) for group in groups] == [3] * RIGHTS
    sampled = {tuple(each.prompt + each.tokens) for each in server.samples}
    items = [item for group in groups for item in group]
    assert len({item.extras["redrb_session"] for item in items}) == 3 * RIGHTS
    assert all(tuple(item.sequences.tolist()) in sampled for item in items)
    stats = stream.stats()
    assert (stats.ledger.balanced, stats.ledger.put, stats.ledger.acked) == (True, RIGHTS, RIGHTS)
    assert stats.admission.held == 0


def test_a_maker_that_is_asked_to_end_drops_its_sessions(server, stream, namespace):
    server.stands_from = 0
    maker = MakerProcess(server, namespace, "maker-1")
    try:
        server.until_standing(1)
        assert stream.stats().admission.held > 0
        began = time.monotonic()
    finally:
        errors = maker.end(signal.SIGTERM)
    assert time.monotonic() - began < 15
    assert (maker.popen.returncode, "Traceback" in errors) == (0, False), errors
    stats = stream.stats()
    assert (stats.admission.held, stats.ledger.put, stats.ledger.balanced) == (0, 0, True)


def test_a_maker_ends_with_its_job_while_it_waits_for_a_right(server, client, stream, namespace):
    maker = MakerProcess(server, namespace, "maker-1")
    try:
        stream.take(RIGHTS, timeout=60).ack()  # it waits for the next version now
        trainer = Broadcast(client, namespace, "job", [])
        trainer.end_job("it is enough", None)
        errors = maker.popen.communicate(timeout=60)[1]
    finally:
        maker.popen.kill()
    assert maker.popen.returncode == 0, errors
    assert "has ended the job: it is enough" in errors


class Completions(GRPORecipe):
    """Samples from the same server without agents."""

    engine = "vllm"
    group_size = 3
    prompts_per_step = 2
    maker_steps = 2
    max_new_tokens = 6
    device = "cpu"
    weights_dtype = "float32"
    max_staleness = -1

    def model(self) -> str:
        return MODEL

    def prompts(self) -> list[dict[str, Any]]:
        return [{"prompt": "12"}]

    def reward(self, completion: Any) -> float:
        return 1.0


@pytest.mark.parametrize("kind", [Agents, Completions])
@pytest.mark.parametrize("is_killed", [False, True])
def test_makers_say_which_server_is_away_and_go_on_when_it_is_back(
    server, client, namespace, kind, is_killed, monkeypatch
):
    monkeypatch.setattr(findings, "ENGINE_AWAY_S", 0.5)
    recipe = of(kind, server, namespace, lease_ms=300)

    def away() -> list[str]:
        try:
            if is_killed:
                server.until_standing(1)
                server.end()
            with Observer(client, namespace, every_s=0.05) as observer:
                found, until = [], time.monotonic() + 30
                while not found and time.monotonic() < until:
                    view = observer.wait(observer.newest().number, 1.0)
                    found = [each for each in view.findings if each.code == "waits-for-engine"]
            return [f"{each.summary} {each.command}" for each in found]
        finally:
            server.stands_from = None
            server.start()

    if is_killed:
        server.stands_from = 0
    else:
        server.end()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(away)
        made(client, recipe)
        [said] = watching.result(60)
    assert f"Its inference server at {server.url} (asked from " in said
    assert said.endswith(f" curl -i --url {server.url}/health")


def test_a_new_agent_runs_and_its_trainer_trains(server, namespace, folder):
    assert cli.main(["new", "agent", "sums.py", "--model", MODEL]) == 0
    words = ["sums.py", "--url", server.redis_url, "--engine-url", server.url, "--out", "out"]
    words += ["--namespace", namespace, "--makers", "1", "--steps", "3", "--device", "cpu"]
    words += ["--group-size", "2", "--groups", "2", "--prompts-per-step", "2", "--largest", "3"]
    words += ["--max-new-tokens", "4", "--most-turns", "2", "--mixed-precision", "no"]
    command = [sys.executable, "-m", "redrb.cli", "run", *words]
    done = subprocess.run(
        command, env=child_environment(without=PREFIX), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "out" / "trainer.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["event"] == "step"]
    assert [each["step"] for each in steps] == [1, 2, 3]
    assert all(each["reward"] == 0 for each in steps)  # it has no letters to write a box
    assert all(each["samples"] >= 4 for each in steps)


class Asks(Agents):
    """Does what a test asks for, once."""

    maker_steps = 1
    prompts_per_step = 1
    group_size = 2

    async def agent(self, prompt: dict[str, Any], session: Any) -> float:
        return await ASKED(session)


ASKED: Any = None


def asks(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ASKED", what)


def test_any_client_samples_by_the_url_even_one_that_blocks(server, client, namespace, monkeypatch):
    async def blocks(session: Any) -> float:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "1"}]}
        reply = httpx.post(f"{session.url}/chat/completions", json=body, timeout=60)
        return float(reply.status_code == 200)

    asks(monkeypatch, blocks)
    [group], _ = made(client, of(Asks, server, namespace), 1)
    assert [float(item.reward) for item in group] == [1.0, 1.0]


@pytest.mark.parametrize("is_thread", [False, True])
def test_an_agent_that_blocks_the_others_is_named_once(
    server, client, namespace, monkeypatch, caplog, is_thread
):
    monkeypatch.setattr(running, "_LOOK_S", 0.05)
    monkeypatch.setattr(running, "_LATE_S", 0.4)

    async def works(session: Any) -> float:
        await session.chat([{"role": "user", "content": "1"}])
        for _ in range(8):
            if is_thread:
                await asyncio.to_thread(time.sleep, 0.5)
            else:
                time.sleep(0.5)
                await asyncio.sleep(0)
        return 1.0

    asks(monkeypatch, works)
    made(client, of(Asks, server, namespace), 1)
    said = [each.message for each in caplog.records if "blocks its event loop" in each.message]
    assert len(said) == (not is_thread)
    assert all(each.startswith("Asks.agent blocks") and "to_thread" in each for each in said)


def test_turns_are_sampled_as_the_trainer_takes_them(server, client, namespace, monkeypatch):
    said: list[str] = []

    async def hot(session: Any) -> float:
        messages = [{"role": "user", "content": "1"}]
        await session.chat(messages, temperature=0.5, max_tokens=3)
        with pytest.raises(EngineError, match=r"temperature must be 0\.5, as the trainer has it"):
            await session.chat(messages, temperature=0.7)
        said.append((await session.chat([{"role": "user", "content": "2"}]))["content"])
        return 1.0

    asks(monkeypatch, hot)
    [group], _ = made(client, of(Asks, server, namespace, temperature=0.5), 1)
    assert [len(item.action_mask) for item in group[::2]] == [3, 3]  # branches, of one session each
    sessions = [item.extras["redrb_session"] for item in group]
    assert sessions[0] != sessions[2]
    assert len(set(sessions)) == len(said) == 2


@pytest.mark.parametrize(
    "options", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.9}]
)
def test_no_agent_samples_in_another_way_than_its_recipe(
    server, client, namespace, monkeypatch, options
):
    async def other(session: Any) -> float:
        messages = [{"role": "user", "content": "1"}]
        with pytest.raises(EngineError, match=r"must be .*, as the trainer has it"):
            await session.chat(messages, **options)
        await session.chat(messages, max_tokens=5000, top_p=1, top_k=0, min_p=0, temperature=1)
        return 1.0

    asks(monkeypatch, other)
    [group], _ = made(client, of(Asks, server, namespace), 1)
    assert all(len(item.action_mask) <= Asks.max_new_tokens for item in group)


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError()])
@pytest.mark.parametrize("count", [1, 2])
def test_an_agent_that_exits_or_cancels_itself_has_failed(
    server, client, namespace, monkeypatch, caplog, error, count, least
):
    begun: list[Any] = []

    async def fails(session: Any) -> float:
        begun.append(session)
        number = len(begun)
        await session.chat([{"role": "user", "content": "1"}])
        if number <= count:
            raise error
        return 1.0

    asks(monkeypatch, fails)
    groups, events = made(client, of(Asks, server, namespace, least=least), int(count <= least))
    assert [len(group) for group in groups] == [1] * (count <= least)
    assert [each["samples"] for each in events if each["event"] == "put"] == [1] * len(groups)
    assert f"an agent raised {type(error).__name__}" in caplog.text


def test_an_agent_that_cancels_its_own_task_has_failed(
    server, client, namespace, monkeypatch, caplog
):
    async def cancels(session: Any) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await session.chat([{"role": "user", "content": "1"}])
        return 1.0

    asks(monkeypatch, cancels)
    groups, events = made(client, of(Asks, server, namespace, least=1), 0)
    assert (groups, [each for each in events if each["event"] == "put"]) == ([], [])
    assert "a group is filtered: an agent raised CancelledError" in caplog.text


def test_a_session_that_cannot_be_kept_costs_no_other(client, namespace, monkeypatch, caplog):
    kept: list[str] = []

    def use(_: Any, name: str) -> None:
        kept.append(name)
        if len(kept) % 2:
            raise StoreDenied("denied")

    monkeypatch.setattr(agent_maker, "SESSION_S", 0.06)
    monkeypatch.setattr(SessionStore, "use", use)

    async def renewed(maker: Any) -> None:
        renewing = asyncio.create_task(maker._renew())
        while len(kept) < 6:
            await asyncio.sleep(0.01)
        assert not renewing.done()
        renewing.cancel()

    recipe = Agents(namespace=namespace, worker="maker-1", engine_url="http://127.0.0.1:9")
    with recipe.maker(client, lambda *_, **__: None) as maker:
        maker._sessions |= {"http://127.0.0.1:9/s/a.b/v1", "http://127.0.0.1:9/s/c.d/v1"}
        asyncio.run(asyncio.wait_for(renewed(maker), 30))
    assert len(set(kept)) == 2
    assert caplog.text.count("sessions of agents that run are not kept: denied") == 1


def test_an_agent_that_is_silent_for_long_keeps_its_session(server, client, namespace, monkeypatch):
    monkeypatch.setattr(agent_maker, "SESSION_S", 0.6)

    async def silent(session: Any) -> float:
        await session.chat([{"role": "user", "content": "1"}])
        await asyncio.sleep(2.0)
        return 1.0

    asks(monkeypatch, silent)
    [group], _ = made(client, of(Asks, server, namespace), 1)
    assert len(group) == 2


@pytest.mark.parametrize("reward", [None, float("nan"), "1"])
def test_what_is_no_reward_is_no_sample(server, client, namespace, monkeypatch, caplog, reward):
    async def odd(session: Any) -> Any:
        await session.chat([{"role": "user", "content": "1"}])
        return reward

    asks(monkeypatch, odd)
    made(client, of(Asks, server, namespace), 0)
    assert "an agent raised ConfigError: reward=" in caplog.text


def test_an_agent_that_lasts_too_long_is_ended(server, client, namespace, monkeypatch, caplog):
    async def endless(session: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    asks(monkeypatch, endless)
    made(client, of(Asks, server, namespace, episode_timeout=0.5), 0)
    assert "an agent raised TimeoutError" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"least": 4}, "--least must be at most --group-size"),
        ({"engine": "sglang"}, "--engine must be vllm"),
        ({"beta": 0.1}, "leave --beta out"),
        ({"overlong_cache": 2}, "leave --overlong-cache out"),
        ({"reward_above": 0.0}, "leave --reward-above and --reward-below out"),
    ],
)
def test_settings_that_no_maker_of_agents_can_follow_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        Agents(**settings)


def test_a_recipe_has_a_coroutine_and_no_held_out_prompts():
    class Plain(Agents):
        def agent(self, prompt: Any, session: Any) -> float:  # type: ignore[override]
            return 1.0

    class HeldOut(Agents):
        def held_out(self) -> Any:
            return PROMPTS

    with pytest.raises(ConfigError, match="async def agent"):
        Plain()
    with pytest.raises(ConfigError, match=r"leave held_out\(\) out"):
        HeldOut()
