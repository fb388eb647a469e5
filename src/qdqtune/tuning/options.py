"""The options of a search, and options that other commands share with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from qdqtune.calibration.options import CacheOption, DataOptions, FixOption, RewriteOption
from qdqtune.engines.options import WorkerOptions
from qdqtune.graph.float16 import Precision
from qdqtune.graph.loading import files_of
from qdqtune.graph.model_folder import graphs_in, model_in
from qdqtune.numerics.accuracy import FLOOR_DB, MOST_EQUAL
from qdqtune.numerics.metrics import LabelOptions, ScoreOption
from qdqtune.options import (
    FILE,
    NAMES,
    OF_RUN,
    SECONDS,
    SWITCH,
    File,
    Flag,
    Group,
    Kind,
    MaybeDuration,
    Option,
    PathLike,
    choice,
    in_range,
    limit,
    option,
    reads,
    texts_of,
)
from qdqtune.types import QuantType

Mode = Literal["cut", "region", "subgraph"]
Division = Literal["auto", "names", "topology"]
FloatType = Literal["float16", "float32", "bfloat16"]
Switched = Literal["auto"] | float | None
"""A limit: a number, the usual one ("auto"), or none."""

MOST_DB = 1000
"""The largest limit in dB: float64 itself has some 300 dB."""


def quant_type_option(help: str) -> Any:
    """The option `quant_type`: the number format of pairs."""
    return option(choice("int8", "fp8"), "int8", help, "Model", short="numbers of the pairs")


def warmup_option() -> Any:
    """The option `warmup_runs`: inferences before the rounds of a comparison."""
    return option(
        in_range(0, make=int),
        2,
        "Inferences of each model before its rounds. trtexec warms up in each process for 200 ms instead; "
        "`engine_options` trtexec_args=--warmUp=N changes that.",
        "Search",
    )


def portable_option() -> Any:
    """The option `portable`: numbers with which a file computes the same on every processor."""
    return option(
        SWITCH,
        False,
        "Numbers with which no sum of products overflows on any processor, x86 without VNNI and ARM included: weights "
        "of 7 bits. For onnxruntime and openvino.",
        "Model",
    )


def time_budget_option(help: str, group: Group) -> Any:
    """The option `time_budget`: the duration of a whole command."""
    return option(SECONDS, None, f"{help}: 90s, 10m, 1h.", group, short="for the whole run: 90s, 10m, 1h")


def precision_option() -> Any:
    """The option `precision`: the type of values without a pair. None means the engine's usual type."""
    return option(
        choice(*get_args(Precision)),
        None,
        "Of what carries no pair; the inputs and outputs of MODEL keep their types. With fp16, nodes stay in float32 "
        "whose values leave its range. Not for onnxruntime.",
        "Model",
        short="of what stays in float; fp16 for GPUs",
        default_in_words="fp16 for tensorrt-rtx, and tensorrt and trtexec from version 10, which take types from the "
        "graph; else fp32",
    )


def _model_files(text: str) -> list[Path]:
    path = Path(text)
    files = [path] if path.is_file() else graphs_in(path)
    return [file for one in files for file in files_of(one)] or [path]


def _model_path(text: str) -> Path:
    path = Path(text)
    if path.suffix in (".npz", ".npy", ".csv", ".txt"):
        raise ValueError(f"{path} is no ONNX file: samples are `calibration_data`, right answers are `labels`")
    return path


MODEL = reads(_model_files, "model", lambda text: model_in(_model_path(text)))
"""The path of a model, or of a folder that holds one (see `model_folder`)."""
MODELS = reads(_model_files, "model", _model_path)
"""The path of a model or of a folder, which may hold several."""


def _wildcards(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | Path):
        return tuple(texts_of(value))
    try:
        lines = [line.strip() for line in FILE.convert(value).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"cannot read {value}: {error.strerror}") from error
    wildcards = tuple(line for line in lines if line and not line.startswith("#"))
    if not wildcards:
        raise ValueError(f"{value} holds no wildcard")
    return wildcards


