"""`qdqtune run`: jobs of `tune` from a YAML file, all checked before the first one begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from qdqtune.cli.command import Terminal, command
from qdqtune.cli.fleet import Job, run_jobs
from qdqtune.cli.tune import TuneArguments
from qdqtune.commands.inputs import check_options
from qdqtune.engines.options import WorkerOptions
from qdqtune.errors import BadOption, InputError, one_line
from qdqtune.options import FILE, REQUIRED, File, flags_of, option, options_of
from qdqtune.placement.files import parsed_yaml

MOST_CHARACTERS = 300
"""Most characters of what is said of a wrong value: a file may hold any text."""

KEYS = {"model": "model"} | {
    flag.lstrip("-"): name for name, flag in flags_of(TuneArguments).items() if name not in options_of(Terminal)
}
"""The options of `tune`, by flag without dashes."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A jobs file: options of `tune` for each job, and for all of them."""

    jobs: Annotated[list[Any], msgspec.Meta(min_length=1)]
    defaults: Any = msgspec.field(default_factory=dict)


@dataclass(kw_only=True)
class RunOptions(Terminal, WorkerOptions):
    """The options of `run`."""

    file: File = option(FILE, REQUIRED, "The YAML file.", is_positional=True, metavar="FILE")


@command(RunOptions)
def run_command(options: RunOptions) -> int:
    """Tune the models that a YAML file names, and say at the end what became of each.

    `jobs` is a list of options of tune by name, with a `model` each; `defaults` are options for all of them. A job that
    fails does not end the others, and the same command goes on where it was stopped. The exit code is that of the worst
    job. With --workers, so many models are tuned at a time, each on a GPU or cores of its own. A jobs file is as a
    command line: it may name code that is run (evaluate, calibration-data, trtexec).

    \b
    qdqtune run jobs.yaml --json
    qdqtune run jobs.yaml --workers 4 --cores-per-worker 2
    """
    return run_jobs(read_jobs(options.file), options, options)


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file: `defaults` for all, and `jobs`, a list of options by name with a `model` each.

    Raises:
        BadOption: it cannot be read, is no such file, or holds what `qdqtune tune` would refuse at its start.
    """
    try:
        file = msgspec.convert(parsed_yaml(path, "jobs"), _File)
    except msgspec.ValidationError as error:
        raise BadOption(
            f"{path} names no jobs ({one_line(error)}): give `jobs:`, a list of jobs, which are "
            "options by name with a `model` each, and `defaults:`, options for all"
        ) from error
    defaults = _values(file.defaults, f"{path}, defaults")
    if "model" in defaults:
        raise BadOption(f"{path}, defaults: each job names its own model")
    jobs = []
    for number, given in enumerate(file.jobs, 1):
        where = f"{path}, job {number}"
        own = _values(given, where)
        model = own.get("model")
        if not isinstance(model, str):
            raise BadOption(f"{where} has no model: give the name of a file")
        usual = {"output_dir": f"{Path(model).stem}_tuned"}
        try:
            options = TuneArguments(**(usual | defaults | own))
            check_options(options)
            options.spec()
        except (InputError, OSError) as error:
            raise BadOption(f"{where} ({model:.100}): {error!s:.{MOST_CHARACTERS}}") from error
        jobs.append(Job(options))
    return jobs


def _values(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadOption(f"{where} takes options by name, not {given!r:.60}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        word = "on" if key is True else str(key).replace("_", "-")  # YAML reads the key `on` as true
        name = KEYS.get(word)
        if name is None:
            raise BadOption(f"{where}: there is no option {key!r:.60}: keys are those of qdqtune tune --help-all")
        if name in values:
            raise BadOption(f"{where}: {word} comes twice")
        if value is None:
            raise BadOption(f"{where}: {word} takes a value, not nothing")
        values[name] = value
    return values
