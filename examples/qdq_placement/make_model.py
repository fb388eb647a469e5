"""Write `model.onnx`, a small network for pictures of 32 x 32, and `samples.npz`, 16 inputs for it.

    python make_model.py

Its weights are random, from a fixed seed: good for latency, not for recognizing anything. The batch is dynamic.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

NETWORK = """
<ir_version: 9, opset_import: ["": 19]>
pictures (float[N,3,32,32] image) => (float[N,10] logits) {
    [stem] a = Conv <pads=[1,1,1,1]> (image, stem_weight, stem_bias)
    [stem_relu] b = Relu(a)
    [block1_conv1] c = Conv <pads=[1,1,1,1]> (b, block1_weight1, block1_bias1)
    [block1_relu1] d = Relu(c)
    [block1_conv2] e = Conv <pads=[1,1,1,1]> (d, block1_weight2, block1_bias2)
    [block1_add] f = Add(e, b)
    [block1_relu2] g = Relu(f)
    [gate_pool] h = GlobalAveragePool(g)
    [gate_squeeze] i = Conv(h, gate_weight1, gate_bias1)
    [gate_relu] j = Relu(i)
    [gate_excite] k = Conv(j, gate_weight2, gate_bias2)
    [gate_sigmoid] l = Sigmoid(k)
    [gate] m = Mul(g, l)
    [block2_conv1] n = Conv <pads=[1,1,1,1]> (m, block2_weight1, block2_bias1)
    [block2_relu1] o = Relu(n)
    [block2_conv2] p = Conv <pads=[1,1,1,1]> (o, block2_weight2, block2_bias2)
    [block2_add] q = Add(p, m)
    [block2_relu2] r = Relu(q)
    [pool] s = GlobalAveragePool(r)
    [flatten] t = Flatten(s)
    [head] logits = Gemm <transB=1> (t, head_weight, head_bias)
}
"""

WEIGHTS = {
    "stem": (64, 3, 3, 3),
    "block1:1": (64, 64, 3, 3),
    "block1:2": (64, 64, 3, 3),
    "gate:1": (16, 64, 1, 1),
    "gate:2": (64, 16, 1, 1),
    "block2:1": (64, 64, 3, 3),
    "block2:2": (64, 64, 3, 3),
    "head": (10, 64),
}
"""Shapes by place; the first size is the number of output channels, and so the length of the bias."""


def network(seed: int = 0) -> onnx.ModelProto:
    """The network, with weights that keep the size of the values from layer to layer."""
    rng = np.random.default_rng(seed)
    model = parser.parse_model(NETWORK)
    for place, shape in WEIGHTS.items():
        block, _, number = place.partition(":")
        scale = np.sqrt(2 / np.prod(shape[1:]))
        arrays = {"weight": scale * rng.standard_normal(shape), "bias": 0.1 * rng.standard_normal(shape[0])}
        for kind, array in arrays.items():
            named = numpy_helper.from_array(array.astype(np.float32), f"{block}_{kind}{number}")
            model.graph.initializer.append(named)
    onnx.checker.check_model(model)
    return model


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """Float32 noise of shape (count, 3, 32, 32) around a brightness of each picture's own."""
    rng = np.random.default_rng((seed, count))
    brightness = rng.standard_normal((count, 3, 1, 1))
    return (brightness + rng.standard_normal((count, 3, 32, 32))).astype(np.float32)


def main() -> None:
    """Write both files into the folder that is asked for."""
    options = argparse.ArgumentParser(description="Write a small model, and samples for it.")
    options.add_argument("--folder", type=Path, default=Path(), help="where to (default: here)")
    options.add_argument("--samples", type=int, default=16, help="number of samples (default: %(default)s)")
    given = options.parse_args()
    onnx.save(network(), given.folder / "model.onnx")
    np.savez(given.folder / "samples.npz", image=pictures(given.samples))
    print(f"{given.folder / 'model.onnx'} and {given.folder / 'samples.npz'}")


if __name__ == "__main__":
    main()
