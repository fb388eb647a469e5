"""What a placement does to the outputs, foretold without the engine: ONNX Runtime runs the Q/DQ model as it stands in
the file, no pair fused away.

Engines round where the file says so, and what they fuse they compute at least as exactly, so their outputs differ from
these far less than from the float model's. A search asks here before it spends a build.

ONNX Runtime itself does more: where a pair stands in front of a convolution (or of a MaxPool and the like there) and
one behind it, it rounds its weights as well, per tensor. What is meant for it runs after these rewrites of the graph.
These weights have all 8 bits: where products saturate (see `engines.cpu`), it may lose far more than is foretold.
Its Softmax of 8 bits computes in integers, to less than a step: it stands in the graph as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Self

import onnx

from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.memory import MemoryBudget
from qdqtune.engines.runner import Runner
from qdqtune.graph.model import Model, rebuild
from qdqtune.graph.saving import ConstantFile, constants_to_share
from qdqtune.numerics.accuracy import accuracy, is_finite
from qdqtune.placement.insertion import Inserter
from qdqtune.system.writing import temporary_folder
from qdqtune.types import Accuracy, Array, Failure, Placement, Sample

MICROSOFT = "com.microsoft"


class Simulation:
    """Placements of one model on some samples, for one `engine`. A context manager; ONNX Runtime starts when it is
    first needed, within the `memory` budget of the run."""

    def __init__(
        self, inserter: Inserter, samples: Sequence[Sample], engine: str = "", memory: MemoryBudget | None = None
    ) -> None:
        self._memory = memory
        self._inserter, self._samples, self._is_engine = inserter, samples, engine == "onnxruntime"
        self._stack = ExitStack()
        self._reference: list[dict[str, Array]] | Failure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def accuracy(self, placement: Placement, inserter: Inserter | None = None) -> Accuracy | Failure:
        """How far the outputs of a placement are from the float model's; a failure if ONNX Runtime does not run it.

        `inserter` has other numbers for the same model.
        """
        if self._reference is None:
            self._reference = self._outputs(Placement())
        if isinstance(self._reference, Failure):
            return self._reference
        outputs = self._outputs(placement, inserter)
        return outputs if isinstance(outputs, Failure) else accuracy(self._reference, outputs)

    def _outputs(self, placement: Placement, inserter: Inserter | None = None) -> list[dict[str, Array]] | Failure:
        runner, constants = self._opened
        model = (inserter or self._inserter).insert(placement)
        written = with_integer_softmax(model) if self._is_engine else model
        path = constants.write(written, f"simulated_{placement.digest}")
        outputs = runner.outputs_of(path, self._samples)
        path.unlink()
        if not isinstance(outputs, Failure) and not is_finite(outputs):
            return Failure("output", "the outputs hold NaN or infinite values")
        return outputs

    @cached_property
    def _opened(self) -> tuple[Runner, ConstantFile]:
        """ONNX Runtime, and the large constants of its models beside which these are written."""
        folder = self._stack.enter_context(temporary_folder())
        constants = self._stack.enter_context(constants_to_share())
        spec = EngineSpec("onnxruntime", {"threads": cores(), "fuse": False, "rewrite": self._is_engine})
        floats = sum(constant.nbytes for constant in self._inserter.insert(Placement()).large.values())
        runner = Runner(spec, log_dir=folder, unpacked=floats, memory=self._memory)
        return self._stack.enter_context(runner), constants


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
