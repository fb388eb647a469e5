"""`debug` on models with known faults: which tensors are named, what is said of them and of an engine at fault."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import runs
from conftest import Call
from models import UINT8, attention, build, conv_net, feeds, joined, normal, ranges
from qdqtune.commands.debug import (
    LOUDEST,
    SENSITIVE,
    UNBOUNDED_NOISE,
    Damage,
    Damages,
    DebugOptions,
    SwitchedPairs,
    debug,
    errors_by_sample,
    noise,
    switched_pairs,
    to_exclude,
)
from qdqtune.engines import EngineSpec
from qdqtune.errors import BadModel, EngineFailure
from qdqtune.graph.loading import load
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.graph.saving import save
from qdqtune.numerics.accuracy import FLOOR_DB
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.stripping import strip_pairs
from qdqtune.placement.switches import SWITCH, file_pairs
from qdqtune.types import Array, Placement, Sample, noise_of
from workers import Workers

HEALTHY = 10 ** (-FLOOR_DB / 10)
EXACT = replace(UINT8, reduced_weights=True)
"""Numbers that ONNX Runtime computes as ONNX defines them on every processor."""


@dataclass(frozen=True)
class Files:
    """A float model, its quantized version, and samples."""

    float: Path
    quantized: Path
    data: Path

    def options(self, **more: Any) -> DebugOptions:
        given: dict[str, Any] = {"quantized": self.quantized, "calibration_data": str(self.data)}
        return DebugOptions(self.float, **(given | more))


def write(model: Model, folder: Path) -> Files:
    path, known = runs.write(model, folder, "float"), ranges(model)
    files = Files(path, folder / "quantized.onnx", path.with_suffix(".npz"))
    save(insert(model, Placement.of(possible_edges(model, known)), known, EXACT), files.quantized)
    return files


@pytest.fixture
def conv(tmp_path: Path, workers: Workers) -> Files:
    return write(conv_net(), tmp_path)


def change(file: Path, name: str, how: Callable[[Any], Any]) -> None:
    """Another value for one initializer of a file."""
    model = onnx.load(file)
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(how(values), values.dtype), name))
    onnx.save(model, file)


def off_by(power: int) -> Callable[[Any], Any]:
    return lambda scale: scale * 2.0**power


def nan(scale: Any) -> Any:
    return np.full_like(scale, np.nan)


CONV_FAULTS = {
    "input": ("image_scale", off_by(6), "image"),
    "weight, 2^4": ("w1_scale", off_by(4), "w1"),
    "bias": ("b1_quantized_scale", off_by(5), "b1"),
    "zero point": ("image_zero_point", lambda zero: 255 - 0 * zero, "image"),
    "weight's zero point": ("w2_zero_point", lambda zero: zero + 60, "w2"),
    "NaN in a weight": ("w3_scale", nan, "w3"),
    "one channel NaN": ("w3_scale", lambda s: np.where(np.arange(s.size) == 3, np.nan, s), "w3"),
}


@pytest.mark.parametrize("fault", CONV_FAULTS)
def test_a_fault_is_named(conv: Files, fault: str) -> None:
    initializer, how, tensor = CONV_FAULTS[fault]
    change(conv.quantized, initializer, how)
    done = debug(conv.options())
    assert [s.tensor for s in done.guilty] == [tensor]
    assert done.noise > done.limit == pytest.approx(HEALTHY)
    assert done.rest <= HEALTHY
    assert not done.is_healthy
    (suspect,) = done.guilty
    assert suspect.noise > HEALTHY
    assert suspect.without <= 0.5 * suspect.noise


def test_a_zero_point_that_had_to_clamp_for_a_relu_that_the_file_dropped(conv: Files) -> None:
    model = load(conv.float)
    known = ranges(model)
    placement = Placement.of(e for e in possible_edges(model, known) if e.node not in ("stem_relu", "add_relu"))
    save(insert(model, placement, known, EXACT), conv.quantized)
    assert "add_relu" not in load(conv.quantized).index_of
    change(conv.quantized, "r1_zero_point", lambda zero: zero + 120)
    done = debug(conv.options(min_sqnr=30.0))
    assert [s.tensor for s in done.guilty] == ["r1"]


def test_a_concat_with_one_scale_for_parts_of_unlike_size_is_named(tmp_path: Path, workers: Workers) -> None:
    done = debug(write(joined(), tmp_path).options())
    assert not done.is_healthy
    (lost,) = done.notes
    assert lost.startswith("y[:, :, 4:12] lost its values: ")
    assert [suspect.tensor for suspect in done.guilty] == ["y"]
    assert "a Concat gives one scale to parts of unlike size: p up to " in done.guilty[0].reason
    assert done.guilty[0].joined["s"][1] < 0.1
    assert done.rest <= done.limit


@pytest.mark.parametrize("how", [off_by(7), nan], ids=["scale", "NaN"])
def test_two_faults_are_named_both(conv: Files, how: Callable[[Any], Any]) -> None:
    for tensor in ("r0", "w4"):
        change(conv.quantized, f"{tensor}_scale", how)
    done = debug(conv.options())
    assert {s.tensor for s in done.guilty} == {"r0", "w4"}
    assert done.rest <= HEALTHY


def test_where_no_tensor_is_guilty_the_worst_are_listed(tmp_path: Path, workers: Workers) -> None:
    files = write(attention(), tmp_path)
    usual = debug(files.options(min_sqnr=5.0))
    done = debug(files.options(min_sqnr=-10 * log10(usual.noise) + 0.5))
    assert not done.is_healthy
    noises = [s.noise for s in done.suspects]
    assert noises == sorted(noises, reverse=True)
    assert noises[0] < done.noise / 2


# Models without a float one beside them


def test_a_quantized_model_alone(conv: Files) -> None:
    change(conv.quantized, "cat_scale", off_by(7))
    done = debug(DebugOptions(conv.quantized, calibration_data=str(conv.data)))
    assert [s.tensor for s in done.guilty] == ["cat"]
    assert any("give the float model as well" in note for note in done.notes)


@pytest.mark.parametrize("quantized_as", ["fixed", "open"])
def test_an_input_that_is_made_constant(quantized_as: str, tmp_path: Path, workers: Workers) -> None:
    """The float file asks for it; the quantized one may, or may not any more."""
    text = "net (float[2,8] x, float[8] g) => (float[2,8] y) { [a] p = MatMul(x, w) [b] q = Mul(p, g) [c] y = Relu(q) }"
    model = build(text, {"w": normal(8, 8)})
    files = write(model, tmp_path)
    if quantized_as == "fixed":
        save(load(files.quantized, fix_inputs={"g": 2.0}), files.quantized)
    np.savez(files.data, x=np.stack([sample["x"] for sample in feeds(model, 3)]))
    assert debug(files.options(fix_inputs={"g": 2.0})).is_healthy
    change(files.quantized, "w_scale", off_by(4))
    done = debug(files.options(fix_inputs={"g": 2.0}))
    assert [s.tensor for s in done.guilty] == ["w"]


# Engines at fault


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_engine_that_computes_other_values_than_the_pairs_define(conv: Files, is_faulty: bool) -> None:
    if is_faulty:
        change(conv.quantized, "image_scale", off_by(6))
    done = debug(conv.options(engine=EngineSpec("fake", {"faults": {"nan": "side"}})))
    assert [s.tensor for s in done.guilty] == ["image"] * is_faulty
    assert "fake computes other values than the pairs define: " in done.notes[-1]
    assert done.rest > HEALTHY


def test_a_file_that_the_engine_refuses(conv: Files) -> None:
    with pytest.raises(EngineFailure, match=r"fake does not run quantized.onnx: .* no implementation"):
        debug(conv.options(engine=EngineSpec("fake", {"faults": {"refuse": "project"}})))


# What cannot be examined


def test_files_that_are_no_pair(conv: Files, tmp_path: Path) -> None:
    save(attention(), tmp_path / "other.onnx")
    for options, why in (
        (DebugOptions(conv.float, quantized=conv.float), "has no Q/DQ pairs: nothing is quantized"),
        (DebugOptions(conv.float), "has no Q/DQ pairs: give the quantized model second"),
        (DebugOptions(conv.quantized, quantized=conv.float), "give the quantized model second"),
        (DebugOptions(conv.quantized, quantized=conv.quantized), "give the float model first"),
        (DebugOptions(tmp_path / "missing.onnx"), "missing.onnx"),
        (DebugOptions(tmp_path / "other.onnx", quantized=conv.quantized), "takes other inputs"),
    ):
        with pytest.raises(BadModel, match=why):
            debug(options)


def test_float_outputs_that_are_not_finite(conv: Files) -> None:
    change(conv.float, "b4", nan)
    with pytest.raises(EngineFailure, match="NaN or infinite"):
        debug(conv.options())


# The command


def test_the_command_names_the_tensor_and_what_to_exclude(conv: Files, call: Call) -> None:
    change(conv.quantized, "w2_scale", off_by(5))
    code, out, _ = call("debug", conv.float, conv.quantized, "--calibration-data", conv.data)
    assert code == 4
    for told in ("w2", "project", "guilty", "SQNR alone", "--nodes-to-exclude project", "healthy"):
        assert told in out
    code, out, err = call("debug", conv.float, conv.quantized, "--calibration-data", conv.data, "--min-sqnr", "-20")
    assert code == 0
    assert "healthy" in out
    assert "guilty" not in out + err


def test_json_has_all_of_it_and_no_nan(conv: Files, call: Call) -> None:
    change(conv.quantized, "logits_scale", nan)
    code, out, _ = call("debug", conv.float, conv.quantized, "--calibration-data", conv.data, "--json")
    assert code == 4
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (guilty,) = found["guilty"]
    assert (guilty["tensor"], guilty["quantized_range"], guilty["output_db"]) == ("logits", ["nan", "nan"], -30)
    assert guilty["float_range"][0] < 0
    assert found["nodes_to_exclude"] == ["head"]
    assert not found["healthy"]
    assert found["rest_sqnr_db"] > FLOOR_DB


def test_a_verdict_does_not_hide_what_was_not_examined(tmp_path: Path, workers: Workers, call: Call) -> None:
    """The guilty pair is in front of a node that has another name and result in the float model."""
    text = (
        "net (float[N,4] x) => (float[N,4] y) { [first] m = MatMul(x, w) [relu] r = Relu(m) [last] y = MatMul(r, w) }"
    )
    pairs = """net (float[N,4] x) => (float[N,4] y) {
        [q1] q1 = QuantizeLinear(x, fine, z) [d1] d1 = DequantizeLinear(q1, fine, z) [first] m = MatMul(d1, w)
        [q2] q2 = QuantizeLinear(m, coarse, z) [d2] d2 = DequantizeLinear(q2, coarse, z)
        [other] o = Relu(d2) [last] y = MatMul(o, w)
    }"""
    model = build(text, {"w": normal(4, 4)})
    files = write(model, tmp_path)
    numbers = {"fine": np.float32(0.02), "coarse": np.float32(4), "z": np.int8(0)}
    save(build(pairs, {"w": normal(4, 4)} | numbers), files.quantized)
    code, out, err = call("debug", files.float, files.quantized, "--calibration-data", files.data)
    assert code == 4
    assert "no single tensor is guilty, and 1 pair not examined" in out
    assert "not examined, the first: d2" in err


def test_a_file_that_is_not_read_rightly_is_refused(conv: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a float model that was made of it wrongly would call right pairs guilty."""

    def wrong(model: Model) -> Model:
        stripped = strip_pairs(model)
        (bias,) = (name for name in stripped.constants if name.startswith("b4"))
        return rebuild(stripped, stripped.proto.graph.node, {bias: Constant.of(normal(5, seed=1))})

    monkeypatch.setattr("qdqtune.commands.debug.strip_pairs", wrong)
    with pytest.raises(BadModel, match="give the float model first, and this file second"):
        debug(DebugOptions(conv.quantized, calibration_data=str(conv.data)))


