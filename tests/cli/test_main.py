"""The command line as a user meets it: options, exit codes, one line for every bad input, and what goes where."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from click import Argument

from command_lines import COMMANDS, QUICK, UNCHECKED, errors, is_refused
from qdqtune.cli import main, tune
from qdqtune.options import options_of
from runs import environment, hopeless, room_for, write


def test_the_summary_of_a_command_is_the_beginning_of_its_help():
    for name, later in main.app.commands.items():
        assert later.get_short_help_str(95) == COMMANDS[name].get_short_help_str(95)
        assert later.name == COMMANDS[name].name


@pytest.mark.parametrize("arguments", [["--help"], ["tuen"]])
def test_what_runs_no_command_imports_none(arguments):
    code = f"""
import sys
from qdqtune.cli import main
try:
    main.main({arguments})
finally:
    print(*sys.modules, file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    loaded = set(done.stderr.split())
    assert "qdqtune.cli.main" in loaded
    assert not loaded & {"numpy", "onnx", "scipy", "onnxruntime", "qdqtune.options", "qdqtune.engines"}


@pytest.mark.parametrize(("more", "words"), [([], "starting\ninterrupted\n"), (["-q"], "interrupted\n")])
def test_a_word_appears_before_the_module_of_a_search_is_imported(more, words, call, monkeypatch):
    monkeypatch.delitem(sys.modules, "qdqtune.cli.tune")
    monkeypatch.setattr(main.importlib, "import_module", Mock(side_effect=KeyboardInterrupt))
    assert call("tune", "model.onnx", *more) == (130, "", words)


def test_words_that_are_no_command(call):
    code, out, err = call("--version")
    assert (code, err) == (0, "")
    assert out.startswith("qdqtune, version ")
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert all(f"  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 110
    code, out, err = call()
    assert code == 2
    assert "Usage:" in out + err
    assert re.fullmatch(r"error: No such command 'tuen'.* \(see qdqtune --help\)\n", call("tuen")[2])


def test_compare_refuses_one_file_and_files_of_other_inputs(call, tuned, model):
    assert errors(call("compare", tuned))[0] == 2
    code, error = errors(call("compare", tuned, write(hopeless(), model.parent, "other"), "--engine", "fake"))
    assert code == 2
    assert "takes other inputs (x: float32[2,8]) than" in error
    assert error.rstrip().endswith("compare is for versions of one model, which take the same inputs")


def test_an_output_folder_that_cannot_be(call, model, tmp_path):
    (tmp_path / "taken").write_text("a file")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "sub"):
        is_refused(call, tmp_path, f"cannot write to {folder}", "tune", model, *QUICK, "-o", folder)


@pytest.mark.parametrize("wrong", [("tensor: a", "tensor: 5"), ("input: 0", "input: first"), ("int8", "int3")])
def test_a_placement_that_cannot_be_read(wrong, call, model, tmp_path):
    path = tmp_path / "earlier.yaml"
    placed = "version: 1\nengine: fake\nquant_type: int8\nedges: [{tensor: a, node: first, input: 0}]"
    path.write_text(placed.replace(*wrong))
    is_refused(call, tmp_path, str(path), "apply", model, "--placement", path)


def test_json_is_all_that_goes_to_standard_output(call, tuned, tmp_path):
    data = ["--calibration-data", tuned.with_suffix(".npz")]
    out = tuned.parent / "out"
    code, printed, _ = call("tune", tuned, *QUICK, *data, "-o", out, "--json")
    assert code == 0
    told = json.loads(printed)
    assert all(isinstance(note, str) for note in told.pop("notes"))
    assert told == json.loads((out / "summary.json").read_text())
    code, printed, _ = call("tune", tuned, *QUICK, *data, "-o", tmp_path / "dry", "--dry-run", "--json")
    assert code == 0
    told = {"regions", "patterns", "builds", "latency", "seconds", "notes"}
    assert json.loads(printed).keys() == told
    target = tmp_path / "made.onnx"
    code, printed, _ = call("apply", tuned, "--placement", out / "placement.yaml", *data, "-o", target, "--json")
    assert code == 0
    applied = json.loads(printed)
    assert applied.pop("accuracy")["sqnr_db"] > 20
    assert applied.pop("scores_told").startswith("no scores of classes recognised in y")
    edges = json.loads((out / "summary.json").read_text())["edges"]
    assert applied == {"output": str(target), "edges": edges, "lost": [], "scores": []}


def test_a_defect_is_code_70_with_its_traceback(monkeypatch, call):
    monkeypatch.setattr(tune, "tune", Mock(side_effect=ZeroDivisionError("unexpected")))
    code, out, err = call("tune", "m.onnx")
    assert (code, out) == (70, "")
    assert "ZeroDivisionError: unexpected" in err
    assert err.splitlines()[-1].startswith("error: this is a defect of qdqtune")


def test_a_time_budget_counts_from_the_start_of_the_program(monkeypatch, call):
    stop = Mock(side_effect=KeyboardInterrupt)
    entered = time.monotonic() - 20.0
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: entered))
    monkeypatch.setattr("qdqtune.tuning.run.Execution", stop)
    for budget, left in (("60s", 40.0), ("10s", -10.0)):
        assert call("tune", "m.onnx", "--time-budget", budget)[0] == 130
        assert stop.call_args.args[1] - time.monotonic() == pytest.approx(left, abs=5.0)


SLOW = ("--engine", "fake", "--builds", "12", "--engine-option", "build_seconds=0.1", "--calibration-method", "minmax",
        "--no-bias-correction", "--no-report", *UNCHECKED)  # fmt: skip


