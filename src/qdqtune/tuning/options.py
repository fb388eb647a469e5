"""The options of a search, some of them shared with other commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from qdqtune.calibration.options import CacheOption, DataOptions, FixOption, RewriteOption
from qdqtune.engines.options import WorkerOptions
from qdqtune.graph.float16 import Precision
from qdqtune.graph.loading import files_of
from qdqtune.graph.model_folder import model_in
from qdqtune.numerics.accuracy import FLOOR_DB, MOST_EQUAL
from qdqtune.numerics.metrics import LabelOptions, ScoreOption
from qdqtune.options import (
    COUNT,
    FILE,
    LIMIT,
    NAMES,
    OF_RUN,
    SECONDS,
    SWITCH,
    TEXT,
    File,
    MaybeDuration,
    Names,
    Option,
    choice,
    text_of,
    texts_of,
    to_read,
)
from qdqtune.types import QuantType

Mode = Literal["cut", "region", "subgraph"]
Division = Literal["auto", "names", "topology"]
FloatType = Literal["float16", "float32", "bfloat16"]
Switched = Literal["auto"] | float | None
"""The value of a limit: a number, the default ("auto"), or none."""

MOST_DB = 1000
"""The largest limit in dB; even float64 only has some 300 dB."""


WARMUP = COUNT(
    "Inferences of each model before its rounds. trtexec warms up in each process for 200 ms instead; "
    "`engine_options` trtexec_args=--warmUp=N changes that.",
    "Search",
    default=2,
    least=0,
)

PORTABLE = SWITCH(
    "Numbers with which no sum of products overflows on any processor, x86 without VNNI and ARM included: weights "
    "of 7 bits. For onnxruntime and openvino.",
    "Model",
)

PRECISION = choice(
    Precision,
    "Of what carries no pair; the inputs and outputs of MODEL keep their types. With fp16, nodes stay in float32 "
    "whose values leave its range. Not for onnxruntime.",
    "Model",
    "of what stays in float; fp16 for GPUs",
    default_in_words="fp16 for tensorrt-rtx, and tensorrt and trtexec from version 10, which take types from the "
    "graph; else fp32",
)


def folder_or_model(value: Any) -> Path:
    path = to_read(value)
    if path.suffix in (".npz", ".npy", ".csv", ".txt"):
        raise ValueError(f"{path} is no ONNX file: samples are `calibration_data`, right answers are `labels`")
    return path


def single_model(value: Any) -> Any:
    """The path of a model, or of the one model in a folder (see `model_folder`); a Python object unchanged."""
    return model_in(folder_or_model(value)) if isinstance(value, str | Path) else value


MODEL = partial(FILE, convert=single_model, reads=files_of)


def _wildcards(value: Any) -> tuple[str, ...]:
    """Wildcards for node names: a sequence, or a file's lines, except empty lines and those that begin with #."""
    if not isinstance(value, str | Path):
        return tuple(map(text_of, texts_of(value)))
    lines = [line.strip() for line in to_read(value).read_text(encoding="utf-8").splitlines()]
    wildcards = tuple(line for line in lines if line and not line.startswith("#"))
    if not wildcards:
        raise ValueError(f"{value} holds no wildcard")
    return wildcards


class SearchOptions(LabelOptions, ScoreOption, DataOptions, CacheOption, RewriteOption, FixOption, WorkerOptions):
    """The options of a search that go into `Settings` unchanged.

    Those that are converted first (engine, builds, rounds) are in `commands.tune.TuneOptions`.
    """

    output_dir: File = OF_RUN(
        "Where everything goes. The same folder again resumes.",
        "Output",
        "folder of results and for resuming",
        default=Path("qdqtune_output"),
        flags="-o --output-dir",
    )
    mode: Mode = choice(
        Mode,
        "How to search. cut: price every fusion group from layer times and take the optimum of the prices. region: "
        "vary the result of the cut pattern by pattern; takes about five times as long. subgraph: time every distinct "
        "fusion group alone, then put together what gains and check it on the whole model.",
        "Search",
        "how to search; cut is quickest to win",
        default="cut",
    )
    quant_type: QuantType = choice(
        QuantType,
        "Numbers of the pairs; fp8 is E4M3, where the engine has it, and needs opset 19.",
        "Model",
        "numbers of the pairs",
        default="int8",
    )
    formats: Option[tuple[str, ...] | None] = NAMES(
        "What may be used, by commas: int8 (or fp8) for pairs, w8 and w4 for weights alone, or exactly w4b32, w8b128; "
        "d8 (d7 on x86 without VNNI) for products whose activations get their scale at run time.",
        "Model",
        default=None,
        default_in_words="all that the engine has",
        metavar="NAMES",
        is_repeated=False,
    )
    portable: bool = PORTABLE
    precision: Precision | None = PRECISION
    min_sqnr: Switched = LIMIT(
        "Take only what keeps the signal this far above the error at the outputs, in dB; 20 is an error of a tenth, "
        "30 of a thirtieth; and what leaves no part of an output without its values. none takes the fastest at any "
        "price, and without samples ships pairs unchecked. Exit code 4 if nothing faster holds it.",
        "Accuracy",
        "least signal to error at the outputs",
        default="auto",
        least=-MOST_DB,
        most=MOST_DB,
        default_in_words=f"{FLOOR_DB:g}, or none with a metric",
        metavar="DB",
    )
    min_agreement: Switched = LIMIT(
        "Take only what leaves the best class as it is in this share of cases where outputs hold scores of classes, "
        "tokens or pixels, as far as the samples can tell; and this share of integers in outputs; or none.",
        "Accuracy",
        default="auto",
        least=0,
        most=1,
        default_in_words=f"{MOST_EQUAL:g}; none with `evaluate`, or where `min_sqnr` is none",
        metavar="SHARE",
    )
    max_drop: Switched = LIMIT(
        "Take only what keeps your metric within X of the float model's, or none. With `labels` the upper end of the "
        "95 % interval of the loss has to be within X, as far as the samples can tell.",
        "Accuracy",
        "most that your metric may lose",
        default="auto",
        least=0,
        default_in_words="1 % of it",
    )
    front: bool = SWITCH(
        "cut: besides the fastest, give points from the fastest to the most exact: front/NAME.onnx, each proven.",
        "Search",
        "points from fastest to most exact",
    )
    time_budget: MaybeDuration = SECONDS(
        "How long the whole run may take, proof included: 90s, 10m, 1h.", "Search", "for the whole run: 90s, 10m, 1h"
    )
    node_filter: Names = TEXT(
        "File of node-name wildcards, one a line: other regions stay in float.",
        "Search",
        default=(),
        convert=_wildcards,
        metavar="PATH",
    )
    from_qdq: bool = SWITCH(
        "MODEL has Q/DQ pairs: strip them, keep their scales, start from them.",
        "Model",
        "MODEL has pairs: start from them",
    )
    restart: bool = SWITCH("Forget what earlier runs in this folder measured.", "Search")
