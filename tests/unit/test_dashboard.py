"""The page's application: routes, headers, tokens, wrong requests, events, packaged files."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from redrb.errors import StoreUnavailable, UnknownTask
from redrb.watch.groups.choice import Choice
from redrb.watch.page import server
from redrb.watch.page.app import make_app
from redrb.watch.page.feed import MOST_PAGES, Feed, encoded
from redrb.watch.page.groups import MOST_BODY, MOST_BYTES, Letters, TaskGroups, fitting
from redrb.watch.page.guard import TOKEN_HEADER, hosts_of
from redrb.watch.page.server import MOST_CONNECTIONS, bound_socket, serve
from redrb.watch.state.history import History
from redrb.watch.state.model import State
from redrb.watch.state.observer import Observer, View
from tests.sample_state import sample_state

ROOT = Path(__file__).parents[2]
LETTERS = {"task": "math", "group": "default", "ids": [7, 9]}
TOKEN = {TOKEN_HEADER: "secret"}


class StillObserver(Observer):
    """Has one view for ever."""

    def __init__(self, state: State | None, error: str = "") -> None:
        self.history = History()
        if state is not None:
            self.history.add(replace(state, time=state.time - 1))
            self.history.add(state)
        self.view = View(state, 1, age_s=0.25, error=error)

    def newest(self) -> View:
        return self.view

    def wait(self, number: int, timeout_s: float, *, error: str = "") -> View:
        return self.view


class NotedRequests(TaskGroups):
    """Stands for the tasks: notes requests, or raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[Any] = []

    def read(self, task: str, choice: Choice) -> Any:
        return self._noted((task, choice), [{"id": 7, "reward": float("nan")}])

    def letters(self, task: str) -> Any:
        return self._noted(task, [])

    def requeue(self, letters: Letters) -> int:
        return int(self._noted(letters, len(letters.ids)))

    def _noted(self, request: object, answer: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.asked.append(request)
        return answer


def answers(
    method: str, path: str, groups: NotedRequests | None = None, **options: Any
) -> httpx.Response:
    """Send one request to the application of a page that is served at port 80 of loopback."""

    async def send() -> httpx.Response:
        feed = Feed(StillObserver(sample_state()))
        await feed.close()  # events end after the first ones
        groups_ = groups or NotedRequests()
        app = make_app(feed, groups_, token="secret", hosts=hosts_of("127.0.0.1", 80) | {"here"})
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def events_of(response: httpx.Response) -> dict[str, Any]:
    events = (event.split("\n") for event in response.text.strip().split("\n\n"))
    return {
        name.removeprefix("event: "): json.loads(data.removeprefix("data: "))
        for name, data in events
    }


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/main.js", "text/javascript"), ("/page.css", "text/css")],
)
def test_files_of_the_page_have_headers_that_keep_foreign_content_out(path: str, kind: str) -> None:
    answer = answers("GET", path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/../cli.py", "/static/main.js", "/%2e%2e/app.py", "/main.js/"])
def test_a_path_names_no_other_file(path: str) -> None:
    assert answers("GET", path).status_code in (307, 404)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:81", "127.0.0.1.evil.example", ""])
@pytest.mark.parametrize("path", ["/", "/events", "/api/letters?task=math", "/api/requeue"])
def test_another_host_name_is_refused(host: str, path: str) -> None:
    answer = answers("GET", path, headers={"Host": host})
    assert answer.status_code == 421
    assert "open the URL that redrb dashboard printed" in answer.text


def test_hosts_are_those_of_loopback_only() -> None:
    assert "localhost:8642" in hosts_of("::1", 8642)
    assert hosts_of("0.0.0.0", 8642) == frozenset()  # every name may lead to this machine
    assert {"127.0.0.1:80", "127.0.0.1"} <= hosts_of("127.0.0.1", 80)  # browsers leave out port 80
    assert "127.0.0.1" not in hosts_of("127.0.0.1", 8642)


@pytest.mark.parametrize("headers", [{}, {TOKEN_HEADER: "secreT"}, {TOKEN_HEADER: ""}])
def test_requeue_needs_the_token(headers: dict[str, str]) -> None:
    groups = NotedRequests()
    answer = answers("POST", "/api/requeue", groups, json=LETTERS, headers=headers)
    assert answer.status_code == 403
    assert not groups.asked


def test_a_token_may_have_any_letters() -> None:
    groups, token = NotedRequests(), "clé 鍵"
    app = make_app(Feed(StillObserver(None)), groups, token=token)

    async def ask(given: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {TOKEN_HEADER: given.encode()}
            return (await client.post("/api/requeue", json=LETTERS, headers=headers)).status_code

    assert asyncio.run(ask(token + "é")) == 403
    assert asyncio.run(ask(token)) == 200


def test_requeue_is_a_post_with_the_token() -> None:
    groups = NotedRequests()
    answer = answers("POST", "/api/requeue", groups, json=LETTERS, headers=TOKEN)
    assert (answer.status_code, answer.json()) == (200, {"requeued": 2})
    assert groups.asked == [Letters("math", "default", [7, 9])]
    assert answers("GET", "/api/requeue", headers=TOKEN).status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        b'{"task": "math"}',
        b'{"task": 1, "group": "default", "ids": [1]}',
        b'{"task": "math", "group": "default", "ids": "7"}',
        b'{"task": "math", "group": "default", "ids": [-1]}',
        b'{"task": "math", "group": "default", "ids": [1.5]}',
        b'{"task": "math", "group": "default", "ids": [true]}',
        b'{"task": "math", "group": "default", "ids": [' + b"9" * 30 + b"]}",
        json.dumps({**LETTERS, "ids": list(range(1001))}).encode(),
        json.dumps({**LETTERS, "group": "\ud800"}).encode(),
        json.dumps({**LETTERS, "task": "\ud800"}).encode(),
        json.dumps(LETTERS).encode() + b" " * MOST_BODY,
    ],
)
def test_damaged_requests_to_requeue_are_refused(body: bytes) -> None:
    groups = NotedRequests()
    answer = answers("POST", "/api/requeue", groups, content=body, headers=TOKEN)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert not groups.asked


