"""Whether a run takes denormal numbers as zero: what decides it, that it is kept and told, and left to the user."""

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import build, normal
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.runner import temporary_runner
from qdqtune.explanation.report import report_of_run
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.tuning.denormals import decided, with_denormals_as_zero
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.records import DenormalsRecord
from qdqtune.tuning.run import prepared, written_once
from qdqtune.tuning.settings import Settings
from qdqtune.types import Accuracy, Measurement
from runs import mixed, settings, write
from workers import Workers

FASTER = [0.05, 0.04, 0.06] * 4


def decayed() -> Model:
    """A net whose second half of channels has nearly died in training: behind two layers its activations are
    denormal numbers, while the outputs come from the other half."""
    group = "group=2, pads=[1, 1, 1, 1]"
    text = f"""net (float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        [first] a = Conv<{group}>(x, w0) [relu] b = Relu(a) [second] c = Conv<{group}>(b, w1) [clip] d = Relu(c)
        [third] e = Conv<{group}>(d, w2) [last] f = Relu(e) [head] y = Conv(f, w3)
    }}"""
    weights = {f"w{n}": normal(8, 4, 3, 3, seed=n, scale=0.25) for n in range(3)} | {"w3": normal(8, 8, 1, 1)}
    for name in ("w0", "w1"):
        weights[name][4:] *= np.float32(1e-20)
    return build(text, weights)


def asked(folder: Path, name: str, model: Model, /, **changes: Any) -> Settings:
    spec = EngineSpec(name, {"threads": 1, **changes.pop("options", {})})
    return settings(write(model, folder), **({"engine": spec, "mode": "cut", "builds": 3} | changes))


@pytest.mark.parametrize(
    ("ratios", "difference", "as_zero", "words"),
    [
        (FASTER, Accuracy(), True, ["20.00x [16.67x, 25.00x] as fast", "=true", "Set session.set_denormal_as_zero"]),
        (FASTER, Accuracy(sqnr_db=119.0, agreement=1.0), True, ["so all models ran so"]),
        (FASTER, Accuracy(sqnr_db=40.0), False, ["its outputs change (40.0 dB)"]),
        (FASTER, Accuracy(sqnr_db=0.0), False, ["its outputs change (0.0 dB)"]),
        (FASTER, Accuracy(agreement=0.99), False, ["its outputs change:"]),
        ([0.85] * 12, Accuracy(), False, []),
        ([0.3] * 6 + [1.1] * 6, Accuracy(), False, []),
        (FASTER[:2], Accuracy(), False, []),
    ],
)
def test_only_a_clear_gain_with_equal_outputs_decides(
    ratios: list[float], difference: Accuracy, as_zero: bool, words: list[str]
) -> None:
    record = decided(Measurement((1.0,) * len(ratios), tuple(ratios)), difference, "onnxruntime")
    assert record.as_zero is as_zero
    assert record.is_cut_short is (len(ratios) == 2)
    assert bool(record.note) is bool(words)
    assert all(word in record.note for word in words)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONNX Runtime and OpenVINO set this on x86 only")
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("as_zero", [False, True])
def test_the_option_reaches_the_sessions_of_the_worker(engine: str, as_zero: bool, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    save(build("net (float[64] x) => (float[64] y) { p = Mul(x, x) y = Mul(p, s) }", {"s": np.float32(1e30)}),
         tmp_path / "model.onnx")  # fmt: skip
    with temporary_runner(EngineSpec(engine, {"denormals_as_zero": as_zero}), EXECUTION) as runner:
        outputs = runner.outputs_of(tmp_path / "model.onnx", [{"x": np.full(64, 1e-20, np.float32)}])
        assert runner.describe().get("denormals_as_zero") == ("yes" if as_zero else None)
    assert isinstance(outputs, list)
    np.testing.assert_allclose(outputs[0]["y"], 0.0 if as_zero else 1e-10, rtol=1e-3)


def test_what_was_measured_is_kept_and_taken_again(tmp_path: Path) -> None:
    with (
        prepared(asked(tmp_path, "onnxruntime", decayed()), Silent()) as ready,
        written_once(ready) as constants,
    ):
        first = with_denormals_as_zero(ready, constants)
        record = ready.store.get(DenormalsRecord)
        assert record is not None
        again = with_denormals_as_zero(ready, constants)
        assert len(ready.store) == 1
        for chosen in (first, again):
            assert chosen.settings.engine.options.get("denormals_as_zero", False) is record.as_zero
            assert chosen.notes == ((record.note,) if record.note else ())
        assert ("denormals_as_zero" in ready.runner.describe()) is record.as_zero


def test_a_run_with_denormals_as_zero_says_so_wherever_it_tells_the_result(tmp_path: Path) -> None:
    settings = asked(tmp_path, "onnxruntime", decayed())
    with prepared(settings, Silent()) as ready:
        ready.store.put(DenormalsRecord(as_zero=True, note="all models ran so"))
    result = tune(settings)
    assert result.notes[0] == "all models ran so"
    assert result.summary["engine"]["denormals_as_zero"] == "yes"
    logged = json.loads((settings.output_dir / "run.json").read_text())
    assert logged["engine"]["options"] == {"threads": 1, "denormals_as_zero": True}
    report = report_of_run(settings.output_dir)
    assert "--engine-option denormals_as_zero=true" in report.commands[-1].value
    assert ("denormals as zero", "yes") in [(fact.name, fact.value) for fact in report.circumstances]
    assert tune(settings).summary == result.summary


@pytest.mark.parametrize(
    "changes",
    [{"engine": EngineSpec("fake")}, {"options": {"denormals_as_zero": False}}, {"time_budget": 20.0}],
)
def test_nothing_is_built_where_nothing_is_to_be_decided(
    changes: dict[str, Any], tmp_path: Path, workers: Workers
) -> None:
    run = asked(tmp_path, "onnxruntime", mixed(), **changes)
    with prepared(run, Silent()) as ready, written_once(ready) as constants:
        assert with_denormals_as_zero(ready, constants) is ready
        record = ready.store.get(DenormalsRecord)
    assert workers.builds == []
    assert (record is not None and record.is_cut_short) is ("time_budget" in changes)  # no time is not no


def test_a_float_model_that_does_not_build_decides_nothing(tmp_path: Path, workers: Workers) -> None:
    workers.refused = lambda build: "no"
    with prepared(asked(tmp_path, "onnxruntime", mixed()), Silent()) as ready, written_once(ready) as constants:
        assert with_denormals_as_zero(ready, constants) is ready
        assert ready.store.get(DenormalsRecord) == DenormalsRecord()
