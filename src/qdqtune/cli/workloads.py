"""The option that names workloads, what its text means, and what it says to engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from qdqtune.calibration.workloads import WorkloadFile, spans_of
from qdqtune.cli import options
from qdqtune.cli.options import Given, repeated
from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.engines.shapes import spans, with_spans


def _files(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[WorkloadFile, ...]:
    """Files with weights, of FILE:WEIGHT; a file alone has the weight 1."""
    return tuple(map(workload_file, values))


def workload_file(value: str) -> WorkloadFile:
    """What FILE:WEIGHT names.

    Raises:
        BadParameter: the weight is none.
    """
    file, colon, weight = value.rpartition(":")
    if not colon or Path(value).exists():
        return WorkloadFile(Path(value))
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or not file:
        raise click.BadParameter(f"{value!r} has no weight above zero: give FILE:0.8, its share of the calls")
    return WorkloadFile(Path(file), number)


def engine(given: Given) -> EngineSpec:
    """The engine of the options, built for the sizes of all workloads where it wants some and is told no others.

    Raises:
        BadOption: see `options.engine`.
        BadData: a workload cannot be read.
    """
    spec = options.engine(given)
    if spec.name not in TENSORRT_FAMILY or not given["workloads"] or spans(spec):
        return spec
    return with_spans(spec, spans_of(given["workloads"], given.get("fix_inputs") or ()))


WORKLOADS = repeated(
    "--workload workloads",
    "FILE:WEIGHT",
    "An .npz of inputs as one call has them, and the share of the calls that are such: decode.npz:0.8. Repeatable: "
    "what counts is the mean time of all calls. Without --calibration-data these are the samples, too.",
    callback=_files,
)