def test_a_pair_at_an_output_is_named(tmp_path: Path, workers: Workers) -> None:
    """The tensor in front of it has a name of its own, as other quantizers than ONNX Runtime's give it."""
    model = build("net (float[N,4] x) => (float[N,4] y) { [product] y = MatMul(x, w) }", {"w": normal(4, 4)})
    files = write(model, tmp_path)
    pairs = """net (float[N,4] x) => (float[N,4] y) {
        [product] m = MatMul(x, w)
        [q] q = QuantizeLinear(m, s, z)
        [d] y = DequantizeLinear(q, s, z)
    }"""
    save(build(pairs, {"w": normal(4, 4), "s": np.float32(9), "z": np.int8(0)}), files.quantized)
    for options in (files.options(), DebugOptions(files.quantized, calibration_data=str(files.data))):
        done = debug(options)
        assert [(s.tensor, s.nodes) for s in done.guilty] == [("y", ("product",))]


@pytest.mark.parametrize("weights", ["", "w8"])
def test_quantize_and_debug_tell_one_sqnr_and_one_count_of_a_file(weights, call, workers, tmp_path):
    model = attention() if weights else conv_net()
    conv = write(model, tmp_path)
    np.savez(conv.data, **{name: np.stack([s[name] for s in feeds(model, 40)]) for name in model.inputs})
    file = tmp_path / "by_rules.onnx"
    data = ("--calibration-data", conv.data, "--json")
    how = ("--weight-only", weights) if weights else ("--calibration-method", "minmax", "--no-bias-correction")
    written = json.loads(call("quantize", conv.float, "-o", file, *data, *how)[1])
    code, out, _ = call("debug", conv.float, file, *data, "--min-sqnr", 90)
    found = json.loads(out)
    assert code == 4
    assert found["output_sqnr_db"] == pytest.approx(written["output_sqnr_db"], abs=0.05)
    assert (found["samples"], found["held_out"]) == (written["samples"], written["held_out"]) == (8, True)
    assert found["examined"]["samples"] == 4
    assert found["examined"]["output_sqnr_db"] <= found["output_sqnr_db"]


