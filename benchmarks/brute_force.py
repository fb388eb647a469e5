"""Cut mode against the best of all placements, measured: every way to quantize the units of a few small networks.

Each network is tuned by default, without limits on accuracy. Then every set of its units that may run quantized, with
every choice of which of their outputs stay in 8 bits, is built once and paired with the cut's model in a few short
rounds; the fastest of these in more, and the fastest of those meet it on fresh builds, since the first among many is
flattered by its luck. 'best/cut' is the ratio of the fastest of them to the cut's model: 0.98 or more means that at
most 2 % were left. A few minutes a network: each row is printed as it comes, and which stage a network is at.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import zoo
from onnx import numpy_helper

from qdqtune.calibration.scales import Calibration
from qdqtune.commands.compare import compare_files
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import Execution
from qdqtune.engines.pool import WorkerPool
from qdqtune.engines.runner import Runner
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search.costs.units import Decision, Partition, fusion_groups, partition
from qdqtune.timing.ratios import Plan, judge
from qdqtune.tuning.bench import Bench, Candidates, Conditions, TrialWorker
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.store import Store
from qdqtune.tuning.subject import calibrated, open_subject
from qdqtune.types import Placement, Proposal, Sample

RESIDUAL = """residual (float[1,64,56,56] x) => (float[1,10] y) {
    a = Conv<pads=[1,1,1,1]>(x, w0)
    b = Relu(a)
    c = Conv<pads=[1,1,1,1]>(b, w1)
    d = Add(c, x)
    e = Relu(d)
    f = GlobalAveragePool(e)
    g = Flatten(f)
    y = Gemm(g, w2)
}"""

ATTENTION = """attention (float[1,197,384] x) => (float[1,197,384] y) {
    q = MatMul(x, w0)
    k = MatMul(x, w1)
    v = MatMul(x, w2)
    t = Transpose<perm=[0,2,1]>(k)
    s = MatMul(q, t)
    p = Softmax(s)
    o = MatMul(p, v)
    y = Add(o, x)
}"""

GATED = """gated (float[1,96,56,56] x) => (float[1,96,56,56] y) {
    a = Conv(x, w0)
    b = Sigmoid(a)
    c = Mul(a, b)
    d = Conv<pads=[1,1,1,1], group=96>(c, w1)
    e = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(d)
    f = Conv(e, w2)
    y = Add(f, x)
}"""

INVERTED = """inverted (float[1,32,28,28] x) => (float[1,32,14,14] y) {
    a = Conv(x, w0)
    b = HardSwish(a)
    c = Conv<pads=[1,1,1,1], group=96>(b, w1)
    d = Relu(c)
    e = Conv(d, w2)
    f = Add(e, x)
    g = Conv<pads=[1,1,1,1]>(f, w3)
    h = Relu(g)
    i = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(f)
    j = Concat<axis=1>(h, i)
    k = AveragePool<kernel_shape=[2,2], strides=[2,2]>(j)
    l = Conv(k, w4)
    m = Sigmoid(l)
    n = Mul(l, m)
    o = Conv<pads=[1,1,1,1], group=64>(n, w5)
    p = Relu(o)
    y = Conv(p, w6)
}"""

GRAPHS: Mapping[str, tuple[str, Sequence[tuple[int, ...]]]] = {
    "residual": (RESIDUAL, [(64, 64, 3, 3), (64, 64, 3, 3), (64, 10)]),
    "attention": (ATTENTION, [(384, 384), (384, 384), (384, 384)]),
    "gated": (GATED, [(96, 96, 1, 1), (96, 1, 3, 3), (96, 96, 1, 1)]),
    "inverted": (
        INVERTED,
        [(96, 32, 1, 1), (96, 1, 3, 3), (32, 96, 1, 1), (32, 32, 3, 3), (64, 64, 1, 1), (64, 1, 3, 3), (32, 64, 1, 1)],
    ),
}
"""Text of each network, and the shapes of its weights w0, w1, ..."""

COLUMNS = ("network", "units", "placements", "cut/float", "builds", "best/cut")
SHORT = Plan((4,), 0.1, turn_seconds=0.003, warmup=1)
STAGES = ((SHORT, 24), (Plan((16,), 0.01, turn_seconds=0.008), 3))
"""How placements meet the cut's model, stage by stage, and how many of them go on."""

PAIRED = Plan((24,), 0.001)
"""How the last ones do, on two fresh builds of each."""


