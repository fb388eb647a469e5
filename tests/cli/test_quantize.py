"""`qdqtune quantize` as a user meets it."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from command_lines import is_refused
from conftest import Call
from models import build, conv_net, normal
from qdqtune.engines import formats
from qdqtune.graph.loading import load
from qdqtune.placement.engine_rules import rules_of
from qdqtune.placement.reading import count_pairs, read_placement
from runs import write

RUN = ("--engine", "openvino", "--calibration-data")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(conv_net(), tmp_path)


def test_one_command_writes_a_file_and_says_what_it_cost(call: Call, model: Path) -> None:
    code, out, err = call("quantize", model, *RUN, model.with_suffix(".npz"))
    target = model.with_suffix(".qdq.onnx")
    first, sizes, second, third = out.splitlines()
    pairs = count_pairs(read_placement(load(model), load(target)).placement)
    assert code == 0
    assert first == f"{target}: {pairs} tensors with a Q/DQ pair (INT8 as openvino wants it)"
    assert sizes.endswith(f" of the float model's {model.stat().st_size / 1e3:.1f} kB")
    assert second.startswith("output SQNR ")
    assert second.endswith(", on 3 samples")
    assert third.startswith("no scores of classes recognised in ")
    assert "calibrating on" in err
    assert "note: fewer than 40 samples" in err


@pytest.mark.parametrize("reduced", [False, True], ids=["weights of 8 bits", "weights of 7 bits"])
def test_the_report_shows_rules_and_the_ten_worst_tensors_and_ends_with_options_that_quantize_takes(
    reduced: bool, call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what makes a tenth of the error or more, the error is smaller. With weights of 7 bits, every product of
    this model makes as much: one stays."""
    monkeypatch.setattr(formats, "products_saturate", lambda: reduced)
    given = ("quantize", model, *RUN, model.with_suffix(".npz"), "--report", "-o", tmp_path / "r.onnx")
    code, out, _ = call(*given)
    assert code == 0
    assert all(rule.name in out for rule in rules_of("openvino", "int8"))
    table = out.split("why")[1].split("measured on")[0]
    assert len([line for line in table.splitlines() if " dB" in line]) == 10
    options = shlex.split(out.partition("may cost the gain:")[2].replace("\\\n", ""))
    before, after = (json.loads(call(*given, *more, "--json")[1]) for more in ((), options))
    assert options == [word for node in before["nodes_to_exclude"] for word in ("--nodes-to-exclude", node)]
    assert after["output_sqnr_db"] > before["output_sqnr_db"] + 1
    assert after["edges"] < before["edges"]


def test_a_report_names_no_node_without_which_nothing_is_quantized(call: Call, tmp_path: Path) -> None:
    path = write(build("net (float[4,8] x) => (float[4,8] y) { [a] y = MatMul(x, w) }", {"w": normal(8, 8)}), tmp_path)
    given = ("quantize", path, *RUN, path.with_suffix(".npz"), "--report")
    assert "no node to keep in float" in call(*given)[1]
    assert json.loads(call(*given, "--json")[1])["nodes_to_exclude"] == []


