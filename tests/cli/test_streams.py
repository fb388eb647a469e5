"""Closed, full and ASCII streams, pipes that nobody reads, Ctrl-C at any time: no traceback, the promised exit code.
Text of models commands no terminal."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conftest import Call
from qdqtune.cli import output, progress, streams
from qdqtune.commands import shown
from qdqtune.errors import Failure
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.observer import State
from qdqtune.types import Accuracy, CostsByRule, Edge, Measurement, Placement, Proposal, Trial
from runs import environment

COMMAND = f"{sys.executable} -m qdqtune"


def shell(line: str, folder: Path, **more: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a line of bash; QDQTUNE in it is the command."""
    text = line.replace("QDQTUNE", COMMAND)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], cwd=folder, env=environment() | more, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("QDQTUNE doctor --skill | head -1", 0, ""),
        ("QDQTUNE doctor --skill >/dev/full", 2, "cannot write to standard output: No space left on device"),
        ("QDQTUNE inspect nothing.onnx <&- >&- 2>&-", 2, ""),
        ("QDQTUNE inspect nothing.onnx 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 2, ""),
        ("QDQTUNE --help >/dev/full", 2, "No space left"),
    ],
)
def test_streams_that_take_nothing(tmp_path: Path, line: str, code: int, words: str) -> None:
    got, _, err = shell(line, tmp_path)
    assert got == code, err
    assert words in err
    assert len(err.splitlines()) == bool(words)


def test_a_terminal_that_has_ascii_only_and_a_file_name_that_is_no_text(tmp_path: Path, model: Path) -> None:
    code, out, err = shell(f"QDQTUNE inspect {model} -v", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "Region" in out
    assert out.isascii()
    code, _, err = shell("QDQTUNE inspect $'\\xff.onnx'", tmp_path)
    assert code == 2
    assert "'\\udcff.onnx' holds characters that are not UTF-8" in err


def interrupts(*_: object, **__: object) -> None:
    """A Ctrl-C of which a library makes another error."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt as error:
        os.kill(os.getpid(), signal.SIGINT)  # at once, as `timeout` does
        raise ImportError("numpy cannot be imported") from error


@pytest.mark.parametrize(
    ("loads", "code", "told"),
    [
        (Mock(side_effect=MemoryError), 2, "error: there is not enough memory for this\n"),
        (interrupts, 130, "interrupted\n"),
    ],
)
def test_short_memory_and_an_interrupt_are_one_line_whatever_is_at_work(loads, code, told, call, model, monkeypatch):
    monkeypatch.setattr("qdqtune.commands.inspect.tuned_graph", loads)
    assert call("inspect", model) == (code, "", told)


def interrupted(code: str, *signals: float) -> tuple[int, str]:
    """Exit code and standard error of Python code that says `ready` and gets Ctrl-C, so many seconds apart; the last of
    several until the process ends, as signals that come together count as one.

    The code sleeps in short steps: Python sleeps to the end when a signal comes just before it begins to.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    for number, seconds in enumerate(signals, 1):
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        while 1 < number == len(signals) and process.poll() is None:
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    return process.returncode, err


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    code = """
import sys, time
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "qdqtune.cli.main":
            print("ready", flush=True)
            while True:
                time.sleep(0.01)
sys.meta_path.insert(0, Slow())
from qdqtune.__main__ import main
main()"""
    assert interrupted(code, 0.0) == (130, "")


def test_a_second_ctrl_c_ends_what_the_first_one_left_at_work() -> None:
    code = """
import time, click
from qdqtune.cli.main import main
@click.command()
def stubborn():
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        time.sleep(60)
main([], stubborn)"""
    assert interrupted(code, 0.0, 0.3) == (130, "")


def test_results_of_a_run_on_a_cluster_reach_standard_output(tmp_path: Path) -> None:
    told = "from qdqtune.cli import fleet, streams; fleet.command_line = lambda: ['qdqtune', '--version']"
    code, out, err = shell(f'{sys.executable} -c "{told}\nwith streams.guarded(): fleet.run_on_ray()"', tmp_path)
    assert (code, out.startswith("qdqtune"), err) == (0, True, "")


# Text of models

HOSTILE = "\x1b]0;owned\x07[red]\x9b31m:smile:\u202e"
BROKEN = HOSTILE + "\nbroken"
SPELT = "\\x1b]0;ow"


def hostile(model: Path) -> Path:
    """The model with names that are commands to a terminal, markup, emoji and a line break."""
    proto = onnx.load(model)
    for node in proto.graph.node:
        node.name = BROKEN + node.name
        for names in (node.input, node.output):
            names[:] = [BROKEN + name if name in "abcdefg" else name for name in names]
    onnx.save(proto, model)
    return model


def test_names_cannot_command_a_terminal(call: Call, model: Path, tmp_path: Path) -> None:
    data = ["--calibration-data", hostile(model).with_suffix(".npz")]
    quick = ["--calibration-method", "minmax", "--no-bias-correction", "--engine", "fake", "--builds", "4"]
    for command in (["inspect", model, "-v"], ["tune", model, *data, *quick, "-v", "-o", tmp_path / "out"]):
        code, out, err = call(*command)
        assert code in (0, 3, 4), err
        assert {c for c in out + err if not c.isprintable()} <= {"\n"}
        assert not [line for line in (out + err).splitlines() if line.strip().startswith("broken")]
        assert SPELT in out or command[0] == "tune"  # which shows names of nodes where units have prices only
    code, out, _ = call("inspect", model, "--json")
    assert BROKEN in json.loads(out)["regions"][-1]["nodes"][0]


def test_a_console_takes_text_as_text() -> None:
    written = io.StringIO()
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE))
    table.add_row("[bold]plain[/bold]")
    with redirect_stdout(streams.SafeStream(written)):
        shown = output.console(width=200)
        shown.print(table)
        shown.print(HOSTILE)
        print(HOSTILE)
    assert written.getvalue().count(SPELT) == 5
    assert "[bold]plain[/bold]" in written.getvalue()
    assert {c for c in written.getvalue() if not c.isprintable()} <= {"\n"}


