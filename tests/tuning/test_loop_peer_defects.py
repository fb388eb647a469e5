"""Mistakes that tools of this kind have made before, each with a test that would catch it here."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from models import FP8, INT8, build, conv_net, normal, ranges
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import FakeOptions, create, latency
from qdqtune.errors import BadState, BaselineFailed
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement import start_placements
from qdqtune.placement.insertion import Inserter, insert
from qdqtune.placement.possible import possible_edges
from qdqtune.search import best_of
from qdqtune.search.regions import discovery, patterns
from qdqtune.search.regions.region import NodeInput, Scheme
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.types import Failure, Measurement, Placement
from runs import cost, hopeless, mixed, settings, write
from workers import Build, Workers

pytestmark = pytest.mark.usefixtures("workers")


def initializers(proto: onnx.ModelProto) -> dict[str, Any]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


@pytest.mark.parametrize("make", [mixed, hopeless, conv_net])
def test_1_a_model_slower_than_the_one_given_is_shipped(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Pattern after pattern was written over the last without asking whether the whole became slower, "leave it as it
    is" was no candidate, and the threshold for an improvement was never read."""
    path = write(make(), tmp_path)
    result = tune(settings(path))
    assert cost(tmp_path / "out" / "optimized_final.onnx") <= cost(path) * (1 if result.improved else 1.0001)
    inserter = Inserter(load(path), ranges(load(path)), INT8)
    best = [latency(inserter.insert(best_of(result.history[:n])).to_proto()) for n in range(len(result.history) + 1)]
    assert best == sorted(best, reverse=True)


def test_2_what_was_measured_is_not_what_is_shipped(model: Path, workers: Workers) -> None:
    """The search measured models with the scale 0.1 everywhere; the one delivered was calibrated and placed anew."""
    measured: dict[str, onnx.ModelProto] = {}

    def watched(build: Build) -> None:
        measured[build.path.stem] = onnx.load(build.path)

    workers.refused = watched
    result = tune(settings(model))
    candidate = measured[result.placement.digest]
    shipped = onnx.load(model.parent / "out" / "optimized_final.onnx")
    assert list(candidate.graph.node) == list(shipped.graph.node)
    ours, theirs = initializers(candidate), initializers(shipped)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    scales = {float(s) for name, s in theirs.items() if "scale" in name and s.ndim == 0}
    assert len(scales) > 1


def test_3_options_that_crash_or_do_nothing(model: Path) -> None:
    """The node filter ended in a traceback, a quantized model given as a start imported not one pair, because names of
    the quantized model were looked up in the float one, and FP8 scales were upside down (448 / largest value)."""
    filtered = tune(settings(model, node_filter=("second",), builds=12))
    assert {e.node for t in filtered.history for e in t.placement} >= {"second"}
    float_model = load(model)
    placement = start_placements.integer_islands(float_model, possible_edges(float_model, ranges(float_model)))
    other = model.parent / "quantized.onnx"
    save(insert(float_model, placement, ranges(float_model), INT8), other)
    imported = tune(settings(model, qdq_baseline=other, builds=5, output_dir=model.parent / "imported"))
    assert imported.history[0].placement == placement
    found = ranges(float_model)
    eight = insert(load(model, min_opset=19), placement, found, FP8).to_proto()
    first = next(n for n in eight.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    assert initializers(eight)[first.input[1]] == pytest.approx(found.activations["x"].magnitude / 448)


def test_4_a_run_that_is_resumed_forgets_or_mixes(model: Path) -> None:
    """A resumed run lost the pattern that it had just finished, took over the options of the old run without a word,
    went on with another model, and a kill while it wrote left a file that could not be read."""
    first = tune(settings(model, builds=14))
    state = model.parent / "out" / "autotuner_state.yaml"
    state.write_bytes(state.read_bytes()[:-100])
    again = tune(settings(model, builds=14))
    assert again.history == first.history
    weights = onnx.load(model)
    weights.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(normal(64, 128, seed=9), weights.graph.initializer[0].name)
    )
    for change in ({"seed": 5}, {"engine": EngineSpec("fake", {"asymmetric": True})}, {}):
        if not change:
            onnx.save(weights, model)
        with pytest.raises(BadState, match="was made with"):
            tune(settings(model, builds=14, **change))


