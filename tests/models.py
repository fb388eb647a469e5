"""Small networks with weights from a fixed generator, and how to run them: for the tests of the numeric stages."""

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from hypothesis import strategies as st
from onnx import parser
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from qdqtune.calibration.scales import Range, Ranges
from qdqtune.engines.facts import ONNXRUNTIME_SHARED
from qdqtune.graph.constants import settle
from qdqtune.graph.inference import infer
from qdqtune.graph.loading import load
from qdqtune.graph.model import Constant, Model, Node
from qdqtune.graph.saving import save
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Edge, NumericFormat, Placement, QType

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

UINT8 = NumericFormat(QType.UINT8, QType.INT8, symmetric=False, bias="int32", drop_clamps=True,
                      shared_scale_ops=ONNXRUNTIME_SHARED)  # fmt: skip
"""As ONNX Runtime wants its numbers."""
PLAIN = NumericFormat(QType.UINT8, QType.INT8, symmetric=False)
"""The same numbers, and no change to the graph but the pairs."""
REDUCED = NumericFormat(QType.UINT8, QType.INT8, symmetric=False, reduced_weights=True, bias="int32")
INT8 = NumericFormat(QType.INT8, QType.INT8, symmetric=True, shared_scale_ops=frozenset({"Concat", "MaxPool"}))
FP8 = NumericFormat(QType.FP8, QType.FP8, symmetric=True, per_channel=False)
FORMATS = {"uint8": UINT8, "plain": PLAIN, "reduced": REDUCED, "int8": INT8, "fp8": FP8}

CONV_NET = """net (float[N,3,8,8] image) => (float[N,5] logits) {
    [stem] c0 = Conv <pads=[1,1,1,1]> (image, w0, b0)
    [stem_relu] r0 = Relu(c0)
    [pool] p0 = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r0)
    [depthwise] c1 = Conv <group=16, pads=[1,1,1,1]> (p0, w1, b1)
    [clip] k1 = Clip(c1, zero, six)
    [project] c2 = Conv(k1, w2, b2)
    [add] a = Add(c2, p0)
    [add_relu] r1 = Relu(a)
    [side] c3 = Conv <pads=[1,1,1,1]> (r1, w3)
    [concat] cat = Concat <axis=1> (r1, c3)
    [average] g = GlobalAveragePool(cat)
    [flatten] f = Flatten(g)
    [head] logits = Gemm <transB=1> (f, w4, b4)
}"""

ATTENTION = """net (float[N,6,16] x) => (float[N,6,16] y) {
    [norm] n = LayerNormalization <axis=-1> (x, gamma, beta)
    [query] q0 = MatMul(n, wq)
    [query_bias] q = Add(q0, bq)
    [key] k = MatMul(n, wk)
    [value] v = MatMul(n, wv)
    [turn] kt = Transpose <perm=[0,2,1]> (k)
    [scores] s = MatMul(q, kt)
    [scale] d = Div(s, four)
    [softmax] p = Softmax <axis=-1> (d)
    [context] z = MatMul(p, v)
    [out] o = MatMul(z, wo)
    [residual] h = Add(x, o)
    [norm2] n2 = LayerNormalization <axis=-1> (h, gamma, beta)
    [up] u = MatMul(n2, wu)
    [gelu_div] e1 = Div(u, root)
    [gelu_erf] e2 = Erf(e1)
    [gelu_add] e3 = Add(e2, one)
    [gelu_mul] e4 = Mul(u, e3)
    [gelu_half] e5 = Mul(e4, half)
    [down] m = MatMul(e5, wd)
    [last] y = Add(h, m)
}"""

BRANCHING = """net (float[N,4] x, bool flag) => (float[N,4] y, float[N,4] t) {
    [first] t = MatMul(x, wa)
    [relu] r = Relu(t)
    [branch] z = If(flag) <
        then_branch = a () => (float[N,4] p) { p = Add(t, r) },
        else_branch = b () => (float[N,4] q) { q = Neg(r) }>
    [second] y = MatMul(z, wb)
    [third] unused = MatMul(r, wb)
    [mark] w = custom.Mark(r)
}"""

