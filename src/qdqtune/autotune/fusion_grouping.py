"""Nodes that TensorRT runs together, from a graph.json of trtexec, for scripts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qdqtune.autotune.benchmark import TrtExecBenchmark
from qdqtune.autotune.graphs import GraphLike, as_model
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt.report import read_report
from qdqtune.errors import reading
from qdqtune.graph.loading import load
from qdqtune.graph.operators import COMPUTE
from qdqtune.tuning.subgraphs.groups import borders

DEFAULT_QUANTIZABLE_OPS = frozenset({*COMPUTE, "Einsum"})


@dataclass
class TRTLayer:
    """A layer as a graph.json has it; `onnx_nodes` are those that it mentions."""

    name: str
    onnx_nodes: list[str] = field(default_factory=list)


@dataclass
class FusionGroup:
    """Nodes of the model that one layer of TensorRT runs, and the tensors at its border."""

    id: int
    trt_layer_name: str
    onnx_node_names: list[str] = field(default_factory=list)
    has_quantizable_op: bool = False
    input_tensors: list[str] = field(default_factory=list)
    output_tensors: list[str] = field(default_factory=list)
    quantizable_node_names: list[str] = field(default_factory=list)


def parse_graph_json(path: str | Path) -> list[TRTLayer]:
    """The layers of a graph.json, in their order.

    Raises:
        BadOption: it is no such file.
    """
    with reading(path):
        text = Path(path).read_text(encoding="utf-8")
    return [TRTLayer(layer.name, list(layer.nodes)) for layer in read_report(text)]


def create_fusion_groups(
    trt_layers: Sequence[TRTLayer], graph: GraphLike, quantizable_ops: Collection[str] | None = None
) -> list[FusionGroup]:
    """A group for each layer that mentions nodes of the graph."""
    model, wanted = as_model(graph), set(quantizable_ops or DEFAULT_QUANTIZABLE_OPS)
    groups = []
    for number, layer in enumerate(trt_layers):
        names = [name for name in dict.fromkeys(layer.onnx_nodes) if name in model.index_of]
        if names:
            nodes = [model.index_of[name] for name in names]
            reads, writes = borders(model, nodes)
            heavy = [model.nodes[n].name for n in nodes if model.nodes[n].op in wanted]
            groups.append(FusionGroup(number, layer.name, names, bool(heavy), sorted(reads), sorted(writes), heavy))
    return groups


def generate_graph_json(
    onnx_path: str | Path,
    output_dir: str | Path,
    plugin_libraries: Sequence[str] | None = None,
    strongly_typed: bool = True,
    extra_trtexec_args: Sequence[str] | None = None,
) -> str:
    """Build a model with trtexec, and leave its layers in `<model>.fp16.graph.json`. Gives that path.

    Engines of TensorRT 10 and later are strongly typed in any case.

    Raises:
        EngineUnavailable: there is no trtexec here.
        EngineFailure: it cannot build or run the model.
    """
    path, folder = Path(onnx_path), Path(output_dir)
    benchmark = TrtExecBenchmark(None, 1, 1, plugin_libraries, extra_trtexec_args)
    sample = benchmark.prepared(load(path)).samples.first(1)[0]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{path.stem}.fp16.build.log"
    with Runner(benchmark.spec, log_dir=folder) as runner:
        runner.report(path, sample, 1, log.stem)
    made = log.with_suffix(".graph.json")
    return str(made.replace(folder / f"{path.stem}.fp16.graph.json"))
