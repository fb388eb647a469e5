"""The public functions: the commands, with their options as keywords.

Models are paths, `onnx.ModelProto`s, or `torch.nn.Module`s with `example_inputs`; samples are of the types of
`SamplesLike`, metrics are functions. Progress goes to the log, to an observer, and with `progress=True` to standard
error; nothing else is printed.

The logger `qdqtune` is silent unless the program configures it. Stages and candidates have the level INFO, notes
WARNING.
"""

from __future__ import annotations

import inspect as inspection
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Any, ParamSpec, TypeVar

from qdqtune.cli import progress as lines
from qdqtune.commands import build as building
from qdqtune.commands import check as checking
from qdqtune.commands import inspect as inspecting
from qdqtune.commands import quantize as quantizing
from qdqtune.commands import verify as verifying
from qdqtune.commands.compare import CompareOptions, Comparison
from qdqtune.commands.compare import compare as compare_files
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.commands.inputs import ModelLike, check_options, execution_of, model_file, on_disk
from qdqtune.commands.tune import Result, TuneOptions
from qdqtune.commands.tune import tune as tune_settings
from qdqtune.engines.execution import cancelled_by
from qdqtune.errors import BadOption, Cancelled, QdqtuneError
from qdqtune.explanation.page import write_report
from qdqtune.options import REQUIRED, Options, flags_of, meant, options_of
from qdqtune.system.writing import named, temporary_folder
from qdqtune.tuning.observer import Observer, Observers, Silent, State
from qdqtune.tuning.options import MODEL
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial


class CallOptions(Options):
    """Keywords of every function: `observer` receives progress in the calling thread, `progress` prints it
    on standard error, and `cancel` ends the call when another thread sets it."""

    observer: Observer | None = None
    progress: bool = False
    cancel: Event | None = None


class ModelCallOptions(CallOptions, kw_only=False):
    """Keywords of every function of a model: `example_inputs` are what the forward of a `torch.nn.Module` takes, by
    which it is exported: a tensor, a tuple of arguments, or a dictionary of keywords."""

    example_inputs: Any = None


P = ParamSpec("P")
O = TypeVar("O", bound=CallOptions)  # noqa: E741
R = TypeVar("R")


def function(kind: Callable[P, O], run: Callable[[O, Observer], R]) -> Callable[P, R]:
    """Make the public function of a command. It takes the first field of `kind`, a model, by position, and all others
    as keywords; its docstring is that of `run` and the help of the options.
    """
    assert isinstance(kind, type)
    name = run.__name__.strip("_")
    signature = inspection.signature(kind)
    first = next(iter(signature.parameters))

    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        if len(arguments) > 1:
            raise BadOption(f"{name} takes keywords behind its {first}")
        for keyword in keywords.keys() - signature.parameters.keys():
            near = " or ".join(map(repr, meant(keyword, signature.parameters)))
            hint = f"did you mean {near}?" if near else f"it has {', '.join(sorted(signature.parameters))}"
            raise BadOption(f"{name} has no option {keyword!r}; {hint}")
        options = kind(*arguments, **keywords)
        check_options(options)
        observers: list[Observer] = [_Log()] if options.observer is None else [_Log(), options.observer]
        cancel = options.cancel

        def check() -> None:
            if cancel is not None and cancel.is_set():
                raise Cancelled("cancelled: the same call goes on from what was measured")

        check()
        with ExitStack() as stack:
            if cancel is not None:
                stack.enter_context(cancelled_by(check))
            if options.progress:
                observers.insert(0, stack.enter_context(lines.shown()))
            here = stack.enter_context(on_disk(options, execution_of(options)))
            try:
                done = _named(run(here, Observers(observers)))
            except QdqtuneError as error:
                error.args = tuple(named(one) if isinstance(one, str) else one for one in error.args)
                raise
        for note in getattr(done, "notes", ()):
            LOGGER.warning("%s", note)
        return done

    call.__name__ = call.__qualname__ = name
    helps = (f"    {name}: {own.help}" for name, own in options_of(kind).items())
    call.__doc__ = "\n".join([inspection.cleandoc(run.__doc__ or ""), "", "Args:", *helps])
    plain = [
        p.replace(annotation=p.empty, kind=p.kind if p.name == first else p.KEYWORD_ONLY)
        for p in signature.parameters.values()
    ]
    call.__signature__ = signature.replace(parameters=plain, return_annotation=signature.empty)  # type: ignore[attr-defined]
    return call


def _named(result: R) -> R:
    """The result; its paths and notes name the objects in memory, not the temporary files that stand for them."""
    changes: dict[str, Any] = {}
    for each in fields(result):  # type: ignore[arg-type]
        value = getattr(result, each.name)
        if isinstance(value, Path):
            changes[each.name] = Path(named(str(value)))
        elif each.name == "notes":
            changes[each.name] = tuple(map(named, value))
    return replace(result, **changes)  # type: ignore[type-var]


class TuneCall(ModelCallOptions, TuneOptions, kw_only=False):
    model: Any = MODEL("The ONNX file, a folder that holds one, or all settings of the run.", default=REQUIRED)


class QuantizeCall(ModelCallOptions, quantizing.QuantizeOptions): ...


class CompareCall(CallOptions, CompareOptions): ...


class ApplyCall(ModelCallOptions, quantizing.ApplyOptions): ...


class CheckCall(ModelCallOptions, checking.CheckOptions): ...


class LayersCall(ModelCallOptions, checking.LayersOptions): ...


class BuildCall(ModelCallOptions, building.BuildOptions): ...


class InspectCall(ModelCallOptions, inspecting.InspectOptions): ...


class VerifyCall(CallOptions, verifying.VerifyOptions): ...


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
        write_report(done.folder, flags_of(TuneOptions))
    return done


tune, quantize = function(TuneCall, _tune), function(QuantizeCall, quantizing.quantize)
apply, verify = function(ApplyCall, quantizing.apply), function(VerifyCall, verifying.verify)
check, layers = function(CheckCall, checking.check), function(LayersCall, checking.layers)
build, inspect = function(BuildCall, building.build), function(InspectCall, inspecting.inspect)


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
        pattern: only the node of this name, or those that match a wildcard; None for all nodes.

    Raises:
        QdqtuneError: the folder holds no finished run, or no such node.
    """
    folder = run.folder if isinstance(run, Result) else Path(run)
    return explain_run(folder, pattern)


# Progress of a call

LOGGER = logging.getLogger("qdqtune")
LOGGER.addHandler(logging.NullHandler())


class _Log(Silent):
    def stage(self, text: str) -> None:
        LOGGER.info("%s", text)

    def note(self, text: str) -> None:
        LOGGER.warning("%s", text)

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        LOGGER.info("%s", lines.line(trial, outcome, state).strip())
