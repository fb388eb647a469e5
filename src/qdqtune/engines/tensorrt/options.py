"""Options of the TensorRT engines, the input shapes among them, and the file of the timing cache."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from qdqtune.engines import EngineSpec
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.loading import read
from qdqtune.graph.model import Model
from qdqtune.options import shapes_of
from qdqtune.system.checks import Output
from qdqtune.types import Array

Shapes = Mapping[str, Sequence[int]]
"""Sizes by input name; for an input that is itself a shape, its values."""

SHAPE_OPTIONS = ("min_shapes", "opt_shapes", "max_shapes")

SHAPE_FLAG = re.compile(r"--(min|opt|max)?[sS]hapes=(.*)", re.DOTALL)

NO_TIMING_CACHES = (b"PK", b"\x93NUMPY", b"\x1f\x8b", b"\x89HDF", b"ftrt", b"ptrt")
"""Beginnings of files that are certainly no timing cache: archives, arrays, and serialized engines."""


class Span(NamedTuple):
    """Smallest, usual and largest sizes of a tensor: TensorRT's optimization profile."""

    low: tuple[int, ...]
    usual: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def of(low: Sequence[int] | None, usual: Sequence[int] | None, high: Sequence[int] | None) -> Span | None:
        """A span where a missing value is replaced by `usual`, else `high`, else `low`; None if all are missing."""
        size = usual or high or low
        return None if size is None else Span(tuple(low or size), tuple(size), tuple(high or size))


@dataclass(frozen=True, kw_only=True)
class TensorRtOptions:
    plugin_libraries: Annotated[Sequence[str], "shared libraries with plug-ins: one, or a list"] = ()
    min_shapes: Annotated[Shapes | None, "smallest sizes of dynamic inputs: input:1x3x224x224,other:1x8"] = None
    opt_shapes: Annotated[Shapes | None, "sizes to tune for (otherwise those of the samples)"] = None
    max_shapes: Annotated[Shapes | None, "largest sizes"] = None
    workspace_mb: Annotated[Annotated[int, Meta(ge=1)] | None, "most scratch memory that a kernel may take"] = None
    builder_level: Annotated[
        Annotated[int, Meta(ge=0, le=5)] | None, "0 (fast builds) to 5 (fast engines); TensorRT itself takes 3"
    ] = None

    @property
    def target(self) -> str | None:
        """The architecture of the GPU to build for, such as `sm89`; None: this machine's GPU."""
        return None

    def shapes(self, name: str) -> Span | None:
        """The sizes that the user gave for an input; None if there are none."""
        return Span.of(*((getattr(self, option) or {}).get(name) for option in SHAPE_OPTIONS))

    def described(self) -> dict[str, str]:
        """The options that change the latency, as text by name."""
        named = {name: getattr(self, name) for name in (*SHAPE_OPTIONS, "workspace_mb", "builder_level", "target")}
        return {name: str(value) for name, value in named.items() if value not in (None, "", {})}


@dataclass(frozen=True, kw_only=True)
class CachedOptions(TensorRtOptions):
    timing_cache: Annotated[str | None, "file of kernel times that builds share, made if it is missing"] = None


