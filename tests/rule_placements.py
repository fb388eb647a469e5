"""Placements by the rules of an engine, as tests of the rules ask for them."""

import numpy as np

from models import known, normal
from qdqtune.graph.model import Model
from qdqtune.placement.engine_rules import PlacedByRules, place
from qdqtune.placement.possible import possible_edges
from qdqtune.types import QuantType


def placed(model: Model, engine: str = "tensorrt", quant_type: QuantType = "int8") -> PlacedByRules:
    return place(model, possible_edges(model, known(model)), engine, quant_type)


def users(found: PlacedByRules) -> set[str]:
    """The nodes with a pair on an input."""
    return {e.node for e in found.placement}


def count(found: PlacedByRules, rule: str) -> int:
    return dict(found.counts)[rule]


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: normal(*shape) for name, shape in shapes.items()}
