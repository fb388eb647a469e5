"""The command line: a command is imported when it is run, and an error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from qdqtune.cli.output import INTERRUPTED, say, say_error, say_exception
from qdqtune.errors import QdqtuneError
from qdqtune.version import __version__

DEFECT = 70

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --timing_runs is --timing-runs
}


def main(
    arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "qdqtune"
) -> NoReturn:
    """Run the command line (or another `command`) and exit: 0 done, 2 usage or bad input, 3 no improvement, 4 a
    constraint unmet, 5 engine unavailable or baseline failed, 70 a defect of qdqtune, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        run = command or app
        # `run.main` would turn a closed pipe into code 1.
        with run.make_context(name, given, obj=(name, *given)) as context:
            code = run.invoke(context)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as done:  # --help and --version
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        asked = getattr(error, "ctx", None)
        hint = f" (see {asked.command_path} --help)" if asked is not None else ""
        _fail(error.format_message().rstrip(".") + hint, 2)
    except QdqtuneError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        sys.exit(0)
    except OSError as error:
        _drop_output()
        _fail(str(error), 2)
    except Exception:  # noqa: BLE001  (a defect: shown whole, and never mistaken for one of the promised codes)
        say_exception()
        _fail("this is a defect of qdqtune: please report it with the lines above", DEFECT)


def _fail(text: str, code: int) -> NoReturn:
    say_error(text)
    sys.exit(code)


def _drop_output() -> None:
    """Forget what cannot be written any more, or the interpreter would try it again at its end and fail."""
    with contextlib.suppress(io.UnsupportedOperation):  # standard output was replaced by something in memory
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Later(click.Command):
    """A command whose module is imported when it is run or completed: lists of commands need its summary only."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._module = module

    @property
    def command(self) -> click.Command:
        """The command itself: `tune_command` in the module of tune."""
        command: click.Command = getattr(importlib.import_module(self._module), f"{self.name}_command")
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """A context of the command itself, so that it is what runs."""
        return self.command.make_context(info_name, args, parent, **extra)


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="qdqtune")
def app() -> None:
    """Find where Q/DQ pairs belong in an ONNX model, by measuring on the engine that you deploy on.

    \b
    qdqtune tune model.onnx --calibration-data samples.npz    search, prove, write optimized_final.onnx
    qdqtune quantize model.onnx --calibration-data data.npz   pairs by rules, without a search
    qdqtune compare a.onnx b.onnx                             time your own files against each other
    qdqtune explain qdqtune_output '/layer1/*'                why nodes run in 8 bits or in float
    qdqtune report qdqtune_output                             what a search found, as one HTML file
    qdqtune apply model.onnx --placement placement.yaml       the same pairs on retrained weights
    qdqtune inspect model.onnx                                regions and patterns of a model
    qdqtune layers model.onnx                                 what the engine made of it, layer by layer
    qdqtune check quantized.onnx                              which pairs the engine does not fuse, and why
    qdqtune debug model.onnx quantized.onnx                   which tensor breaks the outputs
    qdqtune build model.onnx -o model.engine                  save the engine's own format
    qdqtune doctor                                            which engines are usable here
    """


SUMMARIES = {
    "tune": {"tune": "Find the fastest Q/DQ placement for MODEL."},
    "quantize": {
        "quantize": "Quantize MODEL by placement rules: calibrated Q/DQ pairs in one pass, with no search and "
        "no timing.",
        "rules": "List the placement rules of quantize: what each does, why, for which engines, and who says so.",
    },
    "files": {
        "compare": "Time every other of FILES against the first, in interleaved rounds on two fresh builds of both.",
        "apply": "Put the Q/DQ pairs of an earlier search into MODEL, with scales calibrated anew: no search, "
        "no timing.",
    },
    "explain": {
        "explain": "Explain a finished run: why each node runs in 8 bits or in float, and what the other way would "
        "cost."
    },
    "debug": {
        "debug": "Find which tensor breaks the outputs of a quantized model, or which nodes an engine computes wrongly."
    },
    "pages": {"report": "Write the report of a finished run: one HTML file that works offline and makes no request."},
    "inspect": {"inspect": "Show how MODEL divides into regions, and which of them share a pattern."},
    "layers": {
        "layers": "Show what the engine makes of MODEL: its layers in order, the nodes that each covers, and how long "
        "each takes."
    },
    "engines": {
        "build": "Build MODEL, and save it in the engine's own format: a TensorRT plan, an OpenVINO IR, an optimized "
        "ONNX file.",
        "check": "Check that the engine fuses the Q/DQ pairs of MODEL, and say what it does not fuse and why.",
        "doctor": "Show which engines work on this machine, on what hardware, and what to install for the others.",
    },
}
"""Module to its commands, each with the first sentence of its help: lists of commands show it without an import."""

for _module, _commands in SUMMARIES.items():
    for _name, _summary in _commands.items():
        app.add_command(Later(_name, f"qdqtune.cli.{_module}", _summary))
