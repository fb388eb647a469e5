from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine_contract import IMAGE, EngineContract, conv_model, model_of, quantized_conv_model
from models import FORMATS, build, conv_net, feeds, normal, ranges, run, sqnr
from qdqtune.engines import EngineSpec, cpu, open_engine
from qdqtune.engines import fake as fake_module
from qdqtune.engines.fake import latency
from qdqtune.engines.formats import MOVED_ACROSS, ONNXRUNTIME_SHARED
from qdqtune.engines.onnxruntime import engine as ort_module
from qdqtune.errors import BadOption, EngineFailure, EngineUnavailable, one_line
from qdqtune.graph.saving import save
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import NumericFormat, Placement, QType

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs OpenVINO")
SYMMETRIC = NumericFormat(QType.INT8, QType.INT8, symmetric=True)


class TestFake(EngineContract):
    spec = EngineSpec("fake")
    saved = None


class TestFakeAsymmetric(EngineContract):
    spec = EngineSpec("fake", {"asymmetric": True, "noise": 0.05, "drift": 0.1, "spikes": 0.01})
    saved = None


class TestOnnxRuntime(EngineContract):
    spec = EngineSpec("onnxruntime")
    saved = "saved.onnx"


class TestOnnxRuntimeThreads(EngineContract):
    spec = EngineSpec("onnxruntime", {"threads": 2})
    saved = "saved.onnx"


@needs_openvino
class TestOpenVino(EngineContract):
    spec = EngineSpec("openvino")
    saved = "saved.xml"


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, qdqtune.engines, qdqtune.engines.runner; sys.exit(any('onnxruntime' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EngineSpec("nosuch"), "unknown engine 'nosuch'; there are fake, onnxruntime"),
        (EngineSpec("onnxruntime", {"speed": 1}), "no option 'speed'; it has threads, provider"),
        (EngineSpec("onnxruntime", {"threads": 0}), "--threads"),
        (
            EngineSpec("onnxruntime", {"threads": "two"}),
            "option 'threads' of engine 'onnxruntime' is a whole number, not 'two'",
        ),
        (EngineSpec("onnxruntime", {"threads": True}), "is a whole number, not True"),
        (EngineSpec("onnxruntime", {"fuse": 1}), "is true or false, not 1"),
        (EngineSpec("onnxruntime", {"provider": None}), "is text, not None"),
        (EngineSpec("fake", {"noise": "loud"}), "is a number, not 'loud'"),
        (EngineSpec("fake", {"faults": ["hang"]}), "is a JSON object or null, not ['hang']"),
        (EngineSpec("trtexec", {"builder_level": 2.5}), "is a whole number or null, not 2.5"),
        (EngineSpec("trtexec", {"plugin_libraries": "p.so"}), "is a JSON list, not 'p.so'"),
        (EngineSpec("trtexec", {"opt_shapes": {"x": ["1"]}}), "is a JSON object or null, not {'x': ['1']}"),
        (EngineSpec("fake", {"faults": {"melt": "*"}}), "no fault 'melt'"),
        (EngineSpec("fake", {"noise": -1}), "negative"),
    ],
)
def test_bad_options_are_named(spec: EngineSpec, words: str) -> None:
    with pytest.raises(BadOption, match=re.escape(words)):
        open_engine(spec)


def test_a_missing_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdqtune.engines.onnxruntime.engine", None)
    with pytest.raises(EngineUnavailable, match="'onnxruntime' cannot be loaded"):
        open_engine(EngineSpec("onnxruntime"))


def test_a_missing_openvino_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "qdqtune.engines.openvino.engine", raising=False)
    with pytest.raises(EngineUnavailable, match=r"pip install 'qdqtune\[openvino\]'"):
        open_engine(EngineSpec("openvino"))


@needs_openvino
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "--threads must be a whole number"),
        ({"precision": "f64"}, "no precision 'f64'; it has f32, f16, bf16"),
        ({"provider": "x"}, "no option 'provider'; it has threads, precision"),
    ],
)
def test_bad_options_of_openvino_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        open_engine(EngineSpec("openvino", options))


