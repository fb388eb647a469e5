"""What scripts for ModelOpt import from a module of this name."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from qdqtune.graph import Model
from qdqtune.loading import load_proto
from qdqtune.reading import read_placement, strip_pairs


class QuantizedTensors(set[str]):
    """Names of tensors that carry a pair, and the model with them: names alone do not say on which uses pairs stand."""

    def __init__(self, names: Iterable[str], model: Model) -> None:
        super().__init__(names)
        self.model = model


def get_quantized_tensors(onnx_model: onnx.ModelProto) -> QuantizedTensors:
    """The tensors of a Q/DQ model that carry a pair, by their names in the float model as far as that has them.

    Raises:
        BadModel: the model is invalid.
    """
    model = load_proto(onnx_model)
    return QuantizedTensors((e.tensor for e in read_placement(strip_pairs(model), model).placement), model)
