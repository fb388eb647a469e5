"""Quantization by placement rules, or by a search, under the keywords that scripts for ModelOpt's `quantize` use."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy.typing as npt

from qdqtune import api
from qdqtune.autotune.benchmark import default_engine
from qdqtune.autotune.graphs import escaped
from qdqtune.commands.inputs import SamplesLike
from qdqtune.engines.tensorrt.options import read_shapes
from qdqtune.errors import BadOption
from qdqtune.graph.loading import files_of, load
from qdqtune.graph.saving import model_outputs, save, sign
from qdqtune.system.checks import check_outputs
from qdqtune.system.writing import atomic_write
from qdqtune.tuning.folder import FINAL
from qdqtune.types import QuantType

log = logging.getLogger("qdqtune.autotune")

METHODS = {"max": "minmax"}
"""Methods of calibration that have another name here."""


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
    override_shapes: str | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    output_path: str | Path | None = None,
    high_precision_dtype: Literal["fp32", "fp16", "bf16"] | None = None,
    autotune: bool | Literal["quick", "default", "extensive"] = False,
    autotune_output_dir: str | Path | None = None,
    engine: str | None = None,
    **others: Any,
) -> None:
    """Write a quantized version of a model to `output_path`, by default beside it with `.quant.onnx`.

    Names of nodes are regular expressions that match from their beginning. Shapes are written
    `input0:1x3x224x224,input1:1x8`. Pairs stand where `engine` gains from them as a rule (TensorRT by default, which
    need not be installed). With `autotune` a search on an engine that is here decides, and calibrates as it does.
    Keywords `autotune_*` with a counterpart in `qdqtune tune` are options of that search.

    Raises:
        BadOption: a keyword of ModelOpt's has no counterpart here, or a value no meaning.
        QdqtuneError: see `qdqtune.quantize` and `qdqtune.tune`.
    """
    path = Path(onnx_path)
    output = Path(output_path) if output_path is not None else path.with_suffix(".quant.onnx")
    if quantize_mode not in ("int8", "fp8"):
        raise BadOption(f"quantize_mode is int8 or fp8, not {quantize_mode!r}")
    search, shapes = _searched(others), calibration_shapes or override_shapes
    given = _told(
        quant_type=quantize_mode,
        calibration_data=calibration_data if calibration_data_reader is None else _read(calibration_data_reader),
        calibration_method=METHODS.get(calibration_method or "", calibration_method),
        calibration_cache=calibration_cache_path,
        precision=high_precision_dtype,
        input_shape=read_shapes(shapes) if shapes else None,
    )
    chosen = _told(
        nodes_to_quantize=nodes_to_quantize,
        nodes_to_exclude=nodes_to_exclude,
        op_types_to_quantize=op_types_to_quantize,
        op_types_to_exclude=op_types_to_exclude,
    )
    if autotune:
        if chosen:
            raise BadOption(f"a search takes node_filter_list, not a choice of {', '.join(chosen)}")
        here = engine or ("trtexec" if search.pop("use_trtexec", False) else default_engine()[0])
        folder = Path(autotune_output_dir or output.with_suffix(".autotune"))
        effort = "default" if autotune is True else autotune
        read = {"model": files_of(path), "folder of the search": [folder]}
        check_outputs(model_outputs(output, "output_path"), read)
        api.tune(path, engine=here, mode="region", effort=effort, output_dir=folder, **given, **search)
        _copy(folder / FINAL, output)
    else:
        done = api.quantize(path, output, engine=engine or "tensorrt", **given, **_as_wildcards(path, chosen))
        if done.sqnr_db is not None:
            log.info("output SQNR %.1f dB, on %d samples", done.sqnr_db, done.judged)


def _told(**values: Any) -> dict[str, Any]:
    """What was said at all: None and an empty choice are not."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and not (isinstance(value, list) and not value)
    }


def _as_wildcards(model: Path, chosen: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The choice of nodes and operators as `qdqtune.quantize` takes it.

    Raises:
        BadOption: no node is meant to carry a pair.
    """
    names = [node.name for node in load(model).nodes]
    made = {name: _matching(names, v) if name.startswith("nodes") else list(v) for name, v in chosen.items()}
    if made.get("nodes_to_quantize") == []:
        raise BadOption(f"no node matches nodes_to_quantize {chosen['nodes_to_quantize']!r}")
    return made


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
}
"""Keywords that are options of a search, and their names there."""

IDLE = frozenset({
    "autotune_verbose", "calibration_eps", "keep_intermediate_files", "log_file", "log_level", "simplify",
    "trt_rtx_backend", "trust_calibration_data", "trust_remote_code", "use_external_data_format",
})  # fmt: skip
"""Keywords whose value does not change what is written here."""

USUAL: Mapping[str, Any] = {"mha_accumulation_dtype": "fp16", "passes": ["concat_elimination"]}
"""Keywords that are told where they have another value than by default."""


def _searched(others: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a search.

    Raises:
        BadOption: a keyword has a value, and no counterpart.
    """
    known = {*IDLE, *OPTIONS}
    if unknown := [n for n, value in others.items() if value and n not in known and value != USUAL.get(n)]:
        raise BadOption(f"quantize has no {', '.join(sorted(unknown))} here: see docs/migration.md")
    return {OPTIONS[name]: value for name, value in others.items() if name in OPTIONS and value is not None}


def _read(reader: Reader) -> Iterator[Mapping[str, npt.ArrayLike]]:
    while (sample := reader.get_next()) is not None:
        yield sample


def _matching(names: Sequence[str], expressions: Sequence[str] | None) -> list[str]:
    """Wildcards for the names that match one of some regular expressions; what matches none is told in the log.

    Raises:
        BadOption: one is no regular expression.
    """
    found = dict[str, None]()
    for expression in expressions or ():
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


if __name__ == "__main__":
    from qdqtune.autotune.quantize_command import main

    main(quantize)
