"""Environments of other projects by `redrb gateway`: verifiers, the Agents SDK and OpenEnv.

Tests of a project run where its package is installed. verifiers and openai-agents need different
versions of openai, so they need environments of their own.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import uvicorn

import redrb
from redrb import Client, ExperienceStream, WeightPublisher
from redrb.compat.openai_agents import run_agent
from redrb.compat.openenv import play
from redrb.compat.verifiers import run_episode
from redrb.errors import ConfigError, EngineError
from redrb.gateway import client as client_module
from redrb.gateway.client import GatewayClient
from tests.chat_server import CALL, END, ROLES, ChatBackend, Sample
from tests.engine_server import tiny_model
from tests.gateways import GatewayProcess, GatewayThread

GROUP = 4
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Scripted(ChatBackend):
    """A server that samples what `answer` returns for the tokens before it."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url)
        self.answer: Callable[[list[int]], list[int]] = lambda _: [5, END]

    async def _sampled(self, *given: Any) -> tuple[list[int], list[float], str]:
        prompt, _, _, _, labels, *_ = given
        tokens = self.answer(prompt)
        labels += [self.label] * len(tokens)
        log_probs = [-0.5 - at for at in range(len(tokens))]
        self.samples.append(Sample(list(prompt), tokens, log_probs, labels))
        return tokens, log_probs, "stop"


def calls_once(prompt: list[int]) -> list[int]:
    """Answer with a call of a tool whose `x` is 4, and then with the tool's result."""
    if ROLES["tool"] not in prompt:
        return [CALL, 4, END]
    at = len(prompt) - 1 - prompt[::-1].index(ROLES["tool"])
    return [prompt[at + 1], END]


@pytest.fixture
def server(server_urls: Any) -> Iterator[Scripted]:
    with Scripted(server_urls("valkey-9.1")) as server:
        yield server


@pytest.fixture
def stream(server: Scripted, namespace: str) -> Iterator[ExperienceStream]:
    client = redrb.connect(server.redis_url, retry_s=10)
    with client, ExperienceStream(client, "agents", namespace=namespace) as stream:
        stream.join_group()
        yield stream


@pytest.fixture
def url(server: Scripted, stream: ExperienceStream, namespace: str) -> Iterator[str]:
    with redrb.connect(server.redis_url, retry_s=10) as client:
        publish(client, namespace)
        with GatewayThread(client, server.url, namespace=namespace) as gateway:
            yield gateway.url


def publish(client: Client, namespace: str) -> None:
    publisher = WeightPublisher(client, "trainer_0", namespace=namespace)
    state = tiny_model(1).state_dict()
    publisher.publish({f"actor.{name}": each for name, each in state.items()}, version=1)


def in_session(url: str, work: Callable[[GatewayClient], Any]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60), GatewayClient(url) as gateway:
            return await work(gateway)

    return asyncio.run(run())


def taken(stream: ExperienceStream, server: Scripted) -> list[list[Any]]:
    """Take the group that is there; check that its samples are what the server has sampled."""
    groups = stream.take(1, timeout=20).groups()
    made = [(each.prompt + each.tokens, each.log_probs) for each in server.samples]
    for group in groups:
        for item in group:
            [log_probs] = [found for tokens, found in made if tokens == item.sequences.tolist()][:1]
            assert item.action_mask[-len(log_probs) :].all()
            assert item.action_log_probs[-len(log_probs) :].tolist() == pytest.approx(log_probs)
            assert item.token_versions[item.action_mask].unique().tolist() == [1]
    return groups


def is_gone(gateway: GatewayClient, url: str) -> Any:
    async def is_gone() -> bool:
        with pytest.raises(EngineError) as caught:
            await gateway.request("GET", f"{url}/models")
        return caught.value.status == 404

    return is_gone()


def test_a_session_is_a_sample_with_its_reward(url, server, stream):
    async def work(gateway: GatewayClient) -> None:
        async with gateway.session("p", tags={"level": 2}) as session:
            message = await session.chat([{"role": "user", "content": "1"}], max_tokens=8)
            assert message["content"] == "5"
            await session.reward(0.5, extras={"turns": 1})
            await session.reward(0.7)  # the first one holds

    in_session(url, work)
    [[item]] = taken(stream, server)
    assert (item.reward, item.tags, item.extras["turns"]) == (0.5, {"level": 2}, 1)


def test_a_session_without_a_reward_is_dropped(url, server, stream):
    async def work(gateway: GatewayClient) -> None:
        async with gateway.session("p") as session:
            await session.chat([{"role": "user", "content": "1"}])
        assert await is_gone(gateway, session.url)
        with pytest.raises(ZeroDivisionError):
            async with gateway.session("p") as session:
                raise ZeroDivisionError
        assert await is_gone(gateway, session.url)

    in_session(url, work)
    assert stream.count() == 0


