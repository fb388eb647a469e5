"""Every command and snippet of docs/ and examples/ runs, on stand-ins where it needs a GPU; links and options exist."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import click
import numpy as np
import pytest
import yaml

import digits
import examples
import qdqtune
import reference
from documents import (
    EXPORTER,
    PROJECT,
    ROOT,
    Block,
    blocks,
    code_of_notebook,
    imported,
    installed_with_the_package,
    options_of_commands,
    quickly,
    run_command,
    run_notebook,
    run_python,
)
from loaded_modules import present
from qdqtune.cli import main
from qdqtune.cli.main import app
from qdqtune.options import options_of
from qdqtune.tuning.summary import Summary
from tensorrt_fakes import install
from trtexec_stand_in import stand_in

SITE = ROOT / "docs"
GENERATED = [SITE / path for path in (reference.OVERVIEW, *reference.command_paths(), *reference.OTHERS)]
"""Pages of the reference, which `python docs/site/reference.py` writes."""

DOCUMENTS = sorted({*SITE.rglob("*.md"), *(ROOT / "examples").rglob("*.md")} - {*GENERATED})
RELEASES = {"8.6": ("8.6", "8.6.1"), "10": ("10.16", "10.16.1"), "11": ("11.1", "11.4.0")}
"""By generation of TensorRT: the version of the stand-in of trtexec, and that of the Python module."""

BUILDS = 6
"""Of a search: what a text is about can be seen in a few."""

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FORMER = {"bf16", "calib", "layerPrecisions", "precisionConstraints", "workspace"}
"""Options of trtexec up to 10, of which a text says what stands for them now."""
SCHEDULERS = {"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "cpus-per-task", "exclusive"}
"""Options of SLURM in the text about clusters; those of Ray are asked for in test_cluster.py."""
RAY = {"head", "port", "address", "num-gpus", "num-cpus", "block"}
OPTION = re.compile(r"(?<![\w-])--([a-zA-Z][\w-]*)")


def with_tensorrt(release: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put stand-ins of one generation of TensorRT, and of cuda-python, where programs and modules are looked for."""
    program, version = RELEASES[release]
    stand_in(folder, program)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    install(patch, version)


