"""What holds for all placement rules of `quantize`."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given, settings

from models import FORMATS, attention, branching, conv_net, embedding, known, tapped
from qdqtune.engines import MODULES
from qdqtune.engines.formats import numeric_format
from qdqtune.engines.providers import PROVIDERS
from qdqtune.placement.engine_rules import RULES, KeepFloat, effect, rules_of
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import consistent, possible_edges
from qdqtune.types import QuantType
from region_models import networks
from rule_placements import placed

CASES = {"conv_net": conv_net, "attention": attention, "tapped": tapped, "embedding": embedding, "branching": branching}
WITHOUT_FP8 = {"onnxruntime", "openvino", *PROVIDERS}
TYPES: tuple[tuple[str, QuantType], ...] = tuple((e, q) for e in sorted(MODULES) for q in ("int8", "fp8")
                                                 if q == "int8" or e not in WITHOUT_FP8)  # fmt: skip


@pytest.mark.parametrize(("engine", "quant_type"), TYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_placement_is_whole_and_can_be_inserted(name: str, engine: str, quant_type: QuantType) -> None:
    model = CASES[name]()
    found = placed(model, engine, quant_type).placement
    assert found.edges <= possible_edges(model, known(model))
    assert consistent(model, found) == found
    done = insert(model, found, known(model), numeric_format(engine, quant_type))
    if name != "branching":  # which has an operator that no checker knows
        onnx.checker.check_model(done.to_proto(), full_check=True)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(networks())
def test_rules_take_any_graph(network) -> None:  # type: ignore[no-untyped-def]
    model = network.model()
    for engine, numbers in (("onnxruntime", "uint8"), ("tensorrt", "int8"), ("tensorrt", "fp8")):
        found = placed(model, engine, "fp8" if numbers == "fp8" else "int8").placement
        assert consistent(model, found) == found
        insert(model, found, known(model), FORMATS[numbers])


def test_each_rule_has_a_reason_a_source_engines_and_a_function_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({(rule.find, rule.reason) for rule in RULES}) == len({rule.find for rule in RULES})
    cases = [(rule.find, e, t) for rule in RULES for e in rule.engines for t in rule.quant_types]
    assert len(set(cases)) == len(cases)
    for rule in RULES:
        assert all((rule.reason, rule.source, rule.engines, rule.quant_types))
        assert rule.engines <= MODULES.keys()
        assert effect(rule) == ("keeps in float" if isinstance(rule, KeepFloat) else "places pairs")
    assert {r.name for r in rules_of("onnxruntime")} < {r.name for r in rules_of()}
    for engine, quant_type in TYPES:
        assert rules_of(engine, quant_type)
