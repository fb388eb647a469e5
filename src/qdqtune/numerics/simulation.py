"""What a placement does to the outputs, predicted without the engine: ONNX Runtime runs the Q/DQ model, fusing no pair.

Engines round where the file says so, and compute what they fuse at least as exactly, so their outputs differ from these
far less than from the float model's. A search asks here before it spends a build.

ONNX Runtime itself does more: between a pair in front of a convolution (or of a MaxPool and the like before it) and one
behind it, it also rounds the weights, per tensor. For this engine the model runs after these rewrites of the graph.
Weights have all 8 bits here: where products saturate (see `engines.machine`), the engine may lose far more than
predicted. Its Softmax of 8 bits computes in integers, to less than a step, and stands in the graph as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Self

import onnx

from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.graph.model import Model, rebuild
from qdqtune.numerics.accuracy import NOT_FINITE, accuracy, is_finite
from qdqtune.numerics.scores import Scores, scores_of
from qdqtune.numerics.sessions import Outputs, Session, onnxruntime_session
from qdqtune.placement.insertion import Inserter
from qdqtune.types import Accuracy, Failure, Placement, Sample

MICROSOFT = "com.microsoft"


class Simulation:
    """Accuracies of placements of one model on some samples, as on `engine`. A context manager; ONNX Runtime starts
    when the first accuracy is asked for, within the `memory` budget of the run. `scores` are the outputs that the user
    names as scores of classes."""

    def __init__(
        self,
        inserter: Inserter,
        samples: Sequence[Sample],
        engine: str = "",
        memory: MemoryBudget | None = None,
        execution: Execution = EXECUTION,
        scores: Sequence[str] = (),
    ) -> None:
        self._execution, self._asked = execution, scores
        self._inserter, self._samples, self._memory = inserter, samples, memory
        self._is_onnxruntime = engine == "onnxruntime"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def accuracy(self, placement: Placement) -> Accuracy | Failure:
        """How far the outputs of a placement are from the float model's; a failure if ONNX Runtime does not run it, or
        outputs are not finite."""
        reference = self.reference
        if isinstance(reference, Failure):
            return reference
        outputs = self._outputs(self._inserter.insert(placement), placement.digest)
        return outputs if isinstance(outputs, Failure) else accuracy(reference, outputs, self.scores)

    @cached_property
    def scores(self) -> Scores | None:
        """The scores of classes among the float model's outputs; None if ONNX Runtime does not run it."""
        return None if isinstance(self.reference, Failure) else scores_of(self.reference, self._asked)

    @cached_property
    def reference(self) -> Outputs | Failure:
        """The outputs of the float model; a failure if ONNX Runtime does not run it, or they are not finite."""
        return self._outputs(self._float_model, Placement().digest)

    def _outputs(self, model: Model, digest: str) -> Outputs | Failure:
        written = with_integer_softmax(model) if self._is_onnxruntime else model
        outputs = self._session.outputs(written, f"simulated_{digest}", self._samples)
        if not isinstance(outputs, Failure) and not is_finite(outputs):
            return NOT_FINITE
        return outputs

    @cached_property
    def _float_model(self) -> Model:
        return self._inserter.insert(Placement())

    @cached_property
    def _session(self) -> Session:
        unpacked = sum(constant.nbytes for constant in self._float_model.large.values())
        options = {"fuse": False, "rewrite": self._is_onnxruntime}
        opened = onnxruntime_session(self._execution, memory=self._memory, unpacked=unpacked, **options)
        return self._stack.enter_context(opened)


def with_integer_softmax(model: Model) -> Model:
    """Each Softmax between a DQ and a Q as the one node that ONNX Runtime makes of the three."""
    nodes, made, users = list(model.proto.graph.node), dict[str, onnx.NodeProto](), dict[str, list[onnx.NodeProto]]()
    for node in nodes:
        made |= dict.fromkeys(node.output, node)
        for name in node.input:
            users.setdefault(name, []).append(node)
    outputs, fused = {o.name for o in model.proto.graph.output}, dict[str, onnx.NodeProto]()
    for node in nodes:
        before, behind = made.get(node.input[0]) if node.input else None, users.get(node.output[0], [])
        if node.op_type != "Softmax" or before is None or len(behind) != 1 or node.output[0] in outputs:
            continue
        ends = (before, behind[0])
        if [(n.op_type, len(n.input)) for n in ends] == [("DequantizeLinear", 3), ("QuantizeLinear", 3)]:
            axis = next((a.i for a in node.attribute if a.name == "axis"), -1 if model.opset >= 13 else 1)
            fused[ends[1].output[0]] = onnx.helper.make_node(
                "QLinearSoftmax", [*before.input, *ends[1].input[1:]], [ends[1].output[0]], node.name, axis=axis,
                opset=model.opset, domain=MICROSOFT,
            )  # fmt: skip
            nodes.remove(node)
    if not fused:
        return model
    changed = rebuild(model, [fused.get(n.output[0], n) for n in nodes], {})
    if all(o.domain != MICROSOFT for o in changed.proto.opset_import):
        changed.proto.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    return Model(changed.proto, changed.large)
