"""Calls of different shapes: timed together by their shares, judged on all, proven as one and told one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtune
from models import Arrays, build, normal
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Calibration
from qdqtune.calibration.workloads import WorkloadFile, open_workloads
from qdqtune.commands.source import built_for
from qdqtune.engines import EngineSpec
from qdqtune.engines.fake import latency
from qdqtune.engines.runner import Handle, Runner, as_workloads
from qdqtune.engines.worker import Session, average_layers
from qdqtune.errors import BadData, BadOption, BadState
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.timing.ratios import Plan, Ratio
from qdqtune.tuning.compared import Compared
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.proof_notes import slower_workloads
from qdqtune.tuning.run import open_run, prepared, written_once
from qdqtune.tuning.settings import Settings
from qdqtune.types import Failure, Layer, Measurement, Slot, Workload
from runs import rows
from workers import Workers

DECODER = """net (int64[B,S] ids, float[B,2,P,32] past) => (float[B,S,256] y, float[B,2,T,32] present) {
    [embed] x = Gather(table, ids)
    [key] k0 = MatMul(x, wk)
    [heads] k1 = Reshape(k0, split)
    [turn] k = Transpose<perm = [0, 2, 1, 3]>(k1)
    [cache] present = Concat<axis = 2>(past, k)
    [back] kt = Transpose<perm = [0, 1, 3, 2]>(present)
    [scores] s = MatMul(k, kt)
    [softmax] p = Softmax(s)
    [attend] a = MatMul(p, present)
    [unturn] a1 = Transpose<perm = [0, 2, 1, 3]>(a)
    [join] a2 = Reshape(a1, joined)
    [up] u = MatMul(a2, wu)
    [relu] r = Relu(u)
    [down] y = MatMul(r, wd)
}"""


def decoder() -> Model:
    """A layer of a language model with its cache; batch, sequence and past are open."""
    constants = {
        "table": normal(50, 64), "wk": normal(64, 64, scale=0.1), "wu": normal(64, 256, scale=0.1),
        "wd": normal(256, 256, scale=0.1), "split": np.array([0, 0, 2, 32]), "joined": np.array([0, 0, 64]),
    }  # fmt: skip
    return build(DECODER, constants)


def call_of(tokens: int, past: int, batch: int = 1) -> Arrays:
    ids = np.random.default_rng(tokens).integers(0, 50, (batch, tokens))
    return {"ids": ids, "past": normal(batch, 2, past, 32, seed=past)}


def written(folder: Path, model: Model, calls: Mapping[str, Arrays]) -> Path:
    for name, arrays in calls.items():
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    save(model, folder / "model.onnx")
    return folder / "model.onnx"


def settings(model: Path, weights: Mapping[str, float], **changes: Any) -> Settings:
    files = tuple(WorkloadFile(model.with_name(f"{name}.npz"), weight) for name, weight in weights.items())
    base = Settings(
        model, output_dir=model.parent / "out", engine=EngineSpec("fake"),
        calibration=Calibration(), workloads=files, builds=6,
        accuracy_samples=2, plan=Plan(slot_seconds=0.0), min_sqnr=None,
    )  # fmt: skip
    return replace(base, **changes)


CALLS = {"decode": call_of(1, 15), "prefill": call_of(64, 0)}
WEIGHTS = {"decode": 8.0, "prefill": 2.0}


def cost(file: Path, call: Arrays) -> float:
    return latency(onnx.load(file), inputs=call)


def mean(file: Path) -> float:
    return sum(share * cost(file, CALLS[name]) for name, share in (("decode", 0.8), ("prefill", 0.2)))


# A run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, decoder(), CALLS)


def test_the_mean_over_calls_decides_and_each_workload_is_reported(model: Path, workers: Workers) -> None:
    result = tune(settings(model, WEIGHTS))
    final = model.parent / "out" / "optimized_final.onnx"
    assert result.ratio is not None
    assert result.ratio.median == pytest.approx(mean(final) / mean(model))
    assert result.summary["baseline_ms"] == pytest.approx(1e3 * mean(model))
    rows = {row["name"]: row for row in result.summary["workloads"]}
    assert {name: row["share"] for name, row in rows.items()} == {"decode": 0.8, "prefill": 0.2}
    for name, row in rows.items():
        assert row["ratio"] == pytest.approx(cost(final, CALLS[name]) / cost(model, CALLS[name]))
    assert rows["decode"]["ratio"] != pytest.approx(rows["prefill"]["ratio"])
    assert result.summary["accuracy_samples"] == 2
    assert [d.dim_param for d in onnx.load(final).graph.input[0].type.tensor_type.shape.dim] == ["B", "S"]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", ["region", "subgraph"])
def test_other_modes_have_workloads_as_well(model: Path, mode: Any) -> None:
    result = tune(settings(model, WEIGHTS, mode=mode, cut_seed=False, builds=20))
    final = model.parent / "out" / "optimized_final.onnx"
    assert result.ratio is not None
    assert result.ratio.median == pytest.approx(mean(final) / mean(model))


def test_the_shares_decide_which_placement_is_best(model: Path, workers: Workers) -> None:
    """A conversion that prefill pays for is not worth it where nearly all calls decode."""
    often = tune(settings(model, {"decode": 1000, "prefill": 1}, output_dir=model.parent / "often"))
    seldom = tune(settings(model, {"decode": 1, "prefill": 1000}, output_dir=model.parent / "seldom"))
    assert often.placement != seldom.placement


def test_a_run_goes_on_and_other_workloads_are_refused(model: Path, workers: Workers) -> None:
    tune(settings(model, WEIGHTS))
    built = len(workers.builds)
    assert tune(settings(model, WEIGHTS)).improved
    assert len(workers.builds) == built
    tune(settings(model, {"decode": 0.8, "prefill": 0.2}))  # the same shares
    with pytest.raises(BadState, match=r"made with workloads decode 0\.8 .*, now it is decode 0\.5 "):
        tune(settings(model, {"decode": 1, "prefill": 1}))
    np.savez(model.with_name("decode.npz"), **call_of(2, 15))  # type: ignore[arg-type]
    with pytest.raises(BadState, match="workloads"):
        tune(settings(model, WEIGHTS))
    with pytest.raises(BadState, match="workloads"):
        tune(settings(model, {}, calibration_data=str(model.with_name("prefill.npz"))))


def test_a_front_reports_each_workload_of_each_point(model: Path, workers: Workers) -> None:
    result = tune(settings(model, WEIGHTS, front=True, builds=16))
    for row in result.summary["front"]:
        file = model.parent / "out" / row["file"]
        assert row["ratio"] == pytest.approx(mean(file) / mean(model))
        assert [w["ratio"] for w in row["workloads"]] == pytest.approx(
            [cost(file, CALLS[name]) / cost(model, CALLS[name]) for name in CALLS]
        )
    assert result.summary["front"]


def test_the_command_shows_each_workload_and_what_is_wrong_with_one(model: Path, call: Any) -> None:
    folder = model.parent
    asked = ["tune", model, "--engine", "fake", "-o", folder / "out", "-q", "--calibration-method", "minmax",
             "--no-bias-correction", "--min-sqnr", "none", "--builds", "5", "--no-report"]  # fmt: skip
    mix = ["--workload", f"{folder / 'decode.npz'}:0.8", "--workload", f"{folder / 'prefill.npz'}:0.2"]
    code, out, _ = call(*asked, *mix)
    assert code == 0
    assert "latency of a call, on average" in out
    assert "decode, 80% of the calls" in out
    code, out, _ = call(*asked, *mix, "--dry-run")
    assert (code, "float model" in out) == (0, True)
    for text in ("decode.npz:0", "decode.npz:-1", "decode.npz:often", ":0.5", "decode.npz:inf"):
        code, _, err = call(*asked, "--workload", text)
        assert (code, "has no weight above zero" in err, len(err.splitlines())) == (2, True, 1)


def test_calibration_data_stay_the_samples_where_they_are_given(model: Path, workers: Workers) -> None:
    several = {name: np.concatenate([array] * 3) for name, array in call_of(4, 3).items()}
    np.savez(model.with_name("samples.npz"), **several)  # type: ignore[arg-type]
    result = tune(settings(model, WEIGHTS, calibration_data=str(model.with_name("samples.npz")), accuracy_samples=8))
    assert result.summary["accuracy_samples"] == 3
    assert [row["name"] for row in result.summary["workloads"]] == ["decode", "prefill"]


def test_the_command_tunes_a_decoder_for_a_mix_on_openvino(
    model: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr("qdqtune.commands.tune.Plan", partial(Plan, slot_seconds=0.001))
    out = model.parent / "out"
    mix = ["--workload", f"{model.with_name('decode.npz')}:4", "--workload", f"{model.with_name('prefill.npz')}:1"]
    how = ["--calibration-method", "minmax", "--no-bias-correction", "--min-sqnr", "none", "--no-report", "-q"]
    at = ["--engine", "openvino", "--threads", 1, "--deploy-threads", 1, "--builds", 3, "--timing-runs", 12]
    code, _, _ = call("tune", model, *at, *mix, *how, "-o", out)
    assert code in (0, 3)  # faster, or not
    told = json.loads((out / "summary.json").read_text())["workloads"]
    assert [(row["name"], row["share"]) for row in told] == [("decode", 0.8), ("prefill", 0.2)]
    records = rows(out / "autotuner_state.yaml")
    tried = [record["result"]["samples"] for record in records if record["kind"] == "trial"]
    assert [len(samples["parts"]) for samples in tried] == [2, 2]
    (floats,) = (record["layers"] for record in records if record["kind"] == "layers")
    assert any("up" in layer["nodes"] for layer in floats)
    assert load(out / "optimized_final.onnx").tensors["ids"].shape == (None, None)


@pytest.mark.usefixtures("workers")
def test_onnxruntime_times_batches_of_one_and_eight_together(tmp_path: Path) -> None:
    net = build(
        """net (float[N,3,8,8] x) => (float[N,8,8,8] y) {
            [first] a = Conv<pads = [1, 1, 1, 1]>(x, w0)
            [second] y = Conv<pads = [1, 1, 1, 1]>(a, w1)
        }""",
        {"w0": normal(8, 3, 3, 3), "w1": normal(8, 8, 3, 3)},
    )
    file = written(tmp_path, net, {})
    with Runner(EngineSpec("onnxruntime"), log_dir=tmp_path / "logs") as runner:
        runner.feed(
            (Workload({"x": normal(1, 3, 8, 8)}, 3.0, "one"), Workload({"x": normal(8, 3, 8, 8)}, 1.0, "eight"))
        )
        built = runner.load(file)
        assert isinstance(built, Handle)
        measured = runner.rounds(built, built, 2, seed=0, first_round=0, slot_seconds=0.001, warmup=1)
        assert isinstance(measured, Measurement)
        first, second = measured.parts
        assert measured.a == pytest.approx([0.75 * x + 0.25 * y for x, y in zip(first.a, second.a, strict=True)])
        layers = runner.layers(built, 4)
        assert not isinstance(layers, Failure)
        assert {"first", "second"} <= {node for layer in layers for node in layer.nodes}


# What fits


def refusal(model: Path, **changes: Any) -> str:
    with pytest.raises((BadData, BadOption)) as refused:
        tune(settings(model, WEIGHTS, **changes))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.usefixtures("workers")
def test_a_budget_knows_that_a_round_calls_every_workload(model: Path) -> None:
    with (
        prepared(settings(model, WEIGHTS), Silent()) as ready,
        written_once(ready) as constants,
        open_run(ready, constants) as run,
    ):
        assert run.bench.floats.seconds == pytest.approx(mean(model))
        assert run.bench.floats.turn_seconds == pytest.approx(1.5 * sum(cost(model, call) for call in CALLS.values()))


@pytest.mark.usefixtures("workers")
def test_workloads_that_do_not_fit_are_refused(model: Path) -> None:
    assert "leave `input_shapes` out" in refusal(model, input_shapes={"ids": (1, 1)})
    (model.parent / "other").mkdir()
    twice = (WorkloadFile(model.with_name("decode.npz")), WorkloadFile(model.parent / "other" / "decode.npz"))
    assert "two files are called 'decode'" in refusal(model, workloads=twice)
    again = (twice[0], WorkloadFile(model.parent / "other" / ".." / "decode.npz", 2.0))
    assert "names decode.npz more than once: give it once" in refusal(model, workloads=again)
    for arrays, told in (
        ({"ids": CALLS["decode"]["ids"]}, "float32[?,2,?,32]; it holds 'ids'"),
        (CALLS["decode"] | {"more": normal(1)}, "has an array 'more' that is no input"),
        (CALLS["decode"] | {"past": normal(1, 3, 15, 32)}, "'past' has shape (1, 3, 15, 32), the model wants past"),
        (CALLS["decode"] | {"past": normal(2, 2, 15, 32)}, "'B' is 1 in array 'ids' and 2 in 'past'"),
        (CALLS["decode"] | {"ids": np.zeros((1, 1), np.int32)}, "is int32, the model wants int64"),
    ):
        np.savez(model.with_name("decode.npz"), **arrays)  # type: ignore[arg-type]
        assert told in refusal(model)
    model.with_name("decode.npz").unlink()
    assert "decode.npz" in refusal(model)


def test_a_model_is_shaped_where_all_workloads_agree(model: Path) -> None:
    files = [WorkloadFile(model.with_name(f"{name}.npz")) for name in CALLS]
    prepared = prepare(load(model), Data(workloads=files))
    assert prepared.sizes == {"ids": (1, None), "past": (1, 2, None, 32)}
    assert prepared.shaped.tensors["y"].shape == (1, None, 256)
    assert [s["ids"].shape for s in prepared.samples] == [(1, 1), (1, 64)]
    alone = prepare(load(model), Data(workloads=files[:1]))
    assert alone.shaped.tensors["present"].shape == (1, 2, 16, 32)
    empty = prepare(load(model), Data(input_shapes={"ids": (1, 5), "past": (1, 2, 0, 32)}))
    assert empty.shaped.tensors["present"].shape == (1, 2, 5, 32)
    assert empty.samples.first(1)[0]["past"].shape == (1, 2, 0, 32)
    with pytest.raises(
        BadOption,
        match=r"1 more input have .* ids:1x64 `input_shapes` past:1x2x64x32$",
    ):
        prepare(load(model), Data())
    assert [w.share for w in open_workloads(files, load(model))] == [0.5, 0.5]


# Rounds and layers


class Scripted:
    """A model whose inferences take as long as its inputs say, times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor, self.asked = factor, list[tuple[float, int]]()

    def time(self, inputs: Mapping[str, Any], runs: int) -> float:
        self.asked.append((float(inputs["x"]), runs))
        return self.factor * float(inputs["x"])


