"""What every engine must do. A test class per engine inherits `EngineContract` and says how to open it."""

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from models import Arrays, model
from qdqtune.commands.doctor import DoctorOptions, qualify
from qdqtune.engines import Built, Engine, EngineSpec, open_engine
from qdqtune.errors import EngineFailure
from qdqtune.tuning.observer import Silent
from qdqtune.types import NumericFormat, QType

RANDOM = np.random.default_rng(7)
CONV_WEIGHT = (0.2 * RANDOM.standard_normal((8, 4, 3, 3))).astype(np.float32)
MATMUL_WEIGHT = (0.2 * RANDOM.standard_normal((16, 8))).astype(np.float32)
IMAGE = {"x": RANDOM.standard_normal((1, 4, 8, 8)).astype(np.float32)}
ROWS = {"x": RANDOM.standard_normal((3, 16)).astype(np.float32)}


def model_of(body: str, shape: str, constants: Arrays | None = None, opset: int = 19) -> onnx.ModelProto:
    """A model from an input `x` of `shape` to an output `y`, by the text of its nodes."""
    text = f"g (float[{shape}] x) => (float[] y) {{ {body} }}"
    return onnx.shape_inference.infer_shapes(model(text, opset, 9, constants))


def conv_model(side: int = 8) -> onnx.ModelProto:
    body = "[conv] c = Conv <pads=[1,1,1,1]> (x, w) [relu] y = Relu(c)"
    return model_of(body, f"batch,4,{side},{side}", {"w": CONV_WEIGHT})


def matmul_model() -> onnx.ModelProto:
    return model_of("[matmul] y = MatMul(x, w)", "n,16", {"w": MATMUL_WEIGHT})


def quantized_conv_model(numbers: NumericFormat, side: int = 8, *, relu: bool = True) -> onnx.ModelProto:
    """The convolution with a pair on its input, its weight and its output, in an engine's own numbers."""
    middle = 128 if numbers.activation is QType.UINT8 else 0
    weight_high = 63 if numbers.reduced_weights else numbers.weight.high
    channels = np.abs(CONV_WEIGHT).max(axis=(1, 2, 3)) if numbers.per_channel else np.abs(CONV_WEIGHT).max()
    constants = {
        "w": CONV_WEIGHT,
        "s": np.float32(4.0 / (numbers.activation.high - middle)),
        "z": np.array(middle, numbers.activation.dtype),
        "ws": np.asarray(channels / weight_high, np.float32),
        "wz": np.zeros(channels.shape, numbers.weight.dtype),
    }
    axis = "<axis=0>" if numbers.per_channel else ""
    body = f"""
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
        wq = QuantizeLinear{axis}(w, ws, wz) wd = DequantizeLinear{axis}(wq, ws, wz)
        [conv] c = Conv <pads=[1,1,1,1]> (xd, wd) {"[relu] r = Relu(c)" if relu else ""}
        rq = QuantizeLinear({"r" if relu else "c"}, s, z) y = DequantizeLinear(rq, s, z)"""
    return model_of(body, f"batch,4,{side},{side}", constants)


def built_by(engine: Engine, model: onnx.ModelProto, folder: Path) -> Built:
    onnx.save(model, folder / "m.onnx")
    return engine.build(folder / "m.onnx", folder / "build.log")


def static(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with 1 for its dynamic dimensions."""
    for dimension in model.graph.input[0].type.tensor_type.shape.dim:
        dimension.dim_value = dimension.dim_value or 1
    return model


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every node."""
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type.lower()}{i}"
    return model


