"""Quantization by placement rules, or by a search, with the keywords and flags of ModelOpt's `quantize`.

`python -m qdqtune.autotune.quantization` is the program, as is `python -m qdqtune --onnx_path`.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import click
import numpy.typing as npt

from qdqtune import api
from qdqtune.autotune.benchmark import default_engine
from qdqtune.autotune.command import AUTOTUNE, as_parser, option, spread, tell_results
from qdqtune.autotune.graphs import escaped
from qdqtune.autotune.utils import get_node_filter_list
from qdqtune.calibration.samples import files_named
from qdqtune.cli import main as cli
from qdqtune.cli.command import Guarded
from qdqtune.commands.inputs import MODEL, SamplesLike
from qdqtune.engines.options import TIMING_CACHE
from qdqtune.engines.tensorrt.options import read_shapes
from qdqtune.errors import BadOption, writing
from qdqtune.graph.loading import files_of, load
from qdqtune.graph.saving import model_outputs, save, sign
from qdqtune.options import FILE, Given, OfRun, Reads, Writes, choice
from qdqtune.system.checks import LOG_KIND, Output, check_outputs, mark, replaceable
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.folder import BASELINE, FINAL, SUMMARY
from qdqtune.types import QuantType

log = logging.getLogger("qdqtune.autotune")

OPTIONS = {
    "autotune_num_schemes_per_region": "schemes_per_region",
    "autotune_pattern_cache_file": "pattern_cache",
    "autotune_state_file": "state_file",
    "autotune_qdq_baseline": "qdq_baseline",
    "autotune_node_filter_list": "node_filter",
    "autotune_timing_cache": "timing_cache",
    "autotune_warmup_runs": "warmup_runs",
    "autotune_timing_runs": "timing_runs",
    "autotune_trtexec_args": "trtexec_args",
    "autotune_use_trtexec": "use_trtexec",
    "trt_plugins": "plugin_libraries",
}
"""Keywords that are options of a search, and their names there."""

NODE_CHOICES = ("nodes_to_quantize", "nodes_to_exclude", "op_types_to_quantize", "op_types_to_exclude")
"""Keywords that choose nodes; those of names are regular expressions that match from the beginning."""

MODES = ("int8", "fp8")
"""Values of `quantize_mode`."""

UNLISTED = ("disable_mha_qdq", "input_shapes_profile", "override_shapes")
"""Keywords that `quantize` takes among `others`, and that are in none of the lists above and below."""

IDLE = frozenset({
    "autotune_verbose", "calibration_eps", "keep_intermediate_files", "log_file", "log_level", "simplify",
    "trt_rtx_backend", "trust_calibration_data", "trust_remote_code", "use_external_data_format",
})  # fmt: skip
"""Keywords whose value does not change what is written here."""

USUAL: Mapping[str, Any] = {"mha_accumulation_dtype": "fp16", "passes": ["concat_elimination"]}
"""Keywords that are told where they have another value than by default."""

INSTEAD = {
    "output": "with a mode behind the model it is output_path",
    "op_types_to_exclude_fp16": "high_precision_dtype='fp32' keeps all operators in float32",
    "target_dla": "placement_like='implicit' of qdqtune.quantize puts pairs on all that a quantizable layer reads",
    "trt_plugins": "only a search (autotune) loads plug-ins",
}
"""What to do without a keyword."""


class Reader(Protocol):
    """Samples one after the other, as ONNX Runtime's quantizer reads them."""

    def get_next(self) -> Mapping[str, npt.ArrayLike] | None:
        """The next one; None behind the last."""