def test_a_round_has_every_workload_in_its_part_of_a_slot() -> None:
    session = Session(EngineSpec("fake"))
    a, b = Scripted(0.001), Scripted(0.0005)
    session._models = {0: a, 1: b}  # type: ignore[dict-item]
    session.feed(as_workloads((Workload({"x": 1.0}, 3.0), Workload({"x": 10.0}, 1.0))))  # type: ignore[dict-item]
    slots = session.probe(0, 1, 0.02)
    assert slots == [Slot(10, 2, 0.001), Slot(1, 2, 0.01)]
    a.asked.clear()
    measured = session.rounds(0, 1, 5, range(3), slots, 2)
    assert a.asked == [(1.0, 2), (10.0, 2), *([(1.0, 1), (1.0, 10), (1.0, 10), (10.0, 1), (10.0, 1), (10.0, 1)] * 3)]
    assert measured.a == pytest.approx([0.00325] * 3)
    assert [(p.a, p.b) for p in measured.parts] == [((0.001,) * 3, (0.0005,) * 3), ((0.01,) * 3, (0.005,) * 3)]


def test_of_two_models_with_long_inferences_each_has_one_in_a_round() -> None:
    session = Session(EngineSpec("fake"))
    a, b = Scripted(0.05), Scripted(0.02)
    session._models = {0: a, 1: b}  # type: ignore[dict-item]
    session.feed(as_workloads({"x": 1.0}))  # type: ignore[dict-item]
    slots = session.probe(0, 1, 0.02)
    a.asked.clear()
    measured = session.rounds(0, 1, 5, range(8), slots, 2)
    assert a.asked == [(1.0, 2), *[(1.0, 1)] * 8]
    assert (measured.a, measured.b) == ((0.05,) * 8, (0.02,) * 8), "whichever comes first"


