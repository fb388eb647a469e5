"""`quantize` and `apply`: what is written, exact against a float64 reference, and what is said about it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from models import attention, build, conv_net, feeds, joined, normal, run, scales_of
from observers import Log
from qdqtune.calibration.scales import Calibration
from qdqtune.commands.debug import DebugOptions, debug
from qdqtune.commands.quantize import HELD_OUT, ApplyOptions, QuantizeOptions, apply, quantize
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import BadModel, BadOption, EngineFailure
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.rewrites import Rewrites
from qdqtune.numerics.accuracy import sqnr_db
from qdqtune.placement.files import PlacementFile, write_placement
from qdqtune.placement.insertion import insert
from qdqtune.placement.reading import read_placement
from qdqtune.types import Edge, Placement
from runs import write

pytestmark = pytest.mark.usefixtures("workers")


MINMAX: dict[str, Any] = {"calibration_method": "minmax", "bias_correction": False}


def request(path: Path, **changes: Any) -> QuantizeOptions:
    usual = {"output": path.with_name("q.onnx"), "engine": "tensorrt", "precision": "fp32"}
    return QuantizeOptions(**{"model": path, "calibration_data": str(path.with_suffix(".npz"))} | usual | changes)


def test_a_part_of_an_output_that_is_lost_is_warned_of(tmp_path: Path) -> None:
    done = quantize(request(write(joined(), tmp_path, count=5), engine="qnn"))
    assert done.sqnr_db < 3  # as large values do not hide it
    assert done.worst_slice.startswith("y[:, :, 4:12] -")
    assert done.to_dict()["worst_slice"] == done.worst_slice
    assert any(note.startswith("y[:, :, 4:12] lost its values: ") for note in done.notes)


def test_every_fifth_sample_gives_the_reported_sqnr_and_enters_no_scale(tmp_path: Path) -> None:
    model = conv_net()
    path = write(model, tmp_path, count=41)
    done = quantize(request(path))
    unseen = [s for i, s in enumerate(feeds(model, 41), 1) if i % HELD_OUT == 0]
    expected = sqnr_db(run(model, unseen), run(load(done.output), unseen))
    assert done.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert done.judged == 8
    before = scales_of(path.with_name("q.onnx"))
    with np.load(path.with_suffix(".npz")) as data:
        images = data["image"].copy()
    images[4] *= 1000
    np.savez(path.with_suffix(".npz"), image=images)
    quantize(request(path))
    assert scales_of(path.with_name("q.onnx")) == before


@pytest.mark.parametrize(
    ("selection", "gone", "kept"),
    [({"nodes_to_exclude": ["side", "de*"]}, {"side", "depthwise"}, {"stem", "project"}),
     ({"op_types_to_exclude": ["Gemm", "Add"]}, {"head", "add"}, {"stem", "side"}),
     ({"nodes_to_quantize": ["st*", "side"]}, {"project", "head", "add"}, {"stem", "side"}),
     ({"op_types_to_quantize": ["Conv"], "nodes_to_exclude": ["side"]}, {"side", "head"}, {"stem"})],
)  # fmt: skip
def test_nodes_and_operators_to_quantize_and_to_exclude(selection, gone, kept, tmp_path):
    done = quantize(request(write(conv_net(), tmp_path, count=5), engine="openvino", **selection))
    nodes = {e.node for e in done.placed.placement}
    assert not nodes & gone
    assert kept <= nodes


def test_models_that_cannot_be_quantized(tmp_path: Path) -> None:
    path = write(conv_net(), tmp_path, count=5)
    quantize(request(path))
    with pytest.raises(BadModel, match="already has Q/DQ pairs"):
        quantize(request(path, model=path.with_name("q.onnx"), output=tmp_path / "twice.onnx"))
    with pytest.raises(BadModel, match=r"find nothing to quantize in .*model.onnx among the nodes that you chose"):
        quantize(request(path, op_types_to_quantize=["Flatten"]), log := Log())
    assert not any("calibrating" in stage for stage in log.stages)
    with pytest.raises(BadModel, match=r"kept in float by .*tiny-convolutions \(\d+ edges?: [a-z]"):
        quantize(request(path, quant_type="fp8"))


def test_a_model_that_computes_in_integers_already(tmp_path: Path) -> None:
    text = """net (float[4,32] x) => (float[4,32] y) {
        q, s, z = DynamicQuantizeLinear(x)
        p = MatMulInteger(q, w, z)
        f = Cast <to=1> (p)
        y = MatMul(f, v)
    }"""
    path = write(build(text, {"w": np.ones((32, 32), np.int8), "v": normal(32, 32)}), tmp_path, count=5)
    with pytest.raises(BadModel, match=r"has 8-bit operators \(DynamicQuantizeLinear, MatMulInteger\): give the float"):
        quantize(request(path))


@pytest.mark.parametrize(("excluded", "grows"), [([], False), (["p", "q"], True)])
def test_a_file_that_grows_as_its_weights_were_in_8_bits_is_told(excluded, grows, tmp_path):
    text = """g (float[8,128] x) => (float[8,128] y) {
        a = Cast <to=1> (v) b = Mul(a, s) c = Cast <to=1> (w) d = Mul(c, s)
        [p] m = MatMul(x, b) [q] n = MatMul(m, d) [r] y = MatMul(n, d)
    }"""
    weights = {name: np.int8(normal(128, 128, seed=i) * 30) for i, name in enumerate("vw")}
    path = write(build(text, weights | {"s": np.float32(0.01)}), tmp_path)
    done = quantize(request(path, engine="onnxruntime", nodes_to_exclude=excluded))
    assert (
        any("the new file is larger: model.onnx stores weights in fewer bits" in note for note in done.notes) == grows
    )


def test_a_fixed_input_is_none_of_the_file(tmp_path: Path) -> None:
    text = "net (float[4,32] x, float[32] g) => (float[4,32] y) { h = MatMul(x, w) y = Mul(h, g) }"
    path = write(build(text, {"w": normal(32, 32)}), tmp_path)
    assert load(quantize(request(path, fix_inputs={"g": 2.0})).output).inputs == ("x",)


def test_fp8_raises_an_older_opset(tmp_path: Path) -> None:
    text = "net (float[4,32] x) => (float[4,32] y) { h = MatMul(x, w) y = Exp(h) }"
    path = write(build(text, {"w": normal(32, 32)}, opset=17), tmp_path)
    assert load(quantize(request(path, quant_type="fp8")).output).opset == 19


def test_a_float16_model_is_judged_against_the_float32_one(tmp_path: Path) -> None:
    path = write(conv_net(), tmp_path, count=5)
    done = quantize(request(path, precision="fp16", nodes_to_quantize=["side"]))
    assert load(done.output).tensors["c0"].dtype == onnx.TensorProto.FLOAT16
    assert 20 < done.sqnr_db < 80


@pytest.mark.parametrize("engine", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("net", [conv_net, attention])
def test_what_the_report_says_of_a_tensor_holds_in_a_model_with_its_pairs_only(engine, net, tmp_path):
    """Also where a pair stands for a clamp that was dropped, and where it shares its scale."""
    model = net()
    path = write(model, tmp_path, count=4)
    done = quantize(request(path, engine=engine, report=True))
    judges = feeds(model, 4)
    known = read_placement(model, load(done.output)).ranges
    numbers = replace(numeric_format(engine, "int8"), shared_scale_ops=frozenset(), bias="float", drop_clamps=False)
    exact = run(model, judges)
    worst = done.damages.worst
    assert len(worst) == min(10, len({e.tensor for e in done.placed.placement}))
    levels = [damage.output_db for damage in worst]
    assert levels == sorted(levels)
    for damage in worst:
        only = Placement.of(e for e in done.placed.placement if e.tensor == damage.tensor)
        found = sqnr_db(exact, run(insert(model, only, known, numbers), judges))
        assert damage.output_db == pytest.approx(found, abs=0.2)


def test_no_report_where_the_model_with_switches_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.commands.quantize.damages", Mock(side_effect=EngineFailure("no such operator")))
    done = quantize(request(write(conv_net(), tmp_path, count=5), report=True))
    assert done.damages is None
    assert done.sqnr_db is not None
    assert done.notes[1:] == ("no report of single tensors: no such operator",)


def test_portable_files_have_weights_of_seven_bits(tmp_path: Path) -> None:
    path = write(conv_net(), tmp_path, count=40)
    done = quantize(request(path, engine="onnxruntime", portable=True, **MINMAX))
    stored = load(done.output).constants
    weights = [stored[name].array() for name in stored if name.endswith("_quantized") and stored[name].array().ndim > 1]
    assert weights
    assert all(w.dtype == np.int8 and np.abs(w.astype(int)).max() <= 64 for w in weights)
    with pytest.raises(BadOption, match="tensorrt takes the same numbers with every processor"):
        quantize(request(path, portable=True))
    with pytest.raises(BadOption, match="`portable` is about pairs, of which `weight_only` places none"):
        quantize(request(path, engine="onnxruntime", portable=True, weight_only="w4"))


def test_a_portable_placement_is_applied_with_portable_numbers(tmp_path: Path) -> None:
    path = write(conv_net(), tmp_path, count=5)
    placement = quantize(request(path, engine="onnxruntime", **MINMAX)).placed.placement
    file = tmp_path / "placement.yaml"
    recorded = PlacementFile(Placement.of([*placement, Edge("t", "n", 1)]), "int8", "onnxruntime", {}, portable=True)
    write_placement(file, recorded, "net.onnx")
    done = apply(ApplyOptions(path, output=tmp_path / "again.onnx", placement=file))
    assert done.lost == (Edge("t", "n", 1),)
    assert done.notes == (
        "no `calibration_data`: the scales come from random inputs",
        "1 edge of the placement not in this model, the first: t -> n[1]",
    )
    weights = [c.array() for n, c in load(done.output).constants.items() if n.endswith("_quantized")]
    assert max(int(np.abs(w.astype(int)).max()) for w in weights if w.dtype == np.int8) <= 64


# Rewrites of the float model


def normalized(seed: int = 0) -> Model:
    """Two convolutions, each with a BatchNormalization behind it."""
    text = """net (float[N,3,8,8] image) => (float[N,8] y) {
        [first] c0 = Conv <pads=[1,1,1,1]> (image, w0)
        [first_norm] n0 = BatchNormalization(c0, g0, b0, m0, v0)
        [relu] r0 = Relu(n0)
        [second] c1 = Conv(r0, w1, b)
        [second_norm] n1 = BatchNormalization(c1, g1, b1, m1, v1)
        [mean] p = GlobalAveragePool(n1)
        [flat] y = Flatten(p)
    }"""
    norms = {f"{name}{i}": normal(8, seed=10 * i + k + seed) for i in range(2) for k, name in enumerate("gbm")}
    norms |= {f"v{i}": np.abs(normal(8, seed=i + seed)) + np.float32(0.2) for i in range(2)}
    return build(
        text, {"w0": normal(8, 3, 3, 3, scale=0.3), "w1": normal(8, 8, 3, 3, scale=0.2), "b": normal(8), **norms}
    )


def written(model: Model, folder: Path, name: str = "model") -> QuantizeOptions:
    path = write(model, folder, name, count=5)
    data = str(path.with_suffix(".npz"))
    return QuantizeOptions(path, output=folder / f"{name}.q.onnx", calibration_data=data, **MINMAX)


def asked(retrained: QuantizeOptions, target: Path) -> ApplyOptions:
    """The placement beside `target` on that model."""
    data, placement = retrained.calibration_data, target.with_name("placement.yaml")
    return ApplyOptions(retrained.model, output=target, calibration_data=data, placement=placement)


def ops(path: Path) -> Counter[str]:
    return Counter(node.op for node in load(path).nodes)


@pytest.mark.parametrize(("said", "left"), [("auto", 0), ("off", 2)])
def test_quantize_folds_unless_told_otherwise_and_debug_finds_it(said: str, left: int, tmp_path: Path) -> None:
    request = replace(written(normalized(), tmp_path), rewrites=said)
    done = quantize(request)
    assert ops(request.output)["BatchNormalization"] == left
    assert done.sqnr_db > 25
    data, quantized = request.calibration_data, request.output  # none of which is good enough
    looked = debug(DebugOptions(request.model, quantized=quantized, min_sqnr=60.0, calibration_data=data))
    assert looked.by_numbers == pytest.approx(looked.noise, rel=0.5)


def test_apply_folds_retrained_weights_as_the_placement_says(tmp_path: Path) -> None:
    request = written(normalized(), tmp_path)
    placement = quantize(request).placed.placement
    retrained = written(normalized(seed=7), tmp_path, "retrained")
    expected = load(quantize(retrained).output)
    for made in (Rewrites(folded=True), Rewrites()):
        recorded = PlacementFile(placement, "int8", "onnxruntime", {}, Calibration("minmax"), made)
        write_placement(tmp_path / "placement.yaml", recorded, "model.onnx")
        target = tmp_path / "applied.onnx"
        done = apply(asked(retrained, target))
        assert not done.lost  # edges keep their names either way
        assert ops(target)["BatchNormalization"] == (0 if made.folded else 2)
        same = {name: c.array().tolist() for name, c in load(target).constants.items()}
        assert (same.keys() == expected.constants.keys()) is made.folded


def test_named_rewrites_are_made_again_by_apply(tmp_path: Path) -> None:
    text = """net (float[N,16] x) => (float[N,8] y) {
        c = MatMul(x, w) a = Add(c, three) b = Clip(a, zero, six) d = Mul(c, b) y = Div(d, six)
    }"""
    numbers = {name: np.float32(value) for name, value in (("zero", 0), ("three", 3), ("six", 6))}
    given, target = written(build(text, {"w": normal(16, 8), **numbers}), tmp_path), tmp_path / "applied.onnx"
    recorded = PlacementFile(Placement(), "int8", "onnxruntime", {}, rewrites=Rewrites(names=("hardswish",)))
    write_placement(tmp_path / "placement.yaml", recorded, "model.onnx")
    apply(asked(given, target))
    assert ops(target)["HardSwish"] == 1
