"""What one candidate costs: time and memory of Inserter.insert and ConstantFile.save, the weights already written.

Every candidate is another placement: the rule 'everything' less a few edges, drawn with a seed. The same is repeated
with each weight a quarter and four times as long along its input channels (models that are written but never run), so
that the last columns show whether the weights' bytes matter.

Memory beyond the loaded graph: 'traced' is tracemalloc's peak (numpy and Python objects), 'RSS' the rise of the peak
resident set of a forked process that makes one candidate (protobuf's memory as well). Goal for resnet50: 50 ms, 30 MB.
'rules s' lists the possible edges and places all rules; 'first s' is the candidate that writes the weights.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import zoo

from qdqtune.calibration.calibrate import calibrate
from qdqtune.calibration.samples import open_samples
from qdqtune.calibration.scales import Ranges
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.graph.loading import load, nbytes
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.saving import ConstantFile
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter
from qdqtune.placement.possible import possible_edges, weight_role
from qdqtune.search.regions import discovery, patterns
from qdqtune.types import Edge, Placement

NAMES = ("resnet50", "mobilenet_v2", "efficientnet_b0", "deit_small", "convnext_tiny")
MB = 1e6

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Of one candidate, in milliseconds (medians) and MB; `first` is the one that writes the weights, in seconds."""

    insert: float
    save: float
    first: float
    traced: float
    resident: float

    @property
    def total(self) -> float:
        return self.insert + self.save


def candidates(possible: frozenset[Edge], full: Placement, count: int) -> Iterator[Placement]:
    """`full`, and then `count` placements that lack one edge in fifty of it."""
    yield full
    edges = sorted(full.edges & possible)
    rng = np.random.default_rng(0)
    for _ in range(count):
        kept = rng.random(len(edges)) > 0.02
        yield Placement.of(e for e, keep in zip(edges, kept, strict=True) if keep)


def cost(model: Model, ranges: Ranges, placements: Sequence[Placement]) -> Cost:
    """Make all placements, one after the other; the first writes the weights and the second warms up."""
    numbers = open_engine(EngineSpec("onnxruntime")).numeric_format("int8")
    inserter = Inserter(model, ranges, numbers)
    with tempfile.TemporaryDirectory() as folder, ConstantFile(Path(folder) / "constants.bin") as constants:
        inserts, saves = [], []
        for placement in placements:
            start = time.perf_counter()
            made = inserter.insert(placement)
            middle = time.perf_counter()
            constants.save(made, Path(folder) / "candidate.onnx")
            inserts.append(middle - start)
            saves.append(time.perf_counter() - middle)

        def one() -> None:
            constants.save(inserter.insert(placements[-1]), Path(folder) / "candidate.onnx")

        del made
        gc.collect()
        tracemalloc.start()
        one()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        insert, save = (float(np.median(times[2:])) * 1e3 for times in (inserts, saves))
        return Cost(insert, save, inserts[0] + saves[0], peak / MB, resident_rise(one) / MB)


def resident_rise(work: Callable[[], None]) -> float:
    """Bytes by which `work` raises the peak resident set, in a fork: there the peak starts at what is resident now."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide the rise
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, str(rise * (1024 if sys.platform == "linux" else 1)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        rise_text = answer.read()
    os.waitpid(child, 0)
    return float(rise_text)


def resized(model: Model, factor: float) -> Model:
    """The same graph with weights `factor` times as long along an axis that has no scales of its own."""
    large = dict(model.large)
    for node in model.nodes:
        for slot, name in enumerate(node.inputs):
            if name in large and len(large[name].shape) > 1:
                role = weight_role(model, Edge(name, node.name, slot))
                if role is not None:
                    axis = 0 if role.axis else 1
                    large[name] = _resized(model.large[name], axis, factor)
    return Model(model.proto, large)


def _resized(constant: Constant, axis: int, factor: float) -> Constant:
    shape = tuple(max(1, round(d * factor)) if i == axis else d for i, d in enumerate(constant.shape))
    return Constant(
        f"{constant.key}:{axis}:{factor}", constant.dtype, shape, lambda: np.resize(constant.array(), shape)
    )


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def row(entry: zoo.Entry, count: int) -> list[str]:
    """The numbers of one model, in the order of `COLUMNS`."""
    model, loading = timed(lambda: load(entry.path, fix_inputs=entry.fixed))
    found, finding = timed(lambda: discovery.find(model))
    _, grouping = timed(lambda: patterns.group(model, found))
    ranges = calibrate(model, open_samples(entry.data, model, limit=1, fixed=entry.fixed))
    possible, enumerating = timed(lambda: possible_edges(model, ranges))
    _, ruling = timed(lambda: start_placements.placements(model, possible))
    tried = list(candidates(possible, start_placements.everything(model, possible), count + 1))
    own = cost(model, ranges, tried)
    small, big = (cost(resized(model, factor), ranges, tried) for factor in (0.25, 4.0))
    return [
        entry.name, str(len(model.nodes)), str(len(tried[0])), f"{nbytes(entry.path) / MB:.0f}",
        f"{loading:.2f}", f"{finding:.2f}", f"{grouping:.2f}", f"{enumerating + ruling:.2f}", f"{own.first:.2f}",
        f"{own.insert:.1f}", f"{own.save:.1f}", f"{own.total:.1f}", f"{own.traced:.1f}", f"{own.resident:.1f}",
        f"{small.total:.1f}", f"{big.total:.1f}", f"{big.resident:.1f}",
    ]  # fmt: skip


COLUMNS = (
    "model", "nodes", "edges", "weights MB", "load s", "regions s", "patterns s", "rules s", "first s",
    "insert ms", "save ms", "candidate ms", "traced MB", "RSS MB", "ms at 1/4", "ms at x4", "RSS MB at x4",
)  # fmt: skip


def main() -> None:
    arguments = zoo.parser(__doc__, NAMES)
    arguments.add_argument("--count", type=int, default=20, help="candidates to take the median of (%(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    rows = []
    for entry in zoo.find(given.models, given.names):
        rows.append(row(entry, given.count))
        print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
