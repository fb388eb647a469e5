"""What a finished run says of each unit: true of what shipped, in every mode, with one of five reasons."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models import build, normal, ranges
from qdqtune.commands.explain import Explained, explain_run
from qdqtune.engines import EngineSpec
from qdqtune.explanation.units import Explanation, explanations, headline, tally
from qdqtune.placement.files import PlacementFile, write_placement
from qdqtune.placement.possible import possible_edges
from qdqtune.timing.limits import Limits
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.finished import FinishedRun
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import Result
from qdqtune.types import Edge, Layer, Measurement, Placement, Proposal, Trial, WeightFormat
from runs import hopeless, mixed, settings, write
from runs import rows as lines
from workers import in_process


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a run in cut mode, and its result."""
    model = write(mixed(), tmp_path_factory.mktemp("explained"))
    with in_process():
        return model.parent / "out", tune(settings(model, mode="cut", builds=8))


def run(folder: Path, **changes: object) -> Explained:
    with in_process():
        tune(settings(write(mixed(), folder), **changes))
    return explain_run(folder / "out")


def by_name(explained: Explained) -> dict[str, Explanation]:
    return {name: row for row in explained.rows for name in row.nodes}


def test_a_row_has_state_times_and_reason(tuned: tuple[Path, Result]) -> None:
    explained = explain_run(tuned[0])
    rows = by_name(explained)
    assert list(rows) == [n.name for n in mixed().nodes]
    assert "the cut of the prices" in explained.headline
    assert {name for name, row in rows.items() if row.state == "8 bits"} == {"first", "relu", "second", "skip"}
    assert rows["first"] is rows["relu"]
    second, third = rows["second"], rows["third"]
    assert (second.reason, second.precision, second.otherwise) == ("", "int8", "float")
    assert (third.reason, third.precision) == ("conversions cost more than it saves", "fp32")
    assert third.more_ms is not None
    assert third.more_ms > 0.1 * (third.ms or 0.0)
    assert f"{second.ms:.3g} ms, in the float model {second.float_ms:.3g} ms" in second.why
    assert rows["softmax"].reason == rows["tanh"].reason == "no kernel for this operator"
    # `skip` alone is in float in one candidate, which is the whole difference between two builds.
    assert (rows["skip"].source, rows["third"].source, rows["second"].source) == ("measured", "estimated", "")
    assert rows["second"].more_ms is None
    assert "(measured)" in rows["skip"].why


def test_what_ships_need_not_be_what_prices_led_to(tuned: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(tuned[0], folder)
    compute = next(t.placement for t in tuned[1].history if t.proposal.origin == "compute")
    write_placement(folder / "placement.yaml", PlacementFile(compute, "int8", "fake", {}), "model.onnx")
    explained = explain_run(folder)
    assert "the rule 'compute'" in explained.headline
    assert {row.state for row in explained.rows} == {"float"}  # the engine fuses no pair without one on the result
    assert by_name(explained)["softmax"].reason == "no kernel for this operator"


def test_damage_to_the_outputs_is_told_with_the_limit(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="cut", min_sqnr=45.0))
    assert rows["second"].reason == "accuracy limit"
    assert "the limit is 45.0 dB" in rows["second"].detail
    keys = [row["kind"] for row in lines(tmp_path / "out" / "autotuner_state.yaml")]
    assert keys.index("trial") < keys.index("noise")  # what is built first waits for no noise of single tensors


def test_nothing_faster_is_told_of_the_float_model(tmp_path: Path) -> None:
    with in_process():
        tune(settings(write(hopeless(), tmp_path), mode="cut", builds=6))
    explained = explain_run(tmp_path / "out")
    assert explained.headline.startswith("the float model ships")
    assert {row.state for row in explained.rows} == {"float"}
    assert {row.reason for row in explained.rows} <= {
        "conversions cost more than it saves",
        "no kernel for this operator",
    }


def test_without_layer_times_no_unit_has_a_time(tmp_path: Path) -> None:
    explained = run(tmp_path, mode="region", engine=EngineSpec("fake", {"hide_times": True}))
    rows = by_name(explained)
    assert all(row.ms is row.more_ms is None for row in explained.rows)
    assert "no layer times" in explained.table().caption
    assert rows["second"].state == "8 bits"
    assert "x): faster than the float model" in rows["third"].detail
    assert explained.tallies[0].ms is None


