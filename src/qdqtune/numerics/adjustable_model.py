"""A model with pairs whose scales and biases are inputs, so that one build serves all values of them that are tried.

The build of a large network takes longer than its inference. The arithmetic is that of the file: pairs round, weights
are rounded floats, or the integers themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper

from qdqtune.calibration import scales
from qdqtune.calibration.scales import Quantization
from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.placement.insertion import quantized
from qdqtune.placement.possible import BiasedLayer
from qdqtune.types import Array, Edge, QType

SCALES, ZEROS, CHANNELS = "__scales", "__zeros", "__channels"
"""Inputs: scales and zero points of the activations with pairs, in their order; a number for each channel of all layers
in their order."""

WIDE = 128
"""The most outputs of one Split: ONNX Runtime's time for it grows with their square. Chosen, not measured."""

AS_INTEGERS = 2**22
"""Weights of so many bytes or more are written as integers, as in candidates, not again as rounded floats. Chosen, not
measured."""

MOVES = "__moves"
"""Output: one number for each channel of all layers."""

Mode = Literal["means", "centred", "shifted"]
"""What the model does to the channels of layers.

- means: nothing; MOVES are their means.
- shifted: it adds CHANNELS.
- centred: it shifts their means to CHANNELS, sample by sample; MOVES are the shifts. Later layers then see the right
  means, so one run over a sample serves all layers.
"""

Scales = Mapping[str, Quantization]


def feeds(quantized: Scales) -> dict[str, Array]:
    """The inputs SCALES and ZEROS. int8 becomes uint8, with a zero point 128 larger."""
    found = list(quantized.values())
    zeros = [q.zero_point + (128 if q.qtype is QType.INT8 else 0) for q in found]
    return {SCALES: np.asarray([float(q.scale) for q in found], np.float32), ZEROS: np.asarray(zeros, np.uint8)}


def _rounded(constant: Constant, how: Quantization) -> Constant:
    """A constant with rounded values in its own type, computed when it is written."""
    dtype = helper.tensor_dtype_to_np_dtype(constant.dtype)
    digest = hashlib.sha256(f"{how.qtype}{how.axis}{how.zero_point}".encode() + how.scale.tobytes()).hexdigest()[:16]

    def values() -> Array:
        return scales.dequantize(scales.quantize(constant.array(), how), how).astype(dtype)

    return Constant(f"{constant.key}:rounded:{digest}", constant.dtype, constant.shape, values)


def adjustable_model(
    model: Model,
    activations: Scales,
    constants: Mapping[Edge, Quantization],
    paired: Collection[Edge],
    layers: Sequence[BiasedLayer],
    mode: Mode,
    shown: Sequence[Edge],
) -> Model:
    """`model` with pairs on the edges `paired`, and the values of the edges `shown` as outputs, MOVES behind them.

    The scales of `activations` are inputs, in their order; constants are rounded as `constants` say.
    """
    return _Writer(model, activations, constants, paired, layers, mode).written(shown)


