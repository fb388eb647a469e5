"""The input shapes that an engine is told to build for, whichever way the user gave them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qdqtune.engines import TENSORRT_FAMILY, EngineSpec
from qdqtune.errors import BadOption
from qdqtune.graph.model import Model


class Span(NamedTuple):
    """Smallest, usual and largest sizes of a tensor."""

    low: tuple[int, ...]
    usual: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def of(low: Sequence[int] | None, usual: Sequence[int] | None, high: Sequence[int] | None) -> Span | None:
        """The span of what is given, from which follows what is not; None of nothing."""
        size = usual or high or low
        return None if size is None else Span(tuple(low or size), tuple(size), tuple(high or size))


OPTIONS = ("min_shapes", "opt_shapes", "max_shapes")
UNSPEAKABLE = frozenset(",'")
"""What ends a name on trtexec's command line, and cannot be escaped there."""

FLAG = re.compile(r"--(min|opt|max)?[sS]hapes=(.*)", re.DOTALL)


def spans(spec: EngineSpec) -> dict[str, Span]:
    """Smallest, usual and largest sizes by input, from the engine's options and from trtexec_args, which win.

    Raises:
        BadOption: the shapes inside trtexec_args cannot be read.
    """
    if spec.name not in TENSORRT_FAMILY:
        return {}
    given = [dict(spec.options.get(name) or {}) for name in OPTIONS]
    for word in _words(spec):
        if match := FLAG.fullmatch(word):
            for i, which in enumerate(("min", "opt", "max")):
                if match[1] in (None, which):
                    given[i] |= read_shapes(match[2], "trtexec_args: ")
    low, usual, high = given
    named = {name: Span.of(low.get(name), usual.get(name), high.get(name)) for name in low | usual | high}
    return {name: span for name, span in named.items() if span is not None}


def check_inputs(spec: EngineSpec, model: Model) -> None:
    """Refuse shapes for what is no input of a model, shapes that an input cannot have, and names that trtexec cannot
    be told of.

    Engines pass over what does not concern them, since they also build parts of a model.

    Raises:
        BadOption: an unknown input, other sizes than the model fixes, not min <= opt <= max, or such a name.
    """
    for name in model.inputs if spec.name == "trtexec" else ():
        if UNSPEAKABLE & set(name):
            raise BadOption(
                f"trtexec takes no input name with {' or '.join(sorted(UNSPEAKABLE))} in it, such as {name!r}: rename "
                "the input, or use --engine tensorrt"
            )
    for name, span in spans(spec).items():
        if name not in model.inputs:
            raise BadOption(f"shapes given for {name!r}: the model's inputs are {', '.join(model.inputs)}")
        info = model.tensors.get(name)
        if info is None or info.shape is None or (not info.is_float and len(info.shape) < 2):
            continue  # of an input that is itself a shape TensorRT wants the values
        told = ", ".join("x".join(map(str, sizes)) for sizes in dict.fromkeys(span))
        if any(len(sizes) != len(info.shape) for sizes in span):
            raise BadOption(f"input {name!r} has {len(info.shape)} dimensions, and cannot have sizes {told}")
        for number, (known, *sizes) in enumerate(zip(info.shape, *span, strict=True)):
            if (known or 0) > 0 and set(sizes) != {known}:  # some files write -1 for what they leave open
                raise BadOption(f"input {name!r}: dimension {number} is {known}, and cannot have sizes {told}")
            if sizes != sorted(sizes):
                raise BadOption(f"input {name!r}: its smallest, usual and largest sizes must rise, not {told}")


def with_spans(spec: EngineSpec, found: Mapping[str, Span]) -> EngineSpec:
    """The engine told these shapes instead of those that it was told."""
    options = {name: value for name, value in spec.options.items() if name not in OPTIONS}
    if "trtexec_args" in options:
        options["trtexec_args"] = shlex.join(word for word in _words(spec) if not FLAG.fullmatch(word))
    if found:
        options |= {name: {t: list(span[i]) for t, span in found.items()} for i, name in enumerate(OPTIONS)}
    return EngineSpec(spec.name, options)


def _words(spec: EngineSpec) -> list[str]:
    try:
        return shlex.split(spec.options.get("trtexec_args") or "")
    except ValueError as error:
        raise BadOption(f"trtexec_args cannot be read ({error}): {spec.options['trtexec_args']!r}") from error


def read_shapes(text: str, where: str = "") -> dict[str, tuple[int, ...]]:
    """Sizes by input, of `a:1x3x224x224,b:1x8`.

    Raises:
        BadOption: the text, which stands `where`, is none.
    """
    shapes = {}
    for part in text.split(","):
        name, _, sizes = part.strip(" '\"").rpartition(":")
        if not name or not re.fullmatch(r"\d+(x\d+)*", sizes):
            raise BadOption(f"{where}{part!r} is no shape: give NAME:1x3x224x224")
        shapes[name] = tuple(map(int, sizes.split("x")))
    return shapes


def usual_shapes(spec: EngineSpec, calibration_data: str | None) -> dict[str, tuple[int, ...]]:
    """The shapes that the engine tunes for, as those of random inputs; samples of the user's have their own."""
    return {} if calibration_data else {name: span.usual for name, span in spans(spec).items()}
