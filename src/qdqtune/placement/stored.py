"""Weights that alone are quantized, read back: how a Q/DQ model stores them, and the floats that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import helper

from qdqtune.graph.model import Constant, Model, Node, rebuild
from qdqtune.types import Array, WeightFormat


def storage_in(zero_point: Array, block: int | None) -> WeightFormat | None:
    """The weight format of integers with these zero points; None if there is no such one."""
    name = zero_point.dtype.name
    is_signed = not name.startswith("u") and not zero_point.astype(np.int8).any()
    try:
        return WeightFormat(4 if name.endswith("int4") else 8, block, is_signed)
    except ValueError:  # other blocks than ours, or 4 bits with one scale a channel
        return None


def without_blocks(integers: Array, scale: Array, zero_point: Array, axis: int, block: int) -> Array:
    """(q - zero point) * scale in float32, where one scale serves `block` neighbours along `axis`."""

    def spread(numbers: Array) -> Array:
        whole = np.repeat(numbers.astype(np.float32), block, axis)
        return np.take(whole, range(integers.shape[axis]), axis)

    centre = spread(zero_point) if zero_point.ndim else np.float32(0)
    return np.asarray((integers.astype(np.float32) - centre) * spread(scale))


@dataclass(frozen=True, eq=False)
class IntegerTable:
    """A Gather of integers, and the DQ of what it and a Gather of scales have picked (see `placement.compression`)."""

    gather: Node
    scaling: Node
    dq: Node
    weight_format: WeightFormat


def tables_of(model: Model) -> Iterator[IntegerTable]:
    """The tables of a model whose rows are picked as integers."""
    for dq in model.nodes:
        if dq.op != "DequantizeLinear" or len(dq.inputs) > 2 or not dq.attributes.get("block_size"):
            continue
        makers = [maker for t in dq.inputs if (maker := model.maker(t)) is not None]
        if [m.op for m in makers] == ["Gather"] * 2 and all(m.inputs[0] in model.constants for m in makers):
            rows, block = model.constants[makers[0].inputs[0]], int(dq.attributes["block_size"])
            weight_format = storage_in(np.zeros((), helper.tensor_dtype_to_np_dtype(rows.dtype)), _inside(rows, block))
            if weight_format is not None:
                yield IntegerTable(makers[0], makers[1], dq, weight_format)


def _inside(rows: Constant, block: int) -> int | None:
    return None if rows.shape[-1] == block else block


def with_tables(model: Model) -> Model:
    """The model with float tables in place of those whose rows are picked as integers."""
    tables = {table.gather.index: table for table in tables_of(model)}
    if not tables:
        return model
    gone = {node.index for table in tables.values() for node in (table.scaling, table.dq)}
    nodes, added = [], dict[str, Constant]()
    for node, proto in zip(model.nodes, model.proto.graph.node, strict=True):
        copy = deepcopy(proto)
        if node.index in tables:
            name = f"{node.inputs[0]}_float"
            added[name] = _floats(model, tables[node.index])
            copy.input[0], copy.output[0] = name, tables[node.index].dq.outputs[0]
        if node.index not in gone:
            nodes.append(copy)
    return rebuild(model, nodes, added)


def _floats(model: Model, table: IntegerTable) -> Constant:
    rows, scales = (model.constants[node.inputs[0]] for node in (table.gather, table.scaling))
    block = int(table.dq.attributes["block_size"])

    def read() -> Array:
        values = without_blocks(rows.array(), scales.array(), np.zeros(()), rows.array().ndim - 1, block)
        return values.astype(helper.tensor_dtype_to_np_dtype(scales.dtype))

    return Constant(f"{rows.key}:table:{scales.key}", scales.dtype, rows.shape, read)
