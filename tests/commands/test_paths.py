"""No command writes to what it reads, or replaces what was there before, through whatever option and whatever link.

The cases are made of the commands themselves: each option that names something to write, with each file that the
command reads. `pytest -rP tests/commands/test_paths.py | grep refused` prints how many there are.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest

from command_lines import is_refused
from qdqtune.autotune import __main__ as autotune
from qdqtune.cli.main import Later, app
from qdqtune.options import OF_RUN, REQUIRED, Option, options_of
from qdqtune.system.checks import HEAD, LIST
from qdqtune.tuning import folder
from qdqtune.tuning.loop import tune
from qdqtune.tuning.settings import Settings
from runs import mixed, settings, write

QUICK = ("--engine", "fake", "--engine-option", "asymmetric=true", "--builds", "4", "-q")
COMMANDS = {name: command.command for name, command in app.commands.items() if isinstance(command, Later)} | {
    "autotune": autotune.command,
}
TEXTS = frozenset({"trtexec_args", "engine_options", "ray"})
"""Options whose text may hold names of files for another program."""
GIVEN = {"build": ["--engine", "onnxruntime"], "debug": [], "report": [], "autotune": ["--engine", "fake"]}
"""What a command has to be given besides files."""
MODES = {"graph_json": "subgraph", "pattern_cache": "region"}
"""The mode of `tune` in which it reads a file."""


class Case(NamedTuple):
    """An option that names something to write."""

    command: str
    option: Option[Any]

    def __str__(self) -> str:
        return f"{self.command} {self.option.flag}"


def own(command: str) -> list[Option[Any]]:
    return list(options_of(COMMANDS[command].kind).values())


def is_of_run(option: Option[Any]) -> bool:
    return option.convert is OF_RUN.keywords["convert"]


def cases(has: Callable[[Option[Any]], object]) -> list[Case]:
    return [Case(name, option) for name in COMMANDS for option in own(name) if has(option) and option.group]


def reads(command: str) -> list[Option[Any]]:
    return [option for option in own(command) if option.reads is not None]


def needed(case: Case, folder: Path) -> list[object]:
    """Names for other files that the command has to write."""
    others = [o for o in own(case.command) if o.writes and o.default is REQUIRED and o is not case.option]
    return [word for option in others for word in (option.flag, folder / "new.onnx")]


WRITTEN = cases(lambda option: option.writes)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What commands may read, by parameter, and beside it files that were there before."""
    model = write(mixed(), tmp_path)
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    samples = model.with_suffix(".npz")
    made = {"model": model, "files": model, "directory": tmp_path / "run", "calibration_data": samples}
    for name in ("workloads.npz", "plugin_libraries.so", "qdq_baseline.onnx", "quantized.onnx", "placement.yaml",
                 "calibration_cache.txt", "evaluate.py", "labels.txt", "graph_json.json", "profile_json.json",
                 "node_filter.txt", "pattern_cache.yaml", "state_file.yaml", "file.yaml"):  # fmt: skip
        made[Path(name).stem] = path = tmp_path / name
        like = {".onnx": model, ".npz": samples}.get(path.suffix)
        path.write_bytes(like.read_bytes() if like else b"mine\n")
    made["folder"] = made["directory"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LIST).write_text(f"{HEAD}\nsummary.json\nreport.html\noptimized_final.onnx\nlogs/\n")
    for name in ("summary.json", "optimized_final.onnx", "autotuner_state.yaml"):
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "run" / "report.html").write_text("a page")
    for name in ("before.txt", "before.html", "before.yaml", "before.json", "before.npz", "before.xml", "before"):
        (tmp_path / name).write_bytes(samples.read_bytes() if name.endswith("npz") else b"<p>mine</p>")
    shutil.copy(made["qdq_baseline"], tmp_path / "before.onnx")
    return made


def given(command: str, files: dict[str, Path]) -> list[object]:
    """Arguments that name a file for all that a command may read."""
    named: list[object] = [*GIVEN.get(command, ())]
    for param in reads(command):
        assert param.name in files, f"{param.name} of {command} names a file to read: the test needs one"
        path = f"{files[param.name]}:score" if param.name == "evaluate" else files[param.name]
        named += [path] if param.group is None else [param.flag, path]
    return named