@needs_openvino
def test_openvino_says_its_precision_and_wants_symmetric_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: "flags : avx2\n")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    engine = open_engine(EngineSpec("openvino", {"precision": "bf16", "threads": 2}))
    assert (engine.describe()["precision"], engine.describe()["threads"]) == ("bf16", "2")
    numbers = engine.numeric_format("int8")
    assert (numbers.activation, numbers.symmetric, numbers.reduced_weights) == (QType.INT8, True, True)
    assert (numbers.bias, numbers.drop_clamps, numbers.shared_scale_ops) == ("float", False, MOVED_ACROSS)
    with pytest.raises(BadOption, match="--quant-type int8"):
        engine.numeric_format("fp8")


@needs_openvino
def test_openvino_refuses_in_its_own_words_without_its_source_places(tmp_path: Path) -> None:
    onnx.save(model_of([helper.make_node("NoSuchOp", ["x"], ["y"])], [1], {}), tmp_path / "m.onnx")
    with pytest.raises(EngineFailure, match=r"^OpenVINO: Model wasn't fully converted.*NoSuchOp") as refusal:
        open_engine(EngineSpec("openvino")).build(tmp_path / "m.onnx", tmp_path / "log")
    assert ".cpp" not in str(refusal.value)
    assert ".cpp" in (tmp_path / "log").read_text()


@needs_openvino
def test_openvino_computes_what_pairs_between_a_concat_and_a_convolution_say(tmp_path: Path) -> None:
    """It takes steps of 1 for those of an int8 pair there."""
    text = """net (float[1,8,9,9] x, float[1,8,9,9] z) => (float[1,6,9,9] y) {
        [join] c = Concat <axis=1> (x, z)
        [read] y = Conv <pads=[1,1,1,1]> (c, w)
    }"""
    model = build(text, {"w": normal(6, 16, 3, 3)})
    samples, engine = feeds(model), open_engine(EngineSpec("openvino"))
    found = ranges(model, samples)
    placement = Placement(frozenset(e for e in possible_edges(model, found) if e.tensor in "cw"))
    quantized = insert(model, placement, found, engine.numeric_format("int8"))
    save(quantized, tmp_path / "m.onnx")
    built = engine.build(tmp_path / "m.onnx", tmp_path / "log")
    assert sqnr(run(quantized, samples), [built.run(sample) for sample in samples]) > 60


def test_a_missing_provider_names_those_that_exist() -> None:
    with pytest.raises(EngineUnavailable, match=r"it has .*CPUExecutionProvider"):
        open_engine(EngineSpec("onnxruntime", {"provider": "NoSuchExecutionProvider"}))


@pytest.mark.parametrize("name", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def test_an_output_declared_with_another_shape_is_timed(name: str, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n,4] x) => (float[1,m] y) {
       d = Shape(x) f = Cast<to = 1>(d) e = Cast<to = 7>(f) y = Reshape(x, e) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    built = open_engine(EngineSpec(name)).build(tmp_path / "m.onnx", tmp_path / "log")
    inputs = {"x": np.ones((3, 4), np.float32)}
    assert [built.time(inputs, runs) > 0 for runs in (1, 3)] == [True, True]
    assert built.run(inputs)["y"].shape == (3, 4)


def test_onnxruntime_has_no_fp8() -> None:
    with pytest.raises(BadOption, match="--quant-type int8"):
        open_engine(EngineSpec("onnxruntime")).numeric_format("fp8")


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "reduced"),
    [
        ("x86_64", "model name : Old\nflags\t\t: sse avx2 avx512f\n", True),
        ("x86_64", "flags\t\t: avx2 avx512_vnni\n", False),
        ("AMD64", "flags\t\t: avx2 avx_vnni\n", False),
        ("x86_64", "flags\t\t: avx2 amx_int8\n", False),
        ("x86_64", "", True),
        ("aarch64", "Features\t: fp asimd\n", False),
        ("arm64", "", False),
    ],
)
def test_weights_lose_a_bit_where_products_saturate(
    monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str, reduced: bool
) -> None:
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: cpuinfo)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    numbers = ort_module.create().numeric_format("int8")
    assert numbers.reduced_weights is reduced
    assert (numbers.activation, numbers.bias, numbers.drop_clamps) == (QType.UINT8, "int32", True)


@pytest.mark.parametrize("op", ["MaxPool", "Flatten", "Transpose"])
def test_onnxruntime_runs_shared_scale_operators_on_integers(tmp_path: Path, op: str) -> None:
    assert op in ONNXRUNTIME_SHARED
    attributes = {"kernel_shape": [2, 2]} if op == "MaxPool" else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node(op, ["d"], ["t"], **attributes),
        helper.make_node("QuantizeLinear", ["t", "s", "z"], ["u"]),
        helper.make_node("DequantizeLinear", ["u", "s", "z"], ["y"]),
    ]
    model = model_of(nodes, [1, 4, 6, 6], {"s": np.array(0.1, np.float32), "z": np.array(3, np.uint8)}, opset=17)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ran = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ran == ["QuantizeLinear", op, "DequantizeLinear"]


