"""How large a report is, how soon it shows and answers, what it asks for, and what axe-core finds.

    python benchmarks/report.py FOLDER [FOLDER ...] --nodes 10000

Each FOLDER is that of a finished run; --nodes adds a made-up network of so many nodes. Needs Chromium (Debian: apt-get
install chromium) and the packages of the development group. Times are of a window of 1200 by 800, in ms since the file
was opened: first paint, ready to be used, and from a click on a row of the map until its content stands below it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import onnx
from axe_playwright_python.sync_playwright import Axe
from onnx import TensorProto, helper
from playwright.sync_api import Browser, sync_playwright

from qdqtune.explanation.model_map import draw
from qdqtune.explanation.page import render
from qdqtune.explanation.report import Report, report_of_run
from qdqtune.explanation.result_rows import Headline
from qdqtune.explanation.units import Explanation
from qdqtune.graph.model import Model

OPENED = """() => new Promise(done => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  done([paint ? paint.startTime : null, performance.getEntriesByType("navigation")[0].loadEventEnd]);
})"""
CLICKED = """() => new Promise(done => {
  const start = performance.now();
  document.querySelectorAll(".row summary")[0].click();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""


def network(count: int) -> Model:
    """Residual blocks of four nodes."""
    nodes, value = list[onnx.NodeProto](), "x"
    while len(nodes) < count:
        stem = f"/stage{len(nodes) // 400}/block{len(nodes) // 4}"
        for op, inputs, output in (
            ("MatMul", [value, "w"], f"{stem}/product"),
            ("Relu", [f"{stem}/product"], f"{stem}/positive"),
            ("MatMul", [f"{stem}/positive", "w"], f"{stem}/again"),
            ("Add", [f"{stem}/again", value], f"{stem}/sum"),
        ):
            nodes.append(helper.make_node(op, inputs, [output], name=f"{stem}/{op}_{len(nodes)}"))
        value = f"{stem}/sum"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 8]) for name in ("x", value)]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [0.1] * 64)
    return Model(onnx.helper.make_model(helper.make_graph(nodes, "large", ends[:1], ends[1:], [weight])))


def made_up(count: int) -> Report:
    """A report on a network of so many nodes, three of four in 8 bits."""
    model = network(count)
    rows = []
    for node in model.nodes:
        state, ms = ("8 bits", 0.004) if node.index % 4 else ("float", 0.006)
        detail = "part of the placement that proved fastest"
        row = Explanation((node.name,), (node.op,), state, "", ms, 0.01 * (1 + node.index % 7), detail=detail)
        rows.append(row)
    drawn = draw(model, rows, {}, "tuned")
    verdict = Headline(f"{count} nodes", "A made-up network.", True)
    return Report(f"{count} nodes", verdict, map=drawn)


def look(browser: Browser, file: Path, repeats: int = 5) -> tuple[float, float, float, int, int, int]:
    """First paint, ready and click in ms (medians), requests, words on the console, serious findings of axe."""
    paints, readies, clicks = [], [], []
    asked = said = serious = 0
    for number in range(repeats):
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        urls: list[str] = []
        messages: list[str] = []
        page.on("request", lambda request: urls.append(request.url))  # noqa: B023  closed before the next page
        page.on("console", lambda message: messages.append(message.text))  # noqa: B023
        page.goto(file.as_uri())
        page.wait_for_timeout(200)
        paint, ready = page.evaluate(OPENED)
        paints.append(paint or ready)
        readies.append(ready)
        clicks.append(page.evaluate(CLICKED) if page.locator(".row").count() else 0.0)
        asked, said = asked + len(urls) - 1, said + len(messages)
        if number == 0:
            violations = Axe().run(page).response["violations"]
            serious = sum(v["impact"] in ("serious", "critical") for v in violations)
        page.close()
    return (*map(statistics.median, (paints, readies, clicks)), asked, said, serious)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--nodes", type=int, default=0)
    given = parser.parse_args()
    columns = ("report", "nodes", "groups", "CPU s to write", "KB", "paint, ms", "ready, ms", "click, ms", "requests")
    print(f"| {' | '.join((*columns, 'console', 'axe'))} |")
    print("|" + " --- |" * 11)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for run in (*given.folders, *([None] if given.nodes else [])):
            started = time.process_time()
            report = made_up(given.nodes) if run is None else report_of_run(run)
            file = Path(folder) / "report.html"
            file.write_text(render(report, {}), encoding="utf-8")
            seconds = time.process_time() - started
            paint, ready, click, asked, said, serious = look(browser, file)
            groups = report.map.groups if report.map else ()
            nodes = sum(len(group.nodes) for group in groups)
            kilobytes = file.stat().st_size / 1e3
            cells = (
                report.title,
                nodes,
                len(groups),
                f"{seconds:.1f}",
                f"{kilobytes:.0f}",
                f"{paint:.0f}",
                f"{ready:.0f}",
                f"{click:.0f}",
                asked,
                said,
                serious,
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
