"""TensorRT's program, on a stand-in for four versions, and the ranges of input shapes that its arguments give."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from engine_contract import (
    IMAGE,
    ROWS,
    EngineContract,
    built_by,
    conv_model,
    matmul_model,
    model_of,
    quantized_conv_model,
    static,
)
from processes import family, until
from qdqtune.commands.tune import TuneOptions
from qdqtune.engines import Engine, EngineSpec, open_engine
from qdqtune.engines.execution import Execution
from qdqtune.engines.runner import Runner
from qdqtune.engines.tensorrt import trtexec
from qdqtune.engines.tensorrt.options import SHAPE_OPTIONS, Span, spans, with_spans
from qdqtune.engines.tensorrt.trtexec import _outputs
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable
from qdqtune.graph.loading import load
from qdqtune.tuning.loop import tune
from qdqtune.types import NumericFormat, QType
from refusals import refusal
from runs import mixed, write
from trtexec_stand_in import calls, stand_in
from workers import Workers

VERSIONS = ["8.6", "10.0", "10.16", "11.1"]
INT8 = NumericFormat(QType.INT8, QType.INT8, symmetric=True)
TYPES = {"fp16", "int8", "fp8", "best", "stronglyTyped"}


pytestmark = pytest.mark.usefixtures("temporary")


def create(*given: Any, **options: Any) -> trtexec.Trtexec:
    """The engine, with the stand-in in this process."""
    return trtexec.create(trtexec.TrtexecOptions(*given, **options))


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    onnx.save(static(quantized_conv_model(INT8)), tmp_path / "q.onnx")
    return tmp_path / "q.onnx"


class TestContract(EngineContract):
    @pytest.fixture(autouse=True)
    def _program(self, tmp_path: Path) -> None:
        self.spec = EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")})

    def opened(self) -> Engine:
        return create(**self.spec.options)

    def test_close_frees_the_model(self, engine: Engine, tmp_path: Path) -> None:
        """It is never in this process; what stays is a folder."""
        built = built_by(engine, conv_model(), tmp_path)
        assert len(list(tmp_path.glob("trtexec-*/*.plan"))) == 1
        built.close()
        assert not list(tmp_path.glob("trtexec-*"))


def test_a_build_holds_no_weights(tmp_path: Path) -> None:
    model = model_of("y = MatMul(x, w)", "1,99", {"w": np.ones((99, 99), np.float32)})
    built = built_by(create(stand_in(tmp_path, "10.16")), model, tmp_path)
    assert built._graph.proto.ByteSize() < 99 * 99
    assert built.run({"x": np.ones((1, 99), np.float32)})["y"].shape == (1, 99)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_version_builds_runs_times_and_reports(tmp_path: Path, quantized: Path, version: str) -> None:
    engine = create(stand_in(tmp_path, version))
    told = {"8.6": "8.6.1", "10.0": "10.0.1", "10.16": "10.16.1", "11.1": "11.1.0"}
    assert engine.describe()["version"] == told[version]
    whole(engine, tmp_path, quantized)


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch, launch: Any = trtexec.launch) -> None:
    """The program runs in a process of its own."""
    monkeypatch.setattr(trtexec, "launch", launch)


@pytest.mark.usefixtures("as_process")
def test_the_program_runs_as_a_process_of_its_own(tmp_path: Path, quantized: Path) -> None:
    whole(open_engine(EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")})), tmp_path, quantized)


def whole(engine: Engine, tmp_path: Path, quantized: Path) -> None:
    """Everything that one does with a model."""
    built = engine.build(quantized, tmp_path / "build.log")
    outputs, seconds, layers = built.run(IMAGE), built.time(IMAGE, 5), built.layers(IMAGE, 5)
    assert outputs["y"].shape == (1, 8, 8, 8)
    assert 1e-5 < seconds < 1e-3
    names = [name for layer in layers for name in layer.nodes]
    assert sorted(names) == sorted(load(quantized).index_of)
    known = [(x.kind, x.precision) for x in layers if x.kind != "unknown"]
    assert known == [("quantize", "INT8"), ("compute", "INT8"), ("quantize", "FP32")]
    assert all(x.time_ms is not None and x.time_ms > 0 for x in layers)
    built.save(tmp_path / "engine.plan")
    assert (tmp_path / "engine.plan").read_bytes().startswith(b"stand-in plan")
    assert calls(tmp_path)[-1]["loadEngine"] == str(tmp_path / "engine.plan")
    assert (tmp_path / "build.log").read_text().count("\n$ ") + 1 == 5
    built.close()
    assert not list(tmp_path.glob("trtexec-*"))


def test_flags_are_those_of_the_version(tmp_path: Path, quantized: Path, version: str) -> None:
    engine = create(stand_in(tmp_path, version))
    built = engine.build(quantized, tmp_path / "build.log")
    built.time(IMAGE, 3)
    built.layers(IMAGE, 3)
    build, timed, profiled = calls(tmp_path)
    typing = {"8.6": {"fp16", "int8"}, "10.0": {"stronglyTyped"}, "10.16": {"stronglyTyped"}, "11.1": set()}[version]
    assert build.keys() & TYPES == typing
    built_by(engine, static(conv_model()), tmp_path)
    assert calls(tmp_path)[-1].keys() & TYPES == typing - {"int8"}, "for a float model"
    assert {"skipInference", "saveEngine"} <= build.keys()
    assert build["profilingVerbosity"] == "detailed"
    assert not {"minShapes", "shapes"} & (build.keys() | timed.keys())
    quick = {"useCudaGraph", "useSpinWait", "noDataTransfers"}
    assert timed.keys() & quick == (set() if version == "11.1" else quick)
    assert ("separateProfileRun" in profiled) == (version != "11.1")
    assert (timed["duration"], profiled["duration"]) == ("0.2", "0")
    assert timed["iterations"] == profiled["iterations"] == "3"
    assert timed["loadEngine"] == build["saveEngine"]
    assert "onnx" not in timed


def test_time_is_the_median_of_the_exported_times(tmp_path: Path, quantized: Path) -> None:
    seconds = create(stand_in(tmp_path, "10.0")).build(quantized, tmp_path / "build.log").time(IMAGE, 5)
    expected = (0.01 + 0.05 * 0.4 + 0.01 * 0.4) / 1.15 * 1.02 / 1e3  # samples are 0 to 4 % over the modelled latency
    assert seconds == pytest.approx(expected, rel=1e-5)
    built = create(stand_in(tmp_path, "10.0", silent=True)).build(quantized, tmp_path / "build.log")
    with pytest.raises(EngineFailure, match="has exported no times"):
        built.time(IMAGE, 7)


def test_unknown_profiling_flags_are_omitted_from_then_on(tmp_path: Path, quantized: Path) -> None:
    unknown = ["profilingVerbosity", "exportProfile"]
    engine = create(stand_in(tmp_path, "8.6", unknown=unknown))
    built = engine.build(quantized, tmp_path / "build.log")
    assert len(calls(tmp_path)) == 2
    assert built.time(IMAGE, 1) > 0
    with pytest.raises(EngineFailure, match="knows no profiling flags"):
        built.layers(IMAGE, 1)
    engine.build(quantized, tmp_path / "again.log")
    seen = calls(tmp_path)
    assert "profilingVerbosity" in seen[0]
    assert not any({"profilingVerbosity", "exportProfile", "exportLayerInfo"} & flags.keys() for flags in seen[1:])
    assert "Unknown option: --profilingVerbosity detailed" in (tmp_path / "build.log").read_text()


def test_an_unknown_flag_of_the_user_is_not_retried(tmp_path: Path, quantized: Path) -> None:
    engine = create(stand_in(tmp_path, "10.0"), trtexec_args="--fastest")
    with pytest.raises(EngineFailure, match="Unknown option: --fastest"):
        engine.build(quantized, tmp_path / "build.log")
    assert len(calls(tmp_path)) == 1


def test_user_arguments_take_precedence_and_are_passed_once(tmp_path: Path, quantized: Path) -> None:
    arguments = "--warmUp=7 --useCudaGraph --best --builderOptimizationLevel=1 --builderOptimizationLevel=2"
    engine = create(stand_in(tmp_path, "10.16"), trtexec_args=arguments, builder_level=5, workspace_mb=64)
    engine.build(quantized, tmp_path / "build.log").time(IMAGE, 1)
    build, timed = calls(tmp_path)
    assert build["builderOptimizationLevel"] == "2"
    assert build["memPoolSize"] == "workspace:64"
    assert "stronglyTyped" not in build, "trtexec refuses it beside the user's --best"
    assert "best" in build
    assert timed["warmUp"] == "7"
    assert engine.describe()["typing"] == "weak"


@pytest.mark.parametrize("version", ["8.6", "10.16"])
def test_types_of_single_layers_and_the_former_flag_for_scratch_memory_are_understood(tmp_path, quantized, version):
    arguments = "--precisionConstraints=obey --layerPrecisions=conv:fp32"
    engine = create(stand_in(tmp_path, version), trtexec_args=f"--workspace=4096 {arguments}", workspace_mb=64)
    engine.build(quantized, tmp_path / "build.log")
    (build,) = calls(tmp_path)
    assert build.items() >= {"fp16": "", "int8": "", "layerPrecisions": "conv:fp32"}.items()
    assert "stronglyTyped" not in build, "with it all types come from the graph"
    assert engine.describe()["typing"] == "weak"
    assert build["memPoolSize"] == "workspace:4096"
    assert engine.describe()["arguments"] == f"--memPoolSize=workspace:4096 {arguments}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"builder_level": 9}, r"Expected 'int' <= 5 - at '\$.builder_level'"),
        ({"workspace_mb": 0}, r"Expected 'int' >= 1 - at '\$.workspace_mb'"),
        ({"trtexec_args": "--onnx=a.onnx"}, "--onnx is set by qdqtune"),
        ({"trtexec_args": "--a='b"}, "cannot be read"),
    ],
)
def test_unusable_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        open_engine(EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.0"), **options}))


def test_plugins_and_timing_cache(tmp_path: Path, quantized: Path) -> None:
    plugin = tmp_path / "libplugin.so"
    plugin.write_bytes(b"")
    engine = create(
        stand_in(tmp_path, "11.1"), plugin_libraries=[str(plugin)], timing_cache=str(tmp_path / "kernels.cache"),
        trtexec_args=f"--staticPlugins={plugin}",
    )  # fmt: skip
    engine.build(quantized, tmp_path / "build.log").time(IMAGE, 1)
    assert all(flags["staticPlugins"] == str(plugin) for flags in calls(tmp_path))
    assert (tmp_path / "kernels.cache").exists()
    missing = create(stand_in(tmp_path, "11.1"), plugin_libraries=["/nowhere/lib.so"])
    with pytest.raises(EngineFailure, match=r"plugin library /nowhere/lib\.so"):
        missing.build(quantized, tmp_path / "build.log")


def test_given_shapes_make_one_plan(tmp_path: Path) -> None:
    shapes = {"min_shapes": {"x": [1, 16]}, "opt_shapes": {"x": [4, 16]}, "max_shapes": {"x": [8, 16]}}
    built = built_by(create(stand_in(tmp_path, "10.0"), **shapes), matmul_model(), tmp_path)
    assert built.run(ROWS)["y"].shape == (3, 8)
    build, run = calls(tmp_path)
    assert (build["minShapes"], build["optShapes"], build["maxShapes"]) == ("x:1x16", "x:4x16", "x:8x16")
    assert run["shapes"] == "x:3x16"
    with pytest.raises(EngineFailure, match="does not satisfy any optimization profiles"):
        built.run({"x": np.zeros((9, 16), np.float32)})


@pytest.mark.parametrize(
    "given", [{"trtexec_args": "--stronglyTyped --optShapes=x:3x16"}, {"opt_shapes": {"x": [3, 16]}}]
)
def test_usual_sizes_alone_are_enough(tmp_path: Path, given: dict[str, Any]) -> None:
    built = built_by(create(stand_in(tmp_path, "10.0"), **given), matmul_model(), tmp_path)
    assert built.run(ROWS)["y"].shape == (3, 8)
    assert built.time(ROWS, 1) > 0
    assert [flags["optShapes"] for flags in calls(tmp_path) if "onnx" in flags] == ["x:3x16"]
    with pytest.raises(EngineFailure, match="does not satisfy any optimization profiles"):
        built.run({"x": np.zeros((1, 16), np.float32)})


def test_without_shapes_each_size_gets_a_plan(tmp_path: Path) -> None:
    built = built_by(create(stand_in(tmp_path, "10.0")), matmul_model(), tmp_path)
    built.time(ROWS, 1)
    built.time(ROWS, 1)
    assert [flags.get("optShapes") for flags in calls(tmp_path) if "onnx" in flags] == ["x:1x16", "x:3x16"]


@pytest.mark.parametrize("version", ["8.6", "10.0"])
def test_64_bit_integers_are_narrow_before_10(tmp_path: Path, version: str) -> None:
    gather = model_of("y = Gather(w, x)", "2", {"w": np.arange(12, dtype=np.float32)})
    gather.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    built = built_by(create(stand_in(tmp_path, version)), gather, tmp_path)
    assert built.run({"x": np.array([3, 11])})["y"].tolist() == [3, 11]
    with pytest.raises(EngineFailure, match="is int64 of sizes"):
        built.run({"x": np.array([3, 11], np.int32)})


def test_outputs_may_be_nan(tmp_path: Path) -> None:
    built = built_by(create(stand_in(tmp_path, "10.0")), model_of("y = Log(x)", "3"), tmp_path)
    outputs = built.run({"x": np.array([-1, 0, 1], np.float32)})
    np.testing.assert_array_equal(outputs["y"], np.array([np.nan, -np.inf, 0], np.float32))
    assert outputs["y"].dtype == np.float32


@pytest.mark.parametrize("version", ["8.6", "11.1"])
def test_a_refusal_names_cause_and_stage(tmp_path: Path, quantized: Path, version: str) -> None:
    engine = create(stand_in(tmp_path, version, refuse="conv"))
    with pytest.raises(EngineFailure, match=r"any implementation for node conv.*; Engine set up failed$"):
        engine.build(quantized, tmp_path / "build.log")
    assert "Building engine failed" in (tmp_path / "build.log").read_text()
    assert not list(tmp_path.glob("trtexec-*"))


def test_fp8_needs_version_10(tmp_path: Path, version: str) -> None:
    engine = create(stand_in(tmp_path, version))
    assert engine.numeric_format("int8").float_weights == (version == "8.6")
    with pytest.raises(BadOption, match="`quant_type` int8") if version == "8.6" else nullcontext():
        engine.numeric_format("fp8")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "no program '.*trtexec'.*`engine_options` trtexec=PATH"),
        ("echo hello", "tells no TensorRT version"),
        ("echo 'libnvinfer.so.10: cannot open' >&2; exit 127", "cannot open"),
        ("echo '&&&& RUNNING TensorRT.trtexec [TensorRT v8503]'", "8.5.3: 8.6 or later is needed"),
    ],
)
@pytest.mark.usefixtures("as_process")
def test_an_unusable_program_is_refused(tmp_path: Path, script: str | None, words: str) -> None:
    program = tmp_path / "trtexec"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(EngineUnavailable, match=words):
        open_engine(EngineSpec("trtexec", {"trtexec": str(program)}))


@pytest.mark.usefixtures("as_process")
def test_a_crash_names_its_signal(tmp_path: Path, quantized: Path) -> None:
    program = Path(stand_in(tmp_path, "10.0"))
    engine = create(str(program))
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    with pytest.raises(EngineFailure, match="ended with signal SIGSEGV"):
        engine.build(quantized, tmp_path / "build.log")


def test_a_call_that_hangs_ends_with_the_worker(tmp_path: Path, quantized: Path) -> None:
    spec = EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.0", hang=True)})
    with Runner(spec, execution=Execution(3), log_dir=tmp_path / "logs") as runner:
        result = refusal(lambda: runner.load(quantized, "hanging"))
        assert result.stage == "timeout"
        assert "--skipInference" in result.log
    until(lambda: not family(tmp_path))


def test_paired_rounds_through_the_runner(tmp_path: Path, quantized: Path, workers: Workers) -> None:
    onnx.save(static(conv_model()), tmp_path / "m.onnx")
    spec = EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "11.1")})
    with Runner(spec, execution=Execution(60), log_dir=tmp_path / "logs") as runner:
        runner.feed(IMAGE)
        a, b = runner.load(tmp_path / "m.onnx"), runner.load(quantized)
        samples = [{"x": IMAGE["x"] + shift} for shift in range(3)]
        expected, before = runner.outputs(b, samples), len(calls(tmp_path))
        turns = runner.turns([a, b], 1e-4)
        take = partial(runner.rounds, [a, b], seed=1, turns=turns, warmup=1, samples=samples)
        measured = take(range(2)).pair(0, 1)
        assert np.median(measured.b) != np.median(measured.a)
        take(range(2, 5))
        assert len(calls(tmp_path)) == before + 2 * 5, "one process for each side of a round, and no other"
        kept = runner.outputs(b, samples)
        assert len(calls(tmp_path)) == before + 2 * 5, "the rounds have given the outputs, too"
        assert [one["y"].tolist() for one in kept] == [one["y"].tolist() for one in expected]
        assert runner.start_seconds > 0
        runner.outputs(b, samples)
        assert len(calls(tmp_path)) == before + 2 * 5 + 3, "outputs are kept for one run only"


def test_a_whole_search_starts_few_processes(tmp_path: Path, workers: Workers) -> None:
    model = write(mixed(), tmp_path)
    program = {"trtexec": stand_in(tmp_path, "10.16")}
    options = {"engine": "trtexec", "engine_options": program, "report": False}
    data, out = model.with_suffix(".npz"), tmp_path / "out"
    result = tune(TuneOptions(model=model, output_dir=out, calibration_data=data, **options).settings())
    assert result.improved
    timed = [flags for flags in calls(tmp_path) if "exportTimes" in flags]
    in_search = 1 + 7 * (len(result.history) + 2)  # two batches, each against one placement
    assert len(timed) <= in_search + 3 * 2 * 12, "and two builds of three files in the proof"


@pytest.mark.parametrize(
    ("sizes", "values"),
    [("2x-1", "1, 2, 3, 4, 5, 6"), ("2x-1", "Final shape is 2x3 reported by the output allocator.\n1, 2, 3, 4, 5, 6"),
     ("2x3", "1, 2, 3, 4, 5, 6"), ("-1x-1", "Final shape is 2x3 reported by the output allocator.\n1, 2, 3, 4, 5, 6")],
)  # fmt: skip
def test_outputs_whose_size_depends_on_data(sizes: str, values: str) -> None:
    text = f'[\n  {{ "name" : "y"\n  , "dimensions" : "{sizes}"\n  , "values" : [ {values} ]\n  }}\n]\n'
    assert dict(_outputs(text))["y"].tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(EngineFailure, match="2 values for sizes -1x-1"):
        dict(_outputs('[ { "name" : "y", "dimensions" : "-1x-1", "values" : [ 1, 2 ] } ]'))


def test_shapes_in_options_and_in_trtexec_arguments() -> None:
    options = {"min_shapes": {"x": [1, 8]}, "max_shapes": {"x": [9, 8]}, "opt_shapes": {"x": [4, 8], "z": [3]}}
    found = {"x": ((1, 8), (4, 8), (9, 8)), "z": ((3,), (3,), (3,))}
    assert spans(EngineSpec("tensorrt", options)) == found
    text = "--stronglyTyped --minShapes=x:1x8 --optShapes=x:4x8,z:3 --maxShapes=x:9x8"
    spec = EngineSpec("trtexec", {"trtexec_args": text, "builder_level": 1})
    assert spans(spec) == found
    assert spans(EngineSpec("trtexec", {"trtexec_args": "--shapes=x:2x8"})) == {"x": ((2, 8),) * 3}
    assert spans(EngineSpec("onnxruntime", options)) == {}
    other = with_spans(spec, {"t": Span((1,), (2,), (3,))})
    assert other.options["trtexec_args"] == "--stronglyTyped"
    assert other.options["builder_level"] == 1
    assert spans(other) == {"t": ((1,), (2,), (3,))}
    assert not set(with_spans(spec, {}).options) & set(SHAPE_OPTIONS)


@pytest.mark.parametrize("text", ["--optShapes=x", "--minShapes=x:1xN", "--optShapes='x:1"])
def test_shapes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="trtexec_args"):
        spans(EngineSpec("trtexec", {"trtexec_args": text}))
