"""Quantization by placement rules, with the keywords and flags of ModelOpt's `quantize`.

`python -m qdqtune.autotune.quantization` is the program, as is `python -m qdqtune --onnx_path`.
"""

from __future__ import annotations

import argparse
import glob
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import click

from qdqtune import api
from qdqtune.autotune.__main__ import add_flag
from qdqtune.cli import main as cli
from qdqtune.cli.command import Command
from qdqtune.commands.inputs import SamplesLike
from qdqtune.engines.tensorrt.options import read_shapes
from qdqtune.errors import BadOption
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.options import Options
from qdqtune.types import QuantType

log = logging.getLogger("qdqtune.autotune")

IDLE = frozenset({
    "calibration_eps", "keep_intermediate_files", "log_level", "simplify", "trt_rtx_backend", "trust_calibration_data",
    "trust_remote_code", "use_external_data_format",
})  # fmt: skip
"""Keywords whose value does not change what is written here."""

USUAL = {"mha_accumulation_dtype": ["fp16"], "passes": ["concat_elimination"]}
"""Keywords that are told where they have another value than by default."""

INSTEAD = {
    "output": "with a mode behind the model it is output_path",
    "op_types_to_exclude_fp16": "high_precision_dtype='fp32' keeps all operators in float32",
    "target_dla": "placement_like='implicit' of qdqtune.quantize puts pairs on all that a quantizable layer reads",
    "autotune": "python -m qdqtune.autotune and qdqtune.tune search on an engine",
}
"""What to do without a keyword."""


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
    input_shapes_profile: Sequence[Mapping[str, str]] | None = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    disable_mha_qdq: bool = False,
    engine: str = "tensorrt",
    **others: Any,
) -> None:
    """Write a quantized version of a model to `output_path`, by default beside it with `.quant.onnx`.

    Shapes are written `input0:1x3x224x224,input1:1x8`; of a profile of shapes the usual ones count. Nodes are chosen by
    regular expressions that match from the beginning. Pairs stand where `engine`, which need not be installed, gains
    from them as a rule. A reader gives samples as ONNX Runtime's quantizer reads them, with `get_next`. `others` are
    those of `IDLE`.

    Raises:
        BadOption: a keyword of ModelOpt's has no counterpart here, or a value no meaning.
        QdqtuneError: see `qdqtune.quantize`.
    """
    if quantize_mode not in get_args(QuantType):
        raise BadOption(f"quantize_mode is int8 or fp8, not {quantize_mode!r}")
    for name, value in others.items():
        texts = [value] if isinstance(value, str) else value
        if name not in IDLE and texts not in (None, False, [], USUAL.get(name)):
            raise BadOption(f"quantize has no {name} here: {INSTEAD.get(name, 'see docs/reference/modelopt.md')}")
    path = Path(onnx_path)
    data = calibration_data if calibration_data_reader is None else iter(calibration_data_reader.get_next, None)
    profiled = (item for part in input_shapes_profile or () for item in part.items())
    usual = ",".join(text for name, text in profiled if name.endswith("_opt_shapes"))
    shapes = calibration_shapes or override_shapes or usual
    options: dict[str, Any] = {
        "quant_type": quantize_mode,
        "calibration_data": None if isinstance(data, list) and not data else data,
        "calibration_method": "minmax" if calibration_method == "max" else calibration_method,
        "calibration_cache": calibration_cache_path,
        "precision": high_precision_dtype,
        "input_shapes": read_shapes(shapes) if shapes else None,
        "op_types_to_quantize": op_types_to_quantize or None,
        "op_types_to_exclude": op_types_to_exclude or None,
    }
    if nodes_to_quantize or nodes_to_exclude or disable_mha_qdq:
        model = load(path)
        excluded = _matching(model, nodes_to_exclude or ())
        options["nodes_to_exclude"] = excluded + (_products_of_activations(model) if disable_mha_qdq else [])
        options["nodes_to_quantize"] = chosen = _matching(model, nodes_to_quantize or ())
        if nodes_to_quantize and not chosen:
            raise BadOption(f"no node matches nodes_to_quantize {nodes_to_quantize!r}")
    output = path.with_suffix(".quant.onnx") if output_path is None else Path(output_path)
    given = {name: value for name, value in options.items() if value is not None}
    done = api.quantize(path, output=output, engine=engine, **given)
    if done.sqnr_db is not None:
        log.info("output SQNR %.1f dB, on %d samples", done.sqnr_db, done.judged)


