"""Which file of a folder is the model, and what lies beside it."""

from pathlib import Path

import pytest

from qdqtune.errors import BadModel
from qdqtune.graph.model_folder import companions, first_beside, graphs_in, model_in


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.onnx", "config.json"], ["model.onnx"]),
        (["model.onnx", "model_quantized.onnx", "model.qdq.onnx", "model_q4f16.onnx", "model_uint8.onnx"],
         ["model.onnx"]),
        (["onnx/model.onnx", "onnx/model_fp16.onnx", "config.json"], ["onnx/model.onnx"]),
        (["model_quantized.onnx"], ["model_quantized.onnx"]),
        (["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"],
         ["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"]),
    ],
)  # fmt: skip
def test_versions_of_a_graph_are_passed_over(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    folder = with_files(tmp_path, *names)
    assert [path.relative_to(folder).as_posix() for path in graphs_in(folder)] == expected
    if len(expected) == 1:
        assert model_in(folder) == folder / expected[0]


def test_a_folder_without_one_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"holds no \.onnx file: name an ONNX file, or a folder that holds some"):
        model_in(tmp_path)
    with pytest.raises(BadModel, match="optimum-cli export onnx --model"):
        model_in(with_files(tmp_path, "config.json"))
    with_files(tmp_path, "encoder_model.onnx", "decoder_model.onnx")
    with pytest.raises(BadModel) as error:
        model_in(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} holds 2 models (decoder_model.onnx, encoder_model.onnx): name one, such as "
        f"{tmp_path / 'decoder_model.onnx'}"
    )
    assert model_in(tmp_path / "gone.onnx") == tmp_path / "gone.onnx"


def test_companions_lie_beside_a_model_or_above_its_subfolder(tmp_path: Path) -> None:
    plain = with_files(tmp_path / "plain", "model.onnx", "tokenizer.json")
    assert companions(plain / "model.onnx") == []
    flat = with_files(tmp_path / "flat", "model.onnx", "config.json", "tokenizer.json", "notes.md", "model.safetensors")
    assert [path.name for path in companions(flat / "model.onnx")] == ["config.json", "tokenizer.json"]
    nested = with_files(tmp_path / "nested", "onnx/model.onnx", "config.json", "preprocessor_config.json")
    assert companions(nested / "onnx" / "model.onnx") == [nested / "config.json", nested / "preprocessor_config.json"]
    assert first_beside(["gone", "config.json"], [plain, nested / "onnx"]) == nested / "config.json"
    assert first_beside(["tokenizer.json"], [plain, flat]) == plain / "tokenizer.json"
    assert first_beside(["gone"], [plain, flat]) is None
