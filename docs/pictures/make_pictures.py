"""Makes the pictures of the README from a real run: `make pictures`.

It starts `redrb run sorting` on a Redis of its own, waits until the curves show something, and
takes pictures of the page of `redrb dashboard` and of the screen of `redrb top`, in Chromium.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import redrb
from redrb.cli.top.app import Top
from redrb.connection import Client
from redrb.environment import PREFIX, child_environment
from redrb.watch.state.observer import Observer

FOLDER = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
RECIPE = "sorting"
SHOWN_S = 60
"""Seconds of the run that the curves show."""

MOST_BYTES = 200_000
"""A larger picture makes the README slow."""


def main() -> None:
    with (
        redrb.connect("embedded://") as client,
        tempfile.TemporaryDirectory() as out,
        process(client, "run", RECIPE, "--out", out, "--makers", "3", "--target-reward", "2"),
        process(client, "dashboard", "--namespace", RECIPE, "--port", "0", "--json") as dashboard,
        Observer(client, RECIPE) as observer,
        sync_playwright() as playwright,
    ):
        assert dashboard.stdout is not None
        url = json.loads(dashboard.stdout.readline())["url"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        picture_of_page(browser, url, FOLDER / "dashboard.png")
        picture_of_top(browser, observer, FOLDER / "top.png")
        browser.close()
    for file in FOLDER.glob("*.png"):
        size = file.stat().st_size
        print(f"{file}: {size:,} bytes")
        if size > MOST_BYTES:
            raise SystemExit(f"{file.name} is larger than {MOST_BYTES:,} bytes.")


@contextmanager
def process(client: Client, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of redrb; it is ended as Ctrl-C does it."""
    started = subprocess.Popen(
        [sys.executable, "-m", "redrb.cli", *words],
        env=child_environment(without=PREFIX, REDRB_URL=client.url),
        stdout=subprocess.PIPE if "--json" in words else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)


def picture_of_page(browser: Browser, url: str, file: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1150}, color_scheme="light")
    page.goto(url)
    page.locator("#workers tbody tr").nth(3).wait_for(timeout=120_000)  # all have begun
    page.wait_for_timeout(SHOWN_S * 1000)
    page.screenshot(path=str(file))
    page.close()


def picture_of_top(browser: Browser, observer: Observer, file: Path) -> None:
    async def screenshot() -> str:
        app = Top(observer, f"namespace {RECIPE}")
        async with app.run_test(size=(110, 26)) as pilot:
            await pilot.pause()
            return app.export_screenshot(title="redrb top")

    page = browser.new_page(viewport={"width": 1180, "height": 900})
    with ThreadPoolExecutor(1) as threads:  # playwright has an event loop in this thread
        page.set_content(threads.submit(asyncio.run, screenshot()).result())
    page.locator("svg").screenshot(path=str(file))
    page.close()


if __name__ == "__main__":
    main()
