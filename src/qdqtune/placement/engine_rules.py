"""The placement rules of `quantize`, by engine and type.

Each rule is a function with a reason and a source. First, rules exclude edges from pairs. Then others add pairs,
repeatedly, until none adds any more. Finally, where only one of a node's activation and weight has a pair, it is
removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

from qdqtune.engines.facts import ENGINES, facts_of
from qdqtune.graph.float16 import HALF
from qdqtune.graph.model import Model, Node
from qdqtune.graph.operators import ARITHMETIC, AVERAGE_POOLS, CLAMPS, COMPUTE, CONVOLUTIONS, NORMALIZATIONS
from qdqtune.placement import start_placements
from qdqtune.placement.graph_queries import GraphQueries
from qdqtune.placement.possible import compute_edges, consistent
from qdqtune.types import Edge, Placement, QuantType

TENSORRT_FAMILY = frozenset(name for name, facts in ENGINES.items() if facts.is_tensorrt)
TENSORRT = TENSORRT_FAMILY | {"fake"}
OPENVINO = frozenset({"openvino"})
FUSING = TENSORRT | OPENVINO
"""Engines that fuse pointwise operators into the kernel in front of them."""
RTX = frozenset({"tensorrt-rtx"})
ONNXRUNTIME = frozenset({"onnxruntime"})
NPU = frozenset({"qnn"})
"""Engines for accelerators that compute mainly in 8 bits: float operators run elsewhere or need conversions."""
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


@dataclass(frozen=True)
class Rule:
    """A rule, with the engines and types it holds for, its reason, and the source of that. `find` gives the edges that
    must have no pair; or, if `places` is set, the edges to add to those `placed` so far."""

    name: str
    reason: str
    source: str
    engines: frozenset[str]
    quant_types: frozenset[QuantType]
    find: Callable[[GraphQueries], Iterable[Edge]]
    places: bool = False

    @property
    def effect(self) -> str:
        return "places pairs" if self.places else "keeps in float"


# ---- rules that keep operators in float: edges that may carry no pair

FLOAT_FUNCTIONS = frozenset({"Softmax", "LogSoftmax", "Erf", "Gelu"})

TILE = 16
"""Fewest channels, and least K and N of a matrix product, that fill a tile of the 8-bit kernels (NVIDIA Model
Optimizer)."""

LARGEST_FP8_FILTER = 32
"""Most values of a filter that FP8 convolutions have kernels for (NVIDIA Model Optimizer)."""

INT8_HEADS = (16, 32, 64)
"""Head sizes for which INT8 attention has a fused kernel (TensorRT developer guide, as the next two)."""

LONGEST_INT8_ATTENTION = 512
"""Longest sequence of a fused INT8 attention."""

LARGEST_FP8_HEAD = 256
"""Largest head size of a fused FP8 attention."""


def graph_outputs(queries: GraphQueries) -> Iterator[Edge]:
    return (e for e in queries.possible if e.is_graph_output)


def float_outputs(queries: GraphQueries) -> Iterator[Edge]:
    """Edges to graph outputs that are not results of a convolution."""
    own = {result(queries, n) for n in queries.computes() if n.op in CONVOLUTIONS}
    return (e for e in graph_outputs(queries) if e.tensor not in own)


def result(queries: GraphQueries, node: Node) -> str:
    """The result of a compute operator (Conv, Gemm, MatMul ...), or of the clamp that is fused into it."""
    tensor = node.outputs[0]
    while len(uses := queries.model.edges(tensor)) == 1:
        user = queries.model.user(uses[0])
        if user is None or user.op not in CLAMPS or user.domain:
            break
        tensor = user.outputs[0]
    return tensor


def constant_operands(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into Add, Sub, Mul and Div nodes with a constant operand."""
    for node in queries.model.nodes:
        if node.op in ARITHMETIC and any(t in queries.model.constants for t in node.inputs):
            yield from node.into


def swish(queries: GraphQueries) -> Iterator[Edge]:
    """Edges inside SiLU and HardSwish, x * gate(x): x into the gate, x and the gate into the Mul."""
    for node, x, _, first in _gated(queries):
        yield from node.into
        yield from (e for e in first.into if e.tensor == x)


def stem_swish(queries: GraphQueries) -> Iterator[Edge]:
    """Every edge from the data of a first convolution to the readers of the SiLU or HardSwish behind it.

    A convolution is first if no compute operator is in front of it and its inputs have fewer channels than fill a tile.
    """
    behind: set[str] = set()
    for node in queries.model.nodes:
        if node.op in COMPUTE or not behind.isdisjoint(node.reads):
            behind.update(node.outputs)
    for node, x, gate, first in _gated(queries):
        layer = queries.model.maker(x)
        if layer is None or layer.op != "Conv" or layer.inputs[0] in behind:
            continue
        channels = (queries.sizes(layer.inputs[0]) or (None, None))[1]
        if layer.attributes.get("group", 1) == 1 and (channels or TILE) < TILE:
            yield from layer.into
            tensors = {x, gate, node.outputs[0], *first.outputs}
            yield from (e for e in queries.possible if e.tensor in tensors)


def _gated(queries: GraphQueries) -> Iterator[tuple[Node, str, str, Node]]:
    """Each Mul that computes x * gate(x), the names of x and gate(x), and the node of the gate that reads x."""
    for node in queries.model.nodes:
        for x, gate in (node.inputs, node.inputs[::-1]) if node.op == "Mul" and len(node.inputs) == 2 else ():
            # the node that reads x, if the gate is Sigmoid(x), HardSigmoid(x), or Clip(x + 3) times a constant
            first = queries.model.maker(gate)
            while first is not None and first.op in ("Clip", "Div", "Mul") and len(queries.data(first)) == 1:
                first = queries.model.maker(queries.data(first)[0].tensor)
            read = [e.tensor for e in queries.data(first)] if first is not None else []
            if first is not None and read == [x] and first.op in ("Sigmoid", "HardSigmoid", "Add"):
                yield node, x, gate, first


def float_functions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into FLOAT_FUNCTIONS and unfused normalizations, except the data of one that `follows_convolution`."""
    for node in queries.model.nodes:
        if node.op in NORMALIZATIONS and queries.fusions.get(node.index) is None:
            kept = 0 if follows_convolution(queries, node) is not None else None
            yield from (e for e in node.into if e.index != kept)
        elif node.op in FLOAT_FUNCTIONS:
            yield from node.into


def follows_convolution(queries: GraphQueries, node: Node) -> Node | None:
    """The compute operator in front of a LayerNormalization in a convolutional network; None for other nodes.

    The data of the LayerNormalization comes, through copies, from the fusion of a convolution. Or it comes from a
    residual Add whose branch ends in a matrix product, and the result goes, through copies, into a Conv.
    """
    if node.op != "LayerNormalization" or node.domain:
        return None
    source = queries.source(node.inputs[0])
    root = None if source is None else queries.fusions.get(source.index)
    if source is None or root is None:
        return None
    made_by = queries.model.nodes[root]
    if made_by.op in CONVOLUTIONS:
        return made_by
    users = [queries.model.user(e) for e in queries.readers(node.outputs[0])]
    is_residual = source.op == "Add" and queries.skip(source) is not None
    return made_by if is_residual and any(u is not None and u.op == "Conv" for u in users) else None


def matrix_vector(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into products [M, K] x [K, N] with M or N = 1, as NVIDIA Model Optimizer does it; products with a constant
    operand only if two-dimensional, since a step of a language model, [1, 1, K], gains from weights in 8 bits."""
    for node in queries.computes():
        shape = queries.sizes(node.outputs[0])
        is_weighted = any(t in queries.model.constants for t in node.inputs[:2])
        if node.op in CONVOLUTIONS or not shape or (is_weighted and len(shape) > 2):
            continue
        if len(shape) == 1 or 1 in shape[-2:]:
            yield from node.into