def test_a_healthy_file_has_no_guilty_tensor_and_more_outputs_are_compared_with_nothing(conv: Files) -> None:
    model = onnx.load(conv.quantized)
    name = model.graph.output[0].name
    model.graph.node.append(helper.make_node("SequenceConstruct", [name], ["more"], name="more"))
    model.graph.output.append(helper.make_tensor_sequence_value_info("more", onnx.TensorProto.FLOAT, None))
    onnx.save(model, conv.quantized)
    done = debug(conv.options())
    assert done.noise < HEALTHY
    assert done.is_healthy
    assert (done.guilty, done.suspects, done.excluded) == ((), (), ())


def test_pairs_behind_a_transposed_weight_are_examined(tmp_path: Path, workers: Workers) -> None:
    """Other tools take such a weight for an activation."""
    text = "g (float[2,16] x) => (float[2,8] y) { [turn] t = Transpose(w) [product] y = MatMul(x, t) }"
    files = write(build(text, {"w": normal(8, 16)}), tmp_path)
    done = debug(files.options())
    assert not any("not examined" in note for note in done.notes)


# The tensors that do most damage


OUTPUTS = {"y": np.array([3.0, 4.0]), "class": np.array([1, 2, 3, 4])}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 0.0),
        ({"y": np.array([3.0, 4.5])}, 0.01),
        ({"class": np.array([1, 2, 3, 0])}, 0.25),
        ({"y": np.array([3.0, 4.5]), "class": np.array([0, 0, 3, 0])}, 0.75),
        ({"y": np.array([3e9, 0.0])}, LOUDEST),
        ({"y": np.array([np.nan, 4.0])}, UNBOUNDED_NOISE),
        ({"y": np.array([3.0, 4.0, 5.0])}, 3.0),
    ],
)
def test_the_worst_output_counts(changed: dict[str, Array], expected: float) -> None:
    assert noise([OUTPUTS], [OUTPUTS | changed]) == pytest.approx(expected)


