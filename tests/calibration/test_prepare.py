"""What samples and workloads give: notes, sizes, and on which outputs are compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoders import CALLS, WEIGHTS, decoder, settings, written
from models import build, normal
from qdqtune.calibration.inputs import input_specs, size_hints
from qdqtune.calibration.prepare import Data, hidden_work, prepare, unsteady_work
from qdqtune.calibration.workloads import WorkloadFile, open_workloads
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import BadData, BadOption
from qdqtune.graph.loading import load
from qdqtune.placement.possible import can_carry
from qdqtune.tuning.loop import tune
from sample_files import Array, model, saved


@pytest.mark.parametrize(
    ("rows", "is_alike"),
    [
        (np.zeros((3, 3)), True),
        (np.ones((3, 1)) * [0.0, 1.0, 2.0], True),
        (np.arange(9.0).reshape(3, 3), False),
    ],
)
def test_samples_that_are_all_alike_give_one_note(tmp_path: Path, rows: Array, is_alike: bool) -> None:
    hints = prepare(model(), Data(saved(tmp_path, x=rows.astype(np.float32)))).hints
    assert any("data.npz are all equal, or hold one value" in hint for hint in hints) is is_alike


def test_a_small_model_compares_outputs_on_many_samples(tmp_path: Path) -> None:
    prepared = prepare(model(), Data(saved(tmp_path, x=normal(2000, 3))))
    assert (len(prepared.judging), prepared.is_held_out) == (256, True)
    usual = prepare(model(), Data(saved(tmp_path, x=normal(2000, 3))), most=32)
    assert len(usual.judging) == 32


def test_outputs_are_compared_on_samples_that_a_limit_keeps_from_calibration(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32)[:, None].repeat(3, 1)
    few = prepare(model(), Data(saved(tmp_path, x=rows), 4))
    assert [s["x"][0, 0] for s in few.calibration] == [0, 15, 30, 45]
    assert few.is_held_out
    assert [s["x"][0, 0] for s in few.judging] == [n for n in range(60) if n % 15]
    nearly_all = prepare(model(), Data(saved(tmp_path, x=rows), 59))  # one other is too few
    assert (nearly_all.is_held_out, len(nearly_all.judging)) == (True, 11)


def test_a_large_model_compares_outputs_on_fewer_samples(tmp_path, monkeypatch):
    for name in ("JUDGED_WORK", "MORE_WORK"):
        monkeypatch.setattr(f"qdqtune.calibration.prepare.{name}", 9.0)  # work counts an element as one at the least
    prepared = prepare(model(), Data(saved(tmp_path, x=normal(20, 3))))
    assert 8 <= len(prepared.judging) < 20


def test_open_sizes_are_fixed_for_an_engine_that_takes_no_others(tmp_path: Path) -> None:
    prepared = prepare(model("float[N,3] x"), Data(saved(tmp_path, x=normal(20, 3))))
    sized, notes = prepared.sized_for("qnn")
    assert sized.model.tensors["x"].shape == sized.shaped.tensors["x"].shape == (1, 3)
    assert ["takes fixed sizes only" in note for note in notes] == [True]
    assert prepared.sized_for("onnxruntime") == (prepared, ())
    assert sized.sized_for("qnn") == (sized, ())


def test_weights_that_callers_may_override_are_told() -> None:
    text = "g (float[2,4] x, float[4,4] w) => (float[2,4] y) { y = MatMul(x, w) }"
    overridable = build(text, {"w": normal(4, 4)})
    assert "which callers may override" in str(hidden_work(overridable))
    assert can_carry(overridable, "x", 0, 0)
    assert not can_carry(overridable, "w", 0, 1)


LOOP = """
    [a] most = Constant <value_int = 9> ()
    [b] wide = Shape (x)
    [c] size = Squeeze (wide)
    [d] yes = Constant <value = bool {1}> ()
    [e] total = ReduceSum <keepdims = 0> (x)
    [f] isbig = Greater (total, zero)
    [loop] y = Loop (TRIPS, yes, x) <
        body = one (int64 i, bool go, float[4] before) => (bool more, float[4] after) {
            after = MatMul (before, w)
            s = ReduceSum <keepdims = 0> (after)
            big = Greater (s, zero)
            more = Identity (CONDITION)
        }
    >"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = Relu (x)", None),
        ("y = NonZero (x)", "(NonZero)"),
        ("[a] size = Shape (x) \n [b] ones = ConstantOfShape (size) \n [c] y = NonZero (ones)", None),
        (LOOP.replace("TRIPS", "most").replace("CONDITION", "go"), None),
        (LOOP.replace("TRIPS", "size").replace("CONDITION", "go"), None),
        (LOOP.replace("TRIPS", "most").replace("CONDITION", "big"), "(Loop)"),
        (LOOP.replace("TRIPS, yes", "most, isbig").replace("CONDITION", "go"), "(Loop)"),
    ],
)
def test_work_that_depends_on_values_is_told(text: str, expected: str | None) -> None:
    net = build(f"g (float[4] x) => (float[N] y) {{ {text} }}", {"w": normal(4, 4), "zero": np.float32(0)})
    assert (expected or "None") in str(unsteady_work(net))
    if "Loop" in text:
        assert ("they stay in float" if expected else "unroll it") in str(hidden_work(net))