TAPPED = """net (float[N,4,6,6] x) => (float[N,4,6,6] second, float[N,4,6,6] first) {
    [a] first = Conv <pads=[1,1,1,1]> (x, wa, ba)
    [relu] r = Relu(first)
    [b] second = Conv <pads=[1,1,1,1]> (r, wb, bb)
    [leak] l = Sigmoid(second)
}"""

EMBEDDING = """net (int64[N,5] ids, float[N,5] mask) => (float[N,5,8] y) {
    [squeeze] i = Unsqueeze(ids, axes)
    [flat] j = Squeeze(i, axes)
    [lookup] e = Gather(table, j)
    [unsqueeze] u = Unsqueeze(mask, axes)
    [masked] m = Mul(e, u)
    [dense] y = MatMul(m, w)
}"""


def model(text: str, opset: int = 17, ir: int = 8, constants: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    """A model in ONNX text syntax, with `constants` as initializers."""
    proto = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}, "custom": 1]>\n{text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items())
    return proto


def build(text: str, constants: Mapping[str, Array] | None = None, opset: int = 19, half: bool = False) -> Model:
    """A model in ONNX text syntax, with `constants`; all in float16 if `half`."""
    text = text.replace("float[", "float16[") if half else text
    arrays = {name: np.asarray(array) for name, array in (constants or {}).items()}
    if half:
        arrays |= {name: a.astype(np.float16) for name, a in arrays.items() if a.dtype == np.float32}
    proto = model(text, opset, 9 if opset >= 19 else 8, arrays)
    large: dict[str, Constant] = {}
    settle(proto.graph, large)
    return Model(infer(proto, large), large)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    """Float32 values of a normal distribution."""
    return (scale * np.random.default_rng((seed, *shape)).standard_normal(shape)).astype(np.float32)


def conv_net(half: bool = False, opset: int = 19) -> Model:
    """Residual Add, Relu and Clip, MaxPool, depthwise convolution, Concat, a convolution without bias, Gemm."""
    constants = {
        "w0": normal(16, 3, 3, 3, scale=0.3), "b0": normal(16, scale=0.2),
        "w1": normal(16, 1, 3, 3, scale=0.5), "b1": normal(16, scale=0.2, seed=1),
        "w2": normal(16, 16, 1, 1, scale=0.3), "b2": normal(16, scale=0.2, seed=2),
        "w3": normal(16, 16, 3, 3, scale=0.1),
        "w4": normal(5, 32, scale=0.3), "b4": normal(5),
        "zero": np.float32(0), "six": np.float32(6),
    }  # fmt: skip
    return build(CONV_NET, constants, opset, half)


def attention(half: bool = False, opset: int = 19) -> Model:
    """LayerNormalization, products of two activations, Softmax, Gelu made of Erf."""
    constants = {name: normal(16, 16, scale=0.25, seed=k) for k, name in enumerate(("wq", "wk", "wv", "wo"))}
    constants |= {"wu": normal(16, 32, scale=0.25), "wd": normal(32, 16, scale=0.25), "bq": normal(16, scale=0.2),
                  "gamma": 1 + normal(16, scale=0.1), "beta": normal(16, scale=0.1, seed=1)}  # fmt: skip
    scalars = {"four": 4.0, "root": 2**0.5, "one": 1.0, "half": 0.5}
    return build(ATTENTION, constants | {n: np.float32(v) for n, v in scalars.items()}, opset, half)


def joined() -> Model:
    """Boxes up to 1,000 and scores up to 0.05 in one output, as detectors have them."""
    text = """net (float[N,24,128] x) => (float[N,24,12] y) {
        [box] b = MatMul(x, wb)
        [pixels] p = Mul(b, stride)
        [score] c = MatMul(x, wc)
        [bias] l = Add(c, low)
        [share] s = Sigmoid(l)
        [join] y = Concat <axis=2> (p, s)
    }"""
    constants = {
        "wb": normal(128, 4, scale=0.3),
        "wc": normal(128, 8, scale=0.03),
        "stride": np.float32(100),
        "low": np.float32(-4),
    }
    return build(text, constants)


