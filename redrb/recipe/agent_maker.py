"""`AgentRecipeMaker`: runs a recipe's agents at a gateway in its own process."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import threading
import time
import uuid
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from redrb.algorithms.user_functions import FAILURES, submit
from redrb.checks import require_package
from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.stop import Stop, checked_stop_seconds
from redrb.errors import RedrbError, UnknownSession
from redrb.experience.faults import log_filtered, raised
from redrb.gateway.client import AgentSession, GatewayClient
from redrb.recipe.episode_maker import DRAIN_TIMEOUT_S, EpisodeReport
from redrb.recipe.maker import seed_everything, task_of
from redrb.recipe.prompts import endless
from redrb.recipe.served import ServedWeights, engine_of, sampling_of
from redrb.scopes import Entered, closed_on_error
from redrb.train.announcements import JobEnd
from redrb.train.episodes.running import run_and_end, warn_if_blocked
from redrb.watch.metrics.events import Write

if TYPE_CHECKING:
    from redrb.gateway.chat import ChatServer
    from redrb.recipe.agents import AgentRecipe
    from redrb.recipe.recipe import Prompt

UNCHANGED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling of vLLM that leaves the distribution as it is."""

SESSION_S = 60.0
"""Seconds after which the sessions of a maker that was killed are gone."""

_log = logging.getLogger("redrb")


