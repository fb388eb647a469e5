"""`qdqtune tune` of several models, and `qdqtune run`, which names them in a YAML file."""

import json
import resource
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from command_lines import UNCHECKED, is_refused
from conftest import Call
from models import normal
from processes import ran
from qdqtune.cli.fleet import named
from qdqtune.cli.tune import TuneArguments, read_jobs
from qdqtune.errors import BadOption
from runs import hopeless, mixed, room_for, write

QUICK = ["--engine", "fake", "--builds", 5, "--calibration_method=minmax", "--no-bias-correction", "--no-report", "-q"]


def test_names_of_folders_are_those_of_models_and_differ() -> None:
    found = named([Path("x/a.onnx"), Path("y/a.onnx"), Path("y/b.onnx"), Path("z/y/a.onnx")])
    assert list(found.values()) == ["x_a", "y_a", "b", "y_a-2"]


def test_each_model_gets_what_was_typed(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for name in ("b.onnx", "a.onnx", "notes.txt"):
        (Path("models") / name).write_text("")
    Path("--c.onnx").write_text("")
    asked = ran(monkeypatch, [0, 3, 2])
    typed = ["--time-budget", "90s", "--fix-input", "n=1", "--fix_input", "m=2", "--no-report", "--restart"]
    code, out, _ = call("tune", "-o", "out", *typed, "--json", "--", "--c.onnx", "models")
    assert code == 2
    assert [row["model"] for row in json.loads(out)] == ["--c.onnx", "models/a.onnx", "models/b.onnx"]
    for values, model in zip(asked, ("--c", "models/a", "models/b"), strict=True):
        assert json.loads(json.dumps(values, default=str)).items() >= {
            "output_dir": f"out/{Path(model).name}", "time_budget": 90, "fix_inputs": {"n": 1, "m": 2},
            "report": False, "restart": True, "as_machine": True, "quiet": False, "verbose": False,
            "model": f"{model}.onnx",
        }.items()  # fmt: skip


def test_what_makes_no_sense_is_refused(call: Call, tmp_path: Path) -> None:
    model, empty = tmp_path / "a.onnx", tmp_path / "empty"
    model.write_text("")
    empty.mkdir()
    for models in ([model, empty], [empty]):
        is_refused(call, tmp_path, "empty holds no .onnx file", "tune", *models)
    for words in (("tune", model), ("compare", model), ("inspect",)):
        is_refused(call, tmp_path, "a.npz is no ONNX file: samples are --calibration-data", *words, "a.npz")
    is_refused(call, tmp_path, "extra argument (a.npz); samples are --calibration-data", "quantize", model, "a.npz")


def test_a_model_that_fails_does_not_end_the_others(call, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    first, second = write(mixed(), models, "fast"), write(hopeless(), models, "slow")
    (models / "broken.onnx").write_bytes(normal(4).tobytes())
    code, table, err = call("tune", models, "-o", tmp_path / "out", *QUICK[:-1], *UNCHECKED)
    assert code == 2
    assert [line.split()[1] for line in table.splitlines() if ".onnx" in line] == ["failed", "tuned", "baseline"]
    assert table.count("not measured") == 2
    assert err.startswith(f"3 models: {models}/broken.onnx, {models}/fast.onnx, {models}/slow.onnx\n")
    assert "fast.onnx: measuring the float model" in err
    assert "fast.onnx: note: " in err
    assert "broken.onnx: error: " in err
    assert all((tmp_path / "out" / name / "autotuner_state.yaml").is_file() for name in ("fast", "slow"))
    code, table, _ = call("tune", first, second, "-o", tmp_path / "other", *QUICK, "--dry-run")
    assert code == 0
    assert "latency, ms" in table


# From a YAML file

TOLD = {"as_machine": True, "quiet": False, "verbose": False}
JOBS = {
    "defaults": {"engine": "fake", "builds": 7, "output-dir": "out"},
    "jobs": [
        {"model": "a.onnx", "restart": True, "front": False},
        {"model": "gone.onnx", "fix_input": ["sr=16000", "n=1"], "output-dir": "b"},
    ],
}


@pytest.fixture
def jobs_file(tmp_path: Path) -> Path:
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(JOBS))
    return tmp_path / "jobs.yaml"


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([4, 3], 4), ([2, 0], 2), ([3, 5], 5)])
def test_every_job_runs_and_the_worst_decides(codes: list[int], worst: int, call: Call, jobs_file: Path, monkeypatch):
    asked = ran(monkeypatch, codes)
    code, out, _ = call("run", jobs_file, "--json")
    assert code == worst
    assert [row["model"] for row in json.loads(out)] == ["a.onnx", "gone.onnx"]
    assert [row["exit_code"] for row in json.loads(out)] == codes
    first = {"engine": "fake", "builds": 7, "restart": True, "output_dir": Path("out"), "model": Path("a.onnx"), **TOLD}
    assert asked[0].items() >= first.items()
    assert (asked[1]["fix_inputs"], asked[1]["output_dir"]) == ({"sr": 16000, "n": 1}, Path("b"))


