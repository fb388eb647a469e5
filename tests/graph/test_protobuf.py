"""Files that hold no model are refused when they are read."""

from pathlib import Path

import pytest

from loaded_models import model, normal
from qdqtune.errors import BadModel
from qdqtune.graph import protobuf
from qdqtune.graph.loading import load

GOOD = model("g (float[300] x) => (float[300] y) { [n] y = Add(x, w) }", constants={"w": normal(300)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not an ONNX file"),
        (b"no model at all, just some words", "not an ONNX file"),
        (GOOD.SerializeToString()[:-7], "not an ONNX file, or damaged|invalid graph"),
        (GOOD.SerializeToString()[:500], "not an ONNX file"),
        (GOOD.SerializeToString().replace(b"Add", b"\xff\xfe\xfd"), "model.onnx: "),
    ],
)
@pytest.mark.parametrize("apart", [protobuf.APART_BYTES, 0])
def test_files_that_are_no_models(
    file: Path, content: bytes | None, message: str, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protobuf, "APART_BYTES", apart)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadModel, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)