def test_one_line_joins_and_shortens() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 999, limit=50)) == 50


def test_a_pair_around_a_small_operator_costs_and_around_a_large_one_gains() -> None:
    def gain(side: int) -> float:
        return latency(conv_model(side)) / latency(quantized_conv_model(SYMMETRIC, side))

    assert gain(4) < 1 < gain(256)


def _chain(quantized: set[str]) -> onnx.ModelProto:
    """Conv, Softmax, Conv: the tensors in `quantized`, and both weights, carry a pair for their one reader."""
    nodes, current = [], "x"
    weight = np.ones((16, 16, 3, 3), np.float32)
    constants = {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}

    def pair(tensor: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [tensor, "s", "z"], [f"{tensor}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tensor}_q", "s", "z"], [f"{tensor}_d"]))
        return f"{tensor}_d"

    for op, out in (("Conv", "a"), ("Softmax", "b"), ("Conv", "y0")):
        current = pair(current) if current in quantized else current
        inputs = [current]
        if op == "Conv":
            constants[f"w_{out}"] = weight
            inputs.append(pair(f"w_{out}"))
        nodes.append(helper.make_node(op, inputs, [out], **({"pads": [1, 1, 1, 1]} if op == "Conv" else {})))
        current = out
    current = pair(current) if current in quantized else current
    nodes.append(helper.make_node("Identity", [current], ["y"]))
    return model_of(nodes, [1, 16, 16, 16], constants)


def test_an_operator_without_integer_kernel_gains_nothing_from_pairs() -> None:
    nothing, everything = latency(_chain(set())), latency(_chain({"x", "a", "b", "y0"}))
    last_only = latency(_chain({"b", "y0"}))
    half_a_pair = latency(_chain({"b"}))
    assert last_only < nothing < half_a_pair
    assert everything < nothing
    assert latency(_chain({"a"})) > nothing


def test_pairs_on_constants_are_folded() -> None:
    without = _chain(set())
    for node in [n for n in without.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]:
        without.graph.node.remove(node)
    for node in without.graph.node:
        node.input[:] = [name.removesuffix("_d") for name in node.input]
    assert latency(without) == latency(_chain(set()))


def _samples(tmp_path: Path, count: int, **options: object) -> np.ndarray:
    onnx.save(conv_model(), tmp_path / "m.onnx")
    built = fake_module.create(**options).build(tmp_path / "m.onnx", tmp_path / "log")  # type: ignore[arg-type]
    return np.array([built.time(IMAGE, 1) for _ in range(count)]) / latency(conv_model())


def test_noise_follows_the_seed_and_the_call(tmp_path: Path) -> None:
    options = {"noise": 0.05, "drift": 0.1, "spikes": 0.02}
    first = _samples(tmp_path, 50, seed=1, **options)
    assert (first == _samples(tmp_path, 50, seed=1, **options)).all()
    assert (first != _samples(tmp_path, 50, seed=2, **options)).all()
    assert (_samples(tmp_path, 5) == 1).all()


def test_noise_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    noise = np.log(_samples(tmp_path, 2000, noise=0.05))
    drift = np.log(_samples(tmp_path, 2000, drift=0.1))
    spikes = _samples(tmp_path, 2000, spikes=0.02)
    assert math.isclose(noise.std(), 0.05, rel_tol=0.1)
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.1
    assert np.corrcoef(drift[1:], drift[:-1])[0, 1] > 0.95
    assert 0.03 < drift.std() < 0.2
    assert 10 < (spikes > 1).sum() < 80
    assert spikes.max() <= 3


def test_a_fault_strikes_only_models_with_a_pair_at_that_node(tmp_path: Path) -> None:
    engine = fake_module.create(faults={"refuse": "con*"})
    onnx.save(conv_model(), tmp_path / "float.onnx")
    onnx.save(quantized_conv_model(SYMMETRIC), tmp_path / "quantized.onnx")
    assert engine.build(tmp_path / "float.onnx", tmp_path / "log").time(IMAGE, 1) > 0
    with pytest.raises(EngineFailure, match="no implementation"):
        engine.build(tmp_path / "quantized.onnx", tmp_path / "log")
    other = fake_module.create(faults={"refuse": "matmul*"})
    assert other.build(tmp_path / "quantized.onnx", tmp_path / "log").time(IMAGE, 1) > 0