@pytest.mark.parametrize(
    "query",
    [
        "order=newes",
        "order=ids",
        "order=ids&ids=1,x",
        "order=ids&ids=" + ",".join(["1"] * 21),
        "count=0",
        "count=21",
        "count=-1",
        "count=" + "9" * 19,
        "count=%C2%B2",
    ],
)
def test_wrong_requests_for_groups_are_refused(query: str) -> None:
    groups = NotedRequests()
    answer = answers("GET", f"/api/groups?task=math&{query}", groups)
    assert answer.status_code == 400
    assert not groups.asked


def test_groups_come_as_strict_json() -> None:
    groups = NotedRequests()
    answer = answers("GET", "/api/groups?task=math&order=ids&ids=7,9&count=2", groups)
    assert answer.json() == [{"id": 7, "reward": None}]
    assert groups.asked == [("math", Choice((7, 9), count=2))]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownTask("math", namespace="default", where="here"), 404),
        (StoreUnavailable("Redis is away.", where="here"), 503),
    ],
)
def test_errors_become_answers(error: Exception, status: int) -> None:
    answer = answers("GET", "/api/letters?task=math", NotedRequests(error))
    assert (answer.status_code, answer.json()) == (status, {"error": str(error)})


def test_events_begin_with_the_history_and_the_newest_view() -> None:
    answer = answers("GET", "/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert events["history"]["buckets"][0] == "0"
    assert events["history"]["points"]["math"]["waiting"] == [511, 511]
    view = events["view"]
    assert view["age_s"] == 0.25
    assert [task["name"] for task in view["state"]["tasks"]] == ["code", "math"]
    math = view["state"]["tasks"][1]
    assert math["groups"][0]["stats"]["waiting"] == {"completed": 505, "aborted": 6}
    assert math["groups"][0]["stats"]["ledger_balanced"] is True
    assert view["points"]["math"]["put"] == [6.4]


def test_each_page_gets_new_views_and_the_end() -> None:
    async def follow() -> list[str]:
        feed = Feed(StillObserver(None, error="Redis is away."))
        running = asyncio.create_task(feed.run())
        heard = []
        async for event in feed.events():
            heard.append(event)
            if len(heard) == 4:
                await feed.close()
        await running
        return heard

    history, *views = asyncio.run(asyncio.wait_for(follow(), 10))
    assert history.startswith("event: history\n")
    assert all('"error":"Redis is away."' in view and '"state":null' in view for view in views)


async def listening_page(feed: Feed) -> tuple[asyncio.Task[None], socket.socket]:
    app = make_app(feed, NotedRequests(), token="secret")
    listening = bound_socket("127.0.0.1", 0)
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(app, feed, listening, ready.set))
    await ready.wait()
    return serving, listening


