"""Inputs of a model, and random values for them."""

import numpy as np
import pytest

from models import build, embedding, normal
from qdqtune.calibration.inputs import input_specs
from qdqtune.calibration.samples import open_samples
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.model import Model
from sample_files import lists, model, one_line


def test_random_inputs_are_the_same_in_every_pass_and_differ_by_number_and_input() -> None:
    net = model("float[N,3] x, float[N,3] z, bool[2] flag, float16[1] h")
    samples = open_samples(None, net, seed=7)
    assert samples.is_random
    found = lists(samples)
    assert found == lists(samples) == lists(open_samples(None, net, seed=7))
    assert len(found) == 8
    assert found != lists(open_samples(None, net, seed=8))
    assert found[0]["x"] != found[1]["x"]
    assert found[0]["x"] != found[0]["z"]
    assert {n: (a.dtype, a.shape) for n, a in samples.first(1)[0].items()} == {
        "x": (np.float32, (1, 3)), "z": (np.float32, (1, 3)), "flag": (np.bool_, (2,)), "h": (np.float16, (1,)),
    }  # fmt: skip
    assert len(open_samples(None, net, limit=3).first(9)) == 3


TWO_TABLES = """net (int64[1,4] ids) => (float[1,4,2] a, float[2,1,4] b) {
    a = Gather(long, ids) n = Cast<to=6>(ids) b = Gather<axis=1>(wide, n)
}"""
TURNED = "net (int64[1,4] ids) => (float[4,1,2] a) { t = Transpose(ids) a = Gather(table, t) }"


@pytest.mark.parametrize(
    ("net", "end"),
    [
        (embedding(rows=7), 7),
        (build(TWO_TABLES, {"long": normal(9, 2), "wide": normal(2, 5)}), 5),
        (build(TURNED, {"table": normal(6, 2)}), 6),
        (model("int64[1,30] ids"), 2),
    ],
)
def test_random_integers_stay_inside_every_table_they_look_up(net: Model, end: int) -> None:
    ids = np.concatenate([s["ids"] for s in open_samples(None, net, limit=60)])
    assert set(np.unique(ids)) == set(range(end))


def test_dynamic_sizes_are_refused_with_the_option_that_sets_them() -> None:
    with pytest.raises(BadOption, match=r"`input_shapes` x:1x3x224x224$") as error:
        open_samples(None, model("float[N,3,H,W] x"))
    one_line(error)
    with pytest.raises(BadOption, match=r"run with, like `input_shapes` m:1x64 `input_shapes` past:1x4x64x8$"):
        open_samples(None, model("int64[N,T] m, float[N,4,P,8] past"))
    assert open_samples(None, model("float[N,3] x")).first(1)[0]["x"].shape == (1, 3)


def test_inputs_are_described() -> None:
    specs = input_specs(model("float[N,3] x, int64 n"))
    assert [str(s) for s in specs] == ["x: float32[?,3]", "n: int64[]"]
    assert specs[0].fits((9, 3))
    assert not specs[0].fits((3,))


def test_inputs_of_unknown_rank_and_of_strings_are_refused() -> None:
    net = model()
    net.proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(BadModel, match="'x'"):
        input_specs(Model(net.proto))
    with pytest.raises(BadModel, match="input 'x' holds strings: export what is behind"):
        input_specs(model("string[N,2] x"))
