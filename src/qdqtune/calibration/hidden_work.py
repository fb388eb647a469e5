"""Work that no pair can reach, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.samples import Samples
from qdqtune.graph.model import Model, bodies
from qdqtune.graph.operators import COMPUTE, CONTROL_FLOW, HEAVY, integer_operators
from qdqtune.types import Array

LOOKED_AT = 256
"""Samples that an input must have one value in, to count as constant."""

KINDS = sorted(COMPUTE)


def hidden_work(model: Model, samples: Samples) -> str | None:
    """Why compute operators are out of reach: there are none, they are quantized already, or they stand in the bodies
    of If, Loop or Scan.

    An If that depends on inputs with the same value in all samples can be folded, and the option says how.
    """
    if operators := integer_operators(model):
        return (
            f"the model is quantized already, what is ({', '.join(operators)}) stays: tune the float model it came from"
        )
    inside = [op for node in model.proto.graph.node for body in bodies(node) for op in _heavy(body)]
    outside = sum(node.op in HEAVY - CONTROL_FLOW for node in model.nodes)
    if not inside:
        return None if outside else f"the model has none of the operators that 8 bits make faster ({', '.join(KINDS)})"
    flows = [node for node in model.nodes if node.op in CONTROL_FLOW]
    kinds = " and ".join(dict.fromkeys(node.op for node in flows))
    share = "all" if not outside else f"{len(inside)} of {len(inside) + outside}"
    what = f"{share} operators that gain from 8 bits ({', '.join(sorted(set(inside)))}) stand in bodies of {kinds}"
    return f"{what}, where no pair can: {_way_out(model, samples)}"


def _heavy(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        if node.op_type in HEAVY - CONTROL_FLOW:
            yield node.op_type
        for body in bodies(node):
            yield from _heavy(body)


def _way_out(model: Model, samples: Samples) -> str:
    deciding = _deciding_inputs(model)
    if not deciding:
        return "unroll it where the model is exported"
    if samples.is_random:
        flags = " ".join(f"--fix-input {name}=VALUE" for name in deciding)
        return f"give the value that you deploy with, {flags}, and it is folded"
    values = _constants(deciding, samples)
    if changing := [name for name in deciding if name not in values]:
        return f"it depends on the input {changing[0]}, whose value changes: export a model for each value"
    flags = " ".join(f"--fix-input {name}={value}" for name, value in values.items())
    told = " and ".join(f"{name} is {value}" for name, value in values.items())
    return f"{told} in all samples, so give {flags} and it is folded (the result then holds for that value alone)"


def _deciding_inputs(model: Model) -> list[str]:
    """The inputs that the conditions of all If depend on."""
    waiting = [node.inputs[0] for node in model.nodes if node.op == "If"]
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor and tensor not in seen:
            seen.add(tensor)
            producer = model.maker(tensor)
            waiting += [] if producer is None else producer.inputs
    return [spec.name for spec in input_specs(model) if spec.name in seen]


def _constants(names: Sequence[str], samples: Samples) -> dict[str, float | int]:
    """Those of the inputs that hold one number, the same in all samples, with this number."""
    found: dict[str, Array] = {}
    changing: set[str] = set()
    for sample in samples.first(LOOKED_AT):
        for name in names:
            known = found.setdefault(name, sample[name])
            if np.unique(np.append(known, sample[name])).size != 1:
                changing.add(name)
    return {name: array.flat[0].item() for name, array in found.items() if name not in changing}