def layer(name: str, ms: float | None) -> Layer:
    return Layer(name, (name,), "FP32", ms, "compute")


def test_layers_have_the_times_of_the_average_call() -> None:
    mix = as_workloads((Workload({}, 0.75), Workload({}, 0.25)))
    same = average_layers(mix, [(layer("a", 1.0), layer("b", None)), (layer("a", 5.0), layer("b", None))])
    assert same == (layer("a", 2.0), layer("b", None))
    other = average_layers(mix, [(layer("a", 1.0), layer("b", 1.0)), (layer("c", 6.0), layer("d", 12.0))])
    assert other == (layer("c", 2.0), layer("d", 4.0))


def test_compare_reports_each_workload(model: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.commands.compare.LONG_COMPARISON", 0.0)
    tune(settings(model, WEIGHTS))
    final = model.parent / "out" / "optimized_final.onnx"
    mix = [part for name in CALLS for part in ("--workload", f"{model.with_name(name)}.npz:{WEIGHTS[name]}")]
    code, out, err = call("compare", model, final, "--engine", "fake", *mix, "--json", "--timing-runs", "12")
    assert (code, "random" in err) == (0, False)
    assert re.search(r"timing optimized_final.onnx against model.onnx: \d+ s, more where", err)
    (row,) = json.loads(out)["others"]
    assert row["ratio"]["median"] == pytest.approx(mean(final) / mean(model))
    assert [part["ratio"]["median"] for part in row["workloads"]] == pytest.approx(
        [cost(final, arrays) / cost(model, arrays) for arrays in CALLS.values()]
    )
    code, out, _ = call("compare", model, final, "--engine", "fake", *mix, "--timing-runs", "12")
    assert "decode, 80% of the calls" in out


@pytest.mark.usefixtures("workers")
def test_a_library_call_takes_arrays(model: Path) -> None:
    calls = {name: (arrays, WEIGHTS[name]) for name, arrays in CALLS.items()}
    how: Any = {"engine": "fake", "calibration_method": "minmax", "bias_correction": False, "min_sqnr": None}
    result = qdqtune.tune(model, workloads=calls, output_dir=model.parent / "out", builds=6, report=False, **how)
    assert [(row["name"], row["share"]) for row in result.summary["workloads"]] == [("decode", 0.8), ("prefill", 0.2)]
    with pytest.raises(BadOption, match="arrays by name of input, weight"):
        qdqtune.tune(model, workloads={"decode": (1, 2, 3)}, output_dir=model.parent / "x")  # type: ignore[dict-item]


def test_an_engine_for_ranges_of_sizes_is_told_those_of_all_workloads(model: Path) -> None:
    files = [WorkloadFile(model.with_name(f"{name}.npz"), WEIGHTS[name]) for name in CALLS]
    spec = built_for(EngineSpec("trtexec"), files, ["past"])
    assert spec.options == {
        "min_shapes": {"ids": [1, 1]},
        "opt_shapes": {"ids": [1, 1]},
        "max_shapes": {"ids": [1, 64]},
    }
    asked = EngineSpec("trtexec", {"max_shapes": {"ids": [1, 9]}})
    assert built_for(asked, files, ["past"]) == asked


def test_a_workload_that_got_slower_is_noted() -> None:
    mix = as_workloads((Workload({}, 0.8, "decode"), Workload({}, 0.2, "prefill")))
    slow, fast = Compared(Ratio(1.25, 1.2, 1.3), 1.0, 1.25, 4), Compared(Ratio(0.5, 0.4, 0.6), 1.0, 0.5, 4)
    one, four = (
        Compared(Ratio(0.8, 0.7, 0.9), 1.0, 0.8, count, by_workload=(fast, x)) for count, x in ((1, fast), (4, slow))
    )
    assert list(slower_workloads([one], mix)) == []
    (line,) = slower_workloads([one, four], mix)
    assert line.startswith(
        "prefill alone (20% of the calls) got slower: 0.80x [0.77x, 0.83x] the speed of float at 4 th"
    )
