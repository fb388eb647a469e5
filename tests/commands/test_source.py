"""The engine, the samples and the model of a command."""

from pathlib import Path

from decoders import CALLS, WEIGHTS, decoder, written
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.commands.source import built_for
from qdqtune.engines import EngineSpec


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
