"""`qdqtune run`: jobs of `tune` from a YAML file, all checked before the first one begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from qdqtune.cli.command import JSON_FOR_TABLE, command
from qdqtune.cli.jobs import Job, run_jobs, worst
from qdqtune.cli.tune import tune_command
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines.options import WorkerOptions
from qdqtune.errors import BadOption, InputError, one_line
from qdqtune.options import FILE, REQUIRED, File, Number, option, options_of
from qdqtune.placement.files import parsed_yaml

MOST_JOBS = 1000
"""Most jobs of one file. Chosen, not measured."""
MOST_CHARACTERS = 100_000
"""Most characters of one command line: fewer than operating systems allow."""

TEXT = r"[^\0\ud800-\udfff]+$"
"""Text that an argument of a program can be: not empty, no NUL, no unpaired surrogate."""

Text = Annotated[str, msgspec.Meta(pattern=f"^{TEXT}")] | int | float
Model = Annotated[str, msgspec.Meta(pattern=f"^(?!-){TEXT}")]
Given = dict[str, Any]

KNOWN = {
    name[2:]: known
    for known in tune_command.params
    if isinstance(known, click.Option)
    for name in (*known.opts, *known.secondary_opts)
    if name.startswith("--")
}
"""The options of `tune` by their long flags, without dashes."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A jobs file: options of `tune` for each job, and for all of them."""

    jobs: Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MOST_JOBS)]
    defaults: Any = msgspec.field(default_factory=dict)


@dataclass(kw_only=True)
class RunOptions(WorkerOptions):
    """The options of `run`."""

    file: File = option(FILE, REQUIRED, "The YAML file.", is_positional=True)


@command("run", RunOptions, JSON_FOR_TABLE)
def run_command(options: RunOptions, as_machine: bool) -> int:
    """Tune the models that a YAML file names, and say at the end what became of each.

    `jobs` is a list of options of tune by name, with a `model` each; `defaults` are options for all of them. A job that
    fails does not end the others, and the same command goes on where it was stopped. The exit code is that of the worst
    job. With --workers, so many models are tuned at a time, each on a GPU or cores of its own. A jobs file is as a
    command line: it may name code that is run (evaluate, calibration-data, trtexec).

    \b
    qdqtune run jobs.yaml --json
    qdqtune run jobs.yaml --workers 4 --cores-per-worker 2
    """
    return worst(run_jobs(read_jobs(options.file), options, as_machine=as_machine))


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file: `defaults` for all, and `jobs`, a list of options by name with a `model` each.

    Raises:
        BadOption: it cannot be read, is no such file, or holds what `qdqtune tune` would refuse at its start.
    """
    try:
        file = msgspec.convert(parsed_yaml(path, "jobs"), _File)
    except msgspec.ValidationError as error:
        raise BadOption(
            f"{path} names no jobs ({one_line(error)}): give `jobs:`, a list of 1 to {MOST_JOBS} jobs, which are "
            "options by name with a `model` each, and `defaults:`, options for all"
        ) from error
    defaults = _options(file.defaults, f"{path}, defaults", is_job=False)
    made = []
    for number, given in enumerate(file.jobs, 1):
        own = _options(given, f"{path}, job {number}", is_job=True)
        if "model" not in own:
            raise BadOption(f"{path}, job {number} has no model: give the name of a file")
        (model,) = own.pop("model")
        usual = {"output-dir": [f"{Path(model).stem}_tuned"]}
        made.append(_job(model, {**usual, **defaults, **own}, f"{path}, job {number} ({model:.100})"))
    return made


def _options(given: Any, where: str, *, is_job: bool) -> dict[str, list[Any]]:
    """The values of options by their long flags; a job has a model as well."""
    made: dict[str, list[Any]] = {}
    if isinstance(given, dict) and True in given:  # YAML reads the key `on` so
        given = {"on" if key is True else key: value for key, value in given.items()}
    for key, value in _converted(given, Given, "options by name", where).items():
        name = key.replace("_", "-")
        known = KNOWN.get(name)
        if known is None and not (is_job and name == "model"):
            raise BadOption(f"{where}: there is no option {key!r:.60}: keys are those of qdqtune tune --help-all")
        if name in made:
            raise BadOption(f"{where}: {name} comes twice")
        values = value if known is not None and known.multiple and isinstance(value, list) else [value]
        made[name] = [_converted(one, *_type_of(known), f"{where}: {name}") for one in values]
    return made


def _type_of(known: click.Option | None) -> tuple[Any, str]:
    """The type of an option (or of the model) in a jobs file, and its name for people. The option itself checks the
    value."""
    if known is None:
        return Model, "the name of a file that does not begin with -"
    if known.is_flag:
        return bool, "true or false"
    if isinstance(known.type, click.types.IntParamType):
        return int, "a whole number"
    return (float, "a number") if type(known.type) is Number else (Text, "text (true, off, no in quotes)")


def _converted(value: Any, wanted: Any, words: str, where: str) -> Any:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        shown = "nothing" if value is None else repr(value)
        raise BadOption(f"{where} takes {words}, not {one_line(shown, 60)}") from error


def _job(model: str, given: Mapping[str, list[Any]], where: str) -> Job:
    """Make a job, after `tune` has parsed its command line.

    Raises:
        BadOption: `tune` does not take it.
    """
    arguments = tuple(_words(given))
    if len(model) + sum(map(len, arguments)) > MOST_CHARACTERS:
        raise BadOption(f"{where}: its options have more than {MOST_CHARACTERS:,} characters")
    try:
        context = tune_command.make_context("tune", [*arguments, "--", model])
        own = {name: value for name, value in context.params.items() if name in options_of(TuneOptions)}
        return Job(model, arguments, TuneOptions(**own).spec())
    except click.ClickException as error:
        raise BadOption(f"{where}: {error.format_message().rstrip('.')}") from error
    except (InputError, OSError) as error:
        raise BadOption(f"{where}: {error}") from error


def _words(given: Mapping[str, list[Any]]) -> Iterator[str]:
    """Options as arguments of a command line. A switch that is false becomes its negative flag, if it has one."""
    for name, values in given.items():
        known = KNOWN[name]
        for value in values:
            if not known.is_flag:
                yield f"--{name}={value}"
                continue
            same = f"--{name}" in known.opts
            yield from (known.opts if same == value else known.secondary_opts)[:1]
