"""Folders of a model, as Hugging Face's libraries write them: its graphs, and the settings and tokenizers beside them.

A folder holds its graphs itself, or in a subfolder `onnx`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from qdqtune.errors import BadModel, first_of

CONFIG = "config.json"
"""The file that makes a folder of graphs loadable by Optimum."""

SUBFOLDER = "onnx"

COMPANIONS = (
    CONFIG, "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
"""What Transformers reads beside the weights of a model."""

VERSION = re.compile(r"(.+)[._](?:qdq|quantized|optimized|fp16|bf16|u?int8|bnb4|q8|q4|q4f16)")
"""Matches the name of a graph that was made from another one, as Optimum, transformers.js and qdqtune name them."""


def graphs_in(folder: Path) -> list[Path]:
    """The ONNX files in a folder, or else in its subfolder `onnx`, sorted by name. Variants of a graph, such as
    model_quantized.onnx beside model.onnx, are left out."""
    found = sorted(folder.glob("*.onnx")) or sorted((folder / SUBFOLDER).glob("*.onnx"))
    stems = {path.stem for path in found}
    return [path for path in found if not ((made := VERSION.fullmatch(path.stem)) and made[1] in stems)]


def model_in(path: Path) -> Path:
    """The only ONNX file in a folder; a path that is no folder is returned as it is."""
    if not path.is_dir():
        return path
    found = graphs_in(path)
    if not found:
        raise BadModel(without_graph(path))
    if len(found) > 1:
        names = first_of([one.relative_to(path).as_posix() for one in found])
        raise BadModel(f"{path} holds {len(found)} models ({names}): name one, such as {found[0]}")
    return found[0]


def without_graph(folder: Path) -> str:
    """The error message for a folder without an ONNX file."""
    how = "name an ONNX file, or a folder that holds some"
    if (folder / CONFIG).is_file():
        how = f"make one with optimum-cli export onnx --model {folder} NEW_FOLDER, and name that folder"
    return f"{folder} holds no .onnx file: {how}"


def companions(model: Path) -> list[Path]:
    """The settings and tokenizers beside a model file that Hugging Face's Optimum exported; empty for other models."""
    config = first_beside([CONFIG], [model.parent])
    return [] if config is None else [file for name in COMPANIONS if (file := config.parent / name).is_file()]


def first_beside(names: Iterable[str], folders: Iterable[Path]) -> Path | None:
    """The first existing file with one of these names in `folders`, or in the folder above a folder `onnx`."""
    for folder in folders:
        above = [folder.absolute().parent] if folder.absolute().name == SUBFOLDER else []
        for place in (folder, *above):
            for name in names:
                if (place / name).is_file():
                    return place / name
    return None