def test_a_model_in_float64_is_told() -> None:
    text = "g (double[2,4] x) => (double[2,4] y) { y = MatMul(x, w) }"
    model = build(text, {"w": normal(4, 4).astype(np.float64)})
    assert "export it in float32" in str(hidden_work(model))


def refusal(model: Path, **changes: Any) -> str:
    with pytest.raises((BadData, BadOption)) as refused:
        tune(settings(model, WEIGHTS, **changes))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.usefixtures("workers")
def test_workloads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    assert "leave `input_shapes` out" in refusal(model, input_shapes={"ids": (1, 1)})
    twice = (WorkloadFile(model.with_name("decode.npz")), WorkloadFile(model.parent / "other" / "decode.npz"))
    assert "`workloads` has 'decode' more than once" in refusal(model, workloads=twice)
    for arrays, told in (
        ({"ids": CALLS["decode"]["ids"]}, "float32[?,2,?,32]; it holds 'ids'"),
        (CALLS["decode"] | {"more": normal(1)}, "has an array 'more' that is no input"),
        (CALLS["decode"] | {"past": normal(1, 3, 15, 32)}, "'past' has shape (1, 3, 15, 32), the model wants past"),
        (CALLS["decode"] | {"ids": np.zeros((1, 1), np.int32)}, "is int32, the model wants int64"),
    ):
        np.savez(model.with_name("decode.npz"), **arrays)
        assert told in refusal(model)
    model.with_name("decode.npz").unlink()
    assert "decode.npz" in refusal(model)


def test_what_is_the_batch_of_one_input_is_one_in_the_hint_for_all() -> None:
    net = build("n (float[batch,sequence] x, float[2,batch,8] state) => (float[batch,sequence] y) { y = Relu(x) }", {})
    assert size_hints(net, input_specs(net)) == ["`input_shapes` x:1x64", "`input_shapes` state:2x1x8"]


def test_a_model_is_shaped_where_all_workloads_agree(tmp_path: Path) -> None:
    model = written(tmp_path, decoder(), CALLS)
    files = [WorkloadFile(model.with_name(f"{name}.npz")) for name in CALLS]
    prepared = prepare(load(model), Data(workloads=files))
    assert prepared.sizes == {"ids": (1, None), "past": (1, 2, None, 32)}
    assert prepared.shaped.tensors["y"].shape == (1, None, 256)
    assert [s["ids"].shape for s in prepared.samples] == [(1, 1), (1, 64)]
    alone = prepare(load(model), Data(workloads=files[:1]))
    assert alone.shaped.tensors["present"].shape == (1, 2, 16, 32)
    empty = prepare(load(model), Data(input_shapes={"ids": (1, 5), "past": (1, 2, 0, 32)}))
    assert empty.shaped.tensors["present"].shape == (1, 2, 5, 32)
    assert empty.samples.first(1)[0]["past"].shape == (1, 2, 0, 32)
    with pytest.raises(BadOption, match=r"dynamic dimensions: .* ids:1x64 `input_shapes` past:1x2x64x32$"):
        prepare(load(model), Data())
    assert [w.share for w in open_workloads(files, load(model), (), EXECUTION)] == [0.5, 0.5]