WILDCARDS = Kind(_wildcards, "FILE", "list", is_path=True, reads=FILE.reads)
"""Wildcards of node names: a sequence of them, or a file with one a line. Empty lines and lines that begin with # are
skipped."""


@dataclass(kw_only=True)
class SearchOptions(LabelOptions, ScoreOption, DataOptions, CacheOption, RewriteOption, FixOption, WorkerOptions):
    """The options of a search that `Settings` takes as the user gives them.

    Options from which settings are derived (engine, builds, rounds) are in `commands.tune.TuneOptions`.
    """

    output_dir: File = option(
        OF_RUN,
        Path("qdqtune_output"),
        "Where everything goes. The same folder again resumes.",
        "Output",
        short="folder of results and for resuming",
        flags="-o --output-dir",
    )
    mode: Option[Mode, Mode] = option(
        choice(*get_args(Mode)),
        "cut",
        "How to search. cut: price every fusion group from layer times and take the optimum of the prices. region: "
        "vary the result of the cut pattern by pattern; takes about five times as long. subgraph: time every distinct "
        "fusion group alone, then put together what gains and check it on the whole model.",
        "Search",
        short="how to search; cut is quickest to win",
    )
    quant_type: Option[QuantType, QuantType] = quant_type_option(
        "Numbers of the pairs; fp8 is E4M3, where the engine has it, and needs opset 19."
    )
    formats: Option[str | Sequence[str] | None, tuple[str, ...] | None] = option(
        replace(NAMES, metavar="NAMES", takes="list"),
        None,
        "What may be used, by commas: int8 (or fp8) for pairs, w8 and w4 for weights alone, or exactly w4b32, w8b128; "
        "d8 (d7 on x86 without VNNI) for products whose activations get their scale at run time.",
        "Model",
        default_in_words="all that the engine has",
    )
    portable: Flag = portable_option()
    precision: Option[Precision | None, Precision | None] = precision_option()
    min_sqnr: Option[Switched, Switched] = option(
        limit(-MOST_DB, MOST_DB),
        "auto",
        "Take only what keeps the signal this far above the error at the outputs, in dB; 20 is an error of a tenth, "
        "30 of a thirtieth; and what leaves no part of an output without its values. none takes the fastest at any "
        "price, and without samples ships pairs unchecked. Exit code 4 if nothing faster holds it.",
        "Accuracy",
        short="least signal to error at the outputs",
        default_in_words=f"{FLOOR_DB:g}, or none with a metric",
        metavar="DB",
    )
    min_agreement: Option[Switched, Switched] = option(
        limit(0, 1),
        "auto",
        "Take only what leaves the best class as it is in this share of cases where outputs hold scores of classes, "
        "tokens or pixels, as far as the samples can tell; and this share of integers in outputs; or none.",
        "Accuracy",
        default_in_words=f"{MOST_EQUAL:g}; none with `evaluate`, or where `min_sqnr` is none",
        metavar="SHARE",
    )
    max_drop: Option[Switched, Switched] = option(
        limit(0),
        "auto",
        "Take only what keeps your metric within X of the float model's, or none. With `labels` the upper end of the "
        "95 % interval of the loss has to be within X, as far as the samples can tell.",
        "Accuracy",
        short="most that your metric may lose",
        default_in_words="1 % of it",
        metavar="X",
    )
    front: Flag = option(
        SWITCH,
        False,
        "cut: besides the fastest, give points from the fastest to the most exact: front/NAME.onnx, each proven.",
        "Search",
        short="points from fastest to most exact",
    )
    time_budget: MaybeDuration = time_budget_option("How long the whole run may take, proof included", "Search")
    node_filter: Option[PathLike | Sequence[str], tuple[str, ...]] = option(
        WILDCARDS,
        (),
        "File of node-name wildcards, one a line: other regions stay in float.",
        "Search",
        metavar="PATH",
    )
    from_qdq: Flag = option(
        SWITCH,
        False,
        "MODEL has Q/DQ pairs: strip them, keep their scales, start from them.",
        "Model",
        short="MODEL has pairs: start from them",
    )
    restart: Flag = option(SWITCH, False, "Forget what earlier runs in this folder measured.", "Search")
