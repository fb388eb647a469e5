"""The report in a real browser: it shows, says nothing on the console, asks for nothing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from qdqtune.explanation.model_map import MapNode
from qdqtune.explanation.page import render
from qdqtune.explanation.report import Report, report_of_run

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
    """A file in a window of its own, when it has loaded."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    watched = Watched(context.new_page())
    watched.page.on("console", lambda message: watched.said.append(message.text))
    watched.page.on("pageerror", lambda error: watched.said.append(str(error)))
    watched.page.on("request", lambda request: watched.asked.append(request.url))
    watched.page.goto(file.as_uri())
    watched.asked.remove(file.as_uri())
    yield watched
    context.close()


@pytest.fixture
def report(tuned: Path) -> Report:
    return report_of_run(tuned.parent / "out")


@pytest.fixture
def page_file(report: Report, tmp_path: Path) -> Path:
    return written(report, tmp_path)


def written(report: Report, folder: Path) -> Path:
    file = folder / "report.html"
    file.write_text(render(report, {}), encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_it_is_quiet_fits_the_window_and_keeps_nobody_out(browser, page_file, width, scheme):
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


def test_a_row_opens_its_nodes_and_why_by_mouse_and_by_keys(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as seen:
        page, table = seen.page, seen.page.locator(".row .rows").first
        assert not table.is_visible()
        page.locator(".row summary").first.click()
        expect(table).to_be_visible()
        expect(table).to_contain_text("softmax · float: no kernel for this operator")
        page.keyboard.press("Enter")
        expect(table).not_to_be_visible()
        expect(page.locator(".parts .q").first).to_contain_text("MatMul")
        page.emulate_media(media="print")
        assert page.pdf().startswith(b"%PDF")
        assert not seen.said


def test_names_cannot_command_the_page(browser: Browser, report: Report, tmp_path: Path) -> None:
    (first, *rows), hostile = report.map.rows, MapNode(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    group = replace(first.groups[0], nodes=(hostile,), label=HOSTILE, state=HOSTILE)
    drawn = replace(report.map, rows=(replace(first, name=HOSTILE, groups=(group,)), *rows))
    with opened(browser, written(replace(report, title=HOSTILE, map=drawn), tmp_path)) as seen:
        seen.page.locator(".row summary").first.click()
        expect(seen.page.locator(".row .rows bdi").first).to_have_text(
            "</script><img src=x onerror=alert(1)>\\u202ereversed<b>"
        )
        assert seen.page.locator("img").count() == 0
        assert not seen.said
        assert not seen.asked
