"""Commands made of options: their help, wrong usage, and what is typed twice."""

import pytest
from click import Argument, Command, Group

from command_lines import COMMANDS
from qdqtune.cli import main


def test_an_option_that_is_given_twice_is_told(call):
    typed = ("--min-sqnr", 20, "--min_sqnr", 30, "--fix-input", "a=1", "--fix-input", "b=1")
    said = [line for line in call("tune", "missing.onnx", *typed)[2].splitlines() if line.startswith("note: ")]
    assert said == ["note: --min-sqnr is given more than once: the last one counts"]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_every_option(command, call):
    code, out, err = call(*filter(None, [command]), "--help")
    assert (code, err) == (0, "")
    shown: Command | Group = COMMANDS[command] if command else main.app
    for option in shown.params:
        assert all(name in out for name in option.opts if name.startswith("-"))
    if command is None:
        assert all(f"  {name} " in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 110
    if command is not None:
        assert all(name in out for name in ("--json", "--quiet", "--verbose", "--help-all"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_page_of_80_columns_and_the_whole_explains_every_option(command, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 61
    assert max(map(len, out.split("\nOutput:\n")[1].splitlines())) <= 80
    assert "<=x" not in out
    _, everything, _ = call(command, "--help-all")
    told = " ".join(everything.split())
    for option in COMMANDS[command].params:
        assert isinstance(option, Argument) or " ".join(option.own.help.split()[:3]).partition("`")[0] in told


def test_the_first_page_of_tune_has_what_most_runs_need(call):
    _, out, _ = call("tune", "--help")
    explained = [line for line in out.splitlines() if line.startswith("  -")]
    assert len(explained) <= 20
    assert len([one for one in COMMANDS["tune"].params if not isinstance(one, Argument)]) <= 45  # and --help
    for name in ("--labels", "--metric", "--max-drop", "--calibration-data", "--time-budget"):
        assert any(line.startswith(f"  {name} ") for line in explained)


def test_quiet_is_for_every_command(call, model):
    code, _, err = call(
        "compare", model, model, "--engine", "fake", "-q", "--calibration-data", model.with_suffix(".npz")
    )
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'MODEL'"),
        (["m", "--nonsense"], "No such option '--nonsense'"),
        (["m", "--effort", "huge"], "'huge' is not one of"),
        (["m", "--time-budget", "3 days"], "'3 days' is no duration"),
        (["m", "--time-budget", "0s"], "'0s' is no duration"),
        (["m", "--time-limit", "9999999h"], "'9999999h' is longer than a year"),
        (["m", "--calibration-method", "percentile:nan"], "'nan' is no finite number"),
        (["m", "--min-sqnr", "inf"], "'inf' is no finite number"),
        (["m", "--min-sqnr=-1e308"], "up to 1000"),
        (["m", "--evaluate", "a:b", "--max-drop", "nan"], "'nan' is no finite number"),
        (["m", "--threads", "9999999999999999"], "'9999999999999999' is no number of threads"),
        (["m", "--input-shape", "1x3"], "'1x3' is no shape"),
        (["m", "--fix-input", "sr"], "'sr' fixes nothing"),
        (["m", "--engine-option", "noise"], "'noise' sets nothing"),
        (["m", "--builds", "1"], "--builds 1 leaves no candidate"),
        (["m", "--seed", "1.5"], "--seed: '1.5' is no whole number from 0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("tune", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []
