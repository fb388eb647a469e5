"""The placement rules of `quantize`, by engine and type.

Each rule is a function with a reason and a source. Rules that keep operators in float come first; the others then add
pairs to the edges that are left, until none adds any more. In the end pairs on an activation without its weight go, and
on a weight without its activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from qdqtune.engines import TENSORRT_FAMILY
from qdqtune.engines.providers import PROVIDERS
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import AVERAGE_POOLS, COMPUTE
from qdqtune.placement import carry_pairs as pairs
from qdqtune.placement import keep_float as floats
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.possible import compute_edges, consistent
from qdqtune.types import Edge, Placement, QuantType

TENSORRT = TENSORRT_FAMILY | {"fake"}
OPENVINO = frozenset({"openvino"})
FUSING = TENSORRT | OPENVINO
"""Engines that fuse pointwise operators into the kernel in front of them."""
RTX = frozenset({"tensorrt-rtx"})
ONNXRUNTIME = frozenset({"onnxruntime"})
NPU = frozenset({"qnn"})
"""Processors that compute in 8 bits first of all: floats are converted, or leave the chip."""
EVERY = FUSING | ONNXRUNTIME
BOTH: frozenset[QuantType] = frozenset({"int8", "fp8"})
INT8: frozenset[QuantType] = frozenset({"int8"})
FP8: frozenset[QuantType] = frozenset({"fp8"})

LIBRARY_PAGES = "https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library"
GUIDE = f"{LIBRARY_PAGES}/work-quantized-types.html"
OPTIMIZER = "https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/onnx/quantization/graph_utils.py"
QNN = "https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html"
MEASURED = "measured with ONNX Runtime 1.31, see benchmarks/quantize.py"
SIMULATED = "measured in the simulator of QNN 2.7, see benchmarks/findings.md"
OBSERVED = "layer reports of TensorRT-RTX 1.7 for sm89"
RUNTIME_MODEL = "the runtime model of OpenVINO 2026.4"
LAYERNORM = "https://github.com/NVIDIA/Model-Optimizer/pull/1117"
LIBRARY = f"{LIBRARY_PAGES}/transformers-fused-attention.html"


ELEMENTWISE = frozenset({"Add", "Mul", "Sub"})


OTHERS_IN_8_BITS = AVERAGE_POOLS | ELEMENTWISE | {"Concat", "MaxPool", "Resize"}
"""Operators with integer kernels beside COMPUTE. Layers that only move values need no pair of their own: TensorRT moves
pairs across them."""


@dataclass(frozen=True)
class PlacementRule:
    """What rules of both kinds have: engines and types that they are for, a reason, and its source."""

    name: str
    reason: str
    source: str
    engines: frozenset[str]
    quant_types: frozenset[QuantType]


@dataclass(frozen=True)
class KeepFloat(PlacementRule):
    """A rule that finds edges which may carry no pair."""

    find: Callable[[GraphQueries], Iterable[Edge]]


@dataclass(frozen=True)
class CarryPair(PlacementRule):
    """A rule that finds edges which get a pair, given those that have one."""

    find: Callable[[GraphQueries, frozenset[Edge]], Iterable[Edge]]


RULES: tuple[PlacementRule, ...] = (
    KeepFloat("graph-outputs", "what leaves the graph is not rounded to 256 values", GUIDE, FUSING, BOTH,
              floats.graph_outputs),
    KeepFloat("float-outputs", "what leaves the graph is not rounded, unless an integer convolution writes it",
              MEASURED, ONNXRUNTIME, INT8, floats.float_outputs),
    KeepFloat("half-precision", "the integer kernels take and give float32 only", MEASURED, ONNXRUNTIME, INT8,
              floats.half_precision),
    KeepFloat("swish", "the gate and the product of SiLU and HardSwish join the convolution in front of them",
              OPTIMIZER, FUSING, BOTH, floats.swish),
    KeepFloat("stem-swish", "over the range of pictures a step is wider than what the gate bends, and the first layer "
              "has too few channels to gain", MEASURED, ONNXRUNTIME, INT8, floats.stem_swish),
    KeepFloat("inside-fusions", "a pair inside Conv, bias, BatchNormalization and activation breaks their fusion",
              GUIDE, FUSING, BOTH, floats.inside_fusions),
    KeepFloat("constant-operands", "elementwise operators with a constant are fused in float; 8 bits bring conversions",
              OPTIMIZER, FUSING, BOTH, floats.constant_operands),
    KeepFloat("float-functions", "normalizations, Softmax and the Erf of a GELU have float kernels only", GUIDE,
              FUSING, BOTH, floats.float_functions),
    KeepFloat("matrix-vector", "a product with M or N = 1 uses no tensor cores", OPTIMIZER,
              TENSORRT, BOTH, floats.matrix_vector),
    KeepFloat("tiny-products", "K or N below 16 do not fill a tile of the 8-bit kernels", OPTIMIZER, TENSORRT, BOTH,
              floats.tiny_products),
    KeepFloat("tiny-convolutions", "few channels do not fill a tile of the 8-bit kernels", OPTIMIZER, TENSORRT, BOTH,
              floats.tiny_convolutions),
    KeepFloat("pooled-convolutions", "a convolution of one pixel gains nothing, and its Q runs alone", OBSERVED,
              TENSORRT, BOTH, floats.pooled_convolutions),
    KeepFloat("transposed-convolutions", "there is no 8-bit kernel: the weights are dequantized at every inference",
              OBSERVED, TENSORRT, FP8, floats.transposed_convolutions),
    KeepFloat("transposed-convolutions-rtx", "there is no 8-bit kernel: the weights are dequantized at every inference",
              OBSERVED, RTX, INT8, floats.transposed_convolutions),
    KeepFloat("transposed-convolutions-cpu", "there is no 8-bit kernel: the weights are dequantized at every inference",
              MEASURED, ONNXRUNTIME, INT8, floats.transposed_convolutions),
    KeepFloat("grouped-transposed-convolutions", "there is no 8-bit kernel with groups", RUNTIME_MODEL, OPENVINO, INT8,
              floats.grouped_transposed_convolutions),
    KeepFloat("int8-attention", "fused INT8 attention needs heads of 16, 32 or 64, at most 512 positions, and pairs "
              "behind it as well: else float attention, which fuses, is faster", LIBRARY, TENSORRT, INT8,
              floats.unfusable_int8_attention),
    KeepFloat("fp8-attention", "fused FP8 attention needs a head size that is a multiple of 16, up to 256", LIBRARY,
              TENSORRT, FP8, floats.unfusable_fp8_attention),
    KeepFloat("parts-of-float-attention", "float16 attention is not fused if queries, keys and values come from a DQ, "
              "and with pairs on its inputs alone their product runs in float16", OBSERVED, TENSORRT_FAMILY, INT8,
              floats.parts_of_float_attention),
    KeepFloat("running-sums", "of values in 8 bits the NPU gets a CumSum wrong", SIMULATED, NPU, INT8,
              floats.running_sums),
    CarryPair("compute-inputs", "activation and weight together: with one of them the operator runs in float", GUIDE,
              EVERY, BOTH, pairs.compute_inputs),
    CarryPair("attention-results", "fused INT8 attention writes 8 bits: with a pair behind the second product",
              LIBRARY, TENSORRT, INT8, pairs.attention_results),
    CarryPair("attention-parts", "a product that makes queries, keys and values at once runs in 8 bits, or in fewer "
              "kernels, with a pair in front of what divides its result", OBSERVED, TENSORRT_FAMILY, BOTH,
              pairs.attention_parts),
    CarryPair("residual-skip", "with its skip input in 8 bits an Add joins the operator in front of it", GUIDE,
              FUSING, BOTH, pairs.residual_skip),
    CarryPair("conv-layernorm", "the convolution then writes 8 bits itself and gets a faster kernel", LAYERNORM,
              TENSORRT, INT8, pairs.convolution_to_layernorm),
    CarryPair("concat", "with one scale on its inputs and its output a Concat moves 8-bit values, or vanishes", GUIDE,
              FUSING, BOTH, pairs.concat),
    CarryPair("max-pool", "the largest of 8-bit values is one of them: the scale passes through", GUIDE, FUSING, INT8,
              pairs.max_pool),
    CarryPair("resize", "a resized image keeps its range: the scale passes through", GUIDE, FUSING, INT8, pairs.resize),
    CarryPair("average-pool", "fuses between a DQ and a Q; beside a float neighbour it brings a conversion", GUIDE,
              EVERY, INT8, pairs.average_pool),
    CarryPair("compute-results", "an integer convolution, or MatMul with a bias, is made of DQ, operator and Q",
              MEASURED, ONNXRUNTIME, INT8, pairs.compute_results),
    CarryPair("integer-operators", "between quantized neighbours integer kernels save the conversions", MEASURED,
              ONNXRUNTIME, INT8, pairs.integer_operators),
    CarryPair("everywhere", "what carries no pair runs in float16 there, or on the CPU with a border on either side",
              QNN, NPU, INT8, pairs.everywhere),
)  # fmt: skip


@dataclass(frozen=True)
class PlacedByRules:
    """A placement, and how many edges each rule kept in float or gave a pair, in the order of the rules."""

    placement: Placement
    counts: tuple[tuple[str, int], ...]


def rules_of(engine: str | None = None, quant_type: QuantType | None = None) -> tuple[PlacementRule, ...]:
    """The rules of an engine and a type; of all where None. An execution provider has those of an engine like it."""
    engine = PROVIDERS[engine].like if engine is not None and engine in PROVIDERS else engine
    return tuple(
        r
        for r in RULES
        if (engine is None or engine in r.engines) and (quant_type is None or quant_type in r.quant_types)
    )


def place(model: Model, possible: frozenset[Edge], engine: str, quant_type: QuantType) -> PlacedByRules:
    """The placement by the rules of an engine. Rules about sizes apply where `model` has static shapes."""
    chosen = rules_of(engine, quant_type)
    counts = dict.fromkeys((rule.name for rule in chosen), 0)
    queries = GraphQueries(model, possible, quant_type)
    for rule in chosen:
        if isinstance(rule, KeepFloat):
            kept = queries.possible.intersection(rule.find(queries))
            counts[rule.name] = len(kept)
            queries = GraphQueries(model, queries.possible - kept, quant_type)
    placed: frozenset[Edge] = frozenset()
    grows = True
    while grows:
        grows = False
        for rule in chosen:
            if isinstance(rule, CarryPair):
                added = queries.possible.intersection(rule.find(queries, placed)) - placed
                counts[rule.name] += len(added)
                placed, grows = placed | added, grows or bool(added)
    return PlacedByRules(consistent(model, Placement(placed)), tuple(counts.items()))


def place_everywhere(model: Model, possible: frozenset[Edge], quant_type: QuantType) -> Placement:
    """The most pairs that an engine with 16 bits gets: those that rules place on an NPU."""
    (npu,) = NPU
    return place(model, possible, npu, quant_type).placement


def effect(rule: PlacementRule) -> str:
    """What a rule does, in words."""
    return "keeps in float" if isinstance(rule, KeepFloat) else "places pairs"


def place_implicit(model: Model, possible: frozenset[Edge], quant_type: QuantType) -> PlacedByRules:
    """The tensors that TensorRT 8 to 10 ran in 8 bits with `--int8` and a calibration cache, where all had scales.

    Pairs on all inputs of compute operators, and of other quantizable ones if inputs and outputs can carry one. Tensors
    inside a fusion carry none. TensorRT also chose the faster precision for each layer; with pairs it has no choice.
    """
    queries = GraphQueries(model, possible, quant_type)
    edges = frozenset(e for node in model.nodes if not node.domain for e in _into_quantizable(queries, node))
    placement = consistent(model, Placement(frozenset(e for e in edges if not queries.is_inside(e))))
    return PlacedByRules(placement, (("implicit", len(placement)),))


def _into_quantizable(queries: GraphQueries, node: Node) -> Iterator[Edge]:
    if node.op in COMPUTE:
        yield from compute_edges(queries.model, node, queries.possible)
    elif node.op in OTHERS_IN_8_BITS:
        data = queries.data(node)
        outputs = [e for e in queries.model.edges(node.outputs[0]) if not e.is_graph_output]
        is_whole = len(data) == 2 or node.op not in ELEMENTWISE  # with a constant it is fused into the kernel in front
        if data and is_whole and all(e in queries.possible for e in (*data, *outputs)):
            yield from data
