"""TensorRT without TensorRT: the whole call order, on stand-ins that have the names of three versions."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser
from onnx.reference import ReferenceEvaluator

from engine_contract import IMAGE, conv_model, model_of, quantized_conv_model
from loaded_modules import CUDA, absent
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.tensorrt import execution
from qdqtune.engines.tensorrt.execution import CudaError
from qdqtune.engines.tensorrt.options import timing_cache
from qdqtune.errors import EngineFailure, EngineUnavailable
from tensorrt_fakes import FLAGS, VERSIONS, FakeCuda, Module, install


def test_every_name_of_cuda_python_exists() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    used = set(re.findall(r"\b(?:cuda[A-Z]\w+\.)?cuda[A-Z]\w+", Path(execution.__file__).read_text()))
    assert len(used) > 20
    for name in used:
        owner, _, member = name.rpartition(".")
        known = getattr(runtime, owner) if owner else runtime
        assert hasattr(known, member), name


class Rig(SimpleNamespace):
    """The stand-ins of one version, a folder, and how to open the engine on them."""

    trt: Module
    cuda: FakeCuda
    folder: Path

    def open(self, **options: Any) -> Any:
        return open_engine(EngineSpec("tensorrt", options))

    def build(self, model: onnx.ModelProto, **options: Any) -> Any:
        onnx.save(model, self.folder / "m.onnx")
        return self.open(**options).build(self.folder / "m.onnx", self.folder / "build.log")

    @property
    def log(self) -> str:
        return (self.folder / "build.log").read_text()


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    trt, cuda = install(monkeypatch, request.param)
    return Rig(trt=trt, cuda=cuda, folder=tmp_path, version=request.param)


def static(model: onnx.ModelProto, batch: int = 1) -> onnx.ModelProto:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    return model


def expected(model: onnx.ModelProto, inputs: dict[str, Any]) -> Any:
    return ReferenceEvaluator(model).run(None, inputs)[0]


def test_a_model_is_built_and_computed(rig: Rig) -> None:
    built = rig.build(static(conv_model()), workspace_mb=3, builder_level=5)
    outputs = built.run({"x": IMAGE["x"].astype(np.float64)})  # the engine's own type is made of it
    assert list(outputs) == ["y"]
    np.testing.assert_allclose(outputs["y"], expected(conv_model(), IMAGE), rtol=1e-6)
    assert rig.trt.seen.flags == FLAGS[rig.version]
    assert rig.trt.seen.config.profiling_verbosity.name == "DETAILED"
    assert rig.trt.seen.config._limits == {"WORKSPACE": 3 << 20}
    assert rig.trt.seen.config.builder_optimization_level == 5
    assert "Detected 1 inputs" in rig.log
    assert "chatter" not in rig.log


def test_precisions_are_allowed_only_where_typing_is_weak(rig: Rig) -> None:
    rig.build(static(conv_model()))
    assert rig.trt.seen.config._flags == (["FP16"] if rig.version == "8.6.1" else [])
    numbers = rig.open().numeric_format("int8")
    assert numbers.float_weights == (rig.version == "8.6.1")
    rig.build(static(quantized_conv_model(numbers)))
    assert rig.trt.seen.config._flags == (["FP16", "INT8"] if rig.version == "8.6.1" else [])


def test_description_names_all_that_latency_depends_on(rig: Rig) -> None:
    told = rig.open(workspace_mb=512, builder_level=4, opt_shapes={"x": [8, 4]}).describe()
    assert told["engine"] == "tensorrt"
    assert (told["version"], told["device"], told["compute_capability"]) == (rig.version, "Stand-in GPU", "8.9")
    assert (told["driver"], told["threads"]) == ("CUDA 12.8", "1")
    assert (told["workspace_mb"], told["builder_level"], told["opt_shapes"]) == ("512", "4", "{'x': [8, 4]}")


@pytest.mark.parametrize("capturable", [True, False])
def test_time_is_that_of_the_device_by_a_graph_where_one_can_be_captured(rig: Rig, capturable: bool) -> None:
    rig.cuda.capturable = capturable
    built = rig.build(static(conv_model()))
    for runs, launches in ((5, 5), (3, 8)):
        assert built.time(IMAGE, runs) == pytest.approx(2e-3)
        assert rig.cuda.launches == launches * capturable
        rig.cuda.capturable = True  # what could not be captured is not tried again
    assert rig.cuda.alive == {"stream": 1, "event": 0, "graph": int(capturable)}


def test_shapes_may_change_from_run_to_run(rig: Rig) -> None:
    built = rig.build(conv_model(), min_shapes={"x": [1, 4, 8, 8]}, max_shapes={"x": [4, 4, 8, 8]})
    assert rig.trt.seen.profile == {"x": ([1, 4, 8, 8], [4, 4, 8, 8], [4, 4, 8, 8])}
    three = {"x": np.concatenate([IMAGE["x"]] * 3)}
    for inputs in (IMAGE, three, IMAGE):
        assert built.time(inputs, 2) > 0
        np.testing.assert_allclose(built.run(inputs)["y"], expected(conv_model(), inputs), rtol=1e-6)
    assert rig.cuda.alive["graph"] == 1


def test_shapes_of_unknown_inputs_are_ignored(rig: Rig) -> None:
    """Of the inputs of a whole model a part has some."""
    built = rig.build(conv_model(), opt_shapes={"x": [2, 4, 8, 8], "z": [1]})
    assert built.run({"x": np.zeros((2, 4, 8, 8), np.float32)})["y"].shape == (2, 8, 8, 8)


@pytest.mark.parametrize(
    ("operator", "name", "words"),
    [
        ("NoSuchOp", "parsed", r"^TensorRT: (node 'strange': )?Plugin not found, are"),
        ("Refused", "built", r"^TensorRT: Error Code 4: no implementation$"),  # the first error of several
        ("Relu", "unloadable", "Error Code 6: built for another GPU"),
    ],
)
def test_what_is_refused_is_one_line(operator: str, name: str, words: str, rig: Rig) -> None:
    model = static(model_of(f"[strange] y = {operator}(x)", "1"))
    model.graph.name = name
    with pytest.raises(EngineFailure, match=words) as refusal:
        rig.build(model)
    assert len(str(refusal.value).splitlines()) == 1
    assert operator != "Refused" or "Error Code 2" in rig.log
    assert ("'strange'" in str(refusal.value)) == (operator == "NoSuchOp" and rig.version != "8.6.1")


def test_layers_have_names_nodes_and_median_times(rig: Rig) -> None:
    built = rig.build(static(conv_model()))
    conv, relu = built.layers(IMAGE, 3)
    assert (conv.name, conv.nodes, conv.time_ms, conv.precision) == ("conv", ("conv",), 0.25, "FP32")
    assert (relu.name, relu.time_ms) == ("relu", 0.5)
    assert rig.cuda.alive["stream"] == 1


def test_the_plan_is_saved_and_loaded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    built = rig.build(static(conv_model()))
    built.save(rig.folder / "m.plan")
    assert onnx.load(rig.folder / "m.plan").graph.node[0].name == "conv"
    broken = onnx.helper.make_model(onnx.helper.make_graph([], "unloadable", [], [])).SerializeToString()
    monkeypatch.setattr(built, "_plan", broken)
    with pytest.raises(EngineFailure, match="built for another GPU"):
        built.save(rig.folder / "m.plan")


def test_close_frees_all_resources(rig: Rig) -> None:
    engine = rig.open()
    onnx.save(static(conv_model()), rig.folder / "m.onnx")
    first, second = (engine.build(rig.folder / "m.onnx", rig.folder / "build.log") for _ in range(2))
    for built in (first, second):
        built.run(IMAGE)
        built.time(IMAGE, 2)
        built.layers(IMAGE, 1)
    first.close()
    np.testing.assert_allclose(second.run(IMAGE)["y"], expected(conv_model(), IMAGE), rtol=1e-6)
    engine_of_second = weakref.ref(second._engine)
    gc.disable()
    try:
        second.close()
        assert engine_of_second() is None  # its weights go with it, and wait for no garbage collector
    finally:
        gc.enable()
    assert rig.cuda.memory == {}
    assert rig.cuda.alive == {"stream": 0, "event": 0, "graph": 0}


def test_wrong_inputs_are_failures(rig: Rig) -> None:
    built = rig.build(static(conv_model()))
    with pytest.raises(EngineFailure, match="no array for input 'x'"):
        built.run({})
    for shape in ((1, 3, 8, 8), (4, 8, 8)):
        with pytest.raises(EngineFailure, match="'x' cannot have sizes"):
            built.run({"x": np.zeros(shape, np.float32)})
    np.testing.assert_allclose(built.run(IMAGE)["y"], expected(conv_model(), IMAGE), rtol=1e-6)


def test_an_inference_that_is_refused(rig: Rig) -> None:
    model = static(conv_model())
    model.graph.name = "refuse"
    built = rig.build(model)
    for call in (lambda: built.run(IMAGE), lambda: built.time(IMAGE, 1), lambda: built.layers(IMAGE, 1)):
        with pytest.raises(EngineFailure, match="refused"):
            call()
    rig.cuda.fail["cudaDeviceSynchronize"] = rig.cuda.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        built.run(IMAGE)


def test_too_little_memory_is_a_failure_of_the_model(rig: Rig) -> None:
    built = rig.build(static(conv_model()))
    rig.cuda.fail["cudaMalloc"] = rig.cuda.cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(EngineFailure, match="too little free memory"):
        built.run(IMAGE)
    rig.cuda.fail["cudaMalloc"] = rig.cuda.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(CudaError):
        built.run(IMAGE)


def test_outputs_whose_size_depends_on_values(rig: Rig) -> None:
    model = model_of("[nonzero] y = NonZero(x)", "7")
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    if rig.version == "8.6.1":  # there such outputs are int32, and the stand-in has but the model's type
        return
    built = rig.build(model)
    for count in (2, 5, 0):
        x = np.array([1.0] * count + [0.0] * (7 - count), np.float32)
        np.testing.assert_array_equal(built.run({"x": x})["y"], [list(range(count))])
        assert built.time({"x": x}, 2) == pytest.approx(2e-3)
    assert rig.cuda.launches == 0


def test_an_input_that_is_a_shape_stays_on_the_host(rig: Rig) -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 19]> g (float[2,3] x, int32[2] shape) => (float[a,b] y) {'
        " wide = Cast<to=7>(shape) y = Reshape(x, wide) }"
    )
    built = rig.build(model, opt_shapes={"shape": [3, 2]})
    assert rig.trt.seen.profile == {"shape": ("values", [3, 2], [3, 2], [3, 2])}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for shape in ([3, 2], [1, 6]):
        inputs = {"x": x, "shape": np.array(shape, np.int32)}
        assert built.time(inputs, 1) > 0
        np.testing.assert_array_equal(built.run(inputs)["y"], x.reshape(shape))


def test_the_timing_cache_is_combined_with_its_file(rig: Rig) -> None:
    file = rig.folder / "new" / "timing.cache"
    rig.build(static(conv_model()), timing_cache=str(file))
    assert file.read_bytes() == b"fresh"
    engine = rig.open(timing_cache=str(file))
    rig.trt.seen.cache = b"later"
    file.write_bytes(b"other process")
    engine.build(rig.folder / "m.onnx", rig.folder / "build.log")
    assert set(file.read_bytes().split(b"+")) == {b"other process", b"later"}
    assert list(file.parent.iterdir()) == [file]


def test_builds_share_a_timing_cache_in_memory(rig: Rig) -> None:
    engine = rig.open()
    onnx.save(static(conv_model()), rig.folder / "m.onnx")
    for data in (b"one", b"two", b"three"):
        rig.trt.seen.cache = data
        engine.build(rig.folder / "m.onnx", rig.folder / "build.log")
    assert set(rig.trt.seen.config._cache._data.split(b"+")) == {b"one", b"two", b"three"}


def test_files_that_are_certainly_no_timing_cache_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "given"
    (output,) = timing_cache(file, "`timing_cache`")
    for content, may_be in ((b"", True), (b"\x80\x01\xfe" * 99, True), (b"my notes", False), (b"PK\x03\x04", False)):
        file.write_bytes(content)
        assert output.is_ours(file) is may_be
    onnx.save(static(conv_model()), file)
    assert not output.is_ours(file)


def test_a_timing_cache_of_another_version_is_left_alone(rig: Rig) -> None:
    file = rig.folder / "timing.cache"
    file.write_bytes(b"other version")
    engine = rig.open(timing_cache=str(file))
    onnx.save(static(conv_model()), rig.folder / "m.onnx")
    engine.build(rig.folder / "m.onnx", rig.folder / "build.log")
    assert "no timing cache of this TensorRT" in rig.log
    engine.build(rig.folder / "m.onnx", rig.folder / "build.log")
    assert file.read_bytes() == b"other version"
    assert b"fresh" in rig.trt.seen.config._cache._data


def test_plugin_libraries(rig: Rig) -> None:
    rig.open(plugin_libraries=["plugin.so"])
    rig.trt.seen.plugin = None
    with pytest.raises(EngineUnavailable, match=r"plugin\.so cannot be loaded by TensorRT"):
        rig.open(plugin_libraries=["plugin.so"])
    with pytest.raises(EngineUnavailable, match="undefined symbol"):
        rig.open(plugin_libraries=["raise.so"])


def test_what_is_missing_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str) -> None:
        with pytest.raises(EngineUnavailable, match=words):
            rig.open()

    rig.cuda.devices = 0
    refused("no NVIDIA GPU")
    rig.cuda.fail["cudaGetDeviceCount"] = rig.cuda.cudaError_t.cudaErrorInsufficientDriver
    refused("cudaErrorInsufficientDriver")
    del rig.cuda.fail["cudaGetDeviceCount"]
    dlopen = Mock(side_effect=RuntimeError("Failed to dlopen libcuda.so.1"))
    rig.cuda.__dict__["cudaGetDeviceCount"] = dlopen  # some bindings look for a driver at the first call
    refused(r"no NVIDIA driver: .*libcuda")
    absent(monkeypatch, CUDA)
    refused("pip install cuda-python")
    rig.trt.__dict__["IExecutionContext"] = object
    refused(r"too old: install 8\.6")
