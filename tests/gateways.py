"""Gateways of tests: in a thread of this process, or as the command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, Self

import uvicorn

from redrb import Client, ExperienceStream
from redrb.gateway.app import Gateway
from redrb.gateway.chat import ChatServer
from redrb.gateway.store import SessionStore
from redrb.train.engines import EngineWeights
from tests import warm


class GatewayThread:
    """A gateway; `url` is its address."""

    def __init__(
        self,
        client: Client,
        engine: str,
        *,
        namespace: str,
        task: str = "agents",
        weights: str = "trainer_0",
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        self._client, self._engine, self._options = client, engine, options
        self._namespace, self._task, self._name = namespace, task, weights
        self._timeout_s = timeout_s
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def loaded(self) -> bool:
        """Wait until the server has the first weights."""
        waiting = asyncio.run_coroutine_threadsafe(self.gateway._loaded.wait(), self._loop)
        return bool(waiting.result(60))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 (the thread that waits gets it)
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        chat = await ChatServer.open(self._engine)
        stream = ExperienceStream(self._client, self._task, namespace=self._namespace, create=False)
        weights = EngineWeights(self._client, self._name, chat.engine, namespace=self._namespace)
        with SessionStore(stream, timeout_s=self._timeout_s) as store:
            self.gateway = Gateway(store, chat, weights, stream.worker, **self._options)
            server = uvicorn.Server(
                uvicorn.Config(self.gateway.app(), port=0, log_level="warning", lifespan="off")
            )
            serving = asyncio.create_task(server.serve())
            running = asyncio.create_task(self.gateway.run())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._ended.wait()
            server.should_exit = True
            await serving
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        await chat.close()


class GatewayProcess:
    """The command `redrb gateway`, which can be killed."""

    def __init__(
        self, redis_url: str, engine: str, *more: str, namespace: str, port: int = 0
    ) -> None:
        command = [
            *(sys.executable, "-m", "redrb.cli", "gateway", "--engine", engine, "--json"),
            *("--task", "agents", "--weights", "trainer_0", "--namespace", namespace),
            *("--port", str(port), *more),
        ]
        environment = {**os.environ, "REDRB_URL": redis_url}
        self.process = warm.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate(timeout=60)[1])
        self.url = json.loads(line)["url"].rstrip("/")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def end(self) -> tuple[int, str]:
        """End it by SIGTERM; return its status and what it has written to stderr."""
        self.process.send_signal(signal.SIGTERM)
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors
