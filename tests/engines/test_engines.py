"""Engines are opened by name, with options that are checked."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import pytest

from engine_contract import built_by
from loaded_modules import absent
from models import build, normal, ranges
from qdqtune import compare, quantize
from qdqtune.calibration.scales import Ranges
from qdqtune.engines import EngineSpec, devices, open_engine
from qdqtune.engines.devices import Device, allot, cores_for, leased
from qdqtune.engines.facts import ENGINES, PROVIDERS, facts_of
from qdqtune.engines.fake import FakeOptions
from qdqtune.engines.formats import numeric_format, portable, weight_formats
from qdqtune.engines.library_settings import PLAIN_OPTIONS, OnnxRuntimeOptions, plain
from qdqtune.engines.machine import instruction_sets, processor_name
from qdqtune.engines.options import EngineOptions
from qdqtune.engines.tensorrt.options import CachedOptions
from qdqtune.engines.tensorrt.rtx import RtxOptions
from qdqtune.engines.tensorrt.trtexec import TrtexecOptions
from qdqtune.errors import BadOption, EngineUnavailable
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import REWRITES
from qdqtune.graph.saving import save
from qdqtune.placement import engine_rules
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.search.costs.rule_costs import W8A16, W16A16, RuleCosts
from qdqtune.types import Array, QType

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EngineSpec("nosuch"), "unknown engine 'nosuch'; there are cuda, fake"),
        (EngineSpec("onnxruntime", {"speed": 1}), "no option 'speed'; it has threads, provider"),
        (
            EngineSpec("onnxruntime", {"threads": 0}),
            "of engine 'onnxruntime': Expected 'int' >= 1 - at '$.threads'",
        ),
        (
            EngineSpec("onnxruntime", {"threads": "two"}),
            "Expected 'int', got 'str' - at '$.threads'",
        ),
        (EngineSpec("onnxruntime", {"provider": None}), "Expected 'str', got 'null' - at '$.provider'"),
        (EngineSpec("trtexec", {"opt_shapes": {"x": ["1"]}}), "Expected 'int', got 'str' - at '$.opt_shapes"),
        (EngineSpec("fake", {"faults": {"melt": "*"}}), "Invalid enum value 'melt'"),
    ],
)
def test_bad_options_are_named(spec: EngineSpec, words: str) -> None:
    with pytest.raises(BadOption, match=re.escape(words)):
        open_engine(spec)


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "qdqtune.engines.onnxruntime")
    with pytest.raises(EngineUnavailable, match="'onnxruntime' cannot be loaded"):
        open_engine(EngineSpec("onnxruntime"))


@pytest.mark.parametrize("name", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def test_an_output_declared_with_another_shape_is_timed(name: str, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n,4] x) => (float[1,m] y) {
       d = Shape(x) f = Cast<to = 1>(d) e = Cast<to = 7>(f) y = Reshape(x, e) }"""
    built = built_by(open_engine(EngineSpec(name, {"threads": 2})), onnx.parser.parse_model(text), tmp_path)
    inputs = {"x": np.ones((3, 4), np.float32)}
    assert [built.time(inputs, runs) > 0 for runs in (1, 3)] == [True, True]
    assert built.run(inputs)["y"].shape == (3, 4)


# The engine that options choose, with what it is given of them
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"threads": 2}),
        ({"threads": 4, "engine_options": ["fuse=false"]}, {"threads": 4, "fuse": False}),
        ({"engine": "fake", "engine_options": {"provider": "P"}}, {"provider": "P"}),
        ({"engine": "trtexec"}, {"opt_shapes": {"x": [1, 3]}}),
        ({"engine": "trtexec", "engine_options": ["opt_shapes=x:2x3,y:4", "plugin_libraries=a.so"]},
         {"opt_shapes": {"x": [2, 3], "y": [4]}, "plugin_libraries": ["a.so"]}),
        ({"engine": "tensorrt", "engine_options": {"min_shapes": {"x": (2, 3)}, "timing_cache": Path("t.cache")}},
         {"opt_shapes": {"x": [1, 3]}, "min_shapes": {"x": [2, 3]}, "timing_cache": "t.cache"}),
        ({"engine": EngineSpec("fake", {"noise": 0.1})}, {"noise": 0.1}),
    ],
)  # fmt: skip
def test_an_engine_has_the_options_that_are_for_it(given: dict[str, object], expected: dict[str, object]) -> None:
    assert EngineOptions(**given).spec({"x": (1, 3)}, threads=2).options == expected


# Numbers of engines are known without the engine's library
@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_every_engine_names_its_numbers_without_its_library(engine, quant_type, monkeypatch):
    absent(monkeypatch, "tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "openvino")
    if quant_type == "fp8" and engine in ("onnxruntime", "openvino", *PROVIDERS):
        with pytest.raises(BadOption, match="no FP8"):
            numeric_format(engine, quant_type)
    else:
        numbers = numeric_format(engine, quant_type)
        assert (numbers.weight is QType.FP8) == (quant_type == "fp8")
    with pytest.raises(BadOption, match="unknown engine 'gpu'; there are cuda, fake"):
        numeric_format("gpu", quant_type)


@pytest.mark.parametrize(
    ("engine", "version", "wanted"),
    [("tensorrt", "11.4.0", "fp16"), ("tensorrt", "8.6.1", "fp32"), ("tensorrt-rtx", "1.7", "fp16"),
     ("trtexec", "", "fp16"), ("trtexec", "8.6", "fp32"), ("onnxruntime", "1.31", "fp32"), ("fake", "", "fp32")],
)  # fmt: skip
def test_the_usual_precision_is_that_of_the_engine(engine: str, version: str, wanted: str) -> None:
    assert facts_of(engine).usual_precision(version) == wanted


A53 = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid\n"
A76 = "Features\t: fp asimd evtstrm aes atomics asimdhp asimdrdm lrcpc dcpop asimddp\n"
V1 = "Features\t: fp asimd evtstrm asimddp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "activation", "reduced"),
    [
        ("aarch64", A53, QType.INT8, False),
        ("aarch64", A76, QType.UINT8, False),
        ("aarch64", V1, QType.UINT8, False),
        ("arm64", "", QType.UINT8, False),  # macOS and Windows tell nothing, and all that run them have dot products
        ("aarch64", "flags\t\t: avx2 fma\n", QType.UINT8, False),  # an emulator that shows the real processor
        ("x86_64", "flags\t\t: sse avx2 avx_vnni\n", QType.UINT8, False),
        ("AMD64", "flags\t\t: avx2 avx512_vnni\n", QType.UINT8, False),
        ("x86_64", "flags\t\t: avx2 amx_int8\n", QType.UINT8, False),
        ("x86_64", "flags\t\t: sse avx2 avx512f\n", QType.UINT8, True),
        ("x86_64", "", QType.UINT8, True),
    ],
)
def test_numbers_of_onnx_runtime_follow_the_processor(machine, cpuinfo, activation, reduced, set_processor):
    set_processor(machine, cpuinfo)
    numbers = numeric_format("onnxruntime", "int8")
    assert (numbers.activation, numbers.reduced_weights) == (activation, reduced)
    assert not numbers.symmetric  # a pair can replace a Relu
    assert (numbers.bias, numbers.drop_clamps) == ("int32", True)


@pytest.mark.parametrize("cpuinfo", [A53, A76])
def test_portable_numbers_are_the_same_on_every_processor(cpuinfo, set_processor):
    set_processor("x86_64", "flags\t\t: avx2\n")
    plain = numeric_format("onnxruntime", "int8")
    set_processor("aarch64", cpuinfo)
    on_arm = numeric_format("onnxruntime", "int8")
    assert portable("onnxruntime", on_arm) == plain == portable("onnxruntime", plain)
    assert portable("openvino", numeric_format("openvino", "int8")).reduced_weights
    assert [found.name for found in weight_formats("onnxruntime", narrow=True) if found.dynamic] == ["d7"]


@pytest.mark.parametrize("engine", ["tensorrt", "qnn", "fake", "cuda"])
def test_numbers_of_gpus_and_npus_depend_on_no_processor(engine: str) -> None:
    with pytest.raises(BadOption, match=f"{engine} takes the same numbers with every processor: leave `portable` out"):
        portable(engine, numeric_format(engine, "int8"))


