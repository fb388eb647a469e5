"""`qdqtune tune` of several models: a job for each, with the options that all of them were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from qdqtune.cli.command import command_line, is_quiet
from qdqtune.cli.jobs import Job, Wanted, run_jobs
from qdqtune.cli.output import say
from qdqtune.commands.inputs import MODEL
from qdqtune.commands.tune import TuneOptions
from qdqtune.errors import BadOption
from qdqtune.options import Several, options_of

OWN = ("output_dir", "as_machine", "workers", "cores_per_worker", "ray")
"""Options that a job does not get as they were typed."""

SINGLE = ("state_file", "qdq_baseline", "graph_json")
"""Options that name something of one model."""


class Models(Several):
    """One file is what it is; folders of models and several files are many models."""

    name = "path"
    typed = MODEL

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | tuple[Path, ...]:
        """See click."""
        given = [value] if isinstance(value, str | Path) else [*(value or ())]
        paths = tuple(map(Path, given))
        return paths[0] if len(paths) == 1 and not paths[0].is_dir() else paths


def tune_all(given: Sequence[Path], options: TuneOptions, *, dry_run: bool, as_machine: bool) -> int:
    """Tune each model into a folder of its own, as the command line at work says, one model on each device at a time.
    Gives the worst exit code.

    Raises:
        BadOption: an option is for one model, or a folder holds none.
    """
    if wrong := next((name for name in SINGLE if getattr(options, name) is not None), None):
        raise BadOption(f"{options_of(TuneOptions)[wrong].flag} is for one model: name that alone")
    models = tuple(dict.fromkeys(_models(given)))
    arguments = _typed()
    folders = named(models)
    engine = options.spec()
    jobs = [Job(str(m), ("--output-dir", str(options.output_dir / folders[m]), *arguments), engine) for m in models]
    wanted = Wanted(options.workers, options.cores_per_worker, options.ray)
    code = run_jobs(jobs, wanted, as_machine=as_machine)
    if not (dry_run or is_quiet()):
        say(f"what ships lies in {options.output_dir}/MODEL/optimized_final.onnx, with a report.html beside it")
    return code


def _models(given: Sequence[Path]) -> Iterator[Path]:
    """The files as given, and those that lie in folders, by name."""
    for path in given:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob("*.onnx"))
        if not found:
            raise BadOption(f"{path} holds no .onnx file: name a model, or a folder that holds some")
        yield from found


def named(models: Sequence[Path]) -> dict[Path, str]:
    """A folder's name for each model: the name of its file, with that of its parent folder where several have the same,
    and a number where these are the same too."""
    stems = Counter(model.stem for model in models)
    found: dict[Path, str] = {}
    for model in models:
        stem = name = model.stem if stems[model.stem] == 1 else f"{model.absolute().parent.name}_{model.stem}"
        number = 1
        while name in found.values():
            number += 1
            name = f"{stem}-{number}"
        found[model] = name
    return found


def _typed() -> tuple[str, ...]:
    """The options of the command line at work, as typed, but for `OWN`."""
    context = click.get_current_context()
    typed = list(command_line())
    parser = context.command.make_parser(context)
    values, _, order = parser.parse_args(typed[typed.index(str(context.command.name)) + 1 :])
    arguments: list[str] = []
    for option in dict.fromkeys(order):
        if not isinstance(option, click.Option) or option.name is None or option.name in OWN:
            continue
        value = values[option.name]
        if option.is_flag:
            arguments.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for one in value if option.multiple else [value]:
            arguments += [option.opts[0], str(one)]
    return tuple(arguments)