class EngineContract:
    """Inherit, and set `spec`; the graphs that the engine is asked about as `subjects`; names of those requirements
    that it does not meet; and `saved`: a good name for what it saves, None if it saves nothing."""

    spec: EngineSpec
    saved: str | None = "saved.plan"
    subjects = ("convolutions", "dynamic shapes")
    unmet = frozenset[str]()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "subject" in metafunc.fixturenames:
            metafunc.parametrize("subject", self.subjects)

    @pytest.mark.usefixtures("workers")
    def test_it_meets_the_requirements(self, subject: str) -> None:
        seen = qualify(DoctorOptions(engine=self.spec), Silent(), [subject]).checks
        assert {one.check for one in seen if one.state != "held"} == self.unmet

    @pytest.mark.parametrize("text", ["y = NoSuchOp(x)", "y = Add(x, nobody)"])
    def test_a_file_that_is_no_model_is_refused_in_one_line(self, engine, tmp_path, text):
        net = model(f"net (float[1] x) => (float[1] y) {{ {text} }}")
        with pytest.raises(EngineFailure) as refusal:
            built_by(engine, net, tmp_path).run({"x": np.zeros(1, np.float32)})
        assert len(str(refusal.value).splitlines()) == 1

    @pytest.mark.parametrize("inputs", [{}, {"x": np.zeros((1, 1, 2, 2), np.float32)}], ids=["none", "other sizes"])
    def test_inputs_that_do_not_fit_are_refused_in_one_line(self, engine, tmp_path, inputs):
        with pytest.raises(EngineFailure) as refusal:
            built_by(engine, conv_model(), tmp_path).run(inputs)
        assert len(str(refusal.value).splitlines()) == 1

    def opened(self) -> Engine:
        return open_engine(self.spec)

    @pytest.fixture
    def engine(self) -> Engine:
        return self.opened()

    def test_describe_is_stable_text_that_names_engine_and_version(self, engine: Engine) -> None:
        first, second = engine.describe(), self.opened().describe()
        assert first == second
        assert first["engine"] == self.spec.name
        assert {"version", "device", "threads"} <= set(first)
        assert all(isinstance(value, str) for value in first.values())

    def test_outputs_have_their_names_where_one_is_a_copy(self, engine: Engine, tmp_path: Path) -> None:
        model = model_of("[abs] a = Abs(x) [copy] y = Identity(a) [neg] b = Neg(a)", "2,3")
        model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "ba")
        x = np.array([[-1, 2, -3], [4, 5, 6]], np.float32)
        outputs = built_by(engine, model, tmp_path).run({"x": x, "nobody's": x})
        assert list(outputs) == ["y", "b", "a"]
        for name, expected in (("y", abs(x)), ("b", -abs(x)), ("a", abs(x))):
            np.testing.assert_array_equal(outputs[name], expected)

    def test_external_data_are_read_beside_the_file(self, engine: Engine, tmp_path: Path) -> None:
        path, data = tmp_path / "m.onnx", tmp_path / "weights.bin"
        onnx.save(conv_model(), path, save_as_external_data=True, location=data.name, size_threshold=0)
        assert data.stat().st_size >= CONV_WEIGHT.nbytes
        built = engine.build(path, log := tmp_path / "build.log")
        expected = ReferenceEvaluator(conv_model()).run(None, IMAGE)[0]
        np.testing.assert_allclose(built.run(IMAGE)["y"], expected, atol=1e-4)
        assert built.layers(IMAGE, 1)
        data.unlink()
        with pytest.raises(EngineFailure) as refusal:
            engine.build(path, log)
        assert len(str(refusal.value).splitlines()) == 1
        assert log.read_text().strip()

    def test_the_batch_may_differ_from_run_to_run(self, engine: Engine, tmp_path: Path) -> None:
        built = built_by(engine, conv_model(), tmp_path)
        three = {"x": np.concatenate([IMAGE["x"]] * 3)}
        assert built.run(IMAGE)["y"].shape == (1, 8, 8, 8)
        assert built.run(three)["y"].shape == (3, 8, 8, 8)
        assert 0 < built.time(IMAGE, 4) < 1
        assert 0 < built.time(three, 1) < 1

    def test_two_builds_of_one_file_live_side_by_side(self, engine: Engine, tmp_path: Path) -> None:
        first, second = (built_by(engine, matmul_model(), tmp_path) for _ in range(2))
        first.close()
        assert second.run(ROWS)["y"].shape == (3, 8)

    def test_a_layer_holds_what_was_fused_into_it(self, engine: Engine, tmp_path: Path) -> None:
        layers = built_by(engine, named(conv_model()), tmp_path).layers(IMAGE, 1)
        assert [set(layer.nodes) for layer in layers if layer.kind == "compute"] == [{"conv", "relu"}]

    def test_what_is_built_can_be_saved_or_the_refusal_says_why(self, engine, tmp_path):
        built = built_by(engine, conv_model(), tmp_path)
        if self.saved is None:
            with pytest.raises(EngineFailure, match=self.spec.name):
                built.save(tmp_path / "saved")
        else:
            built.save(tmp_path / self.saved)
            assert (tmp_path / self.saved).stat().st_size > 0
            with pytest.raises((EngineFailure, OSError)):
                built.save(tmp_path / "m.onnx" / self.saved)

    def test_close_frees_the_model(self, engine: Engine, tmp_path: Path) -> None:
        statm = Path("/proc/self/statm")
        if not statm.exists():
            pytest.skip("needs /proc")
        weight = np.ones((1024, 2048), np.float32)  # 8 MB
        model = model_of("y = MatMul(x, w)", "n,1024", {"w": weight})
        pages = []
        gc.freeze()  # or each collection looks at all that other tests have left
        for _ in range(8):
            built = built_by(engine, model, tmp_path)
            built.run({"x": np.ones((1, 1024), np.float32)})
            built.close()
            del built
            gc.collect()
            pages.append(int(statm.read_text().split()[1]))
        gc.unfreeze()
        # Each build leaks, or none: an allocator that grows once, or gives back late, is no leak.
        slopes = [(later - pages[i]) / (j - i) for i in range(8) for j, later in enumerate(pages) if j > i]
        grown = np.median(slopes) * 4096
        assert grown < weight.nbytes / 2