def test_5_the_same_placement_is_built_again_and_again(model: Path, workers: Workers) -> None:
    """Half of all builds measured a placement that had been measured, because schemes were compared and not the edges
    that they mean; the unquantized model was built for every pattern; and two runs did not make the same choices."""
    result = tune(settings(model, builds=52))
    built = [build.path.stem for build in workers.builds if build.is_candidate]
    placements = [t.placement for t in result.history]
    assert len(set(placements)) == len(placements) > 12
    assert Placement() not in placements
    repeated = sum(2 for t in result.history if t.check is not None)
    assert len(built) == 1 + len(placements) + repeated
    wins = {t.placement.digest for t in result.history if t.check is not None}
    opponents = {t.against.digest for t in result.history if t.check is not None}
    assert {p for p, n in Counter(built).items() if n > 1} <= wins | opponents
    twin = tune(settings(model, builds=52, output_dir=model.parent / "twin"))
    assert [t.placement for t in twin.history] == placements


def test_6_one_number_of_one_build_decides(model: Path, workers: Workers) -> None:
    """One median of one build was compared with one of another, taken minutes before: neither drift of the machine nor
    the luck of a build was seen. And the count of warm-up runs was handed on as milliseconds."""
    workers.slower = lambda build: (0.5e-4 if build.number % 3 == 2 else 1e-4) / cost(build.path)
    result = tune(settings(model, builds=22))
    checked = [t for t in result.history if t.check is not None]
    assert checked
    assert all(isinstance(t.result, Measurement) and len(t.result.a) >= 12 for t in result.history)
    lost = [t for t in checked if isinstance(t.check, Measurement) and not t.check.b < t.check.a]
    assert not any(t.accepted for t in lost)
    assert not result.improved


def test_6_warmup_is_a_number_of_inferences(model: Path, workers: Workers) -> None:
    """See above."""
    tune(settings(model, builds=4, plan=replace(Plan(), turn_seconds=0.0, warmup=7)))
    assert set(workers.runs) == {1, 7}


def test_7_one_scheme_means_different_edges(model: Path) -> None:
    """A signature left out how many inputs a node has, so that a convolution with a bias and one without were one
    pattern, and inputs were numbered by the alphabet, so that other tensor names meant other edges."""
    convolution = "[c] y = Conv <pads=[1,1,1,1]> (x, w{})"
    texts = [
        f"net (float[1,4,6,6] x) => (float[1,4,6,6] y) {{ {convolution.format(more)} }}" for more in ("", ", bias")
    ]
    weights = {"w": normal(4, 4, 3, 3), "bias": normal(4)}
    plain, biased = (build(text, {k: v for k, v in weights.items() if k in text}) for text in texts)
    signatures = {p.signature for m in (plain, biased) for p in patterns.group(m, discovery.find(m))}
    assert len(signatures) == 2

    meant = set()
    for a, b in (("a", "z"), ("z", "a")):
        net = build(
            f"net (float[2,8] x, float[2,8] t) => (float[2,8] y) {{ [left] {a} = Tanh(x) [right] {b} = Neg(t) "
            f"[sub] y = Sub({a}, {b}) }}"
        )
        for pattern in patterns.group(net, discovery.find(net)):
            for region in pattern.instances:
                for point in pattern.points:
                    edges = patterns.resolve(net, pattern, region, Scheme(frozenset([point])))
                    if isinstance(point, NodeInput):
                        meant |= {(pattern.digest, point, e.node, e.index) for e in edges}
    assert len({(digest, point) for digest, point, _, _ in meant}) == len(meant)


