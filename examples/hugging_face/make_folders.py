"""Write three folders as `optimum-cli export onnx` does, `bert`, `vit` and `detector`, and data for them.

    python make_folders.py

The networks are small, and their weights are random, from a fixed seed: good for latency, not for recognizing anything.
`texts.txt` has a text a line, `pictures` a folder for each of two classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WIDTH, HEADS, LAYERS, SIDE, PATCH, TOKENS = 64, 4, 2, 64, 16, 48
WORDS = ("a", "the", "one", "who", "it", "is", "not", "for", "of", "to", "in", "and", "time", "way", "water")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class Network:
    """Nodes and random weights of a graph."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """A node; gives the name of its output."""
        result = result or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [result], result, **attributes))
        return result

    def constant(self, array: object) -> str:
        """A constant; gives its name."""
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"weight_{len(self.weights)}"))
        return self.weights[-1].name

    def weight(self, *shape: int) -> str:
        """Random values that keep the size of what they are multiplied with."""
        fan_in = shape[0] if len(shape) == 2 else np.prod(shape[1:])
        return self.constant(self.random.standard_normal(shape, np.float32) / np.float32(np.sqrt(fan_in)))

    def dense(self, x: str, inputs: int, outputs: int, result: str = "") -> str:
        """A product with a weight, and a bias."""
        product = self.add("MatMul", x, self.weight(inputs, outputs))
        return self.add("Add", product, self.constant(np.zeros(outputs, np.float32)), result=result)

    def norm(self, x: str) -> str:
        """A layer normalization."""
        scale, bias = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        return self.add("LayerNormalization", x, self.constant(scale), self.constant(bias), axis=-1)

    def encoder(self, x: str, mask: str = "") -> str:
        """A layer of a transformer; `mask` is added to the scores."""
        split = self.constant([0, -1, HEADS, WIDTH // HEADS])
        query, key, value = (self.add("Reshape", self.dense(x, WIDTH, WIDTH), split) for _ in range(3))
        scores = self.add(
            "MatMul", self.add("Transpose", query, perm=[0, 2, 1, 3]), self.add("Transpose", key, perm=[0, 2, 3, 1])
        )
        scores = self.add("Mul", scores, self.constant(np.float32((WIDTH // HEADS) ** -0.5)))
        scores = self.add("Add", scores, mask) if mask else scores
        mixed = self.add("MatMul", self.add("Softmax", scores), self.add("Transpose", value, perm=[0, 2, 1, 3]))
        joined = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), self.constant([0, -1, WIDTH]))
        x = self.norm(self.add("Add", x, self.dense(joined, WIDTH, WIDTH)))
        hidden = self.add("Gelu", self.dense(x, WIDTH, 4 * WIDTH))
        return self.norm(self.add("Add", x, self.dense(hidden, 4 * WIDTH, WIDTH)))

    def model(self, name: str, inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, list[Any]]) -> Any:
        """The finished model."""
        given = [helper.make_tensor_value_info(key, *how) for key, how in inputs.items()]
        made = [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, name, given, made, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        return model


def bert() -> onnx.ModelProto:
    """A classifier of texts."""
    net = Network(0)
    x = net.add("Gather", net.weight(len(SPECIAL + WORDS), WIDTH), "input_ids")
    x = net.norm(net.add("Add", x, net.add("Gather", net.weight(2, WIDTH), "token_type_ids")))
    seen = net.add("Cast", net.add("Unsqueeze", "attention_mask", net.constant([1, 2])), to=TensorProto.FLOAT)
    mask = net.add("Mul", net.add("Sub", seen, net.constant(np.float32(1))), net.constant(np.float32(1e4)))
    for _ in range(LAYERS):
        x = net.encoder(x, mask)
    first = net.add("Gather", x, net.constant(0), axis=1)
    net.dense(first, WIDTH, 3, "logits")
    sizes = TensorProto.INT64, ["batch", "sequence"]
    names = "input_ids", "attention_mask", "token_type_ids"
    return net.model("bert", dict.fromkeys(names, sizes), {"logits": ["batch", 3]})


def vit() -> onnx.ModelProto:
    """A classifier of pictures."""
    net = Network(1)
    patches = net.add("Conv", "pixel_values", net.weight(WIDTH, 3, PATCH, PATCH), strides=[PATCH, PATCH])
    x = net.add("Transpose", net.add("Reshape", patches, net.constant([0, WIDTH, -1])), perm=[0, 2, 1])
    x = net.norm(net.add("Add", x, net.weight((SIDE // PATCH) ** 2, WIDTH)))
    for _ in range(LAYERS):
        x = net.encoder(x)
    net.dense(net.add("ReduceMean", x, net.constant([1]), keepdims=0), WIDTH, 10, "logits")
    pictures = TensorProto.FLOAT, ["batch", 3, SIDE, SIDE]
    return net.model("vit", {"pixel_values": pictures}, {"logits": ["batch", 10]})


def detector() -> onnx.ModelProto:
    """Classes and boxes for each cell of a picture."""
    net, x, channels = Network(2), "pixel_values", 3
    for wider in (16, 32, 64):
        x = net.add("Conv", x, net.weight(wider, channels, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1])
        x = net.add("Relu", x)
        branch = net.add("Relu", net.add("Conv", x, net.weight(wider, wider, 3, 3), pads=[1, 1, 1, 1]))
        x, channels = net.add("Add", x, branch), wider
    for name, count in (("logits", 5), ("boxes", 4)):
        head = net.add("Reshape", net.add("Conv", x, net.weight(count, channels, 1, 1)), net.constant([0, count, -1]))
        net.add("Transpose", head, perm=[0, 2, 1], result="raw_boxes" if name == "boxes" else name)
    net.add("Sigmoid", "raw_boxes", result="pred_boxes")
    cells = (SIDE // 8) ** 2
    pictures = TensorProto.FLOAT, ["batch", 3, SIDE, SIDE]
    outputs: dict[str, list[Any]] = {"logits": ["batch", cells, 5], "pred_boxes": ["batch", cells, 4]}
    return net.model("detector", {"pixel_values": pictures}, outputs)


def write_folder(folder: Path, model: onnx.ModelProto, **settings: dict[str, Any]) -> None:
    """Write a model, and files of settings by name."""
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows some words."""
    words = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    made.save(str(folder / "tokenizer.json"))