@wraps(api.quantize)
def either(*arguments: Any, **given: Any) -> Any:
    """`qdqtune.quantize`, or the `quantize` of this module if a mode such as int8 stands behind the model, or with a
    keyword that only ModelOpt's has.

    A call that names an output is meant for `qdqtune.quantize`, which tells what it calls such a keyword.
    """
    if len(arguments) > 1 and isinstance(arguments[1], str) and not Path(arguments[1]).suffix:
        return quantize(*arguments, **given)
    theirs = {*signature(quantize).parameters, *IDLE} - signature(api.quantize).parameters.keys()
    has_output = "output" in given or len(arguments) > 1
    return (api.quantize if has_output or theirs.isdisjoint(given) else quantize)(*arguments, **given)


def _products_of_activations(model: Model) -> list[str]:
    """The products of attention, which have no weight, as wildcards."""
    products = (n for n in model.nodes if n.op == "MatMul" and model.constants.keys().isdisjoint(n.inputs))
    return [glob.escape(node.name) for node in products]


def _matching(model: Model, expressions: Collection[str]) -> list[str]:
    """Wildcards for the nodes whose name matches one of some regular expressions; what matches none is told in the
    log."""
    wildcards: list[str] = []
    for expression in expressions:
        try:
            names = [node.name for node in model.nodes if re.match(expression, node.name)]
        except re.error as error:
            raise BadOption(f"{expression!r} is no regular expression: {error}") from error
        if not names:
            log.warning("no node matches %r", expression)
        wildcards += map(glob.escape, names)
    return wildcards


# The program


def get_parser() -> argparse.ArgumentParser:
    """A flag for each keyword of `quantize`."""
    parser = argparse.ArgumentParser("python -m qdqtune", description=run.__doc__, allow_abbrev=False)
    for name, keyword in signature(quantize).parameters.items():
        how: dict[str, Any] = {"default": None if keyword.default is keyword.empty else keyword.default}
        if keyword.default is False:
            how = {"action": "store_true"}
        elif str(keyword.annotation).startswith("Sequence[str]"):
            how["nargs"] = "+"
        elif name == "input_shapes_profile":
            how["type"] = _profile
        if name not in ("calibration_data", "calibration_data_reader", "others"):
            add_flag(parser, f"--{name}", required=name == "onnx_path", **how)
    add_flag(parser, "--calibration_data_path", dest="calibration_data")
    add_flag(parser, "--log_level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), type=str.upper, default="INFO")
    return parser


def _profile(text: str) -> list[dict[str, str]]:
    """Shapes of inputs as JSON, or the name of a file of it."""
    try:
        parts = json.loads(text if text.lstrip().startswith(("[", "{")) else Path(text).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"no JSON and no file of it: {error}") from error
    is_profile = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if not is_profile or not all(isinstance(shape, str) for part in parts for shape in part.values()):
        raise argparse.ArgumentTypeError("give a list of dictionaries whose values are texts")
    return list(parts)


def _other_keywords(words: Sequence[str]) -> dict[str, Any]:
    """The keywords that flags without a place in the parser mean: `quantize` says what it makes of them."""
    keywords: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            keywords[name] = [value] if value else True
        else:
            keywords[name] = [word] if keywords.get(name) in (None, True) else [*keywords[name], word]
    return keywords


def run(quantize: Callable[..., None], flags: Mapping[str, Any]) -> int:
    """Quantize a model by the rules of an engine. docs/reference/modelopt.md explains the flags."""
    keywords = {name: value for name, value in flags.items() if value not in (None, False)}
    logging.basicConfig(format="%(message)s")
    logging.getLogger("qdqtune").setLevel(keywords["log_level"])
    path = Path(keywords.pop("onnx_path"))
    output = keywords["output_path"] = Path(keywords.get("output_path", path.with_suffix(".quant.onnx")))
    quantize(str(path), **keywords)
    click.echo(f"{output} is the quantized model")
    return 0


def main(arguments: Sequence[str] | None = None, work: Callable[..., None] = quantize) -> NoReturn:
    """Run the program, whose work a function does, and exit, as `qdqtune.cli.main.main` does."""
    flags, words = get_parser().parse_known_args(arguments)
    given = vars(flags) | _other_keywords(words)
    command = Command("quantization", Options, lambda _: run(work, given))
    cli.main([], command, "python -m qdqtune.autotune.quantization")


if __name__ == "__main__":
    main()
