"""ONNX Runtime in a worker process, for variants of one model: what placements do to outputs, without the engine.

Constants that the variants share are written once. To simulate a placement, ONNX Runtime runs the Q/DQ model and fuses
no pair. Engines round where the file says so, and compute what they fuse at least as exactly, so their outputs differ
from these far less than from the float model's. A search asks here before it spends a build.

ONNX Runtime itself does more: between a pair in front of a convolution (or of a MaxPool and the like before it) and one
behind it, it also rounds the weights, per tensor. For this engine the model runs after these rewrites of the graph.
Weights have all 8 bits here: where products saturate (see `engines.machine`), the engine may lose far more than
predicted. Its Softmax of 8 bits computes in integers, to less than a step, and stands in the graph as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import onnx

from qdqtune.calibration.observe import Outputs, Session, onnxruntime_session
from qdqtune.engines.execution import EXECUTION, Execution
from qdqtune.engines.memory import MemoryBudget
from qdqtune.errors import BadModel, EngineRefused
from qdqtune.graph.model import Model, rebuild
from qdqtune.numerics.accuracy import accuracy, check_finite, is_finite
from qdqtune.numerics.scores import NO_SCORES, Scores, scores_of
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.reading import dynamic_products_of
from qdqtune.placement.switches import file_pairs, with_file_pairs
from qdqtune.types import Accuracy, Placement, Sample, noise_of, sqnr_of

MICROSOFT = "com.microsoft"


@dataclass
class Simulation:
    """Accuracies of placements of one model on some samples, as on `engine`. A context manager; ONNX Runtime starts
    when the first accuracy is asked for, within the `memory` budget of the run. `asked` are the outputs that the user
    names as scores of classes.

    Raises:
        EngineRefused: from what follows, if ONNX Runtime does not run a model, or outputs are not finite.
    """

    inserter: Inserter
    samples: Sequence[Sample]
    engine: str = ""
    memory: MemoryBudget | None = None
    execution: Execution = EXECUTION
    asked: Sequence[str] = ()
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def accuracy(self, placement: Placement) -> Accuracy:
        """How far the outputs of a placement are from the float model's."""
        reference = self.reference
        outputs = self._outputs(self.inserter.insert(placement), placement.digest)
        return accuracy(reference, outputs, self.scores)

    @cached_property
    def scores(self) -> Scores:
        """The scores of classes among the float model's outputs."""
        return scores_of(self.reference, self.asked)

    @cached_property
    def reference(self) -> Outputs:
        """The outputs of the float model."""
        return self._outputs(self.inserter.insert(Placement()), Placement().digest)

    def _outputs(self, model: Model, digest: str) -> Outputs:
        written = with_integer_softmax(model) if self.engine == "onnxruntime" else model
        outputs = self._session.outputs(written, f"simulated_{digest}", self.samples)
        check_finite(outputs)
        return outputs

    @cached_property
    def _session(self) -> Session:
        unpacked = sum(constant.nbytes for constant in self.inserter.insert(Placement()).large.values())
        options = {"fuse": False, "rewrite": self.engine == "onnxruntime"}
        session = onnxruntime_session(self.execution, memory=self.memory, unpacked=unpacked, **options)
        return self._stack.enter_context(session)


def with_integer_softmax(model: Model) -> Model:
    """Each Softmax between a DQ and a Q as the one node that ONNX Runtime makes of the three."""
    nodes = dict(enumerate(model.proto.graph.node))
    for node in model.nodes:
        before = model.maker(node.inputs[0]) if node.op == "Softmax" else None
        uses = model.uses(node.outputs[0])
        if before is None or len(uses) != 1 or uses[0].node < 0:
            continue
        behind = model.nodes[uses[0].node]
        if [(n.op, len(n.inputs)) for n in (before, behind)] == [("DequantizeLinear", 3), ("QuantizeLinear", 3)]:
            del nodes[node.index]
            nodes[behind.index] = onnx.helper.make_node(
                "QLinearSoftmax", [*before.inputs, *behind.inputs[1:]], [behind.outputs[0]], node.name,
                axis=node.attributes.get("axis", -1 if model.opset >= 13 else 1), opset=model.opset, domain=MICROSOFT,
            )  # fmt: skip
    if len(nodes) == len(model.nodes):
        return model
    changed = rebuild(model, list(nodes.values()), {})
    if all(o.domain != MICROSOFT for o in changed.proto.opset_import):
        changed.proto.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    return Model(changed.proto, changed.large)


LEAST_DB = 40.0
"""Both graphs compute the same: only roundings around Casts may differ. Chosen, not measured."""


def check_stripped(stripped: Model, given: Model, session: Session, sample: Sample, name: str, instead: str) -> None:
    """Compare the outputs of `given`, the Q/DQ model of the file `name`, with those of `stripped`, the float model made
    of it, with all pairs put back. `session` runs both without optimization.

    Nothing is compared where ONNX Runtime does not run the file, or gives no equal or no finite outputs twice, or where
    activations are quantized dynamically."""
    if any(True for _ in dynamic_products_of(given)):
        return
    try:
        once, again = session.outputs(given, "given", [sample, sample])
    except EngineRefused:
        return
    if not is_finite([once, again]):
        return
    if not all(np.array_equal(once[output], again[output]) for output in once):
        return
    pairs, _ = file_pairs(stripped, given)
    # Constants that the file has as integers stay floats: they are to be the same numbers.
    pairs = tuple(p for p in pairs if any(node.op_type == "QuantizeLinear" for node in p.nodes))
    try:
        outputs = session.outputs(with_file_pairs(stripped, pairs, given), "put_back", [sample])
    except EngineRefused as refused:
        if refused.is_transient:
            return
        how = f"they do not run: {refused}"
    else:
        judged = accuracy([once], outputs, NO_SCORES)
        noise = max(judged.noise, 0.0 if judged.agreement is None else 1 - judged.agreement)
        if is_finite(outputs) and noise <= noise_of(LEAST_DB):
            return
        how = f"outputs have {sqnr_of(noise):.1f} dB" if is_finite(outputs) else "outputs are NaN or infinite"
    what = f"{name} cannot be read as a float model with Q/DQ pairs"
    raise BadModel(f"{what}: with the pairs taken off and put back, {how}; {instead}")