class AgentRecipeMaker(Entered):
    """Runs the agents of several prompts at the same time, each in a session of its gateway.

    The gateway listens on this machine only, and its token is random. Agents run in an event loop
    of their own: one that blocks it holds up other agents, and no turn. The sessions of an agent
    that runs are kept, however long it sends no request. At the end, by SIGTERM, Ctrl-C or the end
    of the job, agents are cancelled, and their sessions dropped.

    Attributes:
        admission_s: Seconds for which no agent ran, and the maker waited for a right to begin.
        backpressure_s: 0: rewards that wait for room hold up no other agent.
    """

    backpressure_s = 0.0

    def __init__(self, client: Client, recipe: AgentRecipe, write: Write) -> None:
        """Open the task; raises ConfigError if a package is missing."""
        require_package("aiohttp", extra="engines")
        require_package("starlette", extra="dashboard")
        require_package("uvicorn", extra="dashboard")
        from redrb.gateway.store import SessionStore

        self._client, self._recipe, self._write = client, recipe, write
        self._stop = Stop(checked_stop_seconds("stop_timeout", recipe.stop_timeout))
        self._drain_s = min(DRAIN_TIMEOUT_S, recipe.stop_timeout / 2)
        self._error: Exception | None = None
        self._sessions: set[str] = set()  # URLs of those whose agents run
        self.admission_s = 0.0
        stream = task_of(client, recipe)
        with closed_on_error(stream):
            seed_everything(recipe.worker_seed)
            self._store, self._worker = SessionStore(stream, timeout_s=SESSION_S), stream.worker

    def __exit__(self, *_: object) -> None:
        with Deadline(budget=self._stop):
            self._store.close()

    @property
    def stopped(self) -> str:
        """Why `run` was asked to end; "" if it was not."""
        return self._stop.reason

    def fail(self, error: Exception) -> None:
        """Ask `run` to end and to raise an error; any thread may call it."""
        self._error = self._error or error
        self._stop.ask(f"an error came up: {error!r:.200}")

    def run(self) -> None:
        """Run agents until the recipe's number of steps is done, or the maker is asked to end.

        Raises:
            EngineError: The server is away for too long, or refuses sessions.
            RedrbError: The first weights could not be loaded.
        """
        from redrb.watch.page.server import bound_socket

        stop, listening = self._stop, bound_socket("127.0.0.1", 0)
        with listening, stop.on_signals(), Deadline(budget=stop):
            run_and_end(self._run(listening), self._drain_s)
        if self._error is not None:
            raise self._error

    async def _run(self, listening: socket.socket) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(stopped.set)

        with self._stop.waking(wake):
            if self._stop:
                stopped.set()
            stopping = asyncio.create_task(stopped.wait())
            opening = asyncio.create_task(self._opened())
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await self._serve(opening.result(), listening, stopping)
            opening.cancel()
            stopping.cancel()

    async def _opened(self) -> ChatServer:
        """Return the server, as soon as it answers."""
        from redrb.gateway.chat import ChatServer

        recipe = self._recipe
        async with AsyncExitStack() as undo:
            async with engine_of(recipe) as engine:
                self._worker.engine = engine
                opening = partial(ChatServer.open, recipe.engine_url, str(recipe.model()))
                chat = await engine.repeated(opening)
                undo.push_async_callback(chat.close)
            undo.pop_all()
        chat.sampling, chat.max_tokens = UNCHANGED | sampling_of(recipe), recipe.max_new_tokens
        return chat

    async def _serve(
        self, chat: ChatServer, listening: socket.socket, stopping: asyncio.Task[Any]
    ) -> None:
        """Serve the agents' requests until the agents have ended, or are to end."""
        from redrb.gateway.app import Gateway

        recipe, over, token = self._recipe, asyncio.Event(), secrets.token_urlsafe(32)
        weights = ServedWeights(self._client, recipe, chat.engine, self.fail)
        self._report = EpisodeReport(self, weights, recipe.prompts_per_step, self._write)
        gateway = Gateway(self._store, chat, weights, self._worker, token=token)
        served = gateway.serve(listening, hosts=["127.0.0.1"], stopped=over)
        serving = asyncio.create_task(served)
        renewing = asyncio.create_task(self._renew())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with JobEnd(weights, (), self._stop).watching():
            agents = asyncio.wrap_future(submit(self._agents(url, token)))
            first = (serving, renewing, agents, stopping)
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not agents.done():
            submit(self._cancel())
            await asyncio.wait((agents,), timeout=self._drain_s)
            with suppress(RedrbError, TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await chat.engine.abort()  # turns that nobody waits for any more
        over.set()
        await serving
        if not renewing.cancel():
            renewing.result()  # raises what ended it
        if not agents.done():
            _log.warning("a maker ends and gives up agents, which did not end in time")
        elif not agents.cancelled():
            agents.result()
        if self._stop:
            self._report.end()

    async def _renew(self) -> None:
        """Keep the sessions of agents that run."""
        from redrb.gateway.store import session_name

        outage = Outage("sessions of agents that run are not kept")

        def renew() -> None:
            failed: RedrbError | None = None
            for url in tuple(self._sessions):
                name, _, secret = url.removesuffix("/v1").rpartition("/")[2].partition(".")
                try:
                    self._store.use(session_name(name, secret))
                except UnknownSession:
                    continue  # its agent's next request says it
                except RedrbError as error:  # the others are kept
                    failed = error
            outage.failed(failed) if failed else outage.over()

        while True:
            await asyncio.sleep(SESSION_S / 3)
            await asyncio.to_thread(renew)

    async def _cancel(self) -> None:
        self._working.cancel()

    async def _agents(self, url: str, token: str) -> None:
        """Run the agents; all below runs in the event loop of the user's code."""
        watching = asyncio.create_task(warn_if_blocked(f"{type(self._recipe).__name__}.agent"))
        self._working = asyncio.create_task(self._groups(url, token))
        try:
            await self._working
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            watching.cancel()

    async def _groups(self, url: str, token: str) -> None:
        recipe, self._opening = self._recipe, asyncio.Lock()
        places = asyncio.Semaphore(recipe.prompts_per_step)
        most = recipe.maker_steps * recipe.prompts_per_step or None
        prompts = islice(endless(recipe, random.Random(recipe.worker_seed)), most)  # noqa: S311
        client = GatewayClient(url, token=token, wait_s=threading.TIMEOUT_MAX)
        async with client as gateway, asyncio.TaskGroup() as groups:
            for prompt in prompts:
                await places.acquire()
                group = groups.create_task(self._group(gateway, prompt))
                group.add_done_callback(lambda _: places.release())

    async def _group(self, gateway: GatewayClient, prompt: Prompt) -> None:
        """Run the agents of one prompt; as soon as too few are left, cancel them."""
        recipe, key, rewards = self._recipe, uuid.uuid4().hex, list[float]()
        group: Any = asyncio.current_task()  # also cancelled while too few agents are left
        spare, failed = recipe.group_size - (recipe.least or recipe.group_size), 0

        async def agent() -> None:
            nonlocal failed
            try:
                rewards.append(await self._agent(gateway, prompt, key))
            except (*FAILURES, asyncio.CancelledError) as error:  # of the agent, or of its session
                if isinstance(error, asyncio.CancelledError) and group.cancelling():
                    raise
                failed += 1
                fault = raised("an agent", error)
                if failed > spare:
                    raise _TooFew from error
                _log.warning("a session is dropped: %s", fault)

        try:
            async with asyncio.TaskGroup() as agents:
                for _ in range(recipe.group_size):
                    agents.create_task(agent())
        except* _TooFew as errors:
            fault = raised("an agent", errors.exceptions[0].__cause__ or errors)
            log_filtered(fault, "a group is filtered: %s", fault)
        else:
            self._report.add_group(rewards)

    async def _agent(self, gateway: GatewayClient, prompt: Prompt, key: str) -> float:
        """Run one agent in a session, and put its reward; returns it."""
        recipe = self._recipe
        async with AsyncExitStack() as scope:
            session = await self._session(gateway, prompt, key, scope)
            self._sessions.add(session.url)
            scope.callback(self._sessions.discard, session.url)
            async with asyncio.timeout(recipe.episode_timeout):
                reward = await recipe.agent(dict(prompt), session)
            extras = {name: prompt.get(name) for name in recipe.extras}
            await session.reward(reward, extras=extras)
            return float(reward)

    async def _session(
        self, gateway: GatewayClient, prompt: Prompt, key: str, scope: AsyncExitStack
    ) -> AgentSession:
        """Open the next session: one at a time, so that groups get their rights in order."""
        recipe = self._recipe
        tags = {"maker": recipe.worker} | {
            name: prompt[name] for name in recipe.tags if name in prompt
        }
        opening = gateway.session(
            key, group_size=recipe.group_size, tags=tags, least=recipe.least or None
        )
        async with self._opening:
            began = time.monotonic()
            is_idle = not self._sessions
            try:
                session = await scope.enter_async_context(opening)
            except Exception as error:
                self.fail(error)
                raise
            if is_idle:
                self.admission_s += time.monotonic() - began
            return session


class _TooFew(Exception):
    """Too few agents of a group are left."""
