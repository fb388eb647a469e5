"""Rules that keep the modules apart, checked on the source itself."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from runs import environment

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "qdqtune"
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
           for p in sorted(PACKAGE.rglob("*.py"))}  # fmt: skip
VENDORS = {
    "onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "tensorrt_bindings", "tensorrt_rtx_bindings", "ray",
}  # fmt: skip
OTHER_EXTRAS = {
    "torch": "qdqtune.commands.torch_export",
    "onnxscript": "qdqtune.commands.torch_export",
    "PIL": "qdqtune.calibration.raw_data",
    "tokenizers": "qdqtune.calibration.raw_data",
}
"""Libraries of extras that are no engines, and the module that imports each of them."""
GRAPH_TOOLS = {"onnxruntime.transformers"}
"""Parts of vendor packages that rewrite models and run nothing; to be imported where they are used."""
FLOORS = ("autotune", "api", "cli", "commands", "explanation", "tuning", "search", "timing", "numerics", "placement",
          "calibration", "engines", "graph", "system", "options", "types", "errors", "version")  # fmt: skip
"""The folders and the files that all stand on, from the top: imports run downwards only."""

OUTSIDE = {"qdqtune", "qdqtune.__main__", "qdqtune.graph_utils", "qdqtune.op_types",
           "qdqtune.qdq_utils"}  # fmt: skip
"""Doors: what a user imports or runs by name. They lead to any floor, and no floor leads to them."""


pytestmark = pytest.mark.xdist_group("source")
"""One process reads the source for all of them."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, at its top or inside a function, with the names it takes from packages."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if node.module != "qdqtune" or names - MODULES.keys():
                yield str(node.module)
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES)


def ours(name: str) -> set[str]:
    return {m for m in imports(MODULES[name]) if m in MODULES}


def within(name: str, packages: set[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def floor(name: str) -> int:
    return FLOORS.index(name.split(".")[1])


def test_imports_run_downwards() -> None:
    for name in MODULES.keys() - OUTSIDE:
        needs = ours(name) - {name, "qdqtune.autotune"}
        allowed = {"qdqtune.graph_utils"} if floor(name) == 0 else set[str]()  # a guest, by the name that guests know
        assert not (needs & OUTSIDE) - allowed, name
        assert not {m for m in needs - OUTSIDE if floor(m) < floor(name)}, name


def test_strategies_never_reach_an_engine() -> None:
    seen, waiting = set(), [m for m in MODULES if within(m, {"qdqtune.search"})]
    while waiting:
        for module in ours(waiting.pop()) - seen - {"qdqtune"}:
            seen.add(module)
            waiting.append(module)
    assert not {m for m in seen if within(m, {"qdqtune.engines", "qdqtune.tuning", "qdqtune.commands", "qdqtune.cli"})}


def test_vendor_libraries_are_imported_by_their_engine_only() -> None:
    for name in (m for m in MODULES if not within(m, {"qdqtune.engines"})):
        vendors = {m for m in imports(MODULES[name]) if m.split(".")[0] in VENDORS}
        assert not {m for m in vendors if not within(m, GRAPH_TOOLS)}, name


def test_each_library_of_an_extra_is_imported_by_one_module() -> None:
    found = {(m.split(".")[0], name) for name in MODULES for m in imports(MODULES[name])}
    assert {pair for pair in found if pair[0] in OTHER_EXTRAS} == set(OTHER_EXTRAS.items())


def test_an_engine_imports_no_other_engine() -> None:
    vendors = {"onnxruntime", "openvino", "tensorrt"}
    for name in MODULES:
        own = set(name.split(".")[2:3]) & vendors if within(name, {"qdqtune.engines"}) else set[str]()
        others = {f"qdqtune.engines.{vendor}" for vendor in vendors - own}
        if own or name == "qdqtune.engines":
            assert not {m for m in ours(name) if within(m, others)}, name


def test_no_two_modules_import_each_other() -> None:
    graph = {name: ours(name) - {name, "qdqtune"} for name in MODULES if name != "qdqtune"}
    while free := {name for name, needs in graph.items() if not needs & graph.keys()}:
        for name in free:
            del graph[name]
    assert not graph, f"a cycle through {sorted(graph)}"


@pytest.mark.parametrize(("imported", "needed", "never"), [
    ({"qdqtune"}, {"qdqtune"}, {"numpy", "onnx", "click", "rich", "logging"}),
    ({m for m in MODULES if within(m, {"qdqtune.cli"})}, {"qdqtune", "onnx"}, {*VENDORS, *OTHER_EXTRAS}),
], ids=["package", "commands"])  # fmt: skip
def test_importing_loads_no_more_than_it_needs(imported: set[str], needed: set[str], never: set[str]) -> None:
    code = f"import sys, {', '.join(imported)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(), cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert needed <= loaded
    assert not loaded & never


def test_nobody_else_starts_a_python() -> None:
    found = {name for name, path in MODULES.items() if "sys.executable" in path.read_text()}
    assert found == {"qdqtune.system.interpreter"}
    starters = re.compile(r"multiprocessing(?!\.connection)|concurrent\.futures\.process|os\.(exec|spawn|posix_spawn)")
    assert not {name for name, path in MODULES.items() if any(map(starters.match, imports(path)))}


def test_the_architecture_page_lists_every_folder_and_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = page.split("\n## Folders\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", " ".join(rows))) == FLOORS
    files = set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", page))
    assert len(files) > 20
    assert not {name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()}


FOREIGN = {
    "qdqtune.engines", "qdqtune.cli.main", "qdqtune.calibration.user_code",
}  # fmt: skip
"""Where code runs that is not ours: engines, the whole program, the user's samples and metric."""


def test_broad_catches_stand_at_the_border_to_foreign_code_only() -> None:
    for name in (m for m in MODULES if not within(m, FOREIGN)):
        for node in ast.walk(parsed(MODULES[name])):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "BaseException"
                cleans_up = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in node.body)
                assert cleans_up or caught not in ("Exception", "BaseException"), f"{name}:{node.lineno}"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        files = [p for part in ("src", "tests", "benchmarks", "demo") for p in (ROOT / part).rglob("*")]
    return [p for p in files if p.is_file() and "__pycache__" not in p.parts]


def test_nothing_names_a_place_on_the_machine_of_its_author() -> None:
    places = re.compile(r"(?<![\w.}])/(?:work|home|root|Users)/\w|\.\./(?:shared|seeds)\b")
    debts = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{path.relative_to(ROOT)}:{n}: {s}" for n, s in lines if places.search(s) or debts.search(s)]
    assert not found, "\n".join(found)