def test_ctrl_c_is_code_130_and_the_same_command_goes_on(model, tmp_path, call):
    command = ["tune", model, *SLOW, "-o", tmp_path / "out"]
    words, terminal = map(str, command), environment() | {"TERM": "xterm-256color", "COLUMNS": "100"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "qdqtune", *words], env=terminal, **pipes)
    seen = []
    while " builds  best " not in (seen or [""])[-1]:
        seen.append(process.stderr.readline().decode())
        assert seen[-1], seen
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (main.INTERRUPTED, b"")
    said = "interrupted: the same command goes on from what was measured; an unfinished calibration begins anew"
    assert err.decode().splitlines()[-1] == said
    assert b"Traceback" not in err
    code, _, again = call(*command)
    assert code == 0
    assert again.count("from the state file") >= 1


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_is_one_line_and_code_2(again, tuned, tmp_path, call):
    """A limit on the size of files does to a write what a full disk does: here to the weights of the float model."""
    out = tmp_path / "out"
    if again:  # the ranges are in the state file
        out.mkdir()
        shutil.copy(tuned.parent / "out" / "autotuner_state.yaml", out)
    with room_for(50_000):
        code, printed, err = call(
            "tune", tuned, *QUICK, "--calibration-data", tuned.with_suffix(".npz"), "-o", out, "-q"
        )
    assert (code, printed) == (2, "")
    assert re.fullmatch(rf"error: cannot write {re.escape(str(out))}\S*: File too large; .*\n", err)


# Commands made of options: their help and completion, and wrong usage
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_page_of_80_columns_and_the_whole_explains_every_option(command, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 61
    assert max(map(len, out.split("\nOutput:\n")[1].splitlines())) <= 80
    assert "<=x" not in out
    told = " ".join(call(command, "--help-all")[1].split())
    for option in options_of(COMMANDS[command].kind).values():
        if option.group:
            assert all(name in out for name in option.spellings)
            assert " ".join(option.help.split()[:3]).partition("`")[0] in told


def test_help_is_a_value_behind_an_option_that_takes_one(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for asked in ("--help", "--help-all"):
        is_refused(call, tmp_path, "cannot read the model m.onnx", "tune", "m.onnx", "--output-dir", asked)
        assert call("tune", "m.onnx", "--builds", "x", asked)[0] == 0


def test_the_first_page_of_tune_has_what_most_runs_need(call):
    _, out, _ = call("tune", "--help")
    explained = [line for line in out.splitlines() if line.startswith("  -")]
    assert len(explained) <= 20
    assert len([one for one in COMMANDS["tune"].params if not isinstance(one, Argument)]) <= 45  # and --help
    for name in ("--labels", "--metric", "--max-drop", "--calibration-data", "--time-budget"):
        assert any(line.startswith(f"  {name} ") for line in explained)


def test_a_shell_that_asks_is_answered(monkeypatch, call):
    for name, value in {"COMP_WORDS": "qdqtune tune --dry", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_QDQTUNE_COMPLETE", "bash_complete")
    monkeypatch.delitem(sys.modules, "qdqtune.cli.tune")  # as in a fresh process
    monkeypatch.setattr(main.importlib, "import_module", lambda _: tune)
    assert call() == (0, "plain,--dry-run\n", "")


@pytest.mark.parametrize("command", [("doctor",), ("doctor", "--qualify"), ("check", "m.onnx")])
def test_an_engine_that_does_not_exist_is_refused_by_every_command(command, call, tmp_path):
    is_refused(call, tmp_path, "unknown engine 'nope'; there are cuda, fake", *command, "--engine", "nope")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'MODEL'"),
        (["m", "--num-threads", "1"], "No such option '--num-threads'. Did you mean '--threads'?"),
        (
            ["m", "--calib", "a.npz"],
            "No such option '--calib'. Did you mean '--calibration-data' or '--calibration-cache'",
        ),
        (["m", "--effort"], "Option '--effort' requires an argument: quick|default|extensive (see"),
        (["m", "--time-limit", "9999999h"], "'9999999h' is no duration up to a year"),
        (["m", "--calibration-method", "percentile:nan"], "'nan' is no number"),
        (["m", "--min-sqnr=-1e308"], "is no number from -1000 up to 1000 or auto or none"),
        (["m", "--min-sqnr", "20dB"], "up to 1000 or auto or none: give 20 alone"),
        (["m", "--min-agreement", "98"], "is no number from 0 up to 1 or auto or none: 0.98 is 98 %"),
        (["m", "--max-drop", "1%"], ": 0.01 is 1 %"),
        (["a.npz"], "error: MODEL: a.npz is no ONNX file"),
        (["m", "--threads", "8", "1"], "several values of one option are parted by commas, like 8,1"),
        (["m", "--bias-correction", "off"], "takes no value: give --bias-correction alone, or --no-bias"),
        (["m", "--bias_correction", "off"], "takes no value: give --bias-correction alone, or --no-bias"),
        (["m", "--no-bias-correction", "off"], "takes no value: give --no-bias-correction alone, or --bias"),
        (["m", "--quiet=True"], "--quiet takes no value: give --quiet alone, or leave it out"),
        (["m", "--engine", "TensorRT"], "tensorrt-rtx, trtexec"),
        (["m", "--threads", "9999999999999999"], "'9999999999999999' is no whole number from 1 up to 9999"),
        (["m", "--input-shape", "1x3"], "'1x3' is no shape"),
        (["m", "--fix-input", "sr"], "'sr' gives nothing a value"),
        (["m", "--engine-option", "noise"], "'noise' gives nothing a value"),
        (["m", "--engine-option", "threads=abc"], "option 'threads' of engine 'onnxruntime' wants a whole number, not"),
        (["m", "--builds", "1"], "--builds 1 leaves no candidate"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_refused(call, tmp_path, words, "tune", *arguments)
    assert list(tmp_path.iterdir()) == []
