from pathlib import Path

import pytest

from layer_reports import (
    RESIDUAL,
    RESIDUAL_INPUT,
    RESIDUAL_WEIGHTS,
    home,
    layers_of,
    random_array,
    text_model,
)

pytest.importorskip("openvino")


def test_openvino_does_not_take_its_own_names_for_the_models(tmp_path: Path) -> None:
    text = """g (float[1,8,32] x) => (float[1,8,32] y) {
        [MVN_3] a = Tanh(x)
        [Multiply_7] b = LayerNormalization <axis=-1> (a, gamma, beta)
        [Constant_4] c = Sin(b)
        [Add_9] y = MatMul(c, w)
    }"""
    constants = {"gamma": random_array(32), "beta": random_array(32), "w": random_array(32, 32)}
    layers = layers_of("openvino", text_model(text, constants), {"x": random_array(1, 8, 32)}, tmp_path)
    homes = [home(layers, name) for name in ("MVN_3", "Multiply_7", "Add_9")]
    assert len(set(map(id, homes))) == 3
    assert all(x.kind == "compute" for x in homes)
    assert [layers.index(x) for x in homes] == sorted(layers.index(x) for x in homes)


def test_openvino_takes_nodes_of_one_name(tmp_path: Path) -> None:
    model = text_model(RESIDUAL, RESIDUAL_WEIGHTS)
    for node in model.graph.node:
        node.name = "n"
    layers = layers_of("openvino", model, RESIDUAL_INPUT, tmp_path)
    assert [set(x.nodes) for x in layers if "n" in x.nodes] == [{"n", "n_2"}]