def quantize(
    onnx_path: str | Path,
    quantize_mode: QuantType = "int8",
    calibration_data: SamplesLike | None = None,
    calibration_method: str | None = None,
    calibration_cache_path: str | Path | None = None,
    calibration_data_reader: Reader | None = None,
    calibration_shapes: str | None = None,
    *,
    output_path: str | Path | None = None,
    high_precision_dtype: Literal["fp32", "fp16", "bf16"] | None = None,
    autotune: bool | Literal["quick", "default", "extensive"] = False,
    autotune_output_dir: str | Path | None = None,
    engine: str | None = None,
    **others: Any,
) -> None:
    """Write a quantized version of a model to `output_path`, by default beside it with `.quant.onnx`.

    Shapes are written `input0:1x3x224x224,input1:1x8`. Pairs stand where `engine` gains from them as a rule (TensorRT
    by default, which need not be installed). With `autotune` a search on an engine that is here decides, and calibrates
    as it does. `others` are `override_shapes`, `input_shapes_profile` (its usual shapes), `disable_mha_qdq`, and those
    of `NODE_CHOICES`, `OPTIONS` and `IDLE`.

    Raises:
        BadOption: a keyword of ModelOpt's has no counterpart here, or a value no meaning.
        QdqtuneError: see `qdqtune.quantize` and `qdqtune.tune`.
    """
    if quantize_mode not in MODES:
        raise BadOption(f"quantize_mode is int8 or fp8, not {quantize_mode!r}")
    path = Path(onnx_path)
    output = Path(output_path) if output_path is not None else path.with_suffix(".quant.onnx")
    shapes = calibration_shapes or others.pop("override_shapes", None)
    usual = _usual_shapes(others.pop("input_shapes_profile", None) or ())
    chosen: dict[str, Any] = {name: list(value) for name in NODE_CHOICES if (value := others.pop(name, None))}
    chosen |= {"disable_mha_qdq": True} if others.pop("disable_mha_qdq", False) else {}
    search = _search_options(others, searches=bool(autotune))
    data = calibration_data if calibration_data_reader is None else _read(calibration_data_reader)
    told = {
        "quant_type": quantize_mode,
        "calibration_data": None if isinstance(data, list) and not data else data,
        "calibration_method": "minmax" if calibration_method == "max" else calibration_method,
        "calibration_cache": calibration_cache_path,
        "precision": high_precision_dtype,
        "input_shapes": read_shapes(shapes) if shapes else usual or None,
    }
    given: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    if not autotune:
        done = api.quantize(path, output=output, engine=engine or "tensorrt", **given, **_as_wildcards(path, chosen))
        if done.sqnr_db is not None:
            log.info("output SQNR %.1f dB, on %d samples", done.sqnr_db, done.judged)
        return
    if chosen:
        raise BadOption(f"a search takes node_filter_list, not a choice of {', '.join(chosen)}")
    given["engine"] = engine or ("trtexec" if search.pop("use_trtexec", False) else default_engine()[0])
    given["effort"] = "default" if autotune is True else autotune
    _search(path, output, Path(autotune_output_dir or output.with_suffix(".autotune")), **given, **search)


def _search(model: Path, output: Path, folder: Path, **given: Any) -> None:
    """Search, and leave the result under the names that ModelOpt gives to what it compares at the end.

    Raises:
        QdqtuneError: see `qdqtune.tune`.
    """
    check_outputs(model_outputs(output, "output_path"), {"model": files_of(model), "folder of the search": [folder]})
    floor: Any = "auto" if given.get("calibration_data") is not None else None  # users expect a file without samples
    found = api.tune(model, mode="region", output_dir=folder, min_sqnr=floor, **given)
    before, after, pairs = (found.summary[name] for name in ("baseline_ms", "final_ms", "pairs"))
    selected = "qdq" if pairs else "no_qdq"
    log.info("Autotune selected %s: %.3f ms -> %.3f ms, %s", selected, before, after, found.in_words())
    _copy(folder / BASELINE, folder / "calibrated_baseline.onnx")
    for target in (folder / "calibrated_candidate.onnx", output):
        _copy(folder / FINAL, target)


@wraps(api.quantize)
def either(*arguments: Any, **given: Any) -> Any:
    """`qdqtune.quantize`, or the `quantize` of this module if a mode such as int8 stands behind the model, or with a
    keyword that only ModelOpt's has.

    A call that names an output is meant for `qdqtune.quantize`, which tells what it calls such a keyword.
    """
    if len(arguments) > 1 and isinstance(arguments[1], str) and not Path(arguments[1]).suffix:
        return quantize(*arguments, **given)
    known = {*signature(quantize).parameters, *UNLISTED, *NODE_CHOICES, *OPTIONS, *IDLE}
    has_output = "output" in given or len(arguments) > 1
    is_theirs = not has_output and not known.isdisjoint(given.keys() - signature(api.quantize).parameters.keys())
    return (quantize if is_theirs else api.quantize)(*arguments, **given)


def _search_options(others: Mapping[str, Any], *, searches: bool) -> dict[str, Any]:
    """Options of a search.

    Raises:
        BadOption: a keyword has a value, and no counterpart.
    """
    known = {*IDLE, *OPTIONS} - ({"trt_plugins"} if not searches else set())
    for name, value in others.items():
        is_told = value is not None and value is not False and value != []
        if is_told and name not in known and value != USUAL.get(name):
            raise BadOption(f"quantize has no {name} here: {INSTEAD.get(name, 'see docs/reference/modelopt.md')}")
    return {OPTIONS[name]: value for name, value in others.items() if name in OPTIONS and value is not None}


def _usual_shapes(profile: Sequence[Mapping[str, str]]) -> dict[str, tuple[int, ...]]:
    """The usual shapes by input of a profile of ONNX Runtime's TensorRT providers.

    Raises:
        BadOption: one is no shape.
    """
    texts = (text for part in profile for name, text in part.items() if name.endswith("_opt_shapes"))
    return {name: shape for text in texts for name, shape in read_shapes(text).items()}


