"""The report in a real browser: it shows, answers to mouse and keys, says nothing on the console, asks for nothing."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from qdqtune.explanation.model_map import Map, MapGroup, MapNode, blocks
from qdqtune.explanation.page import render
from qdqtune.explanation.report import Report, report_of_run
from qdqtune.explanation.result_rows import Headline
from qdqtune.tuning.loop import tune
from runs import mixed, settings, write
from workers import in_process

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

HOSTILE = "</script><img src=x onerror=alert(1)>\u202ereversed<b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@dataclass
class Watched:
    """A page, with what it said on the console and what it asked for besides itself."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Browser, file: Path, *, width: int = 1200, scheme: str = "light") -> Iterator[Watched]:
    """A file in a window of its own, when its script is done."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    watched = Watched(context.new_page())
    watched.page.on("console", lambda message: watched.said.append(message.text))
    watched.page.on("pageerror", lambda error: watched.said.append(str(error)))
    watched.page.on("request", lambda request: watched.asked.append(request.url))
    watched.page.goto(file.as_uri())
    watched.page.wait_for_selector("html[data-ready]")
    watched.asked.remove(file.as_uri())
    yield watched
    context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    model = write(mixed(), tmp_path_factory.mktemp("run"))
    with in_process():
        tune(settings(model, mode="cut", builds=8))
    return report_of_run(model.parent / "out")


@pytest.fixture
def page_file(report: Report, tmp_path: Path) -> Path:
    return written(report, tmp_path)


def written(report: Report, folder: Path) -> Path:
    file = folder / "report.html"
    file.write_text(render(report, {}), encoding="utf-8")
    return file


def large(count: int) -> Report:
    """A chain of so many nodes, each a group."""
    names = {f"n{number}": ("Conv", "Relu", "Add")[number % 3] for number in range(count)}
    flows = tuple((n, n + 1) for n in range(count - 1))
    nodes = tuple(MapNode(name, op, "8 bits" if op == "Conv" else "float") for name, op in names.items())
    groups = tuple(MapGroup((n,), node.op, node.state, 1.0 + n % 7, 1.0, 0.1, 30.0) for n, node in enumerate(nodes))
    drawn = Map(nodes, groups, flows, blocks(list(names)), "tuned")
    return Report("large.onnx", Headline("large.onnx", "", True), map=drawn)


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_it_is_quiet_fits_the_window_and_keeps_nobody_out(
    browser: Browser, page_file: Path, width: int, scheme: str
) -> None:
    with opened(browser, page_file, width=width, scheme=scheme) as seen:
        expect(seen.page.get_by_role("heading", level=1)).to_contain_text("times as fast")
        found = Axe().run(seen.page)
        serious = [(v["id"], v["nodes"][0]["html"]) for v in found.response["violations"]
                   if v["impact"] in ("serious", "critical")]  # fmt: skip
        assert not serious
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        paper = {"light": "rgb(253, 253, 252)", "dark": "rgb(21, 21, 20)"}[scheme]
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        assert not seen.said
        assert not seen.asked


def test_a_box_opens_what_is_in_it_by_mouse_and_by_keys_and_a_bar_leads_to_its_group(
    browser: Browser, page_file: Path
) -> None:
    with opened(browser, page_file) as seen:
        page, panel = seen.page, seen.page.locator("#panel")
        selected = page.locator("[role=option][aria-selected=true]")
        expect(panel).to_contain_text("whole model")
        page.locator(".cell[aria-label^=Softmax]").click()
        expect(panel.locator("bdi")).to_have_text("softmax")
        expect(panel).to_contain_text("float")
        page.keyboard.press("Escape")
        expect(panel).to_contain_text("whole model")
        page.locator(".cell").first.focus()
        for key in ("End", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        expect(selected).to_be_focused()
        expect(panel).to_contain_text("tanh")
        page.keyboard.press("Escape")
        expect(selected).to_have_count(0)
        page.locator(".bars button").first.click()
        expect(selected).to_be_focused()
        assert not seen.said
        page.emulate_media(media="print")
        assert not panel.is_visible()
        assert page.pdf().startswith(b"%PDF")


def test_colours_change_and_the_legend_with_them(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as seen:
        first = seen.page.locator(".cell").first
        expect(first).to_have_class("cell q")
        assert seen.page.get_by_role("radio").all_inner_texts() == [""] * 3  # the error of no group is known
        assert seen.page.get_by_label("error", exact=True).count() == 0
        seen.page.get_by_text("time saved").click()
        expect(first).to_have_class(re.compile("cell g[123]"))
        expect(seen.page.locator("#legend")).to_contain_text("saved")


def test_thousands_of_nodes_form_blocks_and_search_finds_each(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, written(large(3000), tmp_path)) as seen:
        page = seen.page
        assert page.locator(".cell").count() < 240
        page.locator(".cell").nth(3).click()
        expect(page.locator("#path")).to_contain_text("whole model")
        page.keyboard.press("Escape")
        expect(page.locator("#path")).to_be_empty()
        page.get_by_label("Find nodes").fill("n2999")
        expect(page.locator("#found")).to_contain_text("1 node in 1 group")
        page.keyboard.press("Enter")
        expect(page.locator("#panel bdi")).to_have_text("n2999")
        assert not seen.said


def test_names_cannot_command_the_page(browser: Browser, report: Report, tmp_path: Path) -> None:
    assert report.map is not None
    nodes = tuple(replace(node, name=f"{HOSTILE}{n}", why=HOSTILE) for n, node in enumerate(report.map.nodes))
    hostile = replace(report, title=HOSTILE, map=replace(report.map, nodes=nodes))
    with opened(browser, written(hostile, tmp_path)) as seen:
        seen.page.locator(".cell").first.click()
        expect(seen.page.locator("#panel bdi").first).to_have_text(
            "</script><img src=x onerror=alert(1)>\\u202ereversed<b>0"
        )
        assert seen.page.locator("img").count() == 0
        assert not seen.said
        assert not seen.asked