def test_a_sample_without_a_signal_makes_none_of_the_error() -> None:
    reference = [{"y": np.full(4, value, np.float32)} for value in (1e-6, 1.0, 2.0)]
    outputs = [{"y": np.full(4, value, np.float32)} for value in (1e-3, 1.0, 1.5)]
    silent, exact, wrong = errors_by_sample(reference, outputs)
    assert (exact, wrong) == pytest.approx((0.0, 1.0))
    assert silent < 1e-6
    broken = errors_by_sample(reference[1:], [{"y": np.full(4, np.nan, np.float32)}] * 2)
    assert broken == [UNBOUNDED_NOISE * 4, UNBOUNDED_NOISE * 16]
    names = [{"y": np.array(["a", "b"])}]
    assert errors_by_sample(names, [{"y": np.array(["a", "c"])}]) == [0.5]
    integers = [{"y": np.array([1, 2])}]
    assert errors_by_sample(integers, [{"y": np.array([1, 3])}]) == [0.5]


FITS = Damage("t", "activation", ("a", "b"), 0.5, (-1.0, 1.0), (-1.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, SENSITIVE),
        ({"quantized_range": (np.nan, inf)}, "its scale is no finite number"),
        ({"quantized_range": (0.0, 0.0)}, "its pair can give one value only"),
        ({"quantized_range": (-1.0, 0.5)}, "its pair cuts off 25 % of the range"),
        ({"quantized_range": (-64.0, 64.0)}, "its pair spends its steps on a range 64 times as wide"),
        ({"quantized_range": (-64.0, 64.0), "whole_range": (-2.0, 2.0)}, "its pair spends its steps on a range"),
        (
            {"quantized_range": (-64.0, 64.0), "whole_range": (-60.0, 50.0)},
            "these samples are quiet, and share a scale",
        ),
        (
            {"joined": {"p": (-9.0, 1.0), "s": (0.0, 0.1)}},
            "a Concat gives one scale to parts of unlike size: p up to 9",
        ),
        ({"joined": {"p": (-1.0, 1.0), "s": (0.0, 0.1)}}, SENSITIVE),
        ({"kind": "constant", "quantized_range": (-1.0, 0.5)}, "its constant has other values than the float one"),
    ],
)
def test_the_reason_follows_from_the_two_ranges(changes: dict[str, Any], reason: str) -> None:
    assert replace(FITS, **changes).reason.startswith(reason)


