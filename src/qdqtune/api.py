"""The public functions: the commands, with their options as keywords.

Models are paths, `onnx.ModelProto`s, or `torch.nn.Module`s with `example_inputs`; samples are of the types of
`SamplesLike`, metrics are functions. Nothing is printed: progress goes to the log, to an observer, and with
`progress=True` to a notebook or terminal.

The logger is `qdqtune`; it is silent unless the program configures it. Stages and candidates have the level INFO, notes
about a result the level WARNING.
"""

from __future__ import annotations

import importlib.util
import inspect as inspection
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import cycle
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Console

from qdqtune.cli import progress as lines
from qdqtune.commands import apply as apply_command
from qdqtune.commands import build as build_command
from qdqtune.commands import check as check_command
from qdqtune.commands import inspect as inspect_command
from qdqtune.commands import quantize as quantize_command
from qdqtune.commands.check import Checked, CheckOptions, check_file
from qdqtune.commands.compare import CompareOptions, Comparison
from qdqtune.commands.compare import compare as compare_files
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.commands.inputs import ModelLike, execution_of, model_file, on_disk
from qdqtune.commands.paths import check_options
from qdqtune.commands.quantize import QuantizeOptions
from qdqtune.commands.tune import Result, TuneOptions
from qdqtune.commands.tune import tune as tune_settings
from qdqtune.commands.verify import Verified, VerifyOptions
from qdqtune.commands.verify import verify as verify_run
from qdqtune.engines.execution import cancelled_by
from qdqtune.engines.options import with_timing_cache
from qdqtune.errors import BadOption, Cancelled
from qdqtune.explanation.page import write_report
from qdqtune.explanation.report import report_of_run
from qdqtune.options import REQUIRED, Option, Options, anything, flags_of, option, options_of
from qdqtune.system.writing import temporary_folder
from qdqtune.tuning.folder import REPORT
from qdqtune.tuning.observer import Cancel, Observer, Observers, Silent, State
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial


@dataclass
class CallOptions(Options):
    """Keywords of every function: `observer` receives progress in the calling thread, `progress` shows it in a notebook
    or on a terminal, and `cancel` ends the call when another thread sets it."""

    observer: Observer | None = field(default=None, kw_only=True)
    progress: bool = field(default=False, kw_only=True)
    cancel: Cancel | None = field(default=None, kw_only=True)


@dataclass
class ModelCallOptions(CallOptions):
    """Keywords of every function of a model: `example_inputs` are what the forward of a `torch.nn.Module` takes, by
    which it is exported: a tensor, a tuple of arguments, or a dictionary of keywords."""

    example_inputs: Any = None


P = ParamSpec("P")
O = TypeVar("O", bound=CallOptions)  # noqa: E741
R = TypeVar("R")


def function(kind: Callable[P, O], run: Callable[[O, Observer], R]) -> Callable[P, R]:
    """Make the public function of a command. It takes the first field of `kind`, a model, by position, and all others
    as keywords; its docstring is that of `run` and the help of the options.

    Raises:
        BadOption: a keyword is unknown, or its value cannot be used.
    """
    assert isinstance(kind, type)
    name = run.__name__.strip("_")

    shown = inspection.signature(kind)
    keyword_only = inspection.Parameter.KEYWORD_ONLY
    first, *others = [p.name for p in shown.parameters.values() if p.kind is not keyword_only] or [""]

    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        if len(arguments) > 1:
            hint = f": write {' or '.join(f'{other}=...' for other in others)}" if others else ""
            raise BadOption(f"{name} takes keywords behind its {first}{hint}")
        _check_keywords(kind, name, keywords)
        given = kind(*arguments, **keywords)
        check_options(given)
        watching = observing(given.observer, given.progress, given.cancel)
        with watching as observer, on_disk(given, execution_of(given)) as here:
            done = run(here, observer)
        for note in getattr(done, "notes", ()):
            LOGGER.warning("%s", note)
        return done

    call.__name__ = call.__qualname__ = name
    helps = (f"    {name}: {own.help}" for name, own in options_of(kind).items())
    call.__doc__ = "\n".join([inspection.cleandoc(run.__doc__ or ""), "", "Args:", *helps])
    plain = [
        p.replace(annotation=inspection.Parameter.empty, kind=p.kind if p.name == first else keyword_only)
        for p in shown.parameters.values()
    ]
    call.__signature__ = shown.replace(parameters=plain, return_annotation=inspection.Signature.empty)  # type: ignore[attr-defined]
    return call


