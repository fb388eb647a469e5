"""Layer reports against model and clock: are all nodes covered, and do the layers' times add up to the latency?"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import zoo

from qdqtune.calibration.samples import open_samples
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.graph.loading import load
from qdqtune.types import Failure

NAMES = ("resnet50", "bert_base", "swin_t")
COLUMNS = ("model", "engine", "layers", "nodes covered", "latency ms", "layers ms", "layers/latency")
RUNS = 20


def row(entry: zoo.Entry, engine: str) -> list[str]:
    """One model on one engine: its latency by the rounds' clock, and the median layer times added up."""
    nodes = len(onnx.load(entry.path, load_external_data=False).graph.node)
    sample = open_samples(entry.data, load(entry.path)).first(1)[0]
    with (
        TemporaryDirectory() as folder,
        Runner(EngineSpec(engine, {"threads": 1}), execution=Execution(300), log_dir=Path(folder)) as runner,
    ):
        runner.feed(sample)
        handle = runner.load(entry.path)
        if isinstance(handle, Failure):
            sys.exit(f"{entry.name} on {engine}: {handle.reason}")
        layers = runner.layers(handle, RUNS)
        timed = runner.rounds(handle, handle, RUNS // 2, seed=0, first_round=0, turn_seconds=0.0, warmup=2)
        if isinstance(layers, Failure) or isinstance(timed, Failure):
            sys.exit(f"{entry.name} on {engine}: no report")
    total = sum(layer.time_ms or 0.0 for layer in layers)
    latency = 1e3 * float(np.median(timed.a + timed.b))
    covered = sum(len(layer.nodes) for layer in layers)
    return [entry.name, engine, str(len(layers)), f"{covered} of {nodes}", f"{latency:.2f}", f"{total:.2f}",
            f"{total / latency:.2f}"]  # fmt: skip


def main() -> None:
    arguments = zoo.parser(__doc__, NAMES)
    arguments.add_argument("--engines", nargs="+", default=["onnxruntime", "openvino"])
    given = arguments.parse_args()
    zoo.print_machine()
    zoo.print_table(COLUMNS, [row(e, engine) for e in zoo.find(given.models, given.names) for engine in given.engines])


if __name__ == "__main__":
    main()
