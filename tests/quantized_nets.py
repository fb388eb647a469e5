"""Small networks with all of their pairs, and whether two sets of outputs are equal."""

import numpy as np

from models import FORMATS, Arrays, attention, conv_net, ranges, tapped
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Placement

NETS = {"conv": conv_net, "attention": attention, "tapped": tapped}


def quantized(model: Model, numbers: str = "plain") -> Model:
    known = ranges(model)
    whole = Placement.of(possible_edges(model, known))
    return load_proto(insert(model, whole, known, FORMATS[numbers]).to_proto())


def equal(a: list[Arrays], b: list[Arrays]) -> bool:
    pairs = ((x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True) for x, y in pairs)