def test_a_table_ends_it(call: Call, jobs_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, [0, 2])
    code, out, _ = call("run", jobs_file)
    assert code == 2
    first, second, *_, summary = out.strip().splitlines()[-4:]
    assert first.split() == ["a.onnx", "tuned", "2.000", "1.000", "2.00x", "30.0", "0"]
    assert second.split() == ["gone.onnx", "failed", "2"]
    assert summary == "2 models in 0 s: 1 faster (2.00x in the mean), 0 as before, 1 failed"


def test_a_folder_of_one_model_is_that_model_and_what_ships_is_loadable(call: Call, tmp_path: Path) -> None:
    home, out, taken = tmp_path / "net", tmp_path / "out", tmp_path / "taken"
    for folder in (home, taken):
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"of": "{folder.name}"}}')
    write(mixed(), home)
    write(mixed(), home, "model_quantized")
    (home / "tokenizer.json").write_text("{}")
    assert call("tune", home, "-o", out, *QUICK, *UNCHECKED)[0] == 0
    assert (out / "optimized_final.onnx").is_file()
    assert [(out / name).read_text() for name in ("config.json", "tokenizer.json")] == ['{"of": "net"}', "{}"]
    (home / "tokenizer.json").write_text('{"new": 1}')
    assert call("tune", home, "-o", out, *QUICK, *UNCHECKED, "--restart")[0] == 0
    assert (out / "tokenizer.json").read_text() == '{"new": 1}'
    words = "config.json was there before, and is not of qdqtune's making"
    is_refused(call, taken, words, "tune", home, "-o", taken, *QUICK, *UNCHECKED)
    assert call("tune", home, "-o", home, *QUICK, *UNCHECKED)[0] == 0
    assert (home / "config.json").read_text() == '{"of": "net"}'


# What a jobs file may hold: a schema that follows from the options of `tune` refuses all else at the start
NEVER = ["null", "", "2024-01-01", "{a: 1}", r'"a\0b"', r'"\ud800"', "9" * 5000, "!!binary aGk=",
         "!!python/object/apply:os.system [echo]", "[[1], [2]]", "*nobody", "&a [*a]", "<<", '""', "="]  # fmt: skip
"""Values, as YAML has them, that no option takes."""

STRUCTURES = [
    "", "5", "- 1", "jobs: null", "jobs: {}", "jobs: []", "jobs: [1]", "a: [", "jobs: [{builds: 3}]",
    "jobs: [{model: a.onnx, 1: 2}]", "jobs: [{model: a.onnx, help: true}]", "jobs: [{model: a.onnx, [1]: 2}]",
    "jobs: [{model: a.onnx, fix_input: a=1, fix-input: b=1}]", "jobs: [{model: a.onnx}]\nmore: 1",
    "jobs: [{model: a.onnx}]\ndefaults: [1]", "jobs: [{model: a.onnx}]\ndefaults: {model: b.onnx}",
    "jobs: [{model: [a.onnx]}]", "jobs: [{model: a.onnx, node-filter: gone}]", "\x00",
    "[" * 100_000, f"jobs: [{{model: {'a' * 200_000}}}]",
    "a: &a [x]\n" + "".join(f"{n}: &{n} [{f'*{p},' * 9}]\n" for p, n in pairwise("abcdefghijkl")) + "jobs: *l",
]  # fmt: skip


