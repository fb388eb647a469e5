"""What quantize, layers, check and compare write for a browser: their own findings, and no more than they know."""

import re
from pathlib import Path

from conftest import Call


def headline(page: Path) -> str:
    found = re.search(r"<h1[^>]*><bdi>(.*?)</bdi>", page.read_text())
    assert found is not None
    return found[1]


def test_each_command_leaves_a_page_of_what_it_found(model: Path, call: Call) -> None:
    out, page = model.with_name("q.onnx"), model.with_name("page.html")
    data = ("--calibration-data", model.with_suffix(".npz"))
    plain = ("--calibration-method", "minmax", "--no-bias-correction")
    assert call("quantize", model, *data, *plain, "-o", out, "--html", page)[0] == 0
    assert headline(page) == f"{model.parent.name}/model.onnx is quantized"
    assert "output accuracy" in page.read_text()
    assert call("layers", out, "--engine", "fake", *data, "--html", page)[0] == 0
    assert re.fullmatch(r"fake runs q\.onnx as \d+ layers", headline(page))
    assert "All layers" in page.read_text()
    call("check", out, "--engine", "fake", *data, "--html", page)
    assert "q.onnx" in headline(page)
    assert "fuse" in headline(page)
    assert call("compare", model, out, "--engine", "fake", *data, "--html", page)[0] == 0
    assert re.search(r"q\.onnx .*model\.onnx", headline(page))
    assert page.read_text().count('class="dots"') >= 2


def test_a_page_overwrites_no_input_and_is_refused_before_the_work(model: Path, call: Call) -> None:
    before = model.read_bytes()
    code, _, told = call("layers", model, "--engine", "fake", "--html", model)
    assert code == 2
    assert "would overwrite the model" in told
    assert call("compare", model, model, "--engine", "fake", "--html", model.parent / "no" / "page.html")[0] == 2
    assert model.read_bytes() == before