def run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    if block.kind == "python" and (EXPORTER not in imported(block.text) or importlib.util.find_spec(EXPORTER)):
        run_python(block.text, capsys)
    for command in block.commands if block.kind == "bash" else ():
        run_command(command, on_gpu=bool(block.releases), builds=BUILDS)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_runs_in_the_order_of_the_text(document, prepared, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    quickly(monkeypatch)
    monkeypatch.chdir(folder)
    tracker = MagicMock(spec_set=["start_run", "log_params", "log_metric", "log_metrics", "log_artifact"])
    present(monkeypatch, {"mlflow": tracker})
    text = document.read_text()
    for block in blocks(text):
        if not block.releases:
            run(block, capsys)
        for release in block.releases:
            with monkeypatch.context() as patch:
                with_tensorrt(release, tmp_path, patch)
                run(block, capsys)
    if "import mlflow" in text:
        steps = [(call.args[1], call.kwargs["step"]) for call in tracker.log_metric.call_args_list]
        assert [step for _, step in steps] == [*range(1, len(steps) + 1)]
        assert len(steps) > 1
        assert min(value for value, _ in steps) >= 1
        assert tracker.log_metrics.call_args.args[0]["baseline_ms"] > 0
        tracker.log_artifact.assert_called_once_with(str(Path("tracked") / "placement.yaml"))


def test_the_metric_of_a_library_gets_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the library, called as it is."""
    monkeypatch.chdir(tmp_path)
    wer = Mock(return_value=0.25)
    present(monkeypatch, {"jiwer": SimpleNamespace(wer=wer)})
    functions: dict[str, Any] = {}
    for block in blocks((SITE / "how-to" / "accuracy.md").read_text()):
        if block.kind == "python":
            exec(block.text, functions)
    np.savez("speech.npz", sounds=np.zeros((1, 9), np.float32), texts=np.array(["aab a"]))
    logits = np.eye(29)[None, [0, 1, 1, 0, 1, 2, 2, 28, 1]]
    assert functions["words_right"](lambda given: {"logits": logits}) == 0.75
    wer.assert_called_once_with(["aab a"], ["aab a"])


@pytest.mark.parametrize("document", [ROOT / "README.md", *DOCUMENTS, *GENERATED], ids=lambda path: path.stem)
def test_blocks_are_of_kinds_that_are_run_or_only_shown_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    assert {block.kind for block in blocks(text)} <= {"bash", "python", "text", "mermaid"}
    assert text.count("```") == 2 * len(blocks(text))
    marked = [block for block in blocks(text) if block.releases]
    assert text.count("needs a GPU: ") == text.count("*Needs a GPU.*") == len(marked)
    assert all(set(block.releases) <= RELEASES.keys() for block in marked)
    for place, anchor in LINK.findall(text):
        if not place.startswith("https://"):
            target = (document.parent / place).resolve() if place else document
            assert target.exists(), place
            if anchor:
                assert anchor in {slug(title) for title in HEADING.findall(target.read_text())}, anchor


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", [ROOT / "README.md", *DOCUMENTS], ids=lambda path: path.stem)
def test_every_option_exists(document: Path, tmp_path: Path) -> None:
    folders = ("examples", "benchmarks")
    scripts = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    program = stand_in(tmp_path, "10.16")
    listed = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    known = {"help", "help-all", *FORMER, *SCHEDULERS, *RAY}
    known |= set(OPTION.findall(" ".join(options_of_commands()) + listed + scripts))
    assert set(OPTION.findall(document.read_text())) <= known


@pytest.mark.usefixtures("workers")
def test_the_notebook_runs_and_shows_what_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    quickly(monkeypatch)
    split = digits.load()
    calibration, test = (digits.Images(part.pixels[:8], part.digits[:8]) for part in (split.calibration, split.test))
    monkeypatch.setattr(digits, "load", lambda: replace(split, calibration=calibration, test=test))
    monkeypatch.chdir(tmp_path / "docs")
    notebook = ROOT / "docs" / "notebook.ipynb"
    given = run_notebook(notebook)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    stored = ["".join(output["data"]["text/markdown"]) for cell in cells for output in cell["outputs"]]
    shown: list[str] = [value._repr_markdown_() for value in given]
    assert len(shown) == len(stored) == 5
    for text, before in zip(shown, stored, strict=True):
        assert text.splitlines()[2] == before.splitlines()[2]  # the titles of columns
    for what in (r"^\| (.*?) \|", "^([a-z ]*[a-z])"):
        told = [line for line in re.findall(what, stored[0], re.MULTILINE) if line != "tuned for"]  # it has no threads
        assert re.findall(what, shown[0], re.MULTILINE) == told


@pytest.mark.parametrize(("page", "title"), [("slower-than-float", "what `check` says"), ("resume", "message")])
def test_messages_are_quoted_as_they_are(page: str, title: str) -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    table = (SITE / "how-to" / f"{page}.md").read_text().split(f"\n| {title} |")[1].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) > 2
    for piece in (piece.strip() for quote in quoted for piece in quote.split("...")):
        assert piece in source


SOURCES = {
    **{
        f"{path.name} {number}": (block.text, path)
        for path in [ROOT / "README.md", *DOCUMENTS]
        for number, block in enumerate(blocks(path.read_text()))
        if block.kind == "python" and not block.releases
    },
    "notebook.ipynb": (code_of_notebook(ROOT / "docs" / "notebook.ipynb"), ROOT / "demo" / "digits.py"),
    **{
        path.name: (path.read_text(), path)
        for path in [*(ROOT / "demo").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
        if path.name != "train.py"  # says what to install for it
    },
}
"""Code that users run, with a file in whose folder its own modules lie."""


@pytest.mark.parametrize("source", SOURCES)
def test_code_needs_only_what_the_package_installs(source: str) -> None:
    code, place = SOURCES[source]
    beside = {path.stem for path in place.parent.glob("*.py")}
    others = {"openvino", "PIL", "tokenizers", "mlflow", "jiwer", EXPORTER}
    assert imported(code) <= installed_with_the_package() | beside | others


def test_extras_exist_and_commands_without_a_function_are_listed() -> None:
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *DOCUMENTS])
    extras = {name for group in re.findall(r"(?:qdqtune|'\.)\[([\w,-]+)\]", texts) for name in group.split(",")}
    assert len(extras) > 3
    assert extras <= PROJECT["optional-dependencies"].keys()
    python = (SITE / "how-to" / "python.md").read_text()
    (sentence,) = re.findall(r"command line only:\s+([^.]+)\.", python)
    assert set(re.findall(r"`(\w+)`", sentence)) == main.app.commands.keys() - set(qdqtune.__all__)


def written(nav: object) -> set[str]:
    """The pages that the navigation names."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return {page for part in parts for page in written(part)}


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(SITE).as_posix() for path in SITE.rglob("*.md")}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert written(nav) == pages


