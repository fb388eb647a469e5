"""What tests of several commands share: the commands by name, running one, a short search, and what an error prints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qdqtune.autotune import __main__ as autotune
from qdqtune.cli import main
from qdqtune.cli.command import Command
from runs import contents

COMMANDS: dict[str, Command] = {name: later.command for name, later in main.app.commands.items()}
QUICK = ("--engine", "fake", "--builds", "7")
UNCHECKED = ("--min-sqnr", "none")
"""Pairs ship without samples."""


def exit_code(*arguments: object) -> int:
    """Run a command line in this process. The command `autotune` is `python -m qdqtune.autotune`."""
    words = [str(a) for a in arguments]
    program = autotune.main if words[:1] == ["autotune"] else main.main
    with pytest.raises(SystemExit) as end:
        program(words[1:] if program is autotune.main else words)
    return end.value.code


def errors(found: tuple[int, str, str]) -> tuple[int, str]:
    """Code and error of a run that failed: nothing on standard output, and one line at the end of standard error."""
    code, out, err = found
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("error: ")
    assert not any(line.startswith(("error", "Traceback", " ")) for line in before)
    return code, last.removeprefix("error: ")


def is_refused(call: Callable[..., tuple[int, str, str]], folder: Path, words: str, *arguments: object) -> str:
    """The command ends with one line and code 2, which is returned, and nothing in the folder has changed."""
    before = contents(folder)
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), (arguments, err)
    assert words in err
    (error,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "Traceback" not in err
    assert contents(folder) == before, arguments
    return error
