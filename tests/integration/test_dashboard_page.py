"""The live page in headless Chromium: content, keyboard, accessibility, a Redis that is away."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect, sync_playwright

import redrb
from redrb import BufferItem, ExperienceStream
from redrb.cli.__main__ import main
from redrb.connection import Client
from tests.dashboards import TOKEN, Dashboard
from tests.samples import numbered
from tests.servers import Server
from tests.tools import need

MARKUP = "<img src=x onerror=\"document.title='caught'\"> <b>bold</b>"
"""Text that would change the page if it were read as HTML."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = need("chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may write nothing to the console: no error, no refusal by its policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    opened = context.new_page()
    opened.set_default_timeout(10_000)
    written: list[str] = []
    opened.on("pageerror", lambda error: written.append(str(error)))

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            written.append(message.text)

    opened.on("console", note)
    yield opened
    context.close()
    # a dashboard that was ended; a wrong token; a wrong id
    expected = ("net::ERR_", "403 (Forbidden)", "400 (Bad Request)")
    assert [text for text in written if not any(one in text for one in expected)] == []


def rollout(number: int) -> BufferItem:
    """Return a sample of two actions, whose texts and names are markup, with an image."""
    return numbered(
        number,
        policy_version=number,
        tensors={"pixels": torch.full((1, 8, 8, 3), number, dtype=torch.uint8)},
        token_versions=torch.tensor([number, number + 1]),
        extras={"text": MARKUP, MARKUP: 1},
        group_id=f"{MARKUP}\u202e\x07",
    )


@pytest.fixture
def stream(owner: Client, namespace: str) -> Iterator[ExperienceStream]:
    """A task with waiting groups, and two dead letters with markup in their reasons."""
    with ExperienceStream(owner, "math", namespace=namespace, limit=64) as stream:
        stream.put_many([[rollout(number), rollout(number)] for number in range(6)])
        stream.take(2, timeout=5).reject(MARKUP)
        yield stream


def press_until(page: Page, focused: str, key: str = "Tab", most: int = 60) -> None:
    """Press a key until the focus is on an element; fail if it never is."""
    for _ in range(most):
        if page.evaluate("focused => document.activeElement.matches(focused)", focused):
            return
        page.keyboard.press(key)
    pytest.fail(f"{key} does not lead to {focused}")


def test_a_page_is_accessible_in_both_themes_and_on_phones(
    page: Page, dashboard: Dashboard, stream: ExperienceStream, owner: Client, namespace: str
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, group="critic") as other:
        other.join_group()
    table = redrb.Table(owner, "train", namespace=namespace, limit=9)
    table.put(["a", "b"], {"x": torch.zeros(2, 3)})
    table.register("actor", ["x"])
    table.claim("actor", ["x"], 1).ack()
    page.goto(dashboard.url)
    expect(page.get_by_role("heading", name="Task math")).to_be_visible()
    rows = page.locator("#tables-table tbody tr")
    expect(rows).to_have_text([re.compile(r"^train2.*9 rows"), re.compile("^train:actor101")])
    expect(page.locator("#groups tbody th")).to_have_text(["default", "critic"])
    expect(page.locator("#letters-list tbody tr")).to_have_count(2)
    expect(page.locator("#connection")).to_have_text("live")
    for width in (1280, 375):
        page.set_viewport_size({"width": width, "height": 900})
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            found = Axe().run(page)
            assert not found.violations_count, found.generate_report()
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"at {width} px the page is {wide} px wide"
            cut = page.evaluate("""[...document.querySelectorAll("table, td, th")].filter((one) =>
                one.offsetParent && one.getBoundingClientRect().right > innerWidth).map((one) =>
                one.textContent)""")
            assert cut == [], f"at {width} px"


def test_texts_from_redis_are_never_read_as_html(
    page: Page, dashboard: Dashboard, stream: ExperienceStream
) -> None:
    page.goto(dashboard.url)
    expect(page.locator("#letters-list")).to_contain_text(MARKUP)
    page.get_by_role("button", name="Show").click()
    page.locator("#rollouts summary", has_text="Extras").click()
    expect(page.locator("#rollouts pre")).to_contain_text("<b>bold</b>")
    expect(page.locator("#rollouts")).to_contain_text(f"Prompt {MARKUP}\ufffd\ufffd.")
    assert page.locator("b, img[src=x]").count() == 0
    assert "caught" not in page.title()