def write(name: str, path: Path) -> None:
    """A network with seeded random weights of a usual size."""
    text, shapes = GRAPHS[name]
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> {text}')
    random = np.random.default_rng(0)
    for number, shape in enumerate(shapes):
        values = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else shape[0])
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), f"w{number}"))
    onnx.save(model, path)


def placements(parts: Partition) -> Iterator[Placement]:
    """Every set of units that can run quantized, each with three ways to choose which outputs stay in 8 bits: all of
    them, those that only quantized units read, and none."""
    able = [u.number for u in parts.units if u.inputs]
    seen: set[Placement] = set()
    for quantized in chain.from_iterable(combinations(able, n) for n in range(1, len(able) + 1)):
        made = [t for t in parts.edges if parts.producer.get(t) in quantized]
        inside = [t for t in made if set(parts.users[t]) <= set(quantized)]
        for stored in (made, inside, []):
            placement = parts.placement(Decision.of(quantized, stored))
            if placement not in seen:
                seen.add(placement)
                yield placement


def row(name: str, folder: Path) -> list[str]:
    """The numbers of one network, in the order of `COLUMNS`."""
    path = folder / "model.onnx"
    write(name, path)
    engine, how = EngineSpec("onnxruntime", {"threads": 1}), Calibration("minmax", bias_correction=False)
    settings = Settings(
        path, output_dir=folder / "out", engine=engine,
        seed=1, calibration=how, min_sqnr=None, min_agreement=None, threads=(1,),
        rewrites="off", formats=("int8",),
    )  # fmt: skip
    result = tune(settings)
    execution = Execution(60)
    with Runner(settings.engine, execution=execution, log_dir=folder / "logs") as runner:
        subject = open_subject(settings, runner, execution)
        with Store(folder / "all.yaml", {}) as store:
            subject = calibrated(subject, settings, store, Silent())
            runner.feed(subject.feed)
            inserter = Inserter(subject.model, subject.ranges, subject.numbers)
            with ConstantFile(folder / CONSTANTS) as constants:
                candidates = Candidates(inserter, constants)
                bench, _ = _bench(runner, candidates, SHORT, subject.accuracy[:1], store)
                groups = fusion_groups(subject.shaped, bench.layers())
                parts = partition(subject.shaped, subject.possible, groups)
                found = every = list(placements(parts))
                for plan, count in STAGES:
                    print(f"{name}: {len(found)} placements in {plan.looks[-1]} rounds each", flush=True)
                    with Store(folder / f"{count}.yaml", {}) as own:
                        stage = _bench(runner, candidates, plan, subject.accuracy[:1], own)
                        found = ranked(found, result.placement, plan, *stage)[:count]
                files = [folder / "out" / "optimized_final.onnx"]
                for number, placement in enumerate(found):
                    files.append(folder / f"best{number}.onnx")
                    candidates.write_whole(placement, files[-1])
        rows = compare_files(files, runner, subject.accuracy, PAIRED)
    best = min((r.ratio for r in rows if r.ratio is not None), key=lambda r: r.median)
    units = sum(bool(u.inputs) for u in parts.units)
    return [
        name,
        str(units),
        str(len(every)),
        f"{result.summary['ratio'] or 1:.3f}",
        str(result.summary["builds"]),
        str(best),
    ]


def _bench(
    runner: Runner, candidates: Candidates, plan: Plan, samples: Sequence[Sample], store: Store
) -> tuple[Bench, TrialWorker]:
    conditions = Conditions(plan, samples, seed=0)
    worker = TrialWorker(runner, candidates, conditions)
    return Bench(WorkerPool([worker]), store, conditions), worker


def ranked(
    placements: Iterable[Placement], against: Placement, plan: Plan, bench: Bench, worker: TrialWorker
) -> list[Placement]:
    """All that the engine runs, the fastest first."""
    ratios: dict[Placement, float] = {}
    for number, placement in enumerate(placements, 1):
        if placement != against:
            ((trial, _),) = bench.measured(number, [Proposal("all", placement)], against)
            if (judged := judge(trial, plan)) is not None:
                ratios[placement] = judged.median
            worker.keep_only(against)
    return sorted(ratios, key=lambda p: ratios[p])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", default=list(GRAPHS), help="networks (default: %(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    rows = []
    for name in given.names:
        with TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder)))
        print("  ".join(rows[-1]), flush=True)
    zoo.print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