class _Writer:
    """Writes one adjustable model."""

    def __init__(
        self, model: Model, activations: Scales, constants: Mapping[Edge, Quantization], paired: Collection[Edge],
        layers: Sequence[BiasedLayer], mode: Mode,
    ) -> None:  # fmt: skip
        self._model, self._activations, self._fixed, self._paired = model, activations, constants, paired
        self._numbers = {tensor: i for i, tensor in enumerate(activations)}
        self._layers = {layer.result: (i, layer) for i, layer in enumerate(layers)}
        self._mode = mode
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, Constant] = {}
        self._pairs: dict[str, str] = {}
        self._moves: list[str] = []

    def written(self, shown: Sequence[Edge]) -> Model:
        model, inputs = self._model, []
        if self._activations:
            inputs += [(SCALES, TensorProto.FLOAT), (ZEROS, TensorProto.UINT8)]
            for name, _ in inputs:
                self._split(name, [1] * len(self._activations))
        if self._layers and self._mode != "means":
            inputs.append((CHANNELS, TensorProto.FLOAT))
            self._split(CHANNELS, [layer.channels for _, layer in self._layers.values()])
        for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
            self._add_node(node, proto)
        outputs = [self._node("Identity", self._read(e), result=f"__shown_{i}") for i, e in enumerate(shown)]
        if self._moves:
            outputs.append(self._node("Concat", *self._moves, result=MOVES, axis=0))
        written = rebuild(model, self._nodes, self._constants)
        graph = written.proto.graph
        graph.input.extend(helper.make_tensor_value_info(name, dtype, [None]) for name, dtype in inputs)
        del graph.output[:]
        for name in outputs:
            graph.output.add(name=name)  # ONNX Runtime infers the rest
        written.proto.ir_version = max(written.proto.ir_version, 9 if model.opset >= 19 else 7)
        return Model(written.proto, written.large)

    def _add_node(self, node: Node, proto: onnx.NodeProto) -> None:
        copy = deepcopy(proto)
        for slot, edge in enumerate(node.into):
            copy.input[slot] = self._read(edge)
        self._nodes.append(copy)
        if not node.outputs or node.outputs[0] not in self._layers:
            return
        number, layer = self._layers[node.outputs[0]]
        if self._mode == "means":
            self._moves.append(self._reshaped(self._mean(layer, layer.result), [-1]))
            return
        copy.output[0] = f"__before_{number}"
        move = self._reshaped(f"{CHANNELS}_{number}", _broadcast(layer))
        if self._mode == "centred":
            move = self._node("Sub", move, self._mean(layer, copy.output[0]))
            self._moves.append(self._reshaped(move, [-1]))
        dtype = self._model.tensors[layer.result].dtype
        if dtype != TensorProto.FLOAT:
            move = self._node("Cast", move, to=dtype)
        self._node("Add", copy.output[0], move, result=layer.result)

    def _mean(self, layer: BiasedLayer, values: str) -> str:
        """The mean of each channel over all other axes, in the shape of `_broadcast`."""
        if self._model.tensors[layer.result].dtype != TensorProto.FLOAT:
            values = self._node("Cast", values, to=TensorProto.FLOAT)
        if layer.rank is None:
            values = self._reshaped(values, [-1, layer.channels])
        axes = [i for i in range(layer.rank or 2) if i != 1]
        if self._model.opset >= 18:
            mean = self._node("ReduceMean", values, self._integers(axes), keepdims=1)
        else:
            mean = self._node("ReduceMean", values, axes=axes, keepdims=1)
        return self._reshaped(mean, _broadcast(layer))

    def _reshaped(self, value: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", value, self._integers(shape))

    def _integers(self, values: Sequence[int]) -> str:
        name = f"__integers_{len(self._constants)}"
        self._constants[name] = Constant.of(np.asarray(values, np.int64))
        return name

    def _split(self, vector: str, sizes: Sequence[int]) -> None:
        """Split an input into one tensor for each of the `sizes`, named after it: vector_0, vector_1, ..."""
        parts = [f"{vector}_{i}" for i in range(len(sizes))]
        starts = range(0, len(sizes), WIDE)
        wholes = [f"{vector}_from_{i}" for i in starts] if len(starts) > 1 else [vector]
        if len(starts) > 1:
            self._add_split(vector, wholes, [sum(sizes[i : i + WIDE]) for i in starts])
        for whole, i in zip(wholes, starts, strict=True):
            self._add_split(whole, parts[i : i + WIDE], sizes[i : i + WIDE])

    def _add_split(self, vector: str, parts: Sequence[str], sizes: Sequence[int]) -> None:
        self._nodes.append(helper.make_node("Split", [vector, self._integers(sizes)], parts, f"{vector}_parts", axis=0))

    def _read(self, edge: Edge) -> str:
        """The tensor that the user of an edge reads."""
        if edge not in self._paired:
            return edge.tensor
        if edge in self._fixed:
            return self._constant(self._model.constants[edge.tensor], self._fixed[edge])
        if edge.tensor not in self._pairs:
            self._pairs[edge.tensor] = self._pair(edge.tensor)
        return self._pairs[edge.tensor]

    def _constant(self, constant: Constant, how: Quantization) -> str:
        """The tensor of a rounded constant: floats, or for a large one integers and a DQ that ONNX Runtime folds."""
        is_stored = constant.nbytes >= AS_INTEGERS and constant.dtype == TensorProto.FLOAT
        if not is_stored or how.qtype is not QType.INT8 or how.zero_point:
            known = _rounded(constant, how)
            self._constants[name := f"__{known.key}"] = known
            return name
        known = quantized(constant, how)
        if known.key not in self._pairs:
            integers, scale = f"__{known.key}", f"__{known.key}:scale"
            self._constants |= {integers: known, scale: Constant.of(how.scale)}
            axis: dict[str, Any] = {} if how.axis is None else {"axis": how.axis}
            self._pairs[known.key] = self._node("DequantizeLinear", integers, scale, **axis)
        return self._pairs[known.key]

    def _pair(self, tensor: str) -> str:
        number, dtype = self._numbers[tensor], self._model.tensors[tensor].dtype
        scale, zero = f"{SCALES}_{number}", f"{ZEROS}_{number}"
        if dtype != TensorProto.FLOAT:
            scale = self._node("Cast", scale, to=dtype)
        if self._activations[tensor].qtype is QType.FP8:
            zero = "__zero_fp8"
            self._constants[zero] = Constant.of(np.zeros(1, scales.NUMPY_TYPE[QType.FP8]))
        rounded = self._node("QuantizeLinear", tensor, scale, zero)
        return self._node("DequantizeLinear", rounded, scale, zero)

    def _node(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        result = result or f"__{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [result], f"__node_{len(self._nodes)}", **attributes))
        return result


def _broadcast(layer: BiasedLayer) -> list[int]:
    """The shape in which one number for each channel is added to the result of a layer."""
    return [layer.channels] if layer.rank is None else [1, layer.channels] + [1] * (layer.rank - 2)