def test_replies_are_sent_without_delay() -> None:
    """A reply of two writes would wait 40 ms for the client's acknowledgement of the first."""

    async def main() -> int:
        delays = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            delays.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return int(await delays)

    assert asyncio.run(main())


def test_what_runs_beside_the_pages_has_ended_with_them() -> None:
    class Slow(Feed):
        ended = False

        async def run(self) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.2)
                self.ended = True

    async def end() -> None:
        feed = Slow(StillObserver(None))
        serving, _ = await listening_page(feed)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert feed.ended

    asyncio.run(asyncio.wait_for(end(), 20))


def test_pages_are_bounded_and_those_that_leave_make_room() -> None:
    """All ask at once: each counts before its first event is made."""

    async def status(port: int) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: here\r\n\r\n")
        return (await reader.readline()).split()[1], writer

    async def open_pages() -> None:
        feed = Feed(StillObserver(None))
        serving, listening = await listening_page(feed)
        port = listening.getsockname()[1]
        found = await asyncio.gather(*(status(port) for _ in range(MOST_PAGES + 30)))
        assert sorted(code for code, _ in found) == [b"200"] * MOST_PAGES + [b"503"] * 30
        for _, writer in found:
            writer.close()
        while feed.pages:
            await asyncio.sleep(0.01)
        code, writer = await status(port)
        assert code == b"200"
        writer.close()
        await feed.close()
        await serving

    asyncio.run(asyncio.wait_for(open_pages(), 30))


def test_silent_connections_do_not_shut_others_out() -> None:
    async def ask() -> None:
        feed = Feed(StillObserver(None))
        serving, listening = await listening_page(feed)
        host, port = listening.getsockname()
        silent = [await asyncio.open_connection(host, port) for _ in range(MOST_CONNECTIONS + 40)]
        silent[-1][1].write(b"GET / HTTP/1.1\r\nHost:")  # half a head
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.get("/")).status_code == 200
        for _, writer in silent:
            writer.close()
        await feed.close()
        await serving

    asyncio.run(asyncio.wait_for(ask(), 30))


class Unseen(set[Any]):
    """Connections that nobody looks through."""

    def __iter__(self) -> Any:
        raise AssertionError


class Written(asyncio.Transport):
    """Takes what is written; notes whether it was aborted."""

    aborted = closing = False

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.aborted or self.closing


def test_a_new_connection_looks_at_no_others_and_closes_the_one_that_has_waited_longest() -> None:
    async def main() -> None:
        ends = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await ends.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        kind = type("_Connection", (server._Connection,), {"idle": {}})
        config = uvicorn.Config(app, http=kind, limit_concurrency=5, lifespan="off")
        config.load()
        state = ServerState()
        state.connections = Unseen()
        made: list[tuple[Any, Written]] = []

        def connect() -> None:
            made.append((kind(config, state, {}), Written()))
            made[-1][0].connection_made(made[-1][1])

        def aborted() -> list[int]:
            return [number for number, (_, each) in enumerate(made) if each.aborted]

        for _ in range(4):
            connect()
        for protocol, _ in made[:2]:
            protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        connect()
        assert aborted() == [2]
        made[2][0].connection_lost(None)
        ends.set()
        async with asyncio.timeout(30):
            while len(kind.idle) < 4:  # both have their responses
                await asyncio.sleep(0)
        connect()
        assert aborted() == [2, 3]  # those with a response have waited less
        made[4][0].connection_lost(None)
        connect()
        connect()
        assert aborted() == [0, 2, 3]
        assert len(kind.idle) == len(state.connections) == 4

    asyncio.run(main())


