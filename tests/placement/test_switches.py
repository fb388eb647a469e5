"""A switch for each pair: models with switches compute what models of their own do."""

import numpy as np
import onnx
import pytest

from models import FORMATS, Arrays, attention, conv_net, feeds, ranges, run, tapped
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.switches import SWITCH, file_pairs, with_file_pairs
from qdqtune.types import Placement

NETS = {"conv": conv_net, "attention": attention, "tapped": tapped}


def quantized(model: Model, numbers: str = "plain") -> Model:
    known = ranges(model)
    whole = Placement.of(possible_edges(model, known))
    return load_proto(insert(model, whole, known, FORMATS[numbers]).to_proto())


def equal(a: list[Arrays], b: list[Arrays]) -> bool:
    pairs = ((x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True) for x, y in pairs)


@pytest.mark.parametrize("name", NETS)
def test_switches_choose_the_same_as_a_model_of_its_own(name: str) -> None:
    model = NETS[name]()
    file, samples = quantized(model, "uint8"), feeds(model)
    pairs, _ = file_pairs(model, file)
    switched = with_file_pairs(model, pairs, file, switched=True)
    onnx.checker.check_model(switched.to_proto())
    for chosen in ([], [0], [len(pairs) - 1], range(0, len(pairs), 2), range(len(pairs))):
        switches = {f"{SWITCH}{i}": np.asarray(i in chosen) for i in range(len(pairs))}
        by_switch = run(switched, [{**sample, **switches} for sample in samples])
        assert equal(by_switch, run(with_file_pairs(model, [pairs[i] for i in chosen], file), samples)), chosen


def test_a_bias_that_the_float_model_lacks_is_no_pair_on_nothing() -> None:
    """Correcting biases gives one to a Conv that had none."""
    proto = conv_net().to_proto()
    first = next(node for node in proto.graph.node if node.op_type == "Conv" and len(node.input) == 3)
    del first.input[2:]
    _, unmatched = file_pairs(load_proto(proto), quantized(conv_net(), "uint8"))
    assert not unmatched