def test_8_pairs_that_make_no_sense(model: Path) -> None:
    """Activations were quantized without their weights, float32 pairs stood in float16 models, and FP8 models had an
    opset that knows no FP8."""
    result = tune(settings(model, builds=32))
    nodes = [n for n in load(model).nodes if n.op == "MatMul"]
    for trial in result.history:
        edges = {(e.node, e.index) for e in trial.placement}
        assert all(((n.name, 0) in edges) == ((n.name, 1) in edges) for n in nodes)

    half = conv_net(half=True)
    made = insert(
        half, start_placements.everything(half, possible_edges(half, ranges(half))), ranges(half), INT8
    ).to_proto()
    scales = {n.input[1] for n in made.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")}
    types = {t.data_type for t in made.graph.initializer if t.name in scales}
    assert types == {TensorProto.FLOAT16}
    assert next(o.version for o in made.opset_import if o.domain == "") >= 19

    eight = tune(settings(model, builds=6, quant_type="fp8", output_dir=model.parent / "fp8"))
    assert all(isinstance(t.result, Measurement) for t in eight.history)
    final = onnx.load(model.parent / "out" / "optimized_final.onnx")
    assert all(s > 0 for name, s in initializers(final).items() if "scale" in name and s.ndim == 0)
    proto = insert(load(model, min_opset=19), eight.history[0].placement, ranges(load(model)), FP8).to_proto()
    assert next(o.version for o in proto.opset_import if o.domain == "") >= 19
    assert any(a.dtype == ml_dtypes.float8_e4m3fn for a in initializers(proto).values())


def test_9_a_candidate_costs_as_much_as_the_model_is_large(tmp_path, monkeypatch, workers):
    """Every candidate was imported, rewritten and serialised with all its weights, resolving a scheme took time that
    grew with the square of the graph, and gated blocks took exponential time."""
    written: Counter[str] = Counter()
    original = Path.write_bytes

    def counted(self: Path, data: Any) -> int:
        written[self.parent.name if self.suffix == ".onnx" else ""] += len(data)
        return original(self, data)

    sizes: list[int] = []

    def watched(build: Build) -> None:
        constants = build.path.parent / "constants.bin"
        if build.path.parent.name == "candidates" and constants.exists():
            sizes.append(constants.stat().st_size)

    workers.refused = watched
    monkeypatch.setattr(Path, "write_bytes", counted)
    text = (
        "net (float[1,2,512] x) => (float[1,2,512] y) { [up] a = MatMul(x, w) [r] b = Relu(a) [down] y = MatMul(b, v) }"
    )
    weights = {"w": normal(512, 512, scale=0.05), "v": normal(512, 512, scale=0.05, seed=1)}
    path = write(build(text, weights), tmp_path)
    written.clear()
    result = tune(settings(path, builds=22))
    nbytes = sum(w.nbytes for w in weights.values())
    assert len(result.history) >= 5
    assert written["candidates"] < nbytes / 10
    assert max(sizes) < 1.5 * nbytes + 100_000  # float and 8 bits, once each

    gated = []
    for k in range(60):
        gated += [
            f"[s{k}] a{k} = Sigmoid(x{k})",
            f"[m{k}] b{k} = Mul(a{k}, x{k})",
            f"[n{k}] x{k + 1} = Add(b{k}, x{k})",
        ]
    net = build(f"net (float[1,4] x0) => (float[1,4] x60) {{ {' '.join(gated)} }}")
    assert len(patterns.group(net, discovery.find(net))) > 0


def test_10_infinity_stands_for_failure(model: Path) -> None:
    """A failed build was a latency of infinity that went into sums and files, and a run whose unquantized model failed
    went on and compared with infinity."""
    result = tune(settings(model, engine=EngineSpec("fake", {"faults": {"refuse": "skip"}})))
    failures = [t.result for t in result.history if isinstance(t.result, Failure)]
    assert failures
    assert all(f.reason and f.log for f in failures)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    out = model.parent / "out"
    for line in (out / "autotuner_state.yaml").read_text().splitlines():
        json.loads(line.removeprefix("- "), parse_constant=refuse)
    summary = json.loads((out / "summary.json").read_text(), parse_constant=refuse)
    assert all(math.isfinite(v) for v in summary.values() if isinstance(v, float))


def test_10_a_failed_baseline_ends_the_run(model: Path, workers: Workers) -> None:
    """See above."""
    workers.refused = lambda build: "unsupported" if build.engine == "fake" else None
    with pytest.raises(BaselineFailed, match="unsupported"):
        tune(settings(model))
    assert create(FakeOptions()) is not create(FakeOptions())  # no engine, benchmark or cache is shared between runs