# A line for every candidate: its speed with the interval, all in times as fast as float, and why it is not taken
PAIR, OTHER = Placement.of([Edge("a")]), Placement.of([Edge("b")])
TIMED = Measurement((1.0,), (1.0,))
FASTER, BEST = Ratio(0.5, 0.4, 0.625), Ratio(0.8, 0.8, 0.8)


@pytest.mark.parametrize(
    ("term", "verbose", "moves"), [("xterm", False, True), ("xterm", True, False), ("dumb", False, False)]
)
def test_a_picture_follows_on_terminals_that_can_show_one(term, verbose, moves, monkeypatch):
    screen = StringIO()
    monkeypatch.setattr(
        progress, "console", lambda **_: Console(file=screen, force_terminal=True, _environ={"TERM": term})
    )
    with progress.shown(verbose=verbose) as live:
        live.stage("searching")
        live.progress(1, 2)
    assert ("\x1b[2K" in screen.getvalue()) is moves


def test_a_note_above_the_picture_breaks_between_words() -> None:
    screen = StringIO()
    with progress.Progress(Console(file=screen, force_terminal=True, width=40), is_moving=True) as live:
        live.note("the machine is busy, so that intervals will be wide")
    assert "note: the machine is busy, so that \nintervals will be wide\n" in screen.getvalue()


@pytest.mark.parametrize(
    ("outcome", "ratio", "best", "best_ratio", "against", "words"),
    [
        ("faster", FASTER, PAIR, 0.5, 1.0, "faster than the float model: the best so far"),
        ("faster", FASTER, OTHER, 0.45, 1.0, "faster than the float model, slower than the best so far"),
        ("undecided", FASTER, OTHER, 0.625, 0.625, "not taken: not clearly faster than the best before it"),
        ("undecided", FASTER, PAIR, 0.5, 0.52, "as fast as the best before it within noise, and more exact: the best"),
        ("slower", BEST, OTHER, 0.5, 0.5, "slower than the best before it"),
        ("inaccurate", FASTER, Placement(), 1.0, 1.0, "not taken: 20 dB"),
        ("failed", None, Placement(), 1.0, 1.0, "failed: no kernel"),
    ],
)
def test_a_line_says_how_fast_and_why_not(outcome, ratio, best, best_ratio, against, words):
    result = Failure("build", "no kernel") if ratio is None else TIMED
    opponent = Placement() if against == 1.0 else OTHER
    trial = Trial(3, Proposal("static", PAIR), opponent, result, accuracy=Accuracy(15.14))
    state = State(3, 11, best_ratio, best, 1.0, None, replayed=False, ratio=ratio, missed="20 dB")
    speed = "" if ratio is None else f"{ratio.speedup}, "
    line = progress.line(trial, outcome, state)
    assert line.startswith(f"   3   3/11 builds  best {1 / best_ratio:.2f}x  static: {speed}{words}")
    first = progress.line(trial, outcome, state, is_new=True)
    assert f"  static (pairs where quantize_static of ONNX Runtime places them): {speed}{words}" in first


@pytest.mark.parametrize(("best", "words"), [(PAIR, "cheaper by rule than the float model"), (OTHER, "not taken: not")])
def test_a_line_of_what_is_not_timed_says_its_costs(best: Placement, words: str) -> None:
    trial = Trial(3, Proposal("8 bits", PAIR), Placement(), CostsByRule(2.0, 1.0), accuracy=Accuracy(15.14))
    state = State(3, 11, 1.0, best, 1.0, None, replayed=False, timed=False)
    told = "   3   3/11 builds  8 bits: 0 nodes elsewhere, 0 tensors read in 16 bits, 15.1 dB, "
    assert progress.line(trial, "faster", state).startswith(told + words)


def test_steps_of_a_long_stage_are_told_now_and_then(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.shown() as observer:
        observer.stage("calibrating")
        for step in range(1, 26):
            now += 1.0
            observer.progress(step, 80)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating",
        "calibrating: 10 of 80, about 1 min 10 s left",
        "calibrating: 20 of 80, about 1 min 0 s left",
    ]


def test_long_cells_are_broken_between_words_and_numbers_stand_below_each_other(capsys: Any) -> None:
    path = "/".join(["folder"] * 12)
    output.show(
        shown.Table(("nodes", "file"), [(", ".join(f"/layer{n}/Conv" for n in range(30)), f"{path}, 4 threads")])
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 60 + len(path) + 30
    assert f" {path}, 4 threads" in lines[3]
    assert [word.rstrip(",") for line in lines[3:] for word in line.split() if "Conv" in word][-1] == "/layer29/Conv"
    output.show(shown.Table(("model", "ms"), [("a.onnx", "9.5"), ("b.onnx", "1234.5")]))
    *_, one, other = [line.rstrip() for line in capsys.readouterr().out.splitlines() if ".onnx" in line]
    assert len(one) == len(other)