def test_a_region_search_knows_the_layers_of_float_and_of_what_ships(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="region"))
    assert (rows["second"].ms or 0.0) < (rows["second"].float_ms or 0.0)
    assert rows["third"].reason == "not tried"
    assert "with 5 more units" in rows["third"].detail


def test_what_the_user_excludes_is_not_tried(tmp_path: Path) -> None:
    rows = by_name(run(tmp_path, mode="cut", builds=4, node_filter=("first",)))
    assert rows["first"].state == "8 bits"
    assert {row.reason for name, row in rows.items() if name not in ("first", "relu")} == {"not tried"}
    assert "you have listed" in rows["third"].detail


def test_what_computes_shapes_or_reads_no_floats_has_no_kernel(tmp_path: Path) -> None:
    text = """net (float[8,64] x) => (float[8,64] y, int64[2] s, float[n] r) {
        [big] a = MatMul(x, w) [shape] s0 = Shape(a) [twice] s = Add(s0, s0) [range] r = Range(low, high, step)
        [relu] y = Relu(a) }"""
    numbers = {name: np.float32(value) for name, value in (("low", 0), ("high", 4), ("step", 1))}
    with in_process():
        tune(settings(write(build(text, {"w": normal(64, 64)} | numbers), tmp_path), mode="cut", builds=4))
    rows = by_name(explain_run(tmp_path / "out"))
    for name in {"shape", "twice", "range"} & rows.keys():
        assert rows[name].reason == "no kernel for this operator"
        assert rows[name].more_ms is None
    assert "on its input s0: it is not known to be a float tensor" in rows["twice"].detail


def test_weights_in_fewer_bits_are_a_state_of_their_own(tmp_path: Path) -> None:
    net = """net (float[4,64] x) => (float[4,64] y) {
        [a] p = MatMul(x, w0) [b] q = Tanh(p) [c] r = Softmax(q) [d] y = MatMul(r, w1) }"""
    model = build(net, {"w0": normal(64, 64), "w1": normal(64, 64, seed=1)})
    w4, (first, last) = WeightFormat(4, 32), (Edge("w0", "a", 1), Edge("w1", "d", 1))
    shipped = Placement.of((), [(first, w4), (last, w4)])
    ran = [("a", "W4", 0.25), ("b", "FP32", 1.0), ("c", "FP32", 1.0), ("d", "W4", 0.25)]
    layers = tuple(Layer(n, (n,), precision, ms, "compute") for n, precision, ms in ran)
    floats = tuple(Layer(n.name, (n.name,), "FP32", 1.0, "compute") for n in model.nodes)
    won = Measurement((4e-3,) * 12, (2.5e-3,) * 12)
    trial = Trial(0, Proposal("weights in 4 bits", shipped), Placement(), won, layers=layers, accepted=True)
    able = possible_edges(model, ranges(model))
    summary: Any = {"shipped": "tuned", "rewrites": {}, "by_threads": (), "engine": {}, "baseline_ms": 4.0}
    run = FinishedRun(tmp_path, summary | {"final_ms": 2.5}, *[None] * 2)  # type: ignore[arg-type]
    vars(run).update(model=model, able=able, possible=able, placement=shipped, float_layers=floats, history=(trial,))
    vars(run).update(log=SimpleNamespace(plan=Plan()), limits=Limits(), noise=None, shipped_layers=layers)
    assert "weights of products in 4 bits, and no pairs" in headline(run)
    rows = explanations(run)
    assert (rows[0].state, rows[0].precision, rows[0].otherwise, rows[0].reason) == ("4-bit weights", "w4", "float", "")
    assert (rows[0].ms, rows[0].float_ms) == pytest.approx((0.25, 1.0))
    assert (rows[1].state, rows[1].reason) == ("float", "not tried")
    stored = next(each for each in tally(rows) if each.state == "4-bit weights")
    assert (stored.nodes, stored.ms, stored.float_ms) == (2, 0.5, 2.0)


ROW = Explanation(("a", "b"), ("MatMul", "Relu"), "8 bits", "int8", 2.0, 4.0, "float")


def test_sums_are_by_state_and_reason_with_the_most_time_first() -> None:
    rows = [ROW, replace(ROW, nodes=("c",), ms=1.0), replace(ROW, nodes=("d",), state="float", ms=9.0)]
    in_float, in_8_bits = tally(rows)
    assert (in_float.state, in_float.nodes, in_float.ms) == ("float", 1, 9.0)
    assert (in_8_bits.nodes, in_8_bits.ms, in_8_bits.float_ms, in_8_bits.example) == (3, 3.0, 8.0, "a")