def branching() -> Model:
    """An If whose bodies read outer tensors, one of them a graph output; a node of a custom domain (not to be run)."""
    return build(BRANCHING, {"wa": normal(4, 4), "wb": normal(4, 4, seed=1)})


def tapped(half: bool = False, opset: int = 19) -> Model:
    """Graph outputs that the graph goes on with."""
    constants = {"wa": normal(4, 4, 3, 3, scale=0.3), "ba": normal(4), "wb": normal(4, 4, 3, 3, scale=0.3, seed=1),
                 "bb": normal(4, seed=1)}  # fmt: skip
    return build(TAPPED, constants, opset, half)


def embedding(rows: int = 7) -> Model:
    """Token ids into a table, and a float mask."""
    return build(EMBEDDING, {"table": normal(rows, 8), "w": normal(8, 8), "axes": np.array([2], np.int64)})


def feeds(model: Model, count: int = 4, seed: int = 0) -> list[Arrays]:
    """Samples: batch 2, normal floats, small integers, True."""
    result = []
    for i in range(count):
        rng = np.random.default_rng((seed, i))
        sample = {}
        for name in model.inputs:
            info = model.tensors[name]
            shape = tuple(2 if d is None else d for d in info.shape or ())
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.dtype)
            values = rng.integers(0, 3, shape) if dtype.kind == "i" else rng.standard_normal(shape)
            sample[name] = np.ones(shape, bool) if dtype.kind == "b" else np.asarray(values, dtype)
        result.append(sample)
    return result


def run(model: Model | onnx.ModelProto | Path, samples: Iterable[Arrays], fused: bool = False) -> list[Arrays]:
    """Outputs of ONNX Runtime, operator by operator unless `fused`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = model.to_proto() if isinstance(model, Model) else model
    content = str(proto) if isinstance(proto, Path) else proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(names, sample), strict=True)) for sample in samples]


def evaluate(model: Model, samples: Iterable[Arrays]) -> list[Arrays]:
    """Outputs of ONNX's reference implementation."""
    session = ReferenceEvaluator(model.to_proto())
    return [dict(zip(session.output_names, session.run(None, sample), strict=True)) for sample in samples]


def activations(model: Model, samples: Iterable[Arrays]) -> list[Arrays]:
    """The values of all float inputs and intermediate tensors, as float64."""
    samples = list(samples)
    watched = onnx.ModelProto()
    watched.CopyFrom(model.to_proto())
    floats = [t for n in model.nodes for t in n.outputs if model.tensors[t].is_float]
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in floats)
    made = run(watched, samples)
    given = [{n: a for n, a in s.items() if a.dtype.kind == "f"} for s in samples]
    return [{n: a.astype(np.float64) for n, a in (g | m).items()} for g, m in zip(given, made, strict=True)]


def ranges(model: Model, samples: Iterable[Arrays] | None = None) -> Ranges:
    """Smallest and largest values, by numpy."""
    found: dict[str, Range] = {}
    for values in activations(model, feeds(model) if samples is None else samples):
        for name, array in values.items():
            own = Range(float(array.min()), float(array.max()))
            found[name] = found[name] | own if name in found else own
    return Ranges(found)


def sqnr(reference: Iterable[Arrays], outputs: Iterable[Arrays]) -> float:
    """Of the worst output, in dB."""
    return min(
        10 * np.log10(np.square(a.astype(np.float64)).sum() / max(np.square(a.astype(np.float64) - b[n]).sum(), 1e-30))
        for a_, b in zip(reference, outputs, strict=True)
        for n, a in a_.items()
    )


class Case(NamedTuple):
    """A model with what the numeric stages need of it."""

    model: Model
    samples: list[Arrays]
    ranges: Ranges
    possible: frozenset[Edge]
    outputs: list[Arrays]