def test_rollouts_are_read_by_keyboard(
    page: Page, dashboard: Dashboard, stream: ExperienceStream
) -> None:
    page.goto(dashboard.url)
    expect(page.locator("#rollouts button")).to_be_visible()
    press_until(page, "#rollouts select")
    page.keyboard.type("best")
    press_until(page, "#rollouts button")
    page.keyboard.press("Enter")
    groups = page.locator("#rollouts .rollout")
    expect(groups).to_have_count(4)
    expect(groups.first).to_contain_text("waiting, completed, 2 samples")
    expect(groups.first).to_contain_text("mean reward 5.000")
    expect(groups.first).to_contain_text("Made with weight version 5")
    expect(groups.first.locator("img")).to_have_js_property("naturalWidth", 8)
    expect(groups.first.locator(".token")).to_have_text(["2 ", "3 "])
    assert "log-prob -0.500, version 5" in groups.first.locator(".token").first.get_attribute(
        "title"
    )
    press_until(page, ".rollout:nth-of-type(2) > summary")
    page.keyboard.press("Enter")
    expect(groups.nth(1)).to_contain_text("Sample 1, reward 4.000")
    for text in ("Figures of each token", "Tensors"):
        groups.first.get_by_text(text, exact=True).first.click()
    expect(groups.first.get_by_role("cell", name="-0.250").first).to_be_visible()
    found = Axe().run(page)
    assert not found.violations_count, found.generate_report()
    press_until(page, "#rollouts select[data-focus=order]", "Shift+Tab")
    page.keyboard.type("ids")
    press_until(page, "#rollouts input")
    page.keyboard.type("99999999999999999999")
    page.keyboard.press("Enter")
    expect(page.locator("#rollouts-list")).to_contain_text("give ids as whole numbers")


def test_a_list_of_no_groups_says_why_and_how_to_keep_some(
    page: Page, dashboard: Dashboard, stream: ExperienceStream
) -> None:
    stream.take(4, timeout=5).ack()
    keep = " Trained groups are deleted. A second consumer group keeps what it reads"
    page.goto(dashboard.url)
    said = page.locator("#rollouts-list [role=status]")
    for state, words, of_trained in (
        ("any stored", "No group is stored now.", True),
        ("leased", "No group is leased now.", False),
    ):
        page.get_by_label("State").select_option(state)
        page.get_by_role("button", name="Show").click()
        expect(said).to_contain_text(words)
        assert (keep in said.inner_text()) == of_trained
    page.locator("#rollouts select[data-focus=order]").select_option("ids")
    page.get_by_label("Ids, with commas").fill("999, 1, 998")
    page.get_by_role("button", name="Show").click()
    expect(said).to_have_text(re.compile(f"^Not stored: 999, 998.{keep}"))
    expect(page.locator("#rollouts .rollout")).to_have_count(1)


def test_dead_letters_are_requeued_by_keyboard_with_the_token(
    page: Page, dashboard: Dashboard, stream: ExperienceStream
) -> None:
    page.goto(dashboard.url)
    expect(page.locator("#letters-list tbody tr")).to_have_count(2)
    press_until(page, "#letters-list input[type=checkbox]")
    page.keyboard.press("Space")
    press_until(page, "#letters-list button")
    page.keyboard.press("Enter")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#letters-list")).to_contain_text("the token is missing or wrong")
    assert stream.stats().ledger.dead == 2
    press_until(page, "#letters-list button")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    press_until(page, "#letters-list button")
    page.keyboard.press("Enter")
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#letters-list")).to_contain_text("1 requeued.")
    expect(page.locator("#letters-list tbody tr")).to_have_count(1)
    assert stream.stats().ledger.dead == 1


