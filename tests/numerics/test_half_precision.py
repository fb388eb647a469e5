"""Half precision: what leaves float16's range stays in float32, casts stand where they cost least, the rest holds."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from conftest import Call
from models import build, conv_net, feeds, normal, run
from qdqtune.calibration.calibrate import candidate_tensors
from qdqtune.calibration.prepare import Data, prepare
from qdqtune.calibration.scales import Range, Ranges
from qdqtune.errors import ConstraintUnmet
from qdqtune.graph.float16 import converted, kept_in
from qdqtune.graph.loading import load
from qdqtune.graph.model import Model
from qdqtune.graph.saving import save
from qdqtune.numerics.half_precision import extremes, in_half_precision, keeping, lowered, out_of_range, rounded
from qdqtune.placement.files import existing
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Accuracy, Edge, Placement

pytestmark = pytest.mark.usefixtures("workers")
LOUD = """net (float[2,16] x) => (float[2,16] y) {
    [first] a = MatMul(x, w)
    [square] b = Mul(a, a)
    [shift] c = Abs(b)
    [cube] d = Mul(c, a)
    [root] e = Div(d, c)
    [last] y = MatMul(e, w)
}"""
"""Between `square` and `root` values reach 1e9."""
NORM = """net (float[2,4096] x) => (float[2,1] y) {
    [mean] m = ReduceMean <keepdims=1> (x, axes)
    [last] y = Relu(m)
}"""
MASKED = """net (float[2,4] x, float[2,4] mask) => (float[2,4] y) {
    [first] a = Mul(mask, low)
    [add] b = Add(x, a)
    [soft] y = Softmax(b)
}"""


def loud() -> Model:
    """A network that leaves float16's range on the way and comes back."""
    return build(LOUD, {"w": normal(16, 16, scale=60.0)})


def test_what_makes_or_reads_too_large_values_stays() -> None:
    model = loud()
    kept = out_of_range(model, Ranges({"x": Range(0, 1), "a": Range(-900, 900), "b": Range(0, 810000.0)}))
    assert kept.keys() == {"square", "shift"}
    assert kept["square"] == "b reaches 8.1e+05"
    tiny = out_of_range(model, Ranges({"e": Range(-1e-7, 1e-6)}))
    assert (tiny.keys(), tiny["root"]) == ({"root", "last"}, "e stays below 1e-06")
    assert not out_of_range(model, Ranges({"e": Range(0.0, 30000.0)}))


def test_a_mean_stays_whose_sum_overflows_on_the_way() -> None:
    model = build(NORM, {"axes": np.int64([1])})
    assert out_of_range(model, Ranges({"m": Range(0, 100)})) == {"mean": "its inner sum reaches 4.1e+05"}
    assert not out_of_range(model, Ranges({"m": Range(0, 1)}))


def test_a_mask_may_be_cut_off_and_a_weight_may_not() -> None:
    low = build(MASKED, {"low": np.float32(-3.4e38)})
    assert not out_of_range(low, Ranges({"a": Range(-3.4e38, 0), "b": Range(-3.4e38, 5)}))
    assert out_of_range(low, Ranges({"a": Range(-3.4e38, 3.4e38)})).keys() == {"first", "add"}
    text = "net (float[N,16] x) => (float[N,16] y) { [mm] y = MatMul(x, w) }"
    assert out_of_range(build(text, {"w": np.full((16, 16), -1e6, "f")}), Ranges({})) == {
        "mm": "its weights exceed float16"
    }


def test_a_half_model_tells_what_was_kept() -> None:
    model = loud()
    assert kept_in(converted(model, "fp16", ["square", "cube"]), model) == {"square", "cube"}
    assert kept_in(converted(model, "fp16"), model) == set()


def test_overflow_is_seen_and_kept_nodes_mend_it() -> None:
    model = loud()
    samples = feeds(model)
    ranges, exact = extremes(model, samples, compared=len(samples))
    broken = keeping(model, "fp16", model, {}, samples, exact)
    assert broken.refusal
    half = lowered(model, "fp16", ranges, model, samples, exact)
    assert half.kept.keys() >= {"square", "shift", "cube", "root"}
    assert half.db > 45
    assert "square (b reaches" in half.notes()[1]
    wide = lowered(model, "bf16", ranges, model, samples, exact)
    assert not wide.kept
    assert 25 < wide.db < half.db


def test_rounding_is_that_of_the_format() -> None:
    model = build(
        "net (float[2,4] x) => (float[2,4] y) { [a] t = Mul(x, c) [b] y = Identity(t) }", {"c": np.float32(3)}
    )
    x = np.float32([[1 / 3, 1e-8, 70000, 7], [0, -1 / 3, 1e5, 2049]])
    (found,) = run(rounded(model, "fp16", ()), [{"x": x}])
    with np.errstate(over="ignore"):
        wanted = (x.astype(np.float16).astype(np.float32) * 3).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found["y"], wanted)


def test_what_does_not_hold_stays_in_float32_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtune.numerics.half_precision.accuracy", lambda *_: Accuracy(12.0))
    prepared = prepare(conv_net(), Data())
    left, half, notes = in_half_precision(prepared, None, "fp16")
    assert (left, half) == (prepared, None)
    assert ["12.0 dB, below 20 dB: what carries no pair stays in float32" in note for note in notes] == [True]
    with pytest.raises(ConstraintUnmet, match="give `precision` fp32, or bf16"):
        in_half_precision(prepared, "fp16", "fp32")
    assert in_half_precision(prepared, "fp16", "fp32", None)[1] is not None


@pytest.mark.parametrize(
    ("more", "dtype", "note"),
    [
        ([], TensorProto.FLOAT16, "note: float16 where no pair stands (--precision fp32 keeps float32)"),
        (["--precision", "fp32"], TensorProto.FLOAT, ""),
        (["--precision", "bf16"], TensorProto.BFLOAT16, "bfloat16 where no pair stands"),
    ],
)
def test_the_command_says_so(call: Call, tmp_path: Path, more: list[str], dtype: int, note: str) -> None:
    save(conv_net(), tmp_path / "m.onnx")
    code, _, err = call("quantize", tmp_path / "m.onnx", "--engine", "tensorrt", "--calibration-method", "minmax",
                        "--no-bias-correction", "-o", tmp_path / "q.onnx", *more)  # fmt: skip
    assert code == 0, err
    assert load(tmp_path / "q.onnx").tensors["w0_scale"].dtype == dtype
    assert ("float16" in err) is bool(note)
    assert note in err


def test_a_placement_of_the_float32_model_serves_its_half() -> None:
    half = converted(conv_net(), "fp16")
    edges = [Edge("image", "stem", 0), Edge("w0", "stem", 1), Edge("r0", "pool", 0), Edge("r0", "stem", 0)]
    possible = possible_edges(half, Ranges(dict.fromkeys(candidate_tensors(half), Range(0, 1))))
    known, lost = existing(half, Placement.of(edges), possible)
    assert set(known) == {Edge("graph_input_cast_0", "stem", 0), *edges[1:3]}
    assert lost == (edges[3],)
