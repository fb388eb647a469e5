"""Calls of different shapes: timed together by their shares, judged on all, proven as one and told one by one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from decoders import CALLS, WEIGHTS, call_of, cost, decoder, mean, settings, written
from qdqtune.errors import BadState
from qdqtune.tuning.loop import tune
from workers import Workers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, decoder(), CALLS)


def test_the_mean_over_calls_decides_and_each_workload_is_reported_by_compare_as_well(model: Path, call: Any) -> None:
    result = tune(settings(model, WEIGHTS))
    final = model.parent / "out" / "optimized_final.onnx"
    assert result.ratio.median == pytest.approx(mean(final) / mean(model))
    assert result.summary["baseline_ms"] == pytest.approx(1e3 * mean(model))
    rows = {row["name"]: row for row in result.summary["workloads"]}
    assert {name: row["share"] for name, row in rows.items()} == {"decode": 0.8, "prefill": 0.2}
    for name, row in rows.items():
        assert row["ratio"] == pytest.approx(cost(final, CALLS[name]) / cost(model, CALLS[name]))
    assert rows["decode"]["ratio"] != pytest.approx(rows["prefill"]["ratio"])
    assert result.summary["accuracy_samples"] == 2
    assert [d.dim_param for d in onnx.load(final).graph.input[0].type.tensor_type.shape.dim] == ["B", "S"]
    mix = [part for name in CALLS for part in ("--workload", f"{model.with_name(name)}.npz:{WEIGHTS[name]}")]
    compared = ("compare", model, final, "--engine", "fake", *mix, "--timing-runs", "12")
    code, out, err = call(*compared, "--json")
    assert (code, "random" in err) == (0, False)
    (other,) = json.loads(out)["others"]
    assert other["ratio"]["median"] == pytest.approx(mean(final) / mean(model))
    assert [part["ratio"]["median"] for part in other["workloads"]] == pytest.approx(
        [cost(final, arrays) / cost(model, arrays) for arrays in CALLS.values()]
    )
    assert "decode, 80% of the calls" in call(*compared)[1]


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
    with pytest.raises(BadState, match=r"made with `workloads` decode 0\.8 .*, now it is decode 0\.5 "):
        tune(settings(model, {"decode": 1, "prefill": 1}))
    np.savez(model.with_name("decode.npz"), **call_of(2, 15))
    with pytest.raises(BadState, match="workloads"):
        tune(settings(model, WEIGHTS))
    with pytest.raises(BadState, match="workloads"):
        tune(settings(model, {}, calibration_data=str(model.with_name("prefill.npz"))))


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