# What QNN's simulator computes in 16 bits: nearly what ONNX defines, where the numbers suit it
SIMULATOR = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="Qualcomm's simulator runs on x86-64 only"
)

DATA = np.random.default_rng(0).standard_normal((8, 1, 64, 8, 8)).astype(np.float32)


def convolution(kernel: int, gap: int) -> Model:
    pads = kernel // 2 * gap
    text = f"""n (float[1,64,8,8] x) => (float[1,16,8,8] y) {{
        [conv] y = Conv <pads=[{pads},{pads},{pads},{pads}], dilations=[{gap},{gap}]> (x, w)
    }}"""
    weight = normal(16, 64, kernel, kernel, scale=0.1)
    return build(text, {"w": np.where(weight == -np.abs(weight).max((1, 2, 3), keepdims=True), -weight, weight)})


def costs_of(model: Model, known: Ranges) -> RuleCosts:
    return RuleCosts(model, engine_rules.place(model, possible_edges(model, known), "qnn", "int8").placement)


def simulated(model: Model, folder: Path, data: Array = DATA) -> float:
    """The SQNR in dB of a file with weights and activations of 16 bits."""
    pytest.importorskip("onnxruntime_qnn")
    known = ranges(model, [{"x": sample} for sample in data])
    costs = costs_of(model, known)
    files, samples = (folder / "float.onnx", folder / "pairs.onnx"), str(folder / "samples.npz")
    save(model, files[0])
    save(insert(model, costs.placement(costs.everywhere(W16A16)), known, numeric_format("qnn", "int8")), files[1])
    np.savez(samples, x=data)
    return compare(*files, calibration_data=samples, engine="qnn").rows[-1].sqnr_db


@SIMULATOR
def test_the_simulator_sums_up_the_largest_weight_exactly_and_logarithms_are_right_in_16_bits(tmp_path: Path) -> None:
    for gap in (1, 2):  # a kernel of one point loses nothing without its dilation
        assert simulated(REWRITES["dilations"].apply(convolution(1, gap)), tmp_path) > 70
    logarithm = build("n (float[1,64,8,8] x) => (float[1,64,8,8] y) { [log] y = Log(x) }", {})
    for low, high in ((0.5, 4.0), (1.0, 2.0), (0.05, 0.5)):
        data = np.random.default_rng(0).uniform(low, high, (8, 1, 64, 8, 8)).astype(np.float32)
        assert simulated(logarithm, tmp_path, data) > 60


@SIMULATOR
def test_a_running_sum_is_right_by_the_rules(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    text = "n (float[1,64,8,8] x) => (float[1,64,8,8] y) { [conv] t = Conv(x, w) [sum] y = CumSum(t, axis) }"
    weight = normal(64, 64, 1, 1, scale=0.1)
    files, samples = (tmp_path / "float.onnx", tmp_path / "pairs.onnx"), str(tmp_path / "samples.npz")
    save(build(text, {"w": weight, "axis": np.array(2, np.int64)}), files[0])
    np.savez(samples, x=DATA)
    quantize(files[0], output=files[1], engine="qnn", calibration_data=samples)
    sqnr_db = compare(*files, calibration_data=samples, engine="qnn").rows[-1].sqnr_db
    assert sqnr_db > 25


def test_dilated_convolutions_get_no_weights_of_16_bits() -> None:
    for gap, expected in ((2, W8A16), (1, W16A16)):
        model = convolution(3, gap)
        assert costs_of(model, ranges(model)).everywhere(W16A16) == (expected,)


def test_only_needless_dilations_go() -> None:
    rewrite = REWRITES["dilations"].apply
    for kernel, gap, expected in ((1, 2, 1), (3, 2, 2), (3, 1, 1)):
        model = convolution(kernel, gap)
        found = rewrite(model)
        assert onnx.helper.get_node_attr_value(found.proto.graph.node[0], "dilations") == [expected] * 2
        assert (found is model) == (expected == gap)


# What of an engine's options may come from a folder that somebody else has made
def test_options_of_providers_stay_where_they_are() -> None:
    given = {"provider": "QNNExecutionProvider", "provider_options": {"backend_path": "lib.so"}, "threads": 2}
    assert plain(EngineSpec("onnxruntime", given)) == (EngineSpec("qnn", {"threads": 2}), ["provider_options"])


@pytest.mark.parametrize("kind", [FakeOptions, OnnxRuntimeOptions, CachedOptions, RtxOptions, TrtexecOptions])
def test_what_is_a_text_is_plain_only_if_it_names_no_file(kind: Any) -> None:
    names, hints = {field.name for field in fields(kind)}, get_type_hints(kind)
    texts = {name for name in names if hints[name] in (str, str | None)}
    assert texts & PLAIN_OPTIONS <= {"provider", "target"}
    files = {"timing_cache", "plugin_libraries", "trtexec", "trtexec_args"}
    assert names - PLAIN_OPTIONS <= files | {"provider_options"}


# The processor: what /proc/cpuinfo tells of it
@pytest.mark.parametrize(
    ("name", "cpuinfo", "expected"),
    [
        ("x86_64", "model name\t: Quick 3000\nflags\t\t: sse avx2 avx_vnni\n", ("avx2", "avx_vnni")),
        ("aarch64", "model name\t: Quick 3000\nflags\t\t: sse avx2 avx_vnni\n", ()),  # by an emulator, of the real one
        ("aarch64", "model name\t: Quick 3000\nFeatures\t: asimd asimddp i8mm\n", ("asimddp", "i8mm")),
    ],
)
def test_the_processor_is_described_by_cpuinfo(name, cpuinfo, expected, set_processor):
    set_processor(name, cpuinfo)
    assert processor_name() == "Quick 3000"
    assert instruction_sets() == expected


# Devices: cores and GPUs that workers get, hold and give back
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="cores are pinned on Linux only")


class TestDevices:
    def test_physical_cores_are_not_divided_while_there_are_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "physical_cores", lambda: [[0, 4], [1, 5], [2, 6], [3, 7]])
        monkeypatch.setattr(devices, "is_free", lambda device: device.cores != (2,))
        fake = EngineSpec("fake")
        assert [device.cores for device in allot(fake, 3)] == [(0,), (1,), (6,)]
        assert [device.cores for device in allot(fake, 3, 2)] == [(0, 4), (1, 5), (6, 3)]
        with pytest.raises(BadOption, match="4 of 2 cores each want 8 cores, and 7 are free"):
            allot(fake, 4, 2)

    def test_a_worker_has_a_core_for_each_thread(self) -> None:
        assert cores_for(EngineSpec("onnxruntime", {"threads": 4}), None) == 4
        with pytest.raises(BadOption, match="`cores_per_worker` 2 is too few for `threads` 4"):
            cores_for(EngineSpec("onnxruntime", {"threads": 4}), 2)

    @pytest.mark.usefixtures("eight_cores")
    def test_each_worker_on_gpus_gets_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        asked = allot(EngineSpec("tensorrt"), 2)
        assert [d.environment for d in asked] == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
        with pytest.raises(BadOption, match="`workers` 3 wants a GPU each, and this host has 2"):
            allot(EngineSpec("trtexec"), 3)
        assert devices.needs_gpu(EngineSpec("onnxruntime", {"provider": "CUDAExecutionProvider"}))
        assert not devices.needs_gpu(EngineSpec("tensorrt-rtx", {"target": "sm89"}))


@LINUX
def test_a_device_is_held_until_the_process_that_has_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("mine", gpu=f"test-{os.getpid()}")
    assert devices.is_free(device)
    with leased(device) as (_, held):
        sleeper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                                   stdin=subprocess.PIPE, pass_fds=held)  # fmt: skip
    assert not devices.is_free(device)
    monkeypatch.setattr(devices, "LEASE_SECONDS", 0.0)
    with pytest.raises(EngineUnavailable, match="in use by another run"), leased(device):
        pass
    sleeper.communicate()
    with leased(device):
        assert not devices.is_free(device)
