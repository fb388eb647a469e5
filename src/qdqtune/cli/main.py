"""The command line: imports a command's module only when it runs, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import shell_complete

from qdqtune.cli.output import console, say, say_error
from qdqtune.cli.streams import BEGUN, INTERRUPTED, end_with_parent, guarded, interrupts, lost_output
from qdqtune.errors import QdqtuneError
from qdqtune.version import __version__

if TYPE_CHECKING:
    from qdqtune.cli.command import Command

DEFECT = 70

EXIT_CODES = {
    0: "Done.",
    2: "Wrong usage, bad input, or an output that cannot be written; one line says what to do.",
    3: "Nothing faster was found, and all files are written; of `verify`: it cannot tell.",
    4: "A limit that you set is not held; `check`, `debug`, `doctor` or `verify` found something.",
    5: "The engine is not available, or cannot run the float model or a file to compare.",
    DEFECT: "A defect of qdqtune.",
    INTERRUPTED: "Interrupted.",
}
"""The meaning of the exit codes of all commands."""

COMPLETING = "_QDQTUNE_COMPLETE"
"""The environment variable of click: `_QDQTUNE_COMPLETE=bash_source qdqtune` prints what makes bash complete options,
and the shell asks for completions with it."""

SILENT = frozenset({"-q", "--quiet", "-h", "--help", "--help-all"})
"""Flags with which `tune` shows no progress."""

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --timing_runs is --timing-runs
}


def main(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "qdqtune"
) -> NoReturn:
    """Run the command line (or another `command`) and exit with one of `EXIT_CODES`."""
    begun = time.monotonic()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if (asked := os.environ.get(COMPLETING)) and command is None:
        sys.exit(shell_complete(app, {}, name, COMPLETING, asked))
    end_with_parent()
    with guarded(), interrupts() as interrupted:
        try:
            code = _run(command or app, name, given, interrupted, begun)
            if (lost := lost_output()) is not None:
                code = _failed(f"cannot write to standard output: {lost.strerror or lost}", 2)
        except KeyboardInterrupt:  # while an error was being printed
            code = INTERRUPTED
    sys.exit(code)


def _run(command: click.Command, name: str, given: Sequence[str], interrupted: Event, begun: float) -> int:
    try:
        with command.make_context(name, list(given), obj=(name, *given)) as context:
            context.meta[BEGUN] = begun
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        asked = getattr(error, "ctx", None)
        hint = f" (see {asked.command_path} --help)" if asked is not None else ""
        return _failed(error.format_message().rstrip(".") + hint, 2)
    except QdqtuneError as error:
        return _failed(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return INTERRUPTED
    except OSError as error:
        return _failed(str(error), 2)
    except MemoryError:
        return _failed("there is not enough memory for this", 2)
    except Exception:  # noqa: BLE001  (a defect: shown whole, and never mistaken for one of the promised codes)
        if interrupted.is_set():  # inside of a library that made another error of it
            say("interrupted")
            return INTERRUPTED
        console(is_error=True).print_exception()
        return _failed("this is a defect of qdqtune: please report it with the lines above", DEFECT)


def _failed(text: str, code: int) -> int:
    say_error(text)
    return code


class Later(click.Command):
    """A command whose module is imported only when it runs or is completed by the shell. `summary` is for lists."""

    def __init__(self, name: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._module = f"qdqtune.cli.{'tune' if name in ('tune', 'run') else 'commands'}"

    @property
    def command(self) -> Command:
        command: Command = getattr(importlib.import_module(self._module), f"{self.name}_command")
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # The module of `tune` takes a second to import: a word appears before, but not while a shell completes a line.
        is_run = SILENT.isdisjoint(args) and not extra.get("resilient_parsing")
        if self.name == "tune" and self._module not in sys.modules and is_run:
            print("starting", file=sys.stderr)
        return self.command.make_context(info_name, args, parent, **extra)


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="qdqtune")
def app() -> None:
    """Find where Q/DQ pairs belong in an ONNX model, by measuring on the engine that you deploy on.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz
    """


SUMMARIES = {
    "tune": "Find the fastest Q/DQ placement for MODEL.",
    "apply": "Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, no timing.",
    "build": "Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized "
    "ONNX file.",
    "compare": "Time every other of FILES against the first, in the same rounds on fresh builds of all.",
    "quantize": "Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and no timing.",
    "inspect": "Show what MODEL holds: inputs and outputs, operators, and what keeps it from running in 8 bits.",
    "check": "Check that the engine fuses the Q/DQ pairs of MODEL, and say what it does not fuse and why.",
    "debug": "Find which tensor breaks the outputs of a quantized model.",
    "doctor": "Show which engines work on this machine, on what hardware, and what to install for the others.",
    "explain": "Explain a finished run: why each node runs in 8 bits or in float, and what it takes.",
    "report": "Write the report of a finished run: one HTML file that works offline and makes no request.",
    "verify": "Say whether what a run has proven holds on this machine.",
    "run": "Tune the models that a YAML file names, and say at the end what became of each.",
}
"""The first sentence of each command's help, so that lists of commands need no import."""

for _name, _summary in SUMMARIES.items():
    app.add_command(Later(_name, _summary))