@pytest.mark.parametrize("inferences", [400, 7], ids=["one by one", "in blocks"])
def test_the_worst_stand_first(inferences: int, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.commands.debug.INFERENCES", inferences)
    numbers = {"fine": np.float32(0.01), "coarse": np.float32(3), "z": np.int8(0)}
    scales = ["coarse" if i == 5 else "fine" for i in range(8)]
    nodes = "".join(f"[n{i}] t{i + 1} = Neg(t{i}) " for i in range(8))
    pairs = "".join(
        f"[q{i}] q{i} = QuantizeLinear(t{i}, {scale}, z) [d{i}] d{i} = DequantizeLinear(q{i}, {scale}, z) "
        f"[n{i}] t{i + 1} = Neg(d{i}) "
        for i, scale in enumerate(scales)
    )
    plain, quantized = (
        build(f"net (float[N,4] t0) => (float[N,4] t8) {{ {body}}}", known)
        for body, known in ((nodes, {}), (pairs, numbers))
    )
    found, unmatched = file_pairs(plain, quantized)
    assert not unmatched
    with switched_pairs(plain, quantized, found, feeds(plain, 3)) as switched:
        assert len(switched.ranking()) == 8
        assert next(iter(switched.ranking())) == "t5"


def test_pairs_that_destroy_a_slice_together_are_ranked_by_it() -> None:
    """Each alone leaves 7.6 dB of it, so that it counts as destroyed by none; the whole output has 27 dB with both."""
    values = normal(1, 200, 64)

    def run(samples: Iterable[Sample]) -> list[Sample]:
        outputs = []
        for sample in samples:
            wrong = values.copy()
            for i in range(2):
                wrong[:, 0, i::2] += 0.59 * sample[f"{SWITCH}{i}"]
            outputs.append({"y": wrong})
        return outputs

    pairs: Any = [SimpleNamespace(tensor=name) for name in "ab"]
    switched = SwitchedPairs(pairs, [{}], run)
    switched.judge_alike()
    assert switched.of_slices
    assert sum(switched.ranking().values()) == pytest.approx(switched.noise("ab"))


def test_only_what_makes_a_tenth_of_the_error_is_to_be_excluded() -> None:
    levels = {("n1", "n2"): 12.0, ("n2",): 20.0, ("n3",): 20.1, ("n4",): None}
    found = [
        replace(FITS, tensor=nodes[0], nodes=nodes, noise=0.0 if level is None else noise_of(level))
        for nodes, level in levels.items()
    ]
    for sqnr_db, most, expected in (
        (10.001, 4, ("n1", "n2")),
        (10.2, 4, ("n1", "n2", "n3")),
        (10.2, 2, ("n1", "n2")),
        (10.2, 1, ()),
        (1.0, 4, ()),
        (None, 4, ("n1", "n2", "n3")),
    ):
        report = Damages(tuple(found), 0.0 if sqnr_db is None else noise_of(sqnr_db), 3)
        assert to_exclude(report, lambda nodes, most=most: len(nodes) <= most) == expected
