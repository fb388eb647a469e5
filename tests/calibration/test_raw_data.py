"""Pictures and texts as samples: the numbers that reach the model, and one line for what is missing."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoders import exported
from qdqtune.calibration.samples import digest_of, open_samples
from qdqtune.engines.execution import EXECUTION
from qdqtune.graph.loading import load_proto
from sample_files import lists, model, refused

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
tokenizers = pytest.importorskip("tokenizers", reason="texts need tokenizers")

PIXELS = "float[N,3,H,W] pixel_values"
PLAIN = {"do_rescale": False, "do_normalize": False}
TEXTS = "int64[N,L] input_ids, int64[N,L] attention_mask, int64[N,L] token_type_ids"


def picture(path: Path, height: int = 4, width: int = 6, value: Any = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), value).save(path)
    return path


def settings(folder: Path, content: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def first(folder: Path, inputs: str = PIXELS, *folders: Path) -> Any:
    (sample,) = open_samples(str(folder), model(inputs), folders=folders).first(1)
    return sample


def test_pictures_are_scaled_and_normalized_as_the_file_says(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    settings(tmp_path, {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.5})
    values = first(tmp_path)["pixel_values"]
    assert (values.shape, values.dtype) == ((1, 3, 4, 6), np.float32)
    np.testing.assert_allclose(values[0, :, 0, 0], (np.array([10, 20, 30]) / 255 - [0.1, 0.2, 0.3]) / 0.5, rtol=1e-6)
    settings(tmp_path, PLAIN | {"do_flip_channel_order": True})
    np.testing.assert_array_equal(first(tmp_path)["pixel_values"][0, :, 0, 0], [30, 20, 10])
    assert first(tmp_path, "uint8[1,4,6,3] x")["x"][0, 0, 0].tolist() == [30, 20, 10]
    assert first(tmp_path, "float[1,1,4,6] x")["x"].shape == (1, 1, 4, 6)


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({"size": {"height": 8, "width": 5}}, (8, 5)),
        ({"size": {"shortest_edge": 8}}, (8, 12)),
        ({"size": {"shortest_edge": 8, "longest_edge": 9}}, (6, 9)),
        ({"size": {"shortest_edge": 8}, "crop_size": 6}, (6, 6)),
        ({"size": {"shortest_edge": 8}, "crop_size": {"height": 4, "width": 16}, "do_center_crop": True}, (4, 16)),
        ({"size": {"shortest_edge": 8}, "crop_size": 6, "do_center_crop": False}, (8, 12)),
        ({"size": {"height": 8, "width": 5}, "do_resize": False}, (4, 6)),
    ],
)
def test_sizes_are_those_of_transformers(tmp_path: Path, asked: dict[str, Any], shape: tuple[int, int]) -> None:
    picture(tmp_path / "a.png")
    settings(tmp_path, PLAIN | asked)
    assert first(tmp_path)["pixel_values"].shape == (1, 3, *shape)


def test_pictures_lie_at_any_depth_and_a_limit_takes_some_of_each_class(tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / "ab"[number // 6] / f"{number:02}.{'jpg' if number % 2 else 'PNG'}", value=(number, 0, 0))
    picture(tmp_path / ".hidden" / "x.png")
    settings(tmp_path, PLAIN)
    net = model(PIXELS)
    samples = open_samples(str(tmp_path), net)
    assert len(list(samples)) == 12
    assert lists(samples) == lists(samples)
    few = open_samples(str(tmp_path), net, limit=4)
    assert [int(s["pixel_values"][0, 0, 0, 0]) for s in few] == pytest.approx([0, 3, 6, 9], abs=2)
    pairs = list(open_samples(str(tmp_path), model("float[5,3,4,6] x")))
    assert [s["x"].shape for s in pairs] == [(5, 3, 4, 6)] * 2


def test_settings_beside_the_pictures_come_before_those_of_the_model(tmp_path: Path) -> None:
    pictures, home = tmp_path / "pictures", tmp_path / "model"
    picture(pictures / "a.png")
    settings(home, PLAIN)
    assert first(pictures, PIXELS, home)["pixel_values"].max() == 30
    of_model = open_samples(str(pictures), model(PIXELS), folders=[home])
    assert of_model.digest == digest_of(str(pictures), EXECUTION, [home])
    settings(pictures, {"do_normalize": False})
    assert first(pictures, PIXELS, home)["pixel_values"].max() == pytest.approx(30 / 255)
    assert open_samples(str(pictures), model(PIXELS), folders=[home]).digest != of_model.digest
    settings(pictures, {"image_processor": PLAIN}, "processor_config.json")
    (pictures / "preprocessor_config.json").unlink()
    assert first(pictures)["pixel_values"].max() == 30


@pytest.mark.parametrize(
    ("content", "inputs", "message"),
    [
        (None, PIXELS, 'Put a preprocessor_config.json beside the model or the pictures, like {"size": {"height": 224'),
        (None, "float[N,32,48,3] x", 'like {"size": {"height": 32, "width": 48}'),
        ({}, PIXELS, 'lacks image_mean or image_std: give both, or "do_normalize": false'),
        (PLAIN | {"size": 8}, PIXELS, "has two meanings: give height and width, or shortest_edge"),
        (PLAIN | {"size": {"edge": 8}}, PIXELS, "is neither height and width nor shortest_edge"),
        (PLAIN | {"do_thumbnail": True}, PIXELS, "asks for do_thumbnail, which is not done here"),
        (PLAIN | {"resample": "best"}, PIXELS, "Expected 'int', got 'str'"),
        ({"image_mean": [0.5, 0.5], "image_std": [1, 1]}, PIXELS, "do not fit 3 channels"),
        (PLAIN, "float[N,3] x", "holds pictures, which fit an input of rank 4"),
        (None, "float[1,2,128,2] x", "which fit an input of rank 4 with 1 or 3 channels: the model has x: "),
        (PLAIN, "float[1,3,9,9] x", "has shape (1, 3, 4, 6), the model wants x: float32[1,3,9,9]"),
        ({"do_normalize": False}, "uint8[1,3,4,6] x", "the model wants whole numbers"),
        (PLAIN, "float[1,3,4,6] x, float[1,2] scale", "has no array 'scale'"),
        (PLAIN, "float[7,3,4,6] x", "holds no sample"),
    ],
)
def test_pictures_that_cannot_be_used(tmp_path: Path, content: Any, inputs: str, message: str) -> None:
    picture(tmp_path / "a.png")
    if content is not None:
        settings(tmp_path, content)
    refused(re.escape(message), tmp_path, model(inputs))


def test_damaged_pictures_are_told(tmp_path: Path) -> None:
    settings(tmp_path, PLAIN)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    refused(r"cannot read the picture .*a\.png", tmp_path, model(PIXELS))
    (tmp_path / "preprocessor_config.json").write_text("{")
    refused("is no JSON", tmp_path, model(PIXELS))


def tokenizer(folder: Path, **config: Any) -> Path:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "one": 4, "two": 5, "three": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return settings(folder, {"pad_token": {"content": "[PAD]"}, **config}, "tokenizer_config.json")


def texts(folder: Path, *lines: str) -> Path:
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    return folder / "texts.txt"


def test_texts_keep_their_length_where_that_is_dynamic(tmp_path: Path) -> None:
    source = texts(tokenizer(tmp_path, model_max_length=5), "one two", "", "one two three four")
    assert lists(open_samples(str(source), model(TEXTS))) == [
        {"input_ids": [[2, 4, 5, 3]], "attention_mask": [[1] * 4], "token_type_ids": [[0] * 4]},
        {"input_ids": [[2, 4, 5, 6, 3]], "attention_mask": [[1] * 5], "token_type_ids": [[0] * 5]},
    ]


def test_texts_are_padded_and_cut_to_the_length_of_the_model(tmp_path: Path) -> None:
    home = tokenizer(tmp_path / "model")
    source = texts(tmp_path, "one", "one two three four")
    net = model("int32[2,4] input_ids, int32[2,4] input_mask, int32[2,4] position_ids")
    (sample,) = open_samples(str(source), net, folders=[home])
    assert sample["input_ids"].tolist() == [[2, 4, 3, 0], [2, 4, 5, 3]]
    assert sample["input_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert sample["position_ids"].tolist() == [[0, 1, 2, 1], [0, 1, 2, 3]]
    assert {array.dtype for array in sample.values()} == {np.dtype(np.int32)}
    tokenizer(home, padding_side="left")
    (left,) = open_samples(str(source), net, folders=[home])
    assert left["input_ids"].tolist() == [[0, 2, 4, 3], [2, 4, 5, 3]]


def test_a_decoder_starts_with_empty_caches(tmp_path: Path) -> None:
    source = texts(tokenizer(tmp_path), "one two")
    (sample,) = open_samples(str(source), load_proto(exported()))
    assert sample["past_key_values.0.key"].shape == (1, 2, 0, 32)
    assert sample["attention_mask"].shape == sample["input_ids"].shape == (1, 4)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(PIXELS, "holds texts, which need an input input_ids"), (f"{TEXTS}, float[N,4] extra", "has no array 'extra'")],
)
def test_texts_that_do_not_fit(tmp_path: Path, inputs: str, message: str) -> None:
    refused(message, texts(tokenizer(tmp_path), "one"), model(inputs))


def test_a_tokenizer_that_is_missing_or_damaged(tmp_path: Path) -> None:
    source = texts(tmp_path, "one")
    refused(r"put their tokenizer\.json beside the model or the texts", source, model(TEXTS))
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"cannot use the tokenizer .*tokenizer\.json", source, model(TEXTS))
    tokenizer(tmp_path)
    source.write_bytes(b"\xff\xfe")
    refused("is no text in UTF-8", source, model(TEXTS))
