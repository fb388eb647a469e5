"""What a run gives back and writes."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from models import build, normal
from qdqtune.placement.start_placements import STATIC
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.loop import tune
from qdqtune.tuning.result import best_undecided
from qdqtune.types import Edge, Measurement, Placement, Proposal, Trial
from runs import HOPELESS, MIXED, cost, mixed, out, settings, write


@pytest.mark.usefixtures("workers")
def test_gains_of_fixed_inputs_and_of_pairs_are_reported_apart(tmp_path: Path) -> None:
    text = MIXED.replace("(float[B,ROWS,64] x)", "(float[8,8,64] x, float s0)").replace("B,ROWS", "8,8")
    chain = "".join(f"s{n + 1} = Tanh(s{n})\n" for n in range(12))
    text = text.replace("y = MatMul(g, w3)", f"z = MatMul(g, w3)\n{chain}y = Add(z, s12)")
    model = write(build(text, {name: weight.array() for name, weight in mixed().constants.items()}), tmp_path)
    result = tune(settings(model, fix_inputs={"s0": 1.0}))
    final, folded = cost(out(model, "optimized_final.onnx")), cost(out(model, "baseline.onnx"))
    assert result.improved
    assert folded < 0.9 * cost(model)
    assert result.summary["ratio"] == pytest.approx(final / folded)
    assert result.summary["ratio_to_given"] == pytest.approx(final / cost(model))


@pytest.mark.usefixtures("workers")
def test_other_quantizers_are_told_which_nodes_stay_in_float(tmp_path: Path) -> None:
    model = write(mixed(), tmp_path)
    summary = tune(settings(model, mode="cut", builds=12)).summary
    proto = onnx.load(out(model, "optimized_final.onnx"))
    made = {output: node.op_type for node in proto.graph.node for output in node.output}
    pairs = {n.name: any(made.get(i) == "DequantizeLinear" for i in n.input) for n in proto.graph.node}
    able = [node.name for node in proto.graph.node if node.op_type in STATIC]
    assert summary["float_nodes"] == [name for name in able if not pairs[name]]
    assert 0 < len(summary["float_nodes"]) < len(able)


@pytest.mark.usefixtures("workers")
def test_they_are_told_names_of_the_file_alone(tmp_path: Path) -> None:
    text = HOPELESS.replace("[tanh] b = Tanh", "[soft] b = Softmax")
    model = write(build(text, {"w0": normal(8, 8), "w1": normal(8, 8)}), tmp_path)
    given = onnx.load(model)
    given.graph.node[2].name = ""
    onnx.save(given, model)
    assert tune(settings(model)).summary["float_nodes"] == ["first", "soft"]


PLAN = Plan((12,))


def trial(number: int, seconds: list[float], **how: Any) -> Trial:
    placement = Placement.of([Edge("t", "n", number)])
    return Trial(
        number, Proposal(f"no {number}", placement), Placement(), Measurement((1.0,) * 12, tuple(seconds)), **how
    )


def test_the_best_candidate_of_none_that_is_faster_is_named() -> None:
    seeming, slower = trial(1, [0.8] * 11 + [1.2]), trial(2, [1.1] * 12)
    inaccurate = trial(3, [0.5] * 11 + [1.2], holds=False)
    said = best_undecided([seeming, slower, inaccurate], PLAN)
    assert said is not None
    assert said.startswith("the best candidate, no 1, was 1.25x [0.83x, 1.25x] the speed of float; ")
    assert best_undecided([slower], PLAN) is None
    assert best_undecided([trial(1, [0.5] * 12, accepted=True), slower], PLAN) is None
