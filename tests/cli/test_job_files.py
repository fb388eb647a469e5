"""What a jobs file may hold: a schema that follows from the options of `tune` refuses all else at the start."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from qdqtune.cli.run import read_jobs
from qdqtune.cli.tune import TuneArguments
from qdqtune.errors import BadOption
from runs import environment

HUGE = "9" * 5000

NEVER = {
    "null": "null", "nothing": "", "date": "2024-01-01", "time": "2024-01-01 10:00:00", "mapping": "{a: 1}",
    "jobs": "{jobs: [{model: a.onnx}]}", "NUL": r'"a\0b"', "surrogate": r'"\ud800"', "digits": HUGE,
    "python": "!!python/object/apply:os.system [echo]", "binary": "!!binary aGk=", "list of lists": "[[1], [2]]",
    "unknown alias": "*nobody", "an alias of itself": "&a [*a]", "merge": "<<", "empty": '""', "equals": "=",
}  # fmt: skip
"""Values, as YAML has them, that no option takes."""

STRUCTURES = [
    "", "null", "[]", "5", "text", "- 1", "jobs:", "jobs: null", "jobs: 5", "jobs: {}", "jobs: []", "jobs: [1]", "a: [",
    "jobs: [null]", "jobs: [[{model: a.onnx}]]", "jobs: [{builds: 3}]", "jobs: [{}]", "jobs: [{model: a.onnx, 1: 2}]",
    "jobs: [{model: a.onnx, '': x}]", "jobs: [{model: a.onnx, ' builds': 3}]", "jobs: [{model: a.onnx, --builds: 3}]",
    "jobs: [{model: a.onnx, help: true}]", "jobs: [{model: a.onnx, help-all: true}]", "jobs: [{model: a.onnx, o: b}]",
    "jobs: [{model: a.onnx, [1]: 2}]", "jobs: [{model: a.onnx, null: 2}]",
    "jobs: [{model: a.onnx, fix_input: a=1, fix-input: b=1}]",
    "jobs: [{model: a.onnx}]\nmore: 1", "jobs: [{model: a.onnx}]\ndefaults: [1]", "jobs: [{model: a.onnx}]\ndefaults:",
    "jobs: [{model: a.onnx}]\ndefaults: {model: b.onnx}", "jobs: [{model: a.onnx}]\n---\njobs: [{model: b.onnx}]",
    "jobs: [{model: [a.onnx]}]", "jobs: [{model: 5}]",
    "jobs: [{model: a.onnx, time-budget: soon}]", "jobs: [{model: a.onnx, input-shape: 'x:1xy'}]",
    "jobs: [{model: a.onnx, fix-input: [n]}]", "jobs: [{model: a.onnx, engine-option: [n]}]",
    "jobs: [{model: a.onnx, node-filter: gone}]",
    "\x00", "\x07jobs: []",
    "%YAML 7.0\n---\njobs: []", "jobs: [{model: a.onnx}]x",
    "{" * 3000, "[" * 100_000, "- " * 100_000, "? " * 100_000, "&a " * 1000, "jobs: " + "[" * 60,
    f"jobs: [{{model: {'a' * 200_000}}}]", f"jobs: {['a'] * 1_000_001}",
    f"jobs: [{{model: 1{':1' * 99_999}}}]",
    f"jobs: &a {['a' * 9] * 100_000}\ndefaults: [{'*a,' * 11}]",
    "a: &a [x]\n" + "".join(f"{n}: &{n} [{f'*{p},' * 9}]\n" for p, n in pairwise("abcdefghijkl")) + "jobs: *l",
]  # fmt: skip


BY_OPTION = {
    "front": ["1", "'true'", "text", "[true]", "0.5"],
    "builds": ["'²'", "4.5", "true", ".nan", ".inf", "[4]", "'--help'", "four"],
    "mode": ["other", "true", "'--help'", "1"],
    "calibration-method": ["true", "off", "yes"],
}


def odd() -> Iterator[str]:
    """Jobs files that are none."""
    yield from STRUCTURES
    for name, values in BY_OPTION.items():
        for value in (*NEVER.values(), *values):
            yield f"jobs: [{{model: a.onnx}}, {{model: b.onnx, {name}: {value}}}]"
    for value in NEVER.values():
        yield f"jobs: [{{model: {value}}}]"
        yield f"jobs: [{{model: a.onnx, ? {value or 'null'} : 1}}]"
        yield f"defaults: {{engine: {value}}}\njobs: [{{model: a.onnx}}]"


def test_odd_files_are_refused_in_one_line_and_bounded_memory(tmp_path: Path) -> None:
    """In a process with room for little more than its modules."""
    (tmp_path / "odd.json").write_text(json.dumps(list(odd())))
    code = """
import json, re, resource, sys
from pathlib import Path
from qdqtune.cli.run import read_jobs
from qdqtune.errors import BadOption
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (600 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
path, unlike = Path("jobs.yaml"), []
for text in json.loads(Path("odd.json").read_text()):
    path.write_text(text)
    try:
        read_jobs(path)
        unlike.append((text[:200], "taken"))
    except BadOption as error:
        said = str(error)
        if "\\n" in said or len(said) > 600 or not said.startswith("jobs.yaml"):
            unlike.append((text[:200], said))
        if "b.onnx, " in text and "job 2" not in said and "no jobs file, or damaged" not in said:
            unlike.append((text[:200], said))
    except Exception as error:
        unlike.append((text[:200], repr(error)))
print(json.dumps(unlike))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_wrong_file_ends_the_command_before_anything_begins(call, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    file = tmp_path / "jobs.yaml"
    for text, words in {
        "jobs: [{model: a.onnx}, {model: b.onnx, builds: '²'}]": "job 2 (b.onnx): --builds: '²' is no whole number",
        "jobs: [{model: a.onnx, rewrites: off}]": "job 1 (a.onnx): --rewrites takes a value, not False",
        "jobs: [{model: 5}]": "job 1 has no model: give the name of a file",
        "null": "(Expected 'object', got 'null')",
        "jobs: [{model: a.onnx}]\ndefaults: {'': 1}": "defaults: there is no option ''",
    }.items():
        file.write_text(text)
        code, out, err = call("run", file)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {file}")
        assert words in " ".join(err.split())
        assert len(err.splitlines()) == 1


def test_jobs_go_before_defaults_and_repeat_what_can_be_repeated(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(
        "defaults: &d {engine: fake, threads: 2, report: false, fix_input: [a=1, b=2], restart: true}\n"
        "jobs: [{model: x/a.onnx, fix-input: c=3, restart: false, report: true}, {model: b.onnx, seed: 0x10}]"
    )
    first, second = read_jobs(file)
    assert first.options == TuneArguments(
        model=Path("x/a.onnx"), output_dir="a_tuned", engine="fake", threads=2, fix_inputs={"c": 3}
    )
    assert second.options == TuneArguments(
        model=Path("b.onnx"), output_dir="b_tuned", engine="fake", threads=2, report=False, fix_inputs={"a": 1, "b": 2},
        restart=True, seed=16,
    )  # fmt: skip


def test_a_job_may_run_on_a_machine_with_more_cores(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("jobs: [{model: a.onnx, threads: 4096}]")
    (job,) = read_jobs(tmp_path / "jobs.yaml")
    assert job.options.spec().options == {"threads": 4096}


def test_devices_and_folders_are_not_read() -> None:
    with pytest.raises(BadOption, match="it is no file"):
        read_jobs(Path("/dev/zero"))
    with pytest.raises(BadOption, match="cannot read jobs"):
        read_jobs(Path("/"))