def _check_keywords(kind: type[Any], name: str, given: Iterable[str]) -> None:
    known = [field.name for field in fields(kind)]
    for keyword in given:
        if keyword not in known:
            near = get_close_matches(keyword, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known))}"
            raise BadOption(f"{name} has no option {keyword!r}{hint}")


@dataclass
class TuneCall(ModelCallOptions, TuneOptions):
    """Keywords of `tune`."""

    model: Option[ModelLike | Settings, ModelLike | Settings] = option(  # type: ignore[assignment]
        anything(), REQUIRED, "The ONNX file, a folder that holds one, or all settings of the run.", is_positional=True
    )


@dataclass(kw_only=True)
class QuantizeCall(ModelCallOptions, QuantizeOptions):
    """Keywords of `quantize`."""


@dataclass(kw_only=True)
class CompareCall(CallOptions, CompareOptions):
    """Keywords of `compare`."""


@dataclass(kw_only=True)
class ApplyCall(ModelCallOptions, apply_command.ApplyOptions):
    """Keywords of `apply`."""


@dataclass(kw_only=True)
class CheckCall(ModelCallOptions, CheckOptions):
    """Keywords of `check`."""


@dataclass(kw_only=True)
class LayersCall(ModelCallOptions, check_command.LayersOptions):
    """Keywords of `layers`."""


@dataclass(kw_only=True)
class BuildCall(ModelCallOptions, build_command.BuildOptions):
    """Keywords of `build`."""


@dataclass(kw_only=True)
class InspectCall(ModelCallOptions, inspect_command.InspectOptions):
    """Keywords of `inspect`."""


@dataclass(kw_only=True)
class VerifyCall(CallOptions, VerifyOptions):
    """Keywords of `verify`."""


def _tune(options: TuneCall, observer: Observer) -> Result:
    """Find the fastest Q/DQ placement for a model, prove it, and write it to `output_dir`.

    The same call continues where an earlier one was stopped. `model` may be `Settings`, in place of all options.

    Raises:
        QdqtuneError: see `errors`; Cancelled if `cancel` was set.
    """
    if isinstance(options.model, Settings):
        usual = TuneCall(options.model)
        names = [name for name in options_of(TuneCall) if getattr(options, name) != getattr(usual, name)]
        if names:
            raise BadOption(f"Settings hold everything: {', '.join(names)} cannot be given besides")
        return tune_settings(options.model, observer)
    done = tune_settings(options.settings(), observer)
    if options.report:
        write_report(report_of_run(done.folder), done.folder / REPORT, flags_of(TuneOptions))
    return done


def _quantize(options: QuantizeCall, observer: Observer) -> quantize_command.Quantized:
    """Write a Q/DQ version of a float model, its pairs placed by the rules of an engine, which need not be installed.

    Raises:
        QdqtuneError: see `commands.quantize.quantize`.
    """
    return quantize_command.quantize(options, observer)


def _apply(options: ApplyCall, observer: Observer) -> apply_command.Applied:
    """Put the pairs of a placement file into a model, with scales calibrated anew: no search, no timing.

    Raises:
        QdqtuneError: see `commands.apply.apply`.
    """
    return apply_command.apply(options, observer)


def _check(options: CheckCall, observer: Observer) -> Checked:
    """Find what the engine does not fuse in a Q/DQ model, and why.

    Raises:
        QdqtuneError: see `commands.check.check_file`.
    """
    return check_file(options)


def _layers(options: LayersCall, observer: Observer) -> check_command.Layers:
    """The layers that the engine runs for a model, in order, with their nodes and times.

    Raises:
        QdqtuneError: see `commands.check.layers`.
    """
    return check_command.layers(options)