def test_fake_runs_fp8(tmp_path: Path) -> None:
    engine = fake_module.create()
    onnx.save(quantized_conv_model(engine.numeric_format("fp8")), tmp_path / "q.onnx")
    quantized = engine.build(tmp_path / "q.onnx", tmp_path / "log").run(IMAGE)["y"]
    onnx.save(conv_model(), tmp_path / "f.onnx")
    exact = engine.build(tmp_path / "f.onnx", tmp_path / "log").run(IMAGE)["y"]
    assert 0 < np.abs(quantized - np.clip(exact, 0, 4)).max() < 0.5


@pytest.mark.parametrize("numbers", ["int8", "uint8"])
@pytest.mark.parametrize("opset", [13, 18])
def test_fake_runs_pairs_of_any_opset_that_has_them(opset: int, numbers: str, tmp_path: Path) -> None:
    model = conv_net(opset=opset)
    found = ranges(model)
    everywhere = Placement(possible_edges(model, found))
    quantized = insert(model, everywhere, found, FORMATS[numbers])
    assert quantized.opset == opset
    save(quantized, tmp_path / "q.onnx")
    samples = feeds(model, 2)
    built = fake_module.create().build(tmp_path / "q.onnx", tmp_path / "log")
    assert sqnr(run(quantized, samples), [built.run(sample) for sample in samples]) > 60


@pytest.mark.parametrize("opset", [10, 13, 18, 19])
def test_fake_dequantizes_as_onnxruntime_does(opset: int, tmp_path: Path) -> None:
    """With and without zero point, the scales of channels along any axis, 32-bit values, and in the body of an If."""
    x, wide = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.arange(-3, 3, dtype=np.int32)
    one, many = np.float32(0.5), np.array([0.5, 2, 3, 0.1], np.float32)
    constants = {"x": x, "wide": wide, "one": one, "two": many[:2], "three": many[:3], "four": many,
                 "zero": np.uint8(9), "zeros": np.array([1, 2, 3], np.uint8)}  # fmt: skip
    forms: list[tuple[list[str], dict[str, int]]] = [
        (["x", "one"], {}),
        (["x", "one", "zero"], {}),
        (["wide", "one"], {}),
    ]
    if opset >= 13:
        forms += [(["x", "three", "zeros"], {}), (["x", "two"], {"axis": 0}), (["x", "four"], {"axis": -1})]
    nodes = [helper.make_node("DequantizeLinear", inputs, [f"y{k}"], **more) for k, (inputs, more) in enumerate(forms)]
    inner = helper.make_node("DequantizeLinear", ["x", "one", "zero"], ["inside"])
    body = helper.make_graph(
        [inner], "body", [], [helper.make_tensor_value_info("inside", TensorProto.FLOAT, [2, 3, 4])]
    )
    nodes.append(helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body))
    names = [*(f"y{k}" for k in range(len(forms))), "z"]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [6] if n == "y2" else [2, 3, 4]) for n in names],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    feed = {"c": np.array(True)}
    outputs = fake_module.create().build(tmp_path / "m.onnx", tmp_path / "log").run(feed)
    (expected,) = run(model, [feed])
    assert set(outputs) == set(names)
    for name in names:
        np.testing.assert_array_equal(outputs[name], expected[name], strict=True)


@pytest.mark.parametrize(("ir_version", "opset", "what"), [(999, 17, "IR version 999"), (10, 999, "opset 999")])
def test_onnx_runtime_refuses_a_later_onnx_in_a_sentence(
    tmp_path: Path, ir_version: int, opset: int, what: str
) -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        *([onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])] for name in "xy"),
    )
    opsets = [onnx.helper.make_opsetid("", opset)]
    path = tmp_path / "new.onnx"
    path.write_bytes(onnx.helper.make_model(graph, ir_version=ir_version, opset_imports=opsets).SerializeToString())
    with pytest.raises(EngineFailure) as refusal:
        open_engine(EngineSpec("onnxruntime")).build(path, tmp_path / "log")
    assert re.fullmatch(
        rf"the model has {what}, and ONNX Runtime [\d.]+ reads up to \d+: export it for that one, or install .+",
        str(refusal.value),
    )