def tiny_products(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into products [M, K] x [K, N] with K or N below TILE."""
    for node in queries.computes():
        second, shape = queries.sizes(node.inputs[1]), queries.sizes(node.outputs[0])
        if node.op in CONVOLUTIONS or len(second) < 2 or not shape:
            continue
        inner = second[-1] if node.op == "Gemm" and node.attributes.get("transB", 0) else second[-2]
        if any(0 < (size or 0) < TILE for size in (inner, shape[-1])):
            yield from node.into


def tiny_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into convolutions with few input or output channels.

    INT8: inputs or outputs below 16; and both below 16 behind the first layer, or neither a multiple of 8. A grouped
    one: inputs or outputs below 16; and outputs no multiple of 8, or a filter narrower than 3. FP8: inputs or outputs
    of 16 or less, or a filter of more than 32 values.
    """
    for node in queries.computes():
        weight = queries.sizes(node.inputs[1])
        if node.op != "Conv" or len(weight) < 3 or None in weight:
            continue
        outputs, inputs, *kernel = (d or 0 for d in weight)
        if queries.quant_type == "fp8":
            is_tiny = min(outputs, inputs) <= TILE or prod(kernel) > LARGEST_FP8_FILTER
        elif min(outputs, inputs) >= TILE:
            is_tiny = False
        elif node.attributes.get("group", 1) > 1:
            is_tiny = outputs % 8 != 0 or min(kernel) < 3
        else:
            is_first = node.inputs[0] in queries.model.inputs
            is_tiny = bool(outputs % 8 and inputs % 8) or not (is_first or max(outputs, inputs) >= TILE)
        if is_tiny:
            yield from node.into


def unfusable_attention(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into both products of an attention that no kernel fuses: for its sizes, or where a required pair is
    impossible.

    INT8, as seen with TensorRT-RTX 1.7 for sm89, and in NVIDIA's guide: heads of 16, 32 or 64, at most 512 positions,
    pairs on both inputs of both products and on the result of the second. FP8: heads of a multiple of 16 up to 256,
    pairs on the inputs.
    """
    for attention in queries.attentions:
        size, paired = attention.head_size or 0, {*attention.into_products}
        if queries.quant_type == "fp8":
            fits = 0 < size <= LARGEST_FP8_HEAD and size % 16 == 0
        else:
            fits = size in INT8_HEADS and (attention.sequence or 0) <= LONGEST_INT8_ATTENTION
            paired.update(queries.readers(attention.context.outputs[0]))
        if not fits or not paired <= queries.possible:
            yield from attention.into_products


def parts_of_float_attention(queries: GraphQueries) -> Iterator[Edge]:
    """Inputs of a product that makes queries, keys and values at once, where the attention runs fused in float16."""
    for attention in queries.attentions:
        parts = queries.parts(attention)
        if parts is not None and queries.is_fused_as_float(attention, queries.possible):
            yield from parts[0].into


def transposed_convolutions(queries: GraphQueries, least_groups: int = 1) -> Iterator[Edge]:
    for node in queries.computes():
        if node.op == "ConvTranspose" and node.attributes.get("group", 1) >= least_groups:
            yield from node.into


def pooled_convolutions(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into convolutions of a 1x1 image, as in squeeze-and-excitation: they are matrix-vector products."""
    for node in queries.computes():
        image = queries.sizes(node.inputs[0])[2:]
        if node.op == "Conv" and image and all(size == 1 for size in image):
            yield from node.into


# ---- rules that place pairs: further edges, beside those that have pairs already (`queries.placed`)

INTEGER = frozenset({"Add", "Concat", "LeakyRelu", "Mul", "Sigmoid"})
"""Operators whose integer kernels in ONNX Runtime save time between quantized neighbours."""


def attention_results(queries: GraphQueries) -> Iterator[Edge]:
    """The edges that read an attention's second product, also behind copies, if both products have pairs."""
    for attention in queries.attentions:
        if queries.placed.issuperset(attention.into_products):
            yield from queries.readers(attention.context.outputs[0])


def attention_parts(queries: GraphQueries) -> Iterator[Edge]:
    """Edges into the operators that split the result of a quantized product which makes queries, keys and values at
    once; none if the attention is fused in float16."""
    for attention in queries.attentions:
        parts = queries.parts(attention)
        is_float = queries.is_fused_as_float(attention, queries.placed)
        if parts is not None and compute_edges(parts[0], queries.placed) and not is_float:
            yield from parts[1]


def residual_skip(queries: GraphQueries) -> Iterator[Edge]:
    """The skip input of an Add whose other input comes from a quantized compute operator."""
    for node in queries.model.nodes:
        skip = queries.skip(node) if node.op == "Add" and not node.domain else None
        if skip is not None and skip.tensor in queries.model.producers and _runs_in_8_bits(queries, node):
            yield skip


def convolution_to_layernorm(queries: GraphQueries) -> Iterator[Edge]:
    for node in queries.model.nodes:
        source = follows_convolution(queries, node)
        if source is not None and compute_edges(source, queries.placed):
            yield node.into[0]


def concat(queries: GraphQueries) -> Iterator[Edge]:
    """All inputs and uses of a Concat, if a quantized operator feeds it and only quantized operators read it."""
    for node in queries.model.nodes:
        if node.op == "Concat" and _all_read_in_8_bits(queries, node):
            data = queries.data(node)
            if any(_made_in_8_bits(queries, e.tensor) for e in data):
                yield from data
                yield from queries.model.edges(node.outputs[0])


def passed_on(queries: GraphQueries, operators: frozenset[str]) -> Iterator[Edge]:
    """Inputs of `operators` whose result only quantized operators read; not of a cubic Resize, which exceeds its
    input's range."""
    for node in queries.model.nodes:
        is_cubic = node.attributes.get("mode") in ("cubic", b"cubic")
        if node.op in operators and not is_cubic and _all_read_in_8_bits(queries, node):
            yield from queries.data(node)


def average_pool(queries: GraphQueries) -> Iterator[Edge]:
    """Input and result of an average pool between quantized operators, if nothing reads its input in float."""
    for node in queries.model.nodes:
        if node.op not in AVERAGE_POOLS or not _all_read_in_8_bits(queries, node):
            continue
        tensor = node.inputs[0]
        others = [e for e in queries.model.edges(tensor) if e.node != node.name]
        if _made_in_8_bits(queries, tensor) and all(e in queries.placed for e in others):
            yield from (*queries.data(node), *queries.model.edges(node.outputs[0]))


def compute_results(queries: GraphQueries) -> Iterator[Edge]:
    """All uses of the result of a convolution with pairs in front of it, or of a MatMul with such pairs and a constant
    bias behind it. Where a Relu or Clip is fused into the node, its result counts."""
    for node in queries.computes():
        if node.op == "Gemm" or not compute_edges(node, queries.placed):
            continue
        uses = queries.model.edges(result(queries, node))
        users = [queries.model.user(e) for e in uses]
        biases = [set(user.inputs) & queries.model.constants.keys() for user in users if user and user.op == "Add"]
        if node.op != "MatMul" or any(biases):
            yield from uses


def everywhere(queries: GraphQueries) -> Iterable[Edge]:
    """Every edge that can carry a pair, except those between an operator and the clamp that is fused into it."""
    for edge in queries.possible:
        user, maker = queries.model.user(edge), queries.model.maker(edge.tensor)
        if not (user is not None and user.op in CLAMPS and maker is not None and maker.op in COMPUTE):
            yield edge


def _runs_in_8_bits(queries: GraphQueries, node: Node) -> bool:
    """Whether a node belongs to a quantized fusion."""
    root = queries.fusions.get(node.index)
    return root is not None and bool(compute_edges(queries.model.nodes[root], queries.placed))


def _made_in_8_bits(queries: GraphQueries, tensor: str) -> bool:
    """Whether a quantized fusion makes a tensor, if only through copies, or a Concat, MaxPool or Resize of quantized
    inputs."""
    source = queries.source(tensor)
    if source is None or source.index in queries.fusions:
        return source is not None and _runs_in_8_bits(queries, source)
    data = queries.data(source)
    return source.op in ("Concat", "MaxPool", "Resize") and bool(data) and all(e in queries.placed for e in data)


def _all_read_in_8_bits(queries: GraphQueries, node: Node) -> bool:
    readers = list(queries.readers(node.outputs[0]))
    return bool(readers) and all(e in queries.placed for e in readers)


RULES: tuple[Rule, ...] = (
    Rule("graph-outputs", "what leaves the graph is not rounded to 256 values", GUIDE, FUSING, BOTH,
         graph_outputs),
    Rule("float-outputs", "what leaves the graph is not rounded, unless an integer convolution writes it",
         MEASURED, ONNXRUNTIME, INT8, float_outputs),
    Rule("half-precision", "the integer kernels take and give float32 only", MEASURED, ONNXRUNTIME, INT8,
         lambda queries: (e for e in queries.possible if queries.model.tensors[e.tensor].dtype in HALF)),
    Rule("swish", "the gate and the product of SiLU and HardSwish join the convolution in front of them",
         OPTIMIZER, FUSING, BOTH, swish),
    Rule("stem-swish", "over the range of pictures a step is wider than what the gate bends, and the first layer "
         "has too few channels to gain", MEASURED, ONNXRUNTIME, INT8, stem_swish),
    Rule("inside-fusions", "a pair inside Conv, bias, BatchNormalization and activation breaks their fusion",
         GUIDE, FUSING, BOTH, lambda queries: filter(queries.is_inside, queries.possible)),
    Rule("constant-operands", "elementwise operators with a constant are fused in float; 8 bits bring conversions",
         OPTIMIZER, FUSING, BOTH, constant_operands),
    Rule("float-functions", "normalizations, Softmax and the Erf of a GELU have float kernels only", GUIDE,
         FUSING, BOTH, float_functions),
    Rule("matrix-vector", "a product with M or N = 1 uses no tensor cores", OPTIMIZER,
         TENSORRT, BOTH, matrix_vector),
    Rule("tiny-products", "K or N below 16 do not fill a tile of the 8-bit kernels", OPTIMIZER, TENSORRT, BOTH,
         tiny_products),
    Rule("tiny-convolutions", "few channels do not fill a tile of the 8-bit kernels", OPTIMIZER, TENSORRT, BOTH,
         tiny_convolutions),
    Rule("pooled-convolutions", "a convolution of one pixel gains nothing, and its Q runs alone", OBSERVED,
         TENSORRT, BOTH, pooled_convolutions),
    Rule("transposed-convolutions", "there is no 8-bit kernel: the weights are dequantized at every inference",
         OBSERVED, TENSORRT, FP8, transposed_convolutions),
    Rule("transposed-convolutions-rtx", "there is no 8-bit kernel: the weights are dequantized at every inference",
         OBSERVED, RTX, INT8, transposed_convolutions),
    Rule("transposed-convolutions-cpu", "there is no 8-bit kernel: the weights are dequantized at every inference",
         MEASURED, ONNXRUNTIME, INT8, transposed_convolutions),
    Rule("grouped-transposed-convolutions", "there is no 8-bit kernel with groups", RUNTIME_MODEL, OPENVINO, INT8,
         partial(transposed_convolutions, least_groups=2)),
    Rule("int8-attention", "fused INT8 attention needs heads of 16, 32 or 64, at most 512 positions, and pairs "
         "behind it as well: else float attention, which fuses, is faster", LIBRARY, TENSORRT, INT8,
         unfusable_attention),
    Rule("fp8-attention", "fused FP8 attention needs a head size that is a multiple of 16, up to 256", LIBRARY,
         TENSORRT, FP8, unfusable_attention),
    Rule("parts-of-float-attention", "float16 attention is not fused if queries, keys and values come from a DQ, "
         "and with pairs on its inputs alone their product runs in float16", OBSERVED, TENSORRT_FAMILY, INT8,
         parts_of_float_attention),
    Rule("running-sums", "of values in 8 bits the NPU gets a CumSum wrong", SIMULATED, NPU, INT8,
         lambda queries: (e for node in queries.model.nodes if node.op == "CumSum" for e in node.into)),
    Rule("compute-inputs", "activation and weight together: with one of them the operator runs in float", GUIDE,
         EVERY, BOTH, lambda queries: start_placements.compute_inputs(queries.model, queries.possible), places=True),
    Rule("attention-results", "fused INT8 attention writes 8 bits: with a pair behind the second product",
         LIBRARY, TENSORRT, INT8, attention_results, places=True),
    Rule("attention-parts", "a product that makes queries, keys and values at once runs in 8 bits, or in fewer "
         "kernels, with a pair in front of what divides its result", OBSERVED, TENSORRT_FAMILY, BOTH,
         attention_parts, places=True),
    Rule("residual-skip", "with its skip input in 8 bits an Add joins the operator in front of it", GUIDE,
         FUSING, BOTH, residual_skip, places=True),
    Rule("conv-layernorm", "the convolution then writes 8 bits itself and gets a faster kernel", LAYERNORM,
         TENSORRT, INT8, convolution_to_layernorm, places=True),
    Rule("concat", "with one scale on its inputs and its output a Concat moves 8-bit values, or vanishes", GUIDE,
         FUSING, BOTH, concat, places=True),
    Rule("max-pool", "the largest of 8-bit values is one of them: the scale passes through", GUIDE, FUSING, INT8,
         partial(passed_on, operators=frozenset({"MaxPool"})), places=True),
    Rule("resize", "a resized image keeps its range: the scale passes through", GUIDE, FUSING, INT8,
         partial(passed_on, operators=frozenset({"Resize", "Upsample"})), places=True),
    Rule("average-pool", "fuses between a DQ and a Q; beside a float neighbour it brings a conversion", GUIDE,
         EVERY, INT8, average_pool, places=True),
    Rule("compute-results", "an integer convolution, or MatMul with a bias, is made of DQ, operator and Q",
         MEASURED, ONNXRUNTIME, INT8, compute_results, places=True),
    Rule("integer-operators", "between quantized neighbours integer kernels save the conversions", MEASURED,
         ONNXRUNTIME, INT8,
         lambda queries: start_placements.integer_islands(queries.model, queries.possible, INTEGER), places=True),
    Rule("everywhere", "what carries no pair runs in float16 there, or on the CPU with a border on either side",
         QNN, NPU, INT8, everywhere, places=True),
)  # fmt: skip


@dataclass(frozen=True)
class PlacedByRules:
    """A placement, and how many edges each rule kept in float or gave a pair, in the order of the rules."""

    placement: Placement
    counts: tuple[tuple[str, int], ...]


def rules_of(engine: str, quant_type: QuantType) -> tuple[Rule, ...]:
    """The rules for an engine and a type. An execution provider has those of the engine that it is like."""
    like = facts_of(engine).like or engine
    return tuple(rule for rule in RULES if like in rule.engines and quant_type in rule.quant_types)


def place(model: Model, possible: frozenset[Edge], engine: str, quant_type: QuantType) -> PlacedByRules:
    """The placement by the rules of an engine. Rules about sizes need static shapes."""
    chosen = rules_of(engine, quant_type)
    counts = dict.fromkeys((rule.name for rule in chosen), 0)
    queries = GraphQueries(model, possible, quant_type)
    for rule in chosen:
        if not rule.places:
            kept = queries.possible.intersection(rule.find(queries))
            counts[rule.name] = len(kept)
            queries.possible -= kept
    before = None
    while queries.placed != before:
        before = queries.placed
        for rule in chosen:
            if rule.places:
                added = queries.possible.intersection(rule.find(queries)) - queries.placed
                counts[rule.name] += len(added)
                queries.placed |= added
    return PlacedByRules(consistent(model, Placement(queries.placed)), tuple(counts.items()))