@cache
def case(name: str) -> Case:
    """`conv_net`, `attention`, `tapped`, `embedding`, or with `_half` behind it."""
    makers = {"conv_net": conv_net, "attention": attention, "tapped": tapped, "embedding": lambda half: embedding()}
    model = makers[name.removesuffix("_half")](half=name.endswith("_half"))
    samples = feeds(model, 2)
    found = ranges(model, samples)
    return Case(model, samples, found, possible_edges(model, found), run(model, samples))


class Reader(CalibrationDataReader):
    def __init__(self, samples: list[Arrays]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> Arrays | None:
        return next(self._samples, None)


@cache
def static(name: str, **options: bool) -> tuple[Model, Model]:
    """A model, and what quantize_static makes of it with 64 samples."""
    model, samples = case(name).model, feeds(case(name).model, 64)
    with TemporaryDirectory() as folder:
        float_file, quantized_file = Path(folder) / "float.onnx", Path(folder) / "quantized.onnx"
        save(model, float_file)
        level = logging.getLogger().level
        logging.getLogger().setLevel(logging.ERROR)
        quantize_static(float_file, quantized_file, Reader(samples), quant_format=QuantFormat.QDQ,
                        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, **options)  # fmt: skip
        logging.getLogger().setLevel(level)
        quantized = load(quantized_file)
        held = {name: Constant.of(np.array(c.array())) for name, c in quantized.large.items()}  # their file goes
        return load(float_file), Model(quantized.proto, held)


def edges(*written: str) -> set[Edge]:
    """Edges from `tensor node index` triples."""
    return {Edge(t, n, int(i)) for t, n, i in (w.split() for w in written)}


def known(model: Model) -> Ranges:
    """A range for every tensor, whatever its type."""
    return Ranges({t: Range(-1, 1) for t in (*model.inputs, *model.producers)})


def placements(possible: Iterable[Edge]) -> st.SearchStrategy[Placement]:
    """Any subset of some edges."""
    ordered = sorted(possible)
    return st.lists(st.booleans(), min_size=len(ordered), max_size=len(ordered)).map(
        lambda chosen: Placement.of(e for e, use in zip(ordered, chosen, strict=True) if use)
    )


def check(model: Model) -> None:
    """Also the element types, by inference."""
    onnx.checker.check_model(model.to_proto(), full_check=True)


def of_type(model: Model, op: str) -> list[Node]:
    return [n for n in model.nodes if n.op == op]


def constant(model: Model, tensor: str) -> Any:
    return model.constants[tensor].array()


def dq_of(model: Model, tensor: str, node: str) -> Node:
    """The DequantizeLinear that feeds an input of a node, which is `tensor` in the float model."""
    target = model.nodes[model.index_of[node]]
    matches = [model.nodes[model.producers[t]] for t in target.inputs if t.startswith(f"{tensor}_DequantizeLinear")]
    assert len(matches) == 1
    return matches[0]


def scale_of(model: Model, tensor: str, node: str) -> tuple[Any, Any]:
    """Scale and zero point of the pair on an edge."""
    dq = dq_of(model, tensor, node)
    return constant(model, dq.inputs[1]), constant(model, dq.inputs[2])


def scales_of(path: Path) -> Arrays:
    """The scale of each activation with a pair, of a file."""
    model = load(path)
    return {n.inputs[0]: model.constants[n.inputs[1]].array() for n in model.nodes if n.op == "QuantizeLinear"}


def loaded_from(file: Path, proto: onnx.ModelProto, **options: Any) -> Model:
    """The model that is read from a file with `proto`."""
    file.write_bytes(proto.SerializeToString())
    return load(file, **options)


def outputs(model: onnx.ModelProto | Path, sample: Arrays) -> list[Array]:
    return list(run(model, [sample])[0].values())


def same_when_loaded(file: Path, sample: Arrays, **options: Any) -> None:
    """The loaded model passes the checker, and answers as the file does."""
    loaded = load(file, **options).to_proto()
    onnx.checker.check_model(loaded)
    for expected, got in zip(outputs(file, sample), outputs(loaded, sample), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