def _build(options: BuildCall, observer: Observer) -> build_command.Artifact:
    """Build a model, and save it in the engine's own format.

    Raises:
        QdqtuneError: see `commands.build.build`.
    """
    spec = with_timing_cache(options.spec(), options.output.parent)
    return build_command.build(Path(str(options.model)), options.output, spec, execution_of(options))


def _inspect(options: InspectCall, observer: Observer) -> inspect_command.Inspection:
    """The regions of a model, and which of them share a pattern.

    Raises:
        QdqtuneError: the model cannot be read.
    """
    return inspect_command.inspect(options)


def _verify(options: VerifyCall, observer: Observer) -> Verified:
    """Whether what a run has proven holds on this machine: `folder` is its output folder.

    Raises:
        QdqtuneError: see `commands.verify.verify`.
    """
    return verify_run(options, observer)


tune, quantize, apply = function(TuneCall, _tune), function(QuantizeCall, _quantize), function(ApplyCall, _apply)
check, layers = function(CheckCall, _check), function(LayersCall, _layers)
build, inspect = function(BuildCall, _build), function(InspectCall, _inspect)
verify = function(VerifyCall, _verify)


def compare(first: ModelLike, *others: ModelLike, **given: Any) -> Comparison:
    """Time every other model against the first, in the same rounds on fresh builds of all.

    Keywords are the options of `qdqtune compare`, and `example_inputs` of modules of PyTorch.

    Raises:
        QdqtuneError: see `commands.compare`.
    """
    models = (first, *others)
    names = [str(m) if isinstance(m, str | Path) else f"model {number}" for number, m in enumerate(models, 1)]
    with temporary_folder() as folder:
        examples = given.pop("example_inputs", None)
        paths = [model_file(model, folder, f"model_{number}", examples) for number, model in enumerate(models, 1)]

        def compare(options: CompareCall, observer: Observer) -> Comparison:
            found = compare_files(paths, options, observer)
            rows = (replace(row, file=name) for row, name in zip(found.rows, cycle(names[1:]), strict=False))
            return replace(found, first=names[0], rows=tuple(rows))

        return function(CompareCall, compare)(**given)


def explain(run: str | Path | Result, pattern: str | None = None) -> Explained:
    """Why each node of a finished run runs in 8 bits or in float, and what the other way would cost.

    Args:
        run: its result, or its output folder.
        pattern: only the node of this name, or those that match a wildcard.

    Raises:
        QdqtuneError: the folder holds no finished run, or no such node.
    """
    folder = run.folder if isinstance(run, Result) else Path(run)
    return explain_run(folder, pattern)


# Progress of a call

LOGGER = logging.getLogger("qdqtune")
LOGGER.addHandler(logging.NullHandler())


class _Log(Silent):
    """Writes progress to the log."""

    def stage(self, text: str) -> None:
        LOGGER.info("%s", text)

    def note(self, text: str) -> None:
        LOGGER.warning("%s", text)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        LOGGER.info("%s", lines.line(trial, outcome, state).strip())


@contextmanager
def observing(observer: Observer | None, progress: bool, cancel: Cancel | None) -> Iterator[Observer]:
    """An observer that passes events on to the log, to `observer`, and to a display if `progress` is asked for.

    Raises:
        Cancelled: `cancel` is set.
    """
    observers: list[Observer] = [_Log()] if observer is None else [_Log(), observer]

    def check() -> None:
        if cancel is not None and cancel.is_set():
            raise Cancelled("cancelled: the same call goes on from what was measured")

    check()
    with ExitStack() as stack:
        if cancel is not None:
            stack.enter_context(cancelled_by(check))
        if progress:
            shown = _display()
            stack.enter_context(shown)
            observers.insert(0, shown)
        yield Observers(observers)


def _display() -> lines.Progress:
    """A display of changing lines on a terminal, and in a notebook with ipywidgets; plain lines elsewhere."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return lines.Progress(console, is_moving=importlib.util.find_spec("ipywidgets") is not None)
    return lines.shown()