def test_a_cancelled_session_is_dropped(url, stream):
    async def work(gateway: GatewayClient) -> None:
        begun = asyncio.Event()

        async def endless() -> None:
            async with gateway.session("p") as session:
                urls.append(session.url)
                begun.set()
                await asyncio.Event().wait()

        urls: list[str] = []
        running = asyncio.create_task(endless())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await is_gone(gateway, urls[0])

    in_session(url, work)


def test_a_session_waits_for_the_first_weights(server, stream, namespace, monkeypatch):
    monkeypatch.setattr("redrb.gateway.limits.WAIT_S", 0.01)

    async def work(gateway: GatewayClient) -> None:
        waiting = asyncio.create_task(one_turn(gateway, "p"))
        await refused.wait()
        await asyncio.to_thread(publish, client, namespace)
        assert await waiting == "5"

    with (
        redrb.connect(server.redis_url, retry_s=10) as client,
        GatewayThread(client, server.url, namespace=namespace) as thread,
    ):
        refused = refusals(monkeypatch)
        in_session(thread.url, work)
    taken(stream, server)


def refusals(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set when the gateway has refused a session for now."""
    refused, seconds_of = asyncio.Event(), client_module._seconds

    def noted(text: str) -> float:
        refused.set()
        return min(seconds_of(text), 1.0)

    monkeypatch.setattr(client_module, "_seconds", noted)
    return refused


async def one_turn(gateway: GatewayClient, prompt: str, **options: Any) -> str:
    async with gateway.session(prompt, **options) as session:
        message = await session.chat([{"role": "user", "content": "1"}])
        await session.reward(1)
    return str(message["content"])


def test_a_session_goes_on_at_another_gateway_after_the_first_one_was_killed(
    server, stream, namespace
):
    with redrb.connect(server.redis_url, retry_s=10) as client:
        publish(client, namespace)
    first = GatewayProcess(server.redis_url, server.url, namespace=namespace)
    started: list[GatewayProcess] = []

    def replace() -> None:
        port = int(first.url.rpartition(":")[2])
        process = GatewayProcess(server.redis_url, server.url, namespace=namespace, port=port)
        started.append(process)

    async def work(gateway: GatewayClient) -> None:
        async with gateway.session("p") as session:
            history = [{"role": "user", "content": "1"}]
            history += [await session.chat(history), {"role": "user", "content": "2"}]
            await asyncio.to_thread(first.kill)
            turn = asyncio.create_task(session.chat(history))
            await asyncio.to_thread(replace)
            assert (await turn)["content"] == "5"
            await session.reward(0.5)

    try:
        in_session(first.url, work)
    finally:
        for process in (first, *started):
            process.kill()
    [[item]] = taken(stream, server)
    assert item.reward == 0.5
    assert len(server.samples) == 2


@pytest.mark.long
def test_the_sessions_of_many_groups_at_once_are_whole_groups(url, server, stream):
    async def work(gateway: GatewayClient) -> None:
        sessions = [
            one_turn(gateway, f"p{number}", group_size=GROUP)
            for number in range(25)
            for _ in range(GROUP)
        ]
        await asyncio.gather(*sessions)

    in_session(url, work)
    assert [len(group) for group in stream.take(25, timeout=30).groups()] == [GROUP] * 25
    assert len(server.samples) == 25 * GROUP


# verifiers: packages of a task set and of a harness are modules of these names

ENVIRONMENT = "redrb_example"


@pytest.fixture
def vf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """verifiers, with an environment that doubles a number, in this process."""
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    from openai import AsyncOpenAI

    class Data(vf.TaskData):
        answer: str

    class Double(vf.Task[Data]):
        @vf.reward(weight=0.5)
        async def is_right(self, trace: Any) -> float:
            if trace.last_reply == "7":
                raise ZeroDivisionError
            return float(trace.last_reply == self.data.answer)

        @vf.metric
        async def length(self, trace: Any) -> float:
            return float(len(trace.last_reply))

    class Unscored(vf.Task[Data]):
        pass

    class Doubles(vf.Taskset[Double, vf.TasksetConfig]):
        def load(self) -> Iterator[Any]:
            for number in (4, 9):
                yield Double(Data(prompt=str(number), answer=str(2 * number)))

    class Loop(vf.Harness[vf.HarnessConfig]):
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any
        ) -> Any:
            history: list[Any] = [{"role": "user", "content": rest[1].prompt}]
            async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                while True:
                    reply = await client.chat.completions.create(
                        model=ctx.model, messages=history, tools=[TOOL]
                    )
                    message = reply.choices[0].message
                    history.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls or ():
                        result = {"role": "tool", "tool_call_id": call.id, "content": "8"}
                        history.append(result)
                    if not message.tool_calls:
                        return vf.ProgramResult(0, "", "")

    module: Any = ModuleType(ENVIRONMENT)
    module.unscored = Unscored(Data(prompt="4", answer="8"))
    module.Doubles, module.Loop, module.__all__ = Doubles, Loop, ["Doubles", "Loop"]
    monkeypatch.setitem(sys.modules, ENVIRONMENT, module)
    return vf


def doubling(vf: ModuleType, **agent: Any) -> Any:
    config = vf.SingleAgentEnvConfig(
        taskset={"id": ENVIRONMENT}, agent={"runtime": {"type": "subprocess"}, **agent}
    )
    return vf.load_environment(config)


def test_episodes_of_verifiers_are_groups_of_their_tasks(vf, url, server, stream):
    server.answer = calls_once

    async def work(gateway: GatewayClient) -> list[Any]:
        env = doubling(vf)
        async with env.serving():
            runs = [
                run_episode(gateway, env, task, group_size=GROUP, sampling={"max_tokens": 8})
                for task in env.taskset
                for _ in range(GROUP)
            ]
            return await asyncio.gather(*runs)

    assert all(episode.ok for episode in in_session(url, work))
    groups = taken(stream, server) + taken(stream, server)
    rewards = sorted([item.reward for item in group] for group in groups)
    assert rewards == [[0.0] * GROUP, [0.5] * GROUP]
    for item in (item for group in groups for item in group):
        sampled = item.sequences[-len(item.action_mask) :][item.action_mask].tolist()
        assert sampled == [CALL, 4, END, 8, END]
        assert item.extras["length"] == 1.0


def test_an_episode_of_verifiers_that_is_not_whole_is_no_sample(vf, url, server, stream):
    server.answer = lambda _: [7, END]

    async def work(gateway: GatewayClient) -> Any:
        env = doubling(vf)
        return await run_episode(gateway, env, next(iter(env.taskset)))

    episode = in_session(url, work)
    assert not episode.ok
    assert episode.traces[0].errors
    assert len(server.samples) == 1
    assert stream.count() == 0


def test_an_episode_without_a_reward_is_an_error_and_no_sample(vf, url, stream):
    async def work(gateway: GatewayClient) -> None:
        env, task = doubling(vf), sys.modules[ENVIRONMENT].unscored
        with pytest.raises(ConfigError, match=r"vf\.reward"):
            await run_episode(gateway, env, task)

    in_session(url, work)
    assert stream.count() == 0


def test_an_environment_whose_session_would_have_two_rewards_is_refused(vf, url):
    class TwoAgents(vf.EnvConfig):
        solver: vf.AgentConfig = vf.AgentConfig()
        judge: vf.AgentConfig = vf.AgentConfig()

    async def work(gateway: GatewayClient) -> None:
        env = doubling(vf, retries={"max_retries": 1})
        with pytest.raises(ConfigError, match="retries"):
            await run_episode(gateway, env, next(iter(env.taskset)))
        both = SimpleNamespace(config=TwoAgents(taskset={"id": ENVIRONMENT}))
        with pytest.raises(ConfigError, match="judge"):
            await run_episode(gateway, both, next(iter(env.taskset)))

    in_session(url, work)


# OpenAI's Agents SDK


@pytest.fixture
def agents() -> ModuleType:
    return pytest.importorskip("agents", reason="openai-agents is not installed")


def looking_agent(agents: ModuleType) -> Any:
    @agents.function_tool
    def look(x: str) -> str:
        """Look it up."""
        return str(2 * int(x))

    return agents.Agent(name="helper", instructions="7", tools=[look], model="another")


def test_runs_of_the_agents_sdk_are_a_group(agents, url, server, stream):
    server.answer = calls_once

    async def work(gateway: GatewayClient) -> list[Any]:
        agent = looking_agent(agents)
        runs = [
            run_agent(
                gateway,
                agent,
                "1",
                lambda result: float(result.final_output == "8"),
                prompt="p",
                group_size=GROUP,
            )
            for _ in range(GROUP)
        ]
        return await asyncio.gather(*runs)

    assert [result.final_output for result in in_session(url, work)] == ["8"] * GROUP
    [group] = taken(stream, server)
    assert [item.reward for item in group] == [1.0] * GROUP
    for item in group:
        sampled = item.sequences[-len(item.action_mask) :][item.action_mask].tolist()
        assert sampled == [CALL, 4, END, 8, END]


def test_a_run_of_the_agents_sdk_that_fails_is_no_sample(agents, url, server, stream):
    server.answer = calls_once

    async def work(gateway: GatewayClient) -> None:
        async def reward(result: Any) -> float:
            assert result.final_output == "8"
            return 0.25

        await run_agent(gateway, looking_agent(agents), "1", reward, prompt="p")
        with pytest.raises(agents.MaxTurnsExceeded):
            await run_agent(gateway, looking_agent(agents), "1", reward, prompt="q", max_turns=1)

    in_session(url, work)
    [[item]] = taken(stream, server)
    assert item.reward == 0.25
    assert stream.count() == 0


def test_an_agent_that_takes_over_is_sampled_by_the_gateway(agents, url, server, stream):
    def answer(prompt: list[int]) -> list[int]:
        return [5, END] if ROLES["tool"] in prompt else [CALL, END]

    async def work(gateway: GatewayClient) -> Any:
        expert = agents.Agent(name="expert", instructions="8", model="another")
        first = agents.Agent(
            name="first",
            instructions="7",
            handoffs=[agents.handoff(expert, tool_name_override="look")],
        )
        return await run_agent(gateway, first, "1", lambda _: 1, prompt="p")

    server.answer = answer
    assert in_session(url, work).last_agent.name == "expert"
    [group] = taken(stream, server)
    assert [item.reward for item in group] == [1.0] * 2  # it has other instructions: a branch


# OpenEnv


class Echo:
    """A client of OpenEnv's form, without its package: done after three steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def reset(self, **options: Any) -> Any:
        return SimpleNamespace(observation=str(options["seed"]), reward=None, done=False)

    async def step(self, action: str) -> Any:
        self.seen.append(action)
        count = len(self.seen)
        return SimpleNamespace(observation=action * 2, reward=0.5 * count, done=count == 3)


def test_an_episode_of_steps_is_a_sample_with_the_sum_of_its_rewards(url, server, stream):
    envs = [Echo() for _ in range(GROUP)]

    async def work(gateway: GatewayClient) -> list[float]:
        options: dict[str, Any] = {"group_size": GROUP, "reset": {"seed": 3}}
        runs = [
            play(gateway, env, prompt="p", show=str, act=lambda each: each["content"], **options)
            for env in envs
        ]
        return await asyncio.gather(*runs)

    assert in_session(url, work) == [3.0] * GROUP
    assert all(env.seen == ["5"] * 3 for env in envs)
    [group] = taken(stream, server)
    assert [(item.reward, item.extras["steps"]) for item in group] == [(3.0, 3)] * GROUP
    assert all(item.action_mask.sum() == 6 for item in group)


def test_an_episode_of_steps_ends_after_the_most_steps(url, stream):
    async def work(gateway: GatewayClient) -> float:
        options: dict[str, Any] = {"reset": {"seed": 3}, "max_steps": 1}
        return await play(gateway, Echo(), prompt="p", show=str, act=str, **options)

    assert in_session(url, work) == 0.5


def test_an_action_that_cannot_be_read_drops_the_episode(url, server, stream):
    async def work(gateway: GatewayClient) -> None:
        with pytest.raises(KeyError):
            await play(
                gateway,
                Echo(),
                prompt="p",
                show=lambda seen: [
                    {"role": "system", "content": "7"},
                    {"role": "user", "content": seen},
                ],
                act=lambda message: message["action"],
                reset={"seed": 3},
            )

    in_session(url, work)
    assert [each.prompt[0] for each in server.samples] == [ROLES["system"]]
    assert stream.count() == 0


@pytest.fixture
def open_env() -> Iterator[Any]:
    """A server of openenv-core whose environment wants the double of a number."""
    core = pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    from openenv.core.env_server import Action, Environment, Observation, State
    from openenv.core.env_server.http_server import create_fastapi_app

    class Number(Action):
        value: int

    class Asked(Observation):
        number: int

    class Doubles(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._count = 0

        def reset(self, seed: int | None = None, **_: Any) -> Asked:
            self._count = 0
            return Asked(number=seed or 1)

        def step(self, action: Number, **_: Any) -> Asked:
            self._count += 1
            return Asked(number=self._count, reward=action.value / 10, done=self._count == 2)

        @property
        def state(self) -> State:
            return State(step_count=self._count)

    app = create_fastapi_app(Doubles, Number, Asked, max_concurrent_envs=GROUP)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio"))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections wait until it runs
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        yield lambda: core.GenericEnvClient(base_url=f"http://127.0.0.1:{port}")
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_episodes_of_a_server_of_openenv_are_a_group(open_env, url, server, stream):
    async def episode(gateway: GatewayClient) -> float:
        async with open_env() as env:
            return await play(
                gateway,
                env,
                prompt="p",
                group_size=GROUP,
                show=lambda seen: str(seen["number"]),
                act=lambda message: {"value": int(message["content"])},
                reset={"seed": 4},
                sampling={"max_tokens": 8},
            )

    async def work(gateway: GatewayClient) -> list[float]:
        return await asyncio.gather(*(episode(gateway) for _ in range(GROUP)))

    assert in_session(url, work) == [1.0] * GROUP
    [group] = taken(stream, server)
    assert [(item.reward, item.extras["steps"]) for item in group] == [(1.0, 2)] * GROUP
