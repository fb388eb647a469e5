"""The engine, the samples and the model of a command."""

from pathlib import Path

import numpy as np

from decoders import CALLS, WEIGHTS, decoder, written
from models import build
from qdqtune.calibration.prepare import Data
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.commands.source import built_for, prepared_for
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.tensorrt.options import built_for_sample


def test_an_engine_for_ranges_of_sizes_is_told_those_of_all_workloads(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    files = [WorkloadFile(model.with_name(f"{name}.npz"), WEIGHTS[name]) for name in CALLS]
    spec = built_for(EngineSpec("trtexec"), files, ["past"])
    assert spec.options == {
        "min_shapes": {"ids": [1, 1]},
        "opt_shapes": {"ids": [1, 1]},
        "max_shapes": {"ids": [1, 64]},
    }
    asked = EngineSpec("trtexec", {"max_shapes": {"ids": [1, 9]}})
    assert built_for(asked, files, ["past"]) == asked


def test_samples_or_sizes_each_are_enough_for_an_engine_that_builds_for_sizes() -> None:
    model = build("net (float[N,4] x, float[2,4] z) => (float[N,4] y) { [abs] y = Abs(x) }")
    sample = {"x": np.ones((3, 4), np.float32), "z": np.ones((2, 4), np.float32)}
    sized = {"opt_shapes": {"x": [3, 4]}}
    found = built_for_sample(EngineSpec("tensorrt-rtx"), model, sample)
    assert found.options == {f"{which}_shapes": {"x": [3, 4]} for which in ("min", "opt", "max")}
    larger = EngineSpec("tensorrt-rtx", {"opt_shapes": {"x": [9, 4]}})
    assert built_for_sample(larger, model, sample).options["opt_shapes"] == {"x": [9, 4]}
    assert built_for_sample(EngineSpec("fake"), model, sample) == EngineSpec("fake")
    prepared = prepared_for(model, EngineSpec("tensorrt-rtx", sized), Data(), EXECUTION)
    assert prepared.samples.first(1)[0]["x"].shape == (3, 4)