def test_connections_that_the_server_still_has_make_room_and_no_others() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        kind = type("_Connection", (server._Connection,), {"idle": {}})
        config = uvicorn.Config(app, http=kind, limit_concurrency=5, lifespan="off")
        config.load()
        state = ServerState()
        made = [(kind(config, state, {}), Written()) for _ in range(2)]
        for protocol, transport in made:
            protocol.connection_made(transport)
        (closed, transport), (upgraded, _) = made
        closed.data_received(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(30):
            while not transport.closing:  # its client has not read the reply
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        state.connections.discard(upgraded)  # as for another protocol
        kind.idle.pop(upgraded)
        upgraded.data_received(b"GET / HTTP/1.1\r\n")
        assert list(kind.idle) == [closed]

    asyncio.run(main())


def test_requests_that_wait_for_redis_do_not_hold_up_events() -> None:
    class Slow(NotedRequests):
        def __init__(self) -> None:
            super().__init__()
            self.released = threading.Event()

        def read(self, task: str, choice: Choice) -> Any:
            self.released.wait(10)
            return super().read(task, choice)

    async def follow(groups: Slow) -> None:
        feed = Feed(StillObserver(None))
        transport = httpx.ASGITransport(make_app(feed, groups, token="secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            asked = [asyncio.create_task(client.get("/api/groups?task=math")) for _ in range(60)]
            await asyncio.sleep(0)
            running = asyncio.create_task(feed.run())
            events = feed.events()
            for _ in range(4):
                await asyncio.wait_for(anext(events), 5)
            assert len(groups.asked) == 0
            groups.released.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
            await feed.close()
            await running

    groups = Slow()
    try:
        asyncio.run(follow(groups))
    finally:
        groups.released.set()


def test_groups_that_are_too_large_together_are_named() -> None:
    large = [{"id": number, "text": "x" * (MOST_BYTES // 2)} for number in range(1, 5)]
    page = fitting({"groups": large, "notes": ["4 groups"]})
    assert [group["id"] for group in page["groups"]] == [1]
    assert page["notes"] == ["4 groups", "too large to be shown together: ask for 2, 3, 4 by id"]
    alone = fitting({"groups": [{"id": 1, "text": "x" * MOST_BYTES}], "notes": []})
    assert len(alone["groups"]) == 1


def test_a_feed_that_fails_ends_its_pages() -> None:
    class Failing(StillObserver):
        def wait(self, number: int, timeout_s: float, *, error: str = "") -> View:
            raise RuntimeError("a defect")

    async def follow() -> int:
        feed = Feed(Failing(None))
        running = asyncio.create_task(feed.run())
        heard = [event async for event in feed.events()]
        with pytest.raises(RuntimeError, match="a defect"):
            await running
        return len(heard)

    assert asyncio.run(asyncio.wait_for(follow(), 10)) == 2


def test_json_has_no_figures_that_browsers_refuse() -> None:
    assert encoded({"a": [float("nan"), float("inf"), 1.5], 2: (None,)}) == (
        '{"a":[null,null,1.5],"2":[null]}'
    )


def test_wheels_have_the_files_of_the_page() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["redrb"]
    packaged = {path for pattern in patterns for path in (ROOT / "redrb").glob(pattern)}
    files = set((ROOT / "redrb/watch/page/static").iterdir())
    assert len(files) > 10
    assert files <= packaged


def test_the_page_asks_no_other_host() -> None:
    for path in ROOT.glob("redrb/watch/page/static/*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", ""), path.name
        assert "innerHTML" not in text


@pytest.mark.parametrize(
    ("soft", "hard", "now"),
    [(100, 5000, 3000), (100, resource.RLIM_INFINITY, 3000), (100, 2000, 2000), (4000, 5000, 0)]
    + [(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 0)],
)
def test_a_server_may_open_a_file_for_each_connection(
    soft: int,
    hard: int,
    now: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, pair: allowed.append(pair))
    server._allow_files(3000)
    assert allowed == ([(now, hard)] if now else [])
    assert ("raise the hard limit to 3000" in caplog.text) == (now == 2000)