def as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON values for an `EngineSpec`. Shapes may be text such as input:1x3x224x224, libraries one path."""
    chosen = dict(options)
    for name in SHAPE_OPTIONS:
        shapes = chosen.get(name)
        if isinstance(shapes, str):
            shapes = _shapes(shapes, f"`engine_options` {name}")
        if isinstance(shapes, Mapping):
            chosen[name] = {tensor: list(s) if isinstance(s, Sequence) else s for tensor, s in shapes.items()}
    if "plugin_libraries" in chosen:
        chosen["plugin_libraries"] = libraries_in(chosen)
    if isinstance(chosen.get("timing_cache"), Path):
        chosen["timing_cache"] = str(chosen["timing_cache"])
    return chosen


def libraries_in(options: Mapping[str, Any]) -> list[str]:
    """The option `plugin_libraries`, which may be a single path, as a list."""
    libraries = options.get("plugin_libraries") or ()
    return [str(one) for one in ([libraries] if isinstance(libraries, str | Path) else libraries)]


def timing_cache(path: Path | None, option: str, _: object = None) -> list[Output]:
    """A timing cache to read and write. TensorRT and trtexec add to an existing file. Nothing in a timing cache says
    that it is one, so only texts, archives, arrays, models and plans are refused."""
    return [] if path is None else [Output(path, option, _may_be_timing_cache, makes_folder=True)]


def _may_be_timing_cache(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(NO_TIMING_CACHES):
        return False
    try:
        read(path)
    except BadModel:
        return not start or not start.decode("utf-8", errors="replace").replace("\n", " ").isprintable()
    return False


def spans(spec: EngineSpec) -> dict[str, Span]:
    """Smallest, usual and largest sizes by input, from the engine's options; trtexec_args take precedence."""
    if not spec.facts.is_tensorrt:
        return {}
    given = [dict(spec.options.get(name) or {}) for name in SHAPE_OPTIONS]
    for word in split_arguments(spec.options.get("trtexec_args") or ""):
        match = SHAPE_FLAG.fullmatch(word)
        for i, which in enumerate(("min", "opt", "max")):
            if match is not None and match[1] in (None, which):
                given[i] |= _shapes(match[2], "trtexec_args")
    low, usual, high = given
    named = {name: Span.of(low.get(name), usual.get(name), high.get(name)) for name in low | usual | high}
    return {name: span for name, span in named.items() if span is not None}


def with_spans(spec: EngineSpec, found: Mapping[str, Span]) -> EngineSpec:
    """`spec` with the spans `found` in place of all shapes in its options and in trtexec_args."""
    options = {name: value for name, value in spec.options.items() if name not in SHAPE_OPTIONS}
    if "trtexec_args" in options:
        words = split_arguments(options["trtexec_args"] or "")
        options["trtexec_args"] = shlex.join(word for word in words if not SHAPE_FLAG.fullmatch(word))
    if found:
        options |= {name: {t: list(span[i]) for t, span in found.items()} for i, name in enumerate(SHAPE_OPTIONS)}
    return EngineSpec(spec.name, options)


def built_for_sample(spec: EngineSpec, model: Model, sample: Mapping[str, Array]) -> EngineSpec:
    """`spec` with the sizes of a sample for dynamic inputs that have no sizes there. Inputs that may be shapes, for
    which TensorRT wants values, are left out."""
    if not spec.facts.is_tensorrt:
        return spec
    sizes = {}
    for name in model.inputs:
        shape, array = model.tensors[name].shape, sample[name]
        is_dynamic = shape is None or any((size or 0) < 1 for size in shape)
        if is_dynamic and (array.dtype.kind == "f" or array.ndim > 1):
            sizes[name] = Span(array.shape, array.shape, array.shape)
    return with_spans(spec, sizes | spans(spec)) if sizes else spec


def split_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadOption(f"trtexec_args cannot be read ({error}): {text!r}") from error


def _shapes(text: str, where: str) -> dict[str, tuple[int, ...]]:
    try:
        return shapes_of(text.replace("'", ""))
    except ValueError as error:
        raise BadOption(f"{where}: {error}") from error


def sizes_text(shapes: Mapping[str, Sequence[int]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in shapes.items())


def builder_flags(options: Mapping[str, Any]) -> list[str]:
    flags = {"workspace_mb": "--memPoolSize=workspace:", "builder_level": "--builderOptimizationLevel="}
    return [f"{flag}{options[name]}" for name, flag in flags.items() if options.get(name) is not None]


def usual_shapes(spec: EngineSpec, calibration_data: object) -> dict[str, tuple[int, ...]]:
    """The shapes for random inputs: the usual ones that the engine builds for; none with calibration data."""
    return {} if calibration_data else {name: span.usual for name, span in spans(spec).items()}