def test_json_holds_it_all_and_null_where_nothing_is_lost(call: Call, tmp_path: Path) -> None:
    text = "net (float[4,32] x) => (float[4,32] y) {\n [a] p = MatMul(x, w)\n [b] q = Abs(p)\n [end] y = Floor(q) }"
    path = write(build(text, {"w": np.eye(32, dtype=np.float32)}), tmp_path)
    np.savez(path.with_suffix(".npz"), x=np.float32(np.random.default_rng(0).integers(-1, 2, (6, 4, 32)) * 127))
    code, out, _ = call("quantize", path, *RUN, path.with_suffix(".npz"), "--report", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["output_sqnr_db"] is None
    assert (found["samples"], found["held_out"], found["metric"]) == (6, False, None)
    assert found["rules"]["compute-inputs"] == found["edges"] == 2
    assert {p["tensor"] for p in found["pairs"]} == {"x", "w"}
    assert {(*p["nodes"], p["output_db"]) for p in found["pairs"]} == {("a", None)}
    assert found["finite"]


def test_choices_and_metric_reach_it(call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metric.py").write_text(
        "import numpy as np\ndef spread(predict):\n"
        "    return float(np.std(predict({'image': np.ones((1, 3, 8, 8), 'f')})['logits']))\n"
    )
    monkeypatch.chdir(tmp_path)
    given = (
        "quantize", model, *RUN, model.with_suffix(".npz"), "--nodes-to-exclude", "side",
        "--op-types-to-exclude", "Gemm", "--precision", "fp16",
        "--calibration-method", "mse", "--evaluate", "metric.py:spread",
    )  # fmt: skip
    before, after = json.loads(call(*given, "--json")[1])["metric"].values()
    assert before == pytest.approx(after, rel=0.5)
    assert before != after
    code, out, _ = call(*given)
    assert code == 0
    assert out.splitlines()[-1] == f"metric.py:spread: {before:.4g} before, {after:.4g} after"
    done = load(model.with_suffix(".qdq.onnx"))
    assert done.constants["w0_scale"].array().dtype == np.float16
    assert not {"w3_scale", "w4_scale"} & done.constants.keys()


def test_weights_alone_are_stored_as_asked_and_the_words_say_how_many(call: Call, tmp_path: Path) -> None:
    weights = {"w0": normal(64, 64), "w1": normal(64, 48), "w2": normal(48, 16)}
    net = "net (float[N,64] x) => (float[N,16] y) { [a] h = MatMul(x, w0) [b] i = MatMul(h, w1) [c] y = MatMul(i, w2) }"
    path, target = write(build(net, weights), tmp_path), tmp_path / "w4.onnx"
    code, out, _ = call("quantize", path, "--weight-only", "w4", "--nodes-to-exclude", "c", "-o", target)
    assert code == 0
    assert f"{target}: weights stored in fewer bits: 2 as w4b32a\n" in out
    assert {e.node: s.name for e, s in read_placement(load(path), load(target)).placement.weight_only} == {
        "a": "w4b32a",
        "b": "w4b32a",
    }
    code, out, _ = call("check", target)
    assert code == 0
    assert ": 2 weights are stored in fewer bits, 0 of 3" in out
    code, out, _ = call("check", "--layers", target, "--json")
    ran = [(layer["precision"], layer["nodes"][-1]) for layer in json.loads(out)["layers"] if layer["nodes"]]
    assert ran == [("W4", "a"), ("W4", "b"), ("FP32", "c")]
    assert call("quantize", path, "--weight-only", "w8", "--report", "-o", target)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--engine", "gpu"], "'gpu' is not one of"), (["--quant-type", "fp8"], "onnxruntime has no FP8 kernels"),
     (["--nodes-to-exclude", "nobody"], "no node is named 'nobody'"), (["-o", "no/q.onnx"], "there is no folder no"),
     (["-o", "."], "cannot write .: it is a folder"), (["-o", "/dev/null/q.onnx"], "there is no folder /dev/null"),
     (["-o", "/proc/q.onnx"], "cannot write /proc/q.onnx"),
     (["--precision", "fp16"], " half-precision ("), (["--op-types-to-exclude", "LSTM"], "the model has no LSTM; it "),
     (["--calibration-data", "m.npz", "--report", "--time-budget", "9s"], "--report runs the model up to 400 times")],
)  # fmt: skip
def test_bad_input_is_one_line(call: Call, model: Path, arguments: list[str], words: str) -> None:
    is_refused(call, model.parent, words, "quantize", model, *arguments)


@pytest.mark.parametrize("by", ["float", "quantized"])
def test_outputs_that_are_not_finite_are_told_and_json_stays_valid(by: str, call: Call, tmp_path: Path) -> None:
    """1/p: p is 0 in the quantized model only, where rounding makes it so."""
    text = "net (float[4,32] x) => (float[4,32] y) {\n [a] p = MatMul(x, w)\n [b] y = Reciprocal(p) }"
    path = write(build(text, {"w": np.eye(32, dtype=np.float32)}), tmp_path)
    values = np.ones((6, 4, 32), np.float32)
    values[:, 0, :2] = 1000, 0 if by == "float" else 0.001
    np.savez(path.with_suffix(".npz"), x=values)
    code, out, err = call("quantize", path, *RUN, path.with_suffix(".npz"), "--report", "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert (found["finite"], found["output_sqnr_db"]) == (False, None)
    assert f"note: outputs of the {by} model are NaN or infinite" in err
    assert "output SQNR unknown, on 6 samples\n" in call("quantize", path, *RUN, path.with_suffix(".npz"))[1]


def test_a_folder_of_one_model_gets_the_quantized_one_beside_it(call: Call, model: Path) -> None:
    data = model.with_suffix(".npz").rename(model.parent.parent / "data.npz")
    assert call("quantize", model.parent, *RUN, data)[0] == 0
    assert model.with_suffix(".qdq.onnx").is_file()
    assert call("quantize", model.parent, *RUN, data)[0] == 0