def test_each_option_says_whether_what_it_names_is_read_or_written() -> None:
    for name in COMMANDS:
        for option in own(name):
            told = f"{option.name} {option.metavar}"
            names_file = any(word in told for word in ("FILE", "file", "path", "cache", "output", "_dir", "html"))
            if names_file and not option.is_switch:
                typed = option.reads or option.writes or is_of_run(option)
                assert typed or option.name in TEXTS, f"{name} {option.flag}"


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_no_option_writes_to_what_is_read_or_was_there_before_or_is_a_folder(case, files, tmp_path, call, request):
    others = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    asked = [case.command, *given(case.command, files), *needed(case, tmp_path), case.option.flag]
    link, second, circle = tmp_path / "link", tmp_path / "second", tmp_path / "circle"
    link.symlink_to(files["evaluate"])
    circle.symlink_to(circle)
    os.link(files["evaluate"], second)
    for victim in (*others, link, second, circle):
        is_refused(call, tmp_path, "", *asked, victim)
    assert circle.is_symlink()
    for name in (tmp_path, tmp_path / "run", f"{tmp_path}/run/", f"{tmp_path}/new/"):
        told = is_refused(call, tmp_path, "", *asked, name)
        assert told == f"error: cannot write {name}: it is a folder; name a file in it", case
    request.node.add_report_section("call", "written", f"{case}: {len(others) + 3} files, all refused and untouched")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", [case for case in cases(is_of_run) if case.command == "autotune"], ids=str)
def test_no_run_writes_to_what_is_read_or_was_there_before(case, files, tmp_path, call, request):
    """A file of the run's own is named as each file that a run reads, or as another; its folder holds each of these
    under each name of a result."""
    count, out = 0, tmp_path / "out"
    circle = tmp_path / "before_circle"
    circle.symlink_to(circle)
    known: list[tuple[list[object], Path]] = [([], file) for file in sorted(tmp_path.glob("before*"))]
    for param in reads("autotune"):
        path = files[param.name]
        named: list[object] = [f"{path}:score" if param.name == "evaluate" else path]
        mode = ["--mode", MODES[param.name]] if param.name in MODES else []
        known.append(([*mode, *([] if param.name == "model" else [param.flag, *named])], path))
    is_folder = case.option.name == "output_dir"
    for more, victim in known:
        arguments = ["-m", files["model"], *QUICK, *more, case.option.flag]
        if not is_folder:
            is_refused(call, tmp_path, "", "autotune", *arguments, victim, "-o", out)
            count += 1
            continue
        mode = next((m for m in ("region", "subgraph") if m in more), "region")
        exported = victim if "--graph-json" in more else None
        names = names_of(settings(files["model"], mode=mode, output_dir=out, graph_json=exported))
        for name in names if victim == known[0][1] or "--mode" in more else names[:1]:
            place = out / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(victim, place)
            is_refused(call, tmp_path, "", "autotune", *arguments, out)
            count += 1
            place.unlink()
    request.node.add_report_section("call", "written", f"{case}: {count} files, all refused and untouched")


def names_of(asked: Settings) -> list[str]:
    """Names that files of a run have."""
    below = "logs/baseline.log", "region_models/region_1_level_2.onnx", "subgraphs/group_001.onnx"
    return [*folder._files(asked), *below, "autotuner_state.yaml", "autotuner_state_pattern_cache.yaml"]


@pytest.mark.usefixtures("workers")
def test_what_a_command_has_written_it_writes_again(files, tmp_path, call):
    model, data = files["model"], ["--calibration-data", files["calibration_data"]]
    tune(settings(model, builds=3, mode="cut", output_dir=tmp_path / "o"))
    asked = [
        ("quantize", [model, *data, "-o", tmp_path / "q.onnx"]),
        ("apply", [model, *data, "--placement", tmp_path / "o" / "placement.yaml", "-o", tmp_path / "a.onnx"]),
        ("report", [tmp_path / "o"]),
        ("autotune", ["-m", model, *QUICK, "--state-file", tmp_path / "s.yaml", "-o", tmp_path / "t"]),
    ]  # fmt: skip
    for name, arguments in (*asked, *asked):
        code, _, err = call(name, *arguments)
        assert code in (0, 3, 4), err
    is_refused(call, tmp_path, "", "quantize", model, *data, "-o", tmp_path / "o" / "report.html")  # a page is no model


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_artifact_is_written_again(engine, files, tmp_path, call):
    pytest.importorskip(engine)
    ending = {"onnxruntime": "onnx", "openvino": "xml"}[engine]
    model = write(mixed(), tmp_path, "whole")
    asked = [model, "--engine", engine, "-o", tmp_path / f"b.{ending}"]
    for _ in range(2):
        assert call("build", *asked)[0] == 0
    is_refused(call, tmp_path, "", "quantize", model, "-o", asked[-1])
    if engine == "openvino":
        (tmp_path / "b.xml").unlink()
        assert call("build", *asked)[0] == 0