def test_a_redis_that_stops_and_a_dashboard_that_dies_are_shown(
    page: Page, browser: Browser, own_server: Callable[..., Server]
) -> None:
    server = own_server()
    dashboard = Dashboard(server.url, "default")
    try:
        page.goto(dashboard.url)
        expect(page.locator("#tasks-table")).to_contain_text("There are no tasks")
        os.kill(server.pid, signal.SIGSTOP)
        banner = page.locator("#banner")
        expect(banner).to_be_visible(timeout=5_000)
        expect(banner).to_contain_text(re.compile("Redis does not answer: .* s old"))
        expect(page.locator("#findings-list")).to_contain_text("Critical")
        assert "s old" in banner.inner_text()  # the finding says why, and the banner does not
        shown = page.locator("#findings-list").inner_text()
        assert not [part for part in banner.inner_text().split(": ") if part in shown], shown
        os.kill(server.pid, signal.SIGCONT)
        expect(banner).to_be_hidden(timeout=5_000)
        dashboard.close()
        expect(banner).to_contain_text("The dashboard does not answer", timeout=8_000)
    finally:
        dashboard.close()


def test_a_stage_is_neither_maker_nor_trainer_and_workers_have_the_weights_that_they_name(
    page: Page, dashboard: Dashboard, owner: Client, namespace: str
) -> None:
    for name in ("actor", "critic"):
        publisher = redrb.WeightPublisher(owner, name, namespace=namespace)
        publisher.publish({"w": torch.zeros(1)})
    publisher.publish({"w": torch.ones(1)})
    with (
        ExperienceStream(owner, "scored", namespace=namespace) as maker,
        ExperienceStream(owner, "scored", namespace=namespace) as stage,
    ):
        stage.worker.role, stage.worker.label = "stage", "scorer"
        maker.worker.weights_name, maker.worker.weight_version = "actor", 1
        for stream in (stage, maker):
            stream.worker.begins()
        waiting: list[Route] = []
        page.route("**/events", lambda route: waiting.append(route))
        page.goto(dashboard.url)
        expect(page.get_by_text("Loading…")).to_have_count(4)
        expect(page.locator("#connection")).to_have_text("loading")
        waiting[0].continue_()
        stations = page.locator("#flow .station")
        expect(stations.nth(0)).to_have_text("Makers1 live")
        expect(stations.nth(1)).to_contain_text("stages: 1 live")
        expect(stations.nth(2)).to_have_text("Trainersnone")
        expect(stations.nth(2)).not_to_have_class(re.compile("critical"))  # the stage takes
        expect(stations.nth(3)).to_contain_text("actor")
        expect(page.get_by_text("Loading…")).to_have_count(0)
        row = page.locator("#workers tbody tr", has_text="maker")
        expect(row).to_contain_text(re.compile(r"[0-9.]+ s agoactor 1"))


def test_an_observer_sees_its_task_and_only_names_of_others(
    page: Page,
    owner: Client,
    namespace: str,
    stream: ExperienceStream,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExperienceStream(owner, "secret", namespace=namespace) as other:
        other.put(numbered(1))
    user = f"observer-{namespace}"
    words = ["acl", "--role", "observer", "--task", "math", "--namespace", namespace]
    assert main([*words, "--user", user]) == 0
    owner.execute(*shlex.split(capsys.readouterr().out), ">password")
    dashboard = Dashboard(owner.url.replace("//", f"//{user}:password@"), namespace)
    try:
        page.goto(f"{dashboard.url}#/task/math")
        rows = page.locator("#tasks-table tbody tr")
        expect(rows).to_have_text([re.compile("^math.*fifo.*4"), re.compile("secretnot readable")])
        expect(page.get_by_role("heading", name="Task math")).to_be_visible()
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#rollouts .rollout")).to_have_count(4)
        page.get_by_role("link", name="secret").click()
        expect(page.locator("#task-problem")).to_contain_text("may not read task secret")
        expect(page.locator("#flow")).to_be_hidden()
        page.evaluate("location.hash = '#/task/gone%'")
        expect(page.locator("#task-problem")).to_contain_text("There is no task gone%")
    finally:
        dashboard.close()
        owner.execute("ACL", "DELUSER", user)
