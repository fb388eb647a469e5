"""What Python programs hold in memory becomes files that the package reads."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from decoders import CALLS, WEIGHTS, decoder, written
from models import build
from qdqtune.calibration.options import DataOptions
from qdqtune.calibration.workloads import WorkloadFile
from qdqtune.commands.inputs import built_for, metric_source, model_file, prepared_for, sample_source
from qdqtune.engines import EngineSpec
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.tensorrt.options import built_for_sample
from qdqtune.errors import BadData, BadModel, BadOption
from qdqtune.numerics.metrics import load_evaluation


def test_samples_of_every_kind_have_one_file_or_one_each(tmp_path: Path) -> None:
    one = {"x": np.zeros((2, 3), np.float32), "file": np.ones(2)}
    kinds: list[Any] = [one, [one, one], (s for s in [one, one]), lambda: [one, one], np.zeros(3)]
    made = []
    for number, samples in enumerate(kinds):
        (folder := tmp_path / str(number)).mkdir()
        source = sample_source(samples, folder, EXECUTION)
        made.append([Path(source)] if Path(source).is_file() else sorted(Path(source).iterdir()))
    assert [len(found) for found in made] == [1, 2, 2, 2, 1]
    assert made[1][0].read_bytes() == made[2][1].read_bytes() == made[0][0].read_bytes()
    with np.load(made[0][0]) as arrays:
        assert set(arrays) == {"x", "file"}


def test_a_generator_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    def endless() -> Iterator[Mapping[str, Any]]:
        while True:
            yield {"x": np.zeros(1)}

    source = sample_source(endless(), tmp_path, EXECUTION, limit=3)
    assert len(list(Path(source).iterdir())) == 3


@pytest.mark.parametrize(
    ("samples", "words"),
    [([1, 2], "sample 1 is int"), (iter(()), "gives no sample"), (3, "not int"), ({"x": [object()]}, "numbers")],
)
def test_what_is_no_sample_is_refused(tmp_path: Path, samples: Any, words: str) -> None:
    with pytest.raises(BadData, match=words):
        sample_source(samples, tmp_path, EXECUTION)


def test_a_model_in_memory_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    proto = onnx.load(model)
    before = proto.SerializeToString()
    assert onnx.load(model_file(proto, tmp_path, "copy")) == proto
    assert proto.SerializeToString() == before
    with pytest.raises(BadModel, match="not int"):
        model_file(3, tmp_path)


def test_a_metric_is_a_function_known_by_its_code() -> None:
    def small(predict: Any) -> float:
        return 0.5

    def smaller(predict: Any) -> float:
        return 0.25

    names = []
    for function in (small, smaller, small):
        with metric_source(function) as source:
            evaluation = load_evaluation(source, EXECUTION)
            assert evaluation.function is function
            names.append(evaluation.digest)
    assert names[0] == names[2] != names[1]
    with pytest.raises(BadOption, match="not int"), metric_source(3):
        pass


# Sizes of inputs that engines are built for


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
    prepared = prepared_for(model, EngineSpec("tensorrt-rtx", sized), DataOptions(), EXECUTION)
    assert prepared.samples.first(1)[0]["x"].shape == (3, 4)