def write_data(count: int = 48) -> None:
    """Write texts and pictures."""
    random = np.random.default_rng(3)
    lines = [" ".join(random.choice(WORDS, random.integers(8, TOKENS))) for _ in range(count)]
    Path("texts.txt").write_text("\n".join(lines) + "\n")
    for number in range(count):
        folder = Path("pictures", "day" if number % 2 else "night")
        folder.mkdir(parents=True, exist_ok=True)
        cells = random.integers(100 * (number % 2), 156 + 100 * (number % 2), (6, 8, 3)).astype(np.uint8)
        Image.fromarray(cells).resize((96, 72)).save(folder / f"{number:02}.jpg")


def main() -> None:
    """Write everything into the current folder."""
    numbers = {"do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    numbers |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    square = {"height": SIDE, "width": SIDE}
    cropped = numbers | {"size": {"shortest_edge": SIDE + 8}, "do_center_crop": True, "crop_size": square}
    resized = numbers | {"size": square}
    limit = {"model_max_length": TOKENS, "pad_token": "[PAD]"}
    write_folder(Path("bert"), bert(), config={"model_type": "bert"}, tokenizer_config=limit)
    write_tokenizer(Path("bert"))
    write_folder(Path("vit"), vit(), config={"model_type": "vit"}, preprocessor_config=cropped)
    write_folder(Path("detector"), detector(), config={"model_type": "detr"}, preprocessor_config=resized)
    write_data()
    print("bert, vit, detector; texts.txt and pictures")


if __name__ == "__main__":
    main()
