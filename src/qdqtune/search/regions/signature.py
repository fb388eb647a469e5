"""How an operator is written in a signature: its domain and its attributes, and nothing that names or shapes tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

from qdqtune.graph.model import Model, Node


def digest(content: bytes) -> str:
    """16 hex digits of some bytes."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def written(node: Node, model: Model) -> str:
    """An operator with its domain and attributes, as text."""
    attributes = {name: _attribute(value) for name, value in node.attributes.items()}
    if node.attributes.get("group", 1) != 1 and _is_depthwise(node, model):
        attributes["group"] = "depthwise"  # the number is the number of channels, a shape
    text = ",".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    return (f"{node.domain}." if node.domain else "") + node.op + (f"{{{text}}}" if text else "")


def _is_depthwise(node: Node, model: Model) -> bool:
    info = model.tensors.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if info is None or info.shape is None or len(info.shape) < 2:
        return False
    if node.op == "ConvTranspose":
        return bool(info.shape[0] == node.attributes["group"])
    return node.op == "Conv" and info.shape[1] == 1


def _attribute(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
        return str(value) if len(value) <= 32 else digest(value.encode())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, onnx.TensorProto):
        array = numpy_helper.to_array(value)
        return f"{array.dtype}{list(array.shape)}:{digest(array.tobytes())}"
    if isinstance(value, onnx.GraphProto):
        return "[" + " ".join(_body_node(n) for n in value.node) + "]"
    if isinstance(value, Message):
        return digest(value.SerializeToString(deterministic=True))
    if isinstance(value, Iterable):
        text = ",".join(_attribute(v) for v in value)
        return f"[{text}]" if len(text) <= 256 else digest(text.encode())
    return str(value)


def _body_node(node: onnx.NodeProto) -> str:
    attributes = [
        f"{a.name}={_attribute(onnx.helper.get_attribute_value(a))}"
        for a in sorted(node.attribute, key=lambda a: a.name)
    ]
    return node.op_type + (f"{{{','.join(attributes)}}}" if attributes else "")
