"""The numeric formats that each engine runs fast, on the processor at hand; known without the engine's library."""

from __future__ import annotations

from dataclasses import replace

from qdqtune.engines.facts import facts_of
from qdqtune.engines.machine import lacks_dot_products, products_saturate
from qdqtune.errors import BadOption
from qdqtune.types import NumericFormat, QType, QuantType, WeightFormat


def numeric_format(engine: str, quant_type: QuantType) -> NumericFormat:
    """The number types of Q/DQ pairs for an engine with default options on this machine's processor. Raises BadOption
    if it has no FP8 kernels and `quant_type` is fp8."""
    facts = facts_of(engine)
    numbers = facts.numbers if quant_type == "int8" else facts.fp8
    if numbers is None:
        raise BadOption(f"{engine} has no FP8 kernels: use `quant_type` int8, or another engine")
    if not facts.is_threaded:
        return numbers
    is_slow = numbers.activation is QType.UINT8 and lacks_dot_products()
    activation = QType.INT8 if is_slow else numbers.activation
    return replace(numbers, activation=activation, reduced_weights=products_saturate())


def tensorrt_of(quant_type: QuantType, version: str, is_strongly_typed: bool) -> NumericFormat:
    """The number types for a version of TensorRT. With strong typing it takes all precisions from the graph; without
    (8.6), weights stay float in front of a Q and a DQ, as integers are refused."""
    if quant_type == "fp8" and not is_strongly_typed:
        raise BadOption(f"TensorRT {version} has no FP8: use `quant_type` int8, or TensorRT 10 or later")
    return replace(numeric_format("tensorrt", quant_type), float_weights=not is_strongly_typed)


def portable(engine: str, numbers: NumericFormat) -> NumericFormat:
    """Number types with which a file computes the same on every processor: weights of 7 bits, with which no sum of
    products saturates, and activations that x86 runs fast.

    On ARM without dot products ONNX Runtime rewrites these activations to int8, which takes time but changes no output.
    """
    facts = facts_of(engine)
    if not facts.is_threaded:
        raise BadOption(f"{engine} takes the same numbers with every processor: leave `portable` out")
    return replace(numbers, activation=facts.numbers.activation, reduced_weights=True)


def weight_formats(engine: str, *, narrow: bool | None = None) -> tuple[WeightFormat, ...]:
    """The weight formats for which an engine has matrix-product kernels, the usual ones first. `narrow`: those of
    dynamic quantization get 7 bits, which saturate on no processor (None: only if 8 bits would on this one)."""
    is_narrow = products_saturate() if narrow is None else narrow
    known = map(WeightFormat.named, facts_of(engine).weights)
    return tuple(replace(one, bits=7) if one.dynamic and is_narrow else one for one in known)


def weight_formats_like(engine: str, wanted: str, *, narrow: bool | None = None) -> tuple[WeightFormat, ...]:
    """The weight formats of an engine that match `wanted`: a name ("w4b32") means one, a family ("w4", "w8") every
    format of so many bits. Raises BadOption if there is none."""
    known = weight_formats(engine, narrow=narrow)
    like = [s for s in known if s.name == wanted] + [s for s in known if s.family == wanted]
    if not like:
        names = ", ".join(dict.fromkeys((*(s.family for s in known), *(s.name for s in known))))
        raise BadOption(f"{engine} has no kernels for weights stored as {wanted!r}; it has {names or 'none'}")
    return tuple(dict.fromkeys(like))
