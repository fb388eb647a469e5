"""Commands made of options: their help and completion, wrong usage, and what is typed twice."""

import pytest
from click import Argument, Command, Group

from command_lines import COMMANDS, is_refused
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


def test_a_shell_that_asks_is_answered(monkeypatch, call):
    for name, value in {"COMP_WORDS": "qdqtune tune --dry", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_QDQTUNE_COMPLETE", "bash_complete")
    assert call() == (0, "plain,--dry-run\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'MODEL'"),
        (["m", "--nonsense"], "No such option '--nonsense'"),
        (["m", "--time-budget", "0s"], "'0s' is no duration"),
        (["m", "--time-limit", "9999999h"], "'9999999h' is longer than a year"),
        (["m", "--calibration-method", "percentile:nan"], "'nan' is no finite number"),
        (["m", "--min-sqnr", "inf"], "'inf' is no finite number"),
        (["m", "--min-sqnr=-1e308"], "up to 1000"),
        (["m", "--threads", "9999999999999999"], "'9999999999999999' is no number of threads"),
        (["m", "--input-shape", "1x3"], "'1x3' is no shape"),
        (["m", "--fix-input", "sr"], "'sr' fixes nothing"),
        (["m", "--engine-option", "noise"], "'noise' sets nothing"),
        (["m", "--builds", "1"], "--builds 1 leaves no candidate"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_refused(call, tmp_path, words, "tune", *arguments)
    assert list(tmp_path.iterdir()) == []