def _as_wildcards(model: Path, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of nodes and operators as `qdqtune.quantize` takes it.

    Raises:
        BadOption: no node is meant to carry a pair.
    """
    graph = load(model)
    names = [node.name for node in graph.nodes]
    made = {
        name: _matching(names, chosen[name]) if name.startswith("nodes") else chosen[name]
        for name in NODE_CHOICES
        if name in chosen
    }
    if made.get("nodes_to_quantize") == []:
        raise BadOption(f"no node matches nodes_to_quantize {chosen['nodes_to_quantize']!r}")
    if "disable_mha_qdq" in chosen:  # the products of attention have no weight
        products = (n for n in graph.nodes if n.op == "MatMul" and not graph.constants.keys() & {*n.inputs})
        made["nodes_to_exclude"] = [*made.get("nodes_to_exclude", ()), *(escaped(n.name) for n in products)]
    return made


def _read(reader: Reader) -> Iterator[Mapping[str, npt.ArrayLike]]:
    while (sample := reader.get_next()) is not None:
        yield sample


def _matching(names: Sequence[str], expressions: Sequence[str]) -> list[str]:
    """Wildcards for the names that match one of some regular expressions; what matches none is told in the log.

    Raises:
        BadOption: one is no regular expression.
    """
    found = dict[str, None]()
    for expression in expressions:
        try:
            own = [name for name in names if re.match(expression, name)]
        except re.error as error:
            raise BadOption(f"{expression!r} is no regular expression: {error}") from error
        if not own:
            log.warning("no node matches %r", expression)
        found |= dict.fromkeys(map(escaped, own))
    return list(found)


def _copy(model: Path, target: Path) -> None:
    """A model under another name, its external data as well."""
    with atomic_write(target) as fresh:
        if len(files_of(model)) == 1:
            shutil.copyfile(model, fresh)
        else:
            save(load(model), fresh)
        sign(fresh)


# The program


def _log(path: Path, option: str, _: Given) -> list[Output]:
    """A log goes on where an earlier one ended."""
    return [Output(path, option, replaceable(LOG_KIND), is_appended=True)]


def _beside(given: Given) -> Path | None:
    """The quantized model, where no file is named for it."""
    path: Path = given["onnx_path"]
    return path.with_suffix(".quant.onnx") if path.name else None


def _profile(text: str) -> list[dict[str, str]]:
    """Shapes of inputs as JSON, or the name of a file of it.

    Raises:
        BadParameter: it is no list of dictionaries of texts.
    """
    try:
        found = json.loads(text if text.lstrip().startswith(("[", "{")) else Path(text).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise click.BadParameter(f"no JSON and no file of it: {error}") from error
    parts: list[Any] = found if isinstance(found, list) else [None]
    if not all(isinstance(part, dict) and all(isinstance(t, str) for t in part.values()) for part in parts):
        raise click.BadParameter("give a list of dictionaries whose values are texts")
    return parts


PROFILE = click.types.FuncParamType(_profile)
LEVELS = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False)
OUTPUT_PATH = Writes(lambda path, name, _: model_outputs(path, name), _beside)
SAME_HELP = "As what follows: see python -m qdqtune.autotune --help."

FLAGS = (
    option("--onnx-path onnx_path", "The float model.", MODEL, required=True),
    option("--output-path", "[default: ONNX_PATH with .quant.onnx]", OUTPUT_PATH),
    option("--quantize-mode", "Numbers of the pairs.", choice("int8", "fp8"), default="int8"),
    option("--calibration-data-path calibration_data", "Samples: .npz or .npy. Random ones without it.",
           Reads(files_named, path_type=str), metavar="FILE"),
    option("--calibration-method", "max is minmax.  [default: mse]", metavar="METHOD"),
    option("--calibration-cache-path", "Scales from a calibration cache.", FILE),
    option("--calibration-shapes", "Sizes of open inputs: input0:1x3x224x224,input1:1x8.", metavar="SHAPES"),
    option("--override-shapes", "The same.", metavar="SHAPES"),
    option("--input-shapes-profile", "The same, as JSON or a file of it.", PROFILE, metavar="JSON"),
    option("--high-precision-dtype", "Of what carries no pair.  [default: fp16]", choice("fp32", "fp16", "bf16")),
    option("--op-types-to-quantize", "Only these operators.", metavar="OP ...", multiple=True),
    option("--op-types-to-exclude", "Operators that stay in float.", metavar="OP ...", multiple=True),
    option("--nodes-to-quantize", "Only these nodes.", metavar="REGEX ...", multiple=True),
    option("--nodes-to-exclude", "Nodes that stay in float.", metavar="REGEX ...", multiple=True),
    option("--disable-mha-qdq", "MatMuls without a weight stay in float.", is_flag=True),
    option("--engine", "Whose rules and numbers, or what to time on.  [default: tensorrt]", metavar="NAME"),
    option("--log-level", "How much to tell on standard error.", LEVELS, default="INFO"),
    option("--log-file", "Tell it there as well.", Writes(_log)),
    AUTOTUNE,
    option("--autotune-output-dir", "Where the search goes on.  [default: OUTPUT_PATH with .autotune]", OfRun()),
    option("--autotune-schemes-per-region autotune_num_schemes_per_region", SAME_HELP, click.IntRange(1),
           metavar="N"),
    option("--autotune-pattern-cache autotune_pattern_cache_file", None, FILE),
    option("--autotune-qdq-baseline", None, MODEL),
    option("--autotune-state-file", None, OfRun()),
    option("--autotune-node-filter-list", None, FILE),
    option("--autotune-timing-cache", None, TIMING_CACHE, metavar="FILE"),
    option("--autotune-warmup-runs", None, click.IntRange(1), metavar="N"),
    option("--autotune-timing-runs", None, click.IntRange(1), metavar="N"),
    option("--autotune-trtexec-args", None, metavar="ARGUMENTS"),
    option("--autotune-use-trtexec", "Time with trtexec.", is_flag=True),
    option("--autotune-verbose", "What --log-level DEBUG tells.", is_flag=True),
)  # fmt: skip

SWITCHES = (
    "calibrate-per-node direct-io-types dq-only keep-intermediate-files simplify target-dla trust-calibration-data "
    "trust-remote-code use-external-data-format"
)
VALUES = "mha-accumulation-dtype model-id opset trt-rtx-backend use-zero-point"
LISTS = "calibration-eps op-types-to-exclude-fp16 passes trt-plugins trt-plugins-precision"
OTHERS = tuple(
    click.Option([f"--{name}"], is_flag=is_flag, multiple=multiple, hidden=True)
    for names, is_flag, multiple in ((SWITCHES, True, False), (VALUES, False, False), (LISTS, False, True))
    for name in names.split()
)
"""Other flags of that program: they reach `quantize`, which says what it makes of them."""

SEVERAL = frozenset(flag for option in (*FLAGS, *OTHERS) if option.multiple for flag in option.opts)
"""Flags that take any number of values."""


def run(quantize: Callable[..., None], **given: Any) -> int:
    """Quantize a model by the rules of an engine, or by a search, with the flags of ModelOpt's program.

    \b
    python -m qdqtune.autotune.quantization --onnx_path model.onnx --calibration_data_path calib.npz
    python -m qdqtune.autotune.quantization --onnx_path model.onnx --autotune=quick --output_path tuned.onnx
    """
    path, searches = given.pop("onnx_path"), given["autotune"] is not None
    _log_to(given["log_level"], given["log_file"])
    output = given.pop("output_path")
    folder = given.pop("autotune_output_dir") or output.with_suffix(".autotune")
    given["autotune_node_filter_list"] = get_node_filter_list(given["autotune_node_filter_list"])
    said = {name: value for name, value in given.items() if value not in (None, (), False)}
    keywords: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in said.items()}
    quantize(str(path), output_path=output, **keywords, **({"autotune_output_dir": folder} if searches else {}))
    click.echo(f"{output} is the quantized model")
    if searches:
        tell_results(folder / SUMMARY)
    return 0


def _log_to(level: str, file: Path | None) -> None:
    """Show the package's log, in a file as well if there is one."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        with writing(file), file.open("a") as begun:
            begun.write("" if begun.tell() else f"# {mark(LOG_KIND)}\n")
        handlers.append(logging.FileHandler(file))
    logging.basicConfig(format="%(message)s", handlers=handlers)
    logging.getLogger("qdqtune").setLevel(level.upper())


def command_for(work: Callable[..., None] = quantize) -> click.Command:
    """The program as a command, whose work a function does."""
    return Guarded("quantization", cli.CONTEXT, callback=partial(run, work), params=[*FLAGS, *OTHERS], help=run.__doc__)


def get_parser() -> argparse.ArgumentParser:
    """The flags of the program as a parser of argparse."""
    return as_parser(command_for(), "python -m qdqtune")


def main(arguments: Sequence[str] | None = None, work: Callable[..., None] = quantize) -> NoReturn:
    """Run the program, whose work a function does, and exit, as `qdqtune.cli.main.main` does."""
    cli.main(spread(arguments, SEVERAL), command_for(work), "python -m qdqtune.autotune.quantization")


if __name__ == "__main__":
    main()
