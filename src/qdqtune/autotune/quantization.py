"""Quantization by placement rules, with the keywords of ModelOpt's `quantize`."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Collection, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args

from qdqtune import api
from qdqtune.calibration.options import SamplesLike
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.types import QuantType

log = logging.getLogger("qdqtune.autotune")

IDLE = frozenset({
    "calibration_eps", "keep_intermediate_files", "log_level", "simplify", "trt_rtx_backend", "trust_calibration_data",
    "trust_remote_code", "use_external_data_format",
})  # fmt: skip
"""Keywords of ModelOpt that have no effect here."""

USUAL = {"mha_accumulation_dtype": "fp16", "passes": ["concat_elimination"]}
"""Other keywords of ModelOpt that quantize accepts at their default only, where that is not None, False or empty."""

METHODS = {"max": "minmax", "entropy": "mse"}
"""ModelOpt's calibration methods, with those that replace them."""


def quantize(
    onnx_path: str | Path,
    quantize_mode: QuantType = "int8",
    calibration_data: SamplesLike | None = None,
    calibration_method: str | None = None,
    calibration_cache_path: str | Path | None = None,
    calibration_data_reader: Any = None,
    calibration_shapes: str | None = None,
    *,
    output_path: str | Path | None = None,
    high_precision_dtype: Literal["fp32", "fp16", "bf16"] | None = None,
    override_shapes: str | None = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    engine: str = "tensorrt",
    **others: Any,
) -> None:
    """Write a quantized version of a model to `output_path`, by default beside it with `.quant.onnx`.

    Shapes are written `input0:1x3x224x224,input1:1x8`. Nodes are chosen by regular expressions that match from the
    beginning. Pairs are placed by the rules of `engine`, which need not be installed. `calibration_data_reader`
    replaces `calibration_data`: its `get_next` returns a sample, at the end None. `others` are keywords of `IDLE`,
    which have no effect here; other keywords of ModelOpt may only have their defaults.

    Raises:
        BadOption: a keyword of ModelOpt's has no counterpart here, or a value is unknown.
        QdqtuneError: see `qdqtune.quantize`.
    """
    if quantize_mode not in get_args(QuantType):
        raise BadOption(f"quantize_mode is int8 or fp8, not {quantize_mode!r}")
    for name, value in others.items():
        if name not in IDLE and value not in (None, False, [], USUAL.get(name)):
            raise BadOption(f"quantize has no {name} here: see docs/reference/modelopt.md")
    path = Path(onnx_path)
    data = calibration_data if calibration_data_reader is None else iter(calibration_data_reader.get_next, None)
    shapes = calibration_shapes or override_shapes
    options: dict[str, Any] = {
        "quant_type": quantize_mode,
        "calibration_data": None if isinstance(data, list) and not data else data,
        "calibration_method": METHODS.get(calibration_method or "", calibration_method),
        "calibration_cache": calibration_cache_path,
        "precision": high_precision_dtype,
        "input_shapes": shapes or None,
        "op_types_to_quantize": op_types_to_quantize or None,
        "op_types_to_exclude": op_types_to_exclude or None,
    }
    if nodes_to_quantize or nodes_to_exclude:
        model = load(path)
        options["nodes_to_exclude"] = _matching(model, nodes_to_exclude or ())
        options["nodes_to_quantize"] = _matching(model, nodes_to_quantize or ()) or nodes_to_quantize
    output = path.with_suffix(".quant.onnx") if output_path is None else Path(output_path)
    given = {name: value for name, value in options.items() if value is not None}
    api.quantize(path, output=output, engine=engine, **given)


@wraps(api.quantize)
def either(*arguments: Any, **given: Any) -> Any:
    """`qdqtune.quantize`; or this module's `quantize` if the second argument is a mode such as int8, or if there is a
    keyword that only ModelOpt has and no `output`."""
    if len(arguments) > 1 and isinstance(arguments[1], str) and not Path(arguments[1]).suffix:
        return quantize(*arguments, **given)
    theirs = {*signature(quantize).parameters, *IDLE} - signature(api.quantize).parameters.keys()
    has_output = "output" in given or len(arguments) > 1
    return (api.quantize if has_output or theirs.isdisjoint(given) else quantize)(*arguments, **given)


def _matching(model: Model, expressions: Collection[str]) -> list[str]:
    """Wildcards for the nodes whose name matches a regular expression; expressions without a match are logged."""
    wildcards = list[str]()
    for expression in expressions:
        try:
            names = [node.name for node in model.nodes if re.match(expression, node.name)]
        except re.error as error:
            raise BadOption(f"{expression!r} is no regular expression: {error}") from error
        if not names:
            log.warning("no node matches %r", expression)
        wildcards += map(glob.escape, names)
    return wildcards