BY_OPTION = {
    "front": ["1", "'true'", "[true]"],
    "builds": ["'²'", "4.5", "true", ".nan", "[4]", "'--help'"],
    "mode": ["other", "true"],
    "calibration-method": ["off"],
}


def odd() -> Iterator[str]:
    """Jobs files that are none."""
    yield from STRUCTURES
    for name, values in BY_OPTION.items():
        for value in (*NEVER, *values):
            yield f"jobs: [{{model: a.onnx}}, {{model: b.onnx, {name}: {value}}}]"
    for value in NEVER:
        yield f"jobs: [{{model: {value}}}]"
        yield f"jobs: [{{model: a.onnx, ? {value or 'null'} : 1}}]"
        yield f"defaults: {{engine: {value}}}\njobs: [{{model: a.onnx}}]"


def test_odd_files_are_refused_in_one_line_and_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("jobs.yaml")
    with room_for(600 << 20, resource.RLIMIT_AS):
        for text in odd():
            path.write_text(text)
            with pytest.raises(BadOption) as refused:
                read_jobs(path)
            said = str(refused.value)
            assert said.startswith("jobs.yaml"), text[:200]
            assert "\n" not in said
            assert len(said) <= 600
            assert "b.onnx, " not in text or "job 2" in said or "no jobs file, or damaged" in said, text[:200]


def test_a_wrong_file_ends_the_command_before_anything_begins(call, jobs_file, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    many = jobs_file.parent / "many"
    many.mkdir()
    for name in "ab":
        (many / f"{name}.onnx").touch()
    for text, words in {
        f"jobs: [{{model: {many}}}]": "holds 2 models: give each a job of its own",
        "jobs: [{model: a.onnx}, {model: b.onnx, builds: '²'}]": "job 2 (b.onnx): --builds: '²' is no whole number",
        "jobs: [{model: 5}]": "job 1 has no model: give the name of a file",
        "jobs: [{model: a.onnx, calibration-data: [s.npz]}]": "job 1: calibration-data: ['s.npz'] is no text",
        "jobs: [{model: a.onnx}]\ndefaults: {'': 1}": "defaults: there is no option ''",
    }.items():
        jobs_file.write_text(text)
        error = is_refused(call, jobs_file.parent, "", "run", jobs_file)
        assert error.startswith(f"error: {jobs_file}")
        assert words in error


def test_jobs_go_before_defaults_and_repeat_what_can_be_repeated(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(
        "defaults: &d {engine: fake, threads: 2, report: false, fix_input: [a=1, b=2], restart: true}\n"
        "jobs: [{model: x/a.onnx, fix-input: c=3, restart: false, report: true}, {model: b.onnx, seed: 0x10}]"
    )
    first, second = read_jobs(file)
    assert first == TuneArguments(
        model=Path("x/a.onnx"), output_dir="a_tuned", engine="fake", threads=2, fix_inputs={"c": 3}
    )
    assert second == TuneArguments(
        model=Path("b.onnx"), output_dir="b_tuned", engine="fake", threads=2, report=False, fix_inputs={"a": 1, "b": 2},
        restart=True, seed=16,
    )  # fmt: skip


def test_devices_and_folders_are_not_read() -> None:
    with pytest.raises(BadOption, match="it is no file"):
        read_jobs(Path("/dev/zero"))
    with pytest.raises(BadOption, match="cannot read jobs"):
        read_jobs(Path("/"))
