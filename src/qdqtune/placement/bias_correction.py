"""Bias correction: what quantizing a layer does to the mean of its outputs, taken back in its bias.

Weights that are rounded and inputs that are clipped move the mean of an output channel; behind it everything sees the
move. After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv 1906.04721,
section 4.2), with the means of calibration samples: layer by layer in graph order, so that each layer reads quantized
inputs from layers that are corrected already.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from qdqtune.calibration.prepare import Prepared
from qdqtune.calibration.scales import Ranges
from qdqtune.calibration.stepwise import Stepwise, most_in_use
from qdqtune.engines import EngineSpec
from qdqtune.engines.cpu import cores
from qdqtune.engines.runner import Runner
from qdqtune.errors import BadModel
from qdqtune.graph.files import ConstantFile
from qdqtune.graph.model import Model, Node
from qdqtune.placement.insertion import HAS_BIAS, insert
from qdqtune.types import Array, Edge, NumericFormat, Placement

SAMPLES = 32
"""Samples that a mean is taken over at most."""

MEMORY = 2**30
"""Bytes that the values in use may take, over all samples."""


def bias_shifts(
    prepared: Prepared, placement: Placement, ranges: Ranges, numbers: NumericFormat
) -> dict[str, tuple[float, ...]]:
    """What to add to the bias of each layer of `placement`, by node and output channel.

    Runs the float model and the quantized one side by side on ONNX Runtime: one pass over each. Empty if it does not
    run them so.
    """
    model = prepared.shaped
    layers = list(_layers(model, placement))
    count = max(1, min(SAMPLES, MEMORY // max(most_in_use(model), 1)))
    samples = list(islice(prepared.calibration, count))
    quantized = insert(model, placement, ranges, numbers)
    found: dict[str, tuple[float, ...]] = {}
    spec = EngineSpec("onnxruntime", {"threads": cores(), "fuse": False})
    with (
        tempfile.TemporaryDirectory(prefix="qdqtune-") as name,
        ConstantFile(Path(name, "constants.bin")) as constants,
        Runner(spec, time_limit_s=3600, log_dir=Path(name)) as runner,
    ):
        exact, rounded = (Stepwise(m, samples, runner, Path(name), constants) for m in (model, quantized))
        try:
            for layer in layers:
                twin = quantized.index_of[layer.name]
                wanted, got = exact.through(layer.index), rounded.through(twin)
                shift = _shift(layer, wanted, got)
                if shift is None:
                    continue
                found[layer.name] = tuple(shift.tolist())
                moved = shift.reshape([-1 if i == _axis(layer, got[0]) else 1 for i in range(got[0].ndim)])
                rounded.replace(quantized.nodes[twin].outputs[0], [(g + moved).astype(g.dtype) for g in got])
        except BadModel:
            return {}
    return found


def _layers(model: Model, placement: Placement) -> Iterator[Node]:
    """Nodes in graph order whose input and weight carry pairs, and whose bias is a constant vector, or can be one."""
    for node in model.nodes:
        if node.op not in HAS_BIAS or node.domain or node.inputs[1] not in model.constants:
            continue
        bias = model.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
        is_free = len(node.inputs) < 3 or not node.inputs[2] or (bias is not None and len(bias.shape) == 1)
        is_plain = all(node.attributes.get(a, 1.0) == 1.0 for a in ("alpha", "beta"))
        if is_free and is_plain and all(Edge(t, node.name, i) in placement for i, t in enumerate(node.inputs[:2])):
            yield node


def _axis(node: Node, output: Array) -> int:
    """Where the channels of the output lie."""
    return 1 if node.op != "Gemm" else output.ndim - 1


def _shift(node: Node, wanted: Sequence[Array], got: Sequence[Array]) -> Array | None:
    """Mean of the difference by channel, over samples and positions; None where it is not finite.

    A mean of few samples is luck in part: it is shrunk by the share of its square that its own standard error explains
    (the positive-part estimator of James and Stein, 1961, channel by channel).
    """
    axis = _axis(node, got[0])
    others = tuple(i for i in range(got[0].ndim) if i != axis)
    means = np.stack([(w.astype(np.float64) - g).mean(axis=others) for w, g in zip(wanted, got, strict=True)])
    shift = means.mean(axis=0)
    if not np.isfinite(shift).all():
        return None
    if len(means) > 1:
        error = means.var(axis=0, ddof=1) / len(means)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = np.where(shift == 0, 0.0, np.maximum(1 - error / np.square(shift), 0))
        shift = shift * kept
    return np.asarray(shift, np.float32)
