"""`tune` on a simulator: what is known is told, and nothing about speed. On the real one where it is installed."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from models import build, normal
from qdqtune import apply, compare, quantize
from qdqtune.commands.explain import explain_run
from qdqtune.commands.tune import BY_RULE_BUILDS, TuneOptions, tune
from qdqtune.commands.verify import VerifyOptions, verify
from qdqtune.engines.machine import simulated, this_machine
from qdqtune.errors import BadOption
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.loading import load
from qdqtune.graph.saving import save
from qdqtune.placement.files import read_placement_file
from qdqtune.search.costs.rule_costs import left_nodes
from qdqtune.tuning.bench import NO_NODES
from runs import without_seconds

pytestmark = pytest.mark.xdist_group("npu")
"""One process makes the runs that most of them look at."""

SPEED = ("faster", "speedup", "times as fast", "0x", " ms ")
"""What no result of a run says that timed nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network and samples."""
    folder = tmp_path_factory.mktemp("npu")
    draw = np.random.default_rng(0)
    weights = {f"w{i}": draw.standard_normal((8, 8, 3, 3)).astype(np.float32) / 8 for i in range(3)}
    weights["w3"] = draw.standard_normal((8, 4)).astype(np.float32)
    text = """net (float[1,8,12,12] x) => (float[1,4] y) {
        [first] c0 = Conv <pads=[1,1,1,1]> (x, w0)
        [relu] r0 = Relu(c0)
        [second] c1 = Conv <pads=[1,1,1,1]> (r0, w1)
        [third] c2 = Conv <pads=[1,1,1,1]> (c1, w2)
        [pool] p = GlobalAveragePool(c2)
        [flatten] f = Flatten(p)
        [last] y = Gemm(f, w3)
    }"""
    save(build(text, weights, opset=17), folder / "m.onnx")
    np.savez(folder / "samples.npz", x=draw.standard_normal((40, 8, 12, 12)).astype(np.float32))
    return folder


def options(folder: Path, name: str, **more) -> TuneOptions:
    data = {"calibration_data": str(folder / "samples.npz"), "output_dir": folder / name}
    return TuneOptions(model=folder / "m.onnx", engine="qnn", **{**data, **more})


@pytest.fixture(scope="module")
def simulator() -> None:
    pytest.importorskip("onnxruntime_qnn")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("Qualcomm's simulator runs on x86-64 only")


@pytest.fixture(scope="module")
def missed(folder: Path, simulator: None):
    """What a run with a limit that nothing holds found."""
    return tune(options(folder, "probed", min_sqnr=200.0, builds=3).settings())


@pytest.fixture(scope="module")
def limit(missed) -> float:
    """An SQNR in dB a little above that of all 8 bits, and below that of all 16, as the simulator computes them."""
    narrow, wide = missed.history
    assert (narrow.proposal.origin, wide.proposal.origin) == ("8 bits", "16 bits")
    assert narrow.sqnr_db + 2 < wide.sqnr_db
    return narrow.sqnr_db + 0.15 * (wide.sqnr_db - narrow.sqnr_db)


@pytest.fixture(scope="module")
def done(folder: Path, limit: float):
    return tune(options(folder, "out", min_sqnr=limit).settings())


def test_accuracy_that_8_bits_miss_takes_16_where_it_must(done, folder: Path, limit: float) -> None:
    narrow, wide = done.history[:2]
    assert (narrow.proposal.origin, wide.proposal.origin) == ("8 bits", "16 bits")
    assert not narrow.holds
    assert narrow.accuracy.samples < wide.accuracy.samples == done.summary["accuracy_samples"]
    assert wide.holds
    ships = next(trial for trial in done.history if trial.placement == done.placement)
    assert ships.sqnr_db >= limit
    assert 0 < done.summary["bits"]["tensors_16"] < done.summary["bits"]["tensors"]
    assert not left_nodes(ships.layers)
    placement = read_placement_file(folder / "out" / "placement.yaml").placement
    assert placement == done.placement
    assert placement.wide
    assert load(folder / "out" / "optimized_final.onnx").opset == 21


def test_nodes_are_explained_and_nothing_is_said_about_speed(done, folder: Path) -> None:
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["timed"] is False
    for name in ("baseline_ms", "final_ms", "ratio", "ratio_low", "ratio_high"):
        assert summary[name] is None
    kit = json.loads((folder / "out" / "deploy" / "settings.json").read_text())
    assert "not timed" in kit["told"]
    assert kit["library"]["provider_options"]["soc_model"] == "57"  # the chip whose outputs were compared
    assert kit["proven"]["ratio"] is None
    report, explained = report_of_run(folder / "out"), explain_run(folder / "out")
    words = (done.in_words(), kit["told"], report.verdict.headline, report.verdict.meaning, explained.headline,
             *(f"{f.name} {f.value} {f.hint}" for f in report.facts), *(row.reason for row in explained.rows),
             *(candidate.told for candidate in report.candidates))  # fmt: skip
    for word in SPEED:
        assert not any(word in text for text in words), word
    assert {row.state for row in explained.rows} >= {"8 bits", "16 bits"}
    assert {row.reason for row in explained.rows} <= {"", "accuracy limit", "no gain beyond noise"}
    assert not report.points
    assert not report.proof
    assert all(candidate.speed is None for candidate in report.candidates)


def test_the_same_command_gives_the_same_result(done, folder: Path, limit: float) -> None:
    again = tune(options(folder, "out", min_sqnr=limit).settings())
    assert [trial.placement for trial in again.history] == [trial.placement for trial in done.history]
    assert (without_seconds(again.summary), again.notes) == (without_seconds(done.summary), done.notes)


def test_what_was_found_is_verified_by_its_outputs(done, folder: Path) -> None:
    found = verify(VerifyOptions(folder=folder / "out", calibration_data=str(folder / "samples.npz")))
    assert found.holds
    assert "nothing was timed" in found.why


def test_the_rules_give_the_first_candidate(done, folder: Path) -> None:
    written = folder / "rules.onnx"
    made = quantize(folder / "m.onnx", output=written, calibration_data=str(folder / "samples.npz"), engine="qnn")
    assert made.placed.placement == done.history[0].placement


def test_limits_that_nothing_holds_ship_the_float_model(missed) -> None:
    assert missed.shipped == "baseline"
    assert missed.unmet
    assert "Nothing in 8 or 16 bits is exact enough" in missed.in_words()


@pytest.mark.skipif(not simulated("qnn"), reason="QNN is a simulator on x86-64 only")
@pytest.mark.parametrize("more", [{"mode": "region"}, {"front": True}])
def test_searches_that_need_times_are_refused(folder: Path, more) -> None:
    with pytest.raises(BadOption, match="qnn is a simulator on this machine, whose times mean nothing: a search there"):
        options(folder, "refused", **more).settings()


@pytest.mark.parametrize(("processor", "is_timed"), [("aarch64", True), ("x86_64", False)])
def test_on_another_machine_its_processor_tells_whether_a_search_goes_by_time(folder, processor, is_timed, monkeypatch):
    there = replace(this_machine(), machine=processor, where="board")
    monkeypatch.setattr("qdqtune.engines.remote.Destination.facts", lambda _: there)
    found = options(folder, "far", on="board").settings()
    assert (found.is_timed, found.machine) == (is_timed, there)
    assert (found.builds == BY_RULE_BUILDS["default"]) is not is_timed


def test_the_placement_is_applied_with_its_bits_and_sizes_and_without_them_elsewhere(done, folder: Path) -> None:
    model = onnx.load(folder / "m.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, folder / "open.onnx")
    given = {"placement": folder / "out" / "placement.yaml", "calibration_data": str(folder / "samples.npz")}
    same = apply(folder / "open.onnx", output=folder / "sized.onnx", **given)
    sized = load(folder / "sized.onnx")
    assert (same.placement, sized.opset, sized.tensors["x"].shape) == (done.placement, 21, (1, 8, 12, 12))
    assert "takes fixed sizes only: what ships has those of the samples" in " ".join(same.notes)
    other = apply(folder / "m.onnx", output=folder / "cpu.onnx", engine="onnxruntime", **given)
    assert not other.placement.wide
    assert "onnxruntime has no 16 bits: pairs of 16 bits have 8 here" in " ".join(other.notes)


DRAWN = np.random.default_rng(0).standard_normal((40, 4, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("nodes", "samples", "least_db"),
    [
        ("y = Reciprocal(x)", 0.01 + np.abs(DRAWN) / 50, 20),  # of small numbers
        ("p = MatMul(x, w) y = Add(zeros, p)", DRAWN, 30),  # a bias of zeros, and a small sum
    ],
)
def test_small_numbers_stay_right(simulator, tmp_path, nodes, samples, least_db):
    weights = {"w": normal(32, 32, scale=1 / 500), "zeros": np.zeros(32, np.float32)} if "w" in nodes else {}
    model, data, written = tmp_path / "m.onnx", str(tmp_path / "samples.npz"), tmp_path / "pairs.onnx"
    save(build(f"net (float[1,4,32] x) => (float[1,4,32] y) {{ {nodes} }}", weights, opset=17), model)
    np.savez(data, x=samples)
    quantize(model, output=written, calibration_data=data, engine="qnn")
    assert compare(model, written, calibration_data=data, engine="qnn").rows[-1].sqnr_db > least_db


def test_poor_outputs_in_8_bits_are_told_where_16_help(missed, folder: Path) -> None:
    x = np.random.default_rng(1).standard_normal((40, 8, 12, 12)).astype(np.float32)
    x[1] *= 1000  # a sample of calibration, beside whose values all others are rounded to nothing
    np.savez(folder / "outlier.npz", x=x)
    data = str(folder / "outlier.npz")
    how = {"calibration_method": "minmax"}
    made = quantize(folder / "m.onnx", output=folder / "poor.onnx", calibration_data=data, engine="qnn", **how)
    assert made.sqnr_db < 20
    assert "tune with `engine` qnn finds the tensors that need 16 bits" in " ".join(made.notes)


def test_a_chip_that_the_provider_does_not_know_ships_nothing(simulator: None, folder: Path) -> None:
    chip = {"provider_options": {"soc_model": "9999"}}
    found = tune(options(folder, "no chip", min_sqnr=20.0, engine_options=chip).settings())
    assert found.shipped == "baseline"
    assert found.history
    assert all(trial.result == NO_NODES for trial in found.history)
