"""The model value, and how it is saved: in one file, or by reference to a file of constants."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser

from models import Array, build, normal, outputs
from qdqtune.errors import OutputError
from qdqtune.graph.loading import nbytes
from qdqtune.graph.model import Constant, Model
from qdqtune.graph.saving import ConstantFile, save

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[N,40] x, bool c) => (float[N,40] y, float[N,40] z) <float[N,40] t, float[1] b = {2}> {
    [mm] t = MatMul(x, w)
    [add] s = Add(t, b)
    [mm2] y = MatMul(s, v)
    [if] z = If(c) <
        then_branch = a () => (float[N,40] p) { k = Relu(t)
            p = Add(k, b) },
        else_branch = d () => (float[N,40] q) { q = Add(x, x) }>
}"""
FEEDS = {"x": np.ones((2, 40), np.float32), "c": np.array(True)}


def weights(value: float = 1.0) -> Array:
    array = np.eye(40, dtype=np.float32)
    array[0, 0] = value
    return array


def model(w: Array | None = None, v: Array | None = None) -> Model:
    large = {"w": Constant.of(weights() if w is None else w), "v": Constant.of(weights() if v is None else v)}
    return Model(parser.parse_model(TEXT), large)


def test_beyond_the_limit_constants_go_beside_it_and_each_content_once(tmp_path, monkeypatch):
    monkeypatch.setattr("qdqtune.graph.saving.ONE_FILE_LIMIT", 6000)
    (tmp_path / "m.onnx.data").write_bytes(bytes(100_000))
    save(model(), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size == 40 * 40 * 4
    assert (tmp_path / "m.onnx").stat().st_size < 2000
    np.testing.assert_array_equal(outputs(tmp_path / "m.onnx", FEEDS)[0], np.full((2, 40), 3))
    onnx.checker.check_model(str(tmp_path / "m.onnx"))


def test_the_size_of_a_model_counts_its_external_data(tmp_path: Path) -> None:
    model = build("g (float[4,300] x) => (float[4,8] y) { y = MatMul(x, w) }", {"w": normal(300, 8)})
    with ConstantFile(tmp_path / "w.bin") as constants:
        small = constants.write(model, "small")
    assert nbytes(small) == small.stat().st_size + 300 * 8 * 4
    save(model, tmp_path / "whole.onnx")
    assert nbytes(tmp_path / "whole.onnx") == (tmp_path / "whole.onnx").stat().st_size


def test_a_constant_may_be_computed_by_running_a_model_that_is_written_to_the_same_file(tmp_path: Path) -> None:
    given = model()

    def computed() -> Array:
        return weights() * outputs(constants.write(given, "observed"), FEEDS)[0][0, 0]

    with ConstantFile(tmp_path / "w.bin") as constants:
        late = {"v": Constant("late", TensorProto.FLOAT, (40, 40), computed)}
        constants.save(Model(given.proto, given.large | late), tmp_path / "m.onnx")
    assert outputs(tmp_path / "m.onnx", FEEDS)[0][0, 0] == 9


def test_a_new_file_does_not_truncate_an_older_mapped_one(tmp_path: Path) -> None:
    with ConstantFile(tmp_path / "w.bin") as constants:
        constants.save(model(), tmp_path / "m.onnx")
    with (tmp_path / "w.bin").open("rb") as held:
        ConstantFile(tmp_path / "w.bin").__exit__()
        assert held.read()


def test_a_file_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "where"
    with pytest.raises(OutputError, match=r"cannot write .*where"):
        save(model(), nowhere)
    with pytest.raises(OutputError, match=r"cannot write .*where"):
        ConstantFile(nowhere)
    with ConstantFile(tmp_path / "w.bin") as constants, pytest.raises(OutputError, match=r"cannot write .*where"):
        constants.save(model(), nowhere)


def test_keys_name_the_content() -> None:
    zeros = np.zeros((4, 300), np.float32)
    assert Constant.of(zeros).key == Constant.of(zeros.copy()).key
    others = [zeros.T, zeros.astype(np.int32), zeros + 1, zeros.astype(ml_dtypes.bfloat16)]
    assert len({Constant.of(a).key for a in [zeros, *others]}) == 5
    assert Constant.of(zeros[:, ::2]).array().shape == (4, 150)


def test_the_fingerprint_follows_the_content_of_constants_only() -> None:
    assert model().fingerprint == model().fingerprint
    assert model(weights(2)).fingerprint != model().fingerprint
    assert model(weights(2), weights()).fingerprint != model(weights(), weights(2)).fingerprint
    renamed = parser.parse_model(TEXT.replace("[mm2]", "[other]"))
    assert Model(renamed, model().large).fingerprint != model().fingerprint


def test_spans_are_aligned(tmp_path: Path) -> None:
    with ConstantFile(tmp_path / "w.bin") as constants:
        constants.save(model(v=weights(3)), tmp_path / "a.onnx")
    tensors = onnx.load(tmp_path / "a.onnx", load_external_data=False).graph.initializer
    offsets = [int(e.value) for t in tensors for e in t.external_data if e.key == "offset"]
    assert len(set(offsets)) == 2
    assert all(offset % ConstantFile.ALIGN == 0 for offset in offsets)
