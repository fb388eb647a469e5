"""A switch for each pair: models with switches compute what models of their own do."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models import FORMATS, conv_net, feeds, ranges, run
from qdqtune.graph.loading import load_proto
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.switches import SWITCH, file_pairs, with_file_pairs
from qdqtune.types import Placement
from quantized_nets import NETS, equal, quantized


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


@pytest.mark.parametrize("switched", [False, True])
def test_a_clamp_that_the_file_dropped_is_missed_if_the_pair_does_not_clamp(switched: bool) -> None:
    model, samples = conv_net(), feeds(conv_net())
    known = ranges(model)
    clamps = {"stem_relu", "clip", "add_relu"}
    placement = Placement.of(e for e in possible_edges(model, known) if e.node not in clamps)
    proto = insert(model, placement, known, FORMATS["uint8"]).to_proto()
    (zero,) = (t for t in proto.graph.initializer if t.name == "r0_zero_point")
    zero.CopyFrom(numpy_helper.from_array(np.uint8(100), zero.name))
    file = load_proto(proto)
    assert "stem_relu" not in file.index_of
    pairs, _ = file_pairs(model, file)
    assert {p.tensor: p.source for p in pairs if p.source != p.tensor}["r0"] == "c0"
    if switched:
        switches = {f"{SWITCH}{i}": np.asarray(True) for i in range(len(pairs))}
        found = run(with_file_pairs(model, pairs, file, switched=True), [{**sample, **switches} for sample in samples])
    else:
        assert "stem_relu" not in with_file_pairs(model, pairs, file).index_of
        found = run(with_file_pairs(model, pairs, file), samples)
    assert equal(found, run(file, samples))