@pytest.mark.usefixtures("workers")
def test_generated_pages_are_those_that_the_code_gives() -> None:
    pages = reference.pages()
    stale = [path for path, text in pages.items() if (SITE / path).read_text() != text]
    assert not stale, "run `python docs/site/reference.py`"
    assert {*(SITE / "reference").rglob("*.md")} == {SITE / "reference" / "modelopt.md", *GENERATED}


@pytest.mark.parametrize("name", main.app.commands)
def test_the_page_of_a_command_has_all_its_options(name: str) -> None:
    command = main.app.commands[name].command
    page = reference.command_page(f"qdqtune {name}", command)
    told = re.findall(r"`(--?[\w-]+)`", "".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE)))
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("-")} <= set(told)
    assert len(told) == len(set(told))


def test_python_has_all_names_and_keywords() -> None:
    page = reference.python_page()
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == set(qdqtune.__all__) - {"__version__"}
    compare = page.split("\n## compare\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in compare for name in options_of(reference.KEYWORDS["compare"]))


def test_files_exit_codes_and_fields_are_told() -> None:
    assert all(f"| `{name}` |" in reference.files_page() for name in reference.FILES)
    assert all(f"| `{code}` |" in reference.exit_page() for code in main.EXIT_CODES)
    assert all(f"| `{field}` |" in reference.fields_of(Summary, {}) for field in Summary.__annotations__)


def test_fields_of_a_value() -> None:
    value = {"first": "a.onnx", "others": [{"ratio": {"low": 0.5}, "reason": None}], "notes": []}
    told = [("first", "text"), ("others[].ratio.low", "number"), ("others[].reason", "null, or a value")]
    assert list(examples.fields(value)) == [*told, ("notes", "array")]


# Commands about clusters in docs/ that want more machines than a test has: their options exist, and fit together
PAGES = ("many-models", "cluster", "schedulers")
TEXT = "\n".join((ROOT / "docs" / "how-to" / f"{page}.md").read_text() for page in PAGES)
LINES = [line.partition("  #")[0].strip() for block in blocks(TEXT) for line in block.text.splitlines()]
LINES += re.findall(r"`((?:qdqtune|ray) [^`]+)`", TEXT)


def told(program: str) -> list[list[str]]:
    """The arguments of each call of a program."""
    found = [re.search(rf"(?:^|[ ]){program} (?!/|start --head --port=6379 --block &$)(.*)", line) for line in LINES]
    return [shlex.split(m[1].removesuffix("&")) for m in found if m]


@pytest.mark.parametrize("words", told("qdqtune"), ids=" ".join)
def test_commands_of_ours_take_what_they_are_given(words: list[str]) -> None:
    with app.make_context("qdqtune", list(words)) as group:
        name, command, rest = app.resolve_command(group, words)
        assert name in {"tune", "run", "doctor"}
        with command.make_context(name, list(rest), parent=group) as context:
            assert context.params


def test_commands_of_ray_take_what_they_are_given() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    calls = told("ray")
    assert len(calls) >= 4
    for words in calls:
        command: click.Command = scripts.cli.commands[words[0]]
        command.make_context(words[0], words[1:])
