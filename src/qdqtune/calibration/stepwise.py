"""A model run piece by piece over all samples, so that values can be looked at and changed between its nodes.

Between two pieces the values that are still needed lie in memory, for all samples: one pass over the model, however
many places are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import onnx
from onnx import helper

from qdqtune.engines.runner import Runner
from qdqtune.errors import BadModel
from qdqtune.graph.files import ConstantFile
from qdqtune.graph.model import Model
from qdqtune.types import Array, Failure, Sample


class Stepwise:
    """One model on some samples. `through` takes it past a node; `values` are then those of a tensor still in use."""

    def __init__(
        self, model: Model, samples: Sequence[Sample], runner: Runner, folder: Path, constants: ConstantFile
    ) -> None:
        """Pieces are written to `folder`, where `constants` lies."""
        self._model, self._runner, self._folder, self._constants = model, runner, folder, constants
        self._values = [dict(sample) for sample in samples]
        self._last = last_uses(model)
        self._done = 0

    def through(self, node: int) -> list[Array]:
        """Run all nodes up to number `node`, and give the first output of that one, sample by sample.

        Raises:
            BadModel: ONNX Runtime cannot run a piece.
        """
        result = self._model.nodes[node].outputs[0]
        if node >= self._done:
            piece = self._piece(self._done, node + 1, result)
            path = self._folder / "piece.onnx"
            self._constants.save(piece, path)
            handle = self._runner.load(path)
            for values in self._values:
                found = handle if isinstance(handle, Failure) else self._runner.outputs(handle, [values])
                if isinstance(found, Failure):
                    raise BadModel(f"ONNX Runtime cannot run the model piece by piece: {found.reason}")
                kept = {t: a for t, a in values.items() if self._last.get(t, -1) > node}
                values.clear()
                values.update(kept | found[0])
            if not isinstance(handle, Failure):
                self._runner.unload(handle)
            self._done = node + 1
        return [values[result] for values in self._values]

    def replace(self, tensor: str, values: Sequence[Array]) -> None:
        """Let the nodes to come read other values of a tensor."""
        for sample, array in zip(self._values, values, strict=True):
            sample[tensor] = array

    def _piece(self, start: int, stop: int, result: str) -> Model:
        """Nodes `start` to `stop` as a model, from the values at hand to those that later nodes read."""
        nodes = self._model.nodes[start:stop]
        made = {o for n in nodes for o in n.outputs if o}
        read = dict.fromkeys(t for n in nodes for t in (*n.inputs, *n.captures) if t and t not in made)
        proto = onnx.ModelProto()
        proto.CopyFrom(self._model.proto)
        graph = proto.graph
        for part in (graph.node, graph.input, graph.output, graph.value_info):
            del part[:]
        graph.node.extend(self._model.proto.graph.node[start:stop])
        kept = [t for t in graph.initializer if t.name in read]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for tensor in read:
            if tensor not in self._model.constants:
                dtype = helper.np_dtype_to_tensor_dtype(self._values[0][tensor].dtype)
                graph.input.append(helper.make_tensor_value_info(tensor, dtype, None))
        for tensor in sorted(made):
            if tensor == result or self._last.get(tensor, -1) >= stop:
                graph.output.add(name=tensor)  # ONNX Runtime infers the rest
        return Model(proto, {name: c for name, c in self._model.large.items() if name in read})


def last_uses(model: Model) -> dict[str, int]:
    """The number of the last node that reads each tensor; graph outputs do not count."""
    return {t: node.index for node in model.nodes for t in (*node.inputs, *node.captures) if t}


def most_in_use(model: Model) -> int:
    """Bytes of the values in use at the worst place between two nodes; an unknown dimension counts as 1."""
    last = last_uses(model)
    sizes = {t: 4 * prod(d or 1 for d in info.shape or ()) for t, info in model.tensors.items()}
    change = [0] * (len(model.nodes) + 1)
    for tensor, until in last.items():
        if tensor not in model.constants:
            change[model.producers.get(tensor, 0)] += sizes.get(tensor, 0)
            change[until + 1] -= sizes.get(tensor, 0)
    most = now = 0
    for step in change:
        now += step
        most = max(most, now)
    return most
