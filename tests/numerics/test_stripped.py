"""A float model that is not the one behind a file is refused; what cannot be compared is not."""

from collections.abc import Iterator

import numpy as np
import pytest

from models import INT8, build, conv_net, feeds, ranges
from qdqtune.calibration.observe import Session, onnxruntime_session
from qdqtune.engines.execution import EXECUTION
from qdqtune.errors import BadModel
from qdqtune.graph.model import Constant, Model, rebuild
from qdqtune.numerics.simulation import check_stripped
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.placement.stripping import strip_pairs
from qdqtune.types import Placement
from workers import Workers


@pytest.fixture
def session(workers: Workers) -> Iterator[Session]:
    with onnxruntime_session(EXECUTION, fuse=False) as session:
        yield session


def quantized(model: Model) -> Model:
    known = ranges(model)
    return insert(model, Placement.of(possible_edges(model, known)), known, INT8)


def check(session: Session, stripped: Model, given: Model) -> None:
    check_stripped(stripped, given, session, feeds(given, 1)[0], "net.onnx", "give the float model")


def test_a_file_of_ours_is_read_rightly(session: Session) -> None:
    file = quantized(conv_net())
    check(session, strip_pairs(file), file)


def test_another_float_model_is_refused_in_one_line(session: Session) -> None:
    file = quantized(conv_net())
    stripped = strip_pairs(file)
    other = rebuild(stripped, stripped.proto.graph.node, {"b4": Constant.of(stripped.constants["b4"].array() + 1)})
    message = r"^net.onnx cannot be read as .* outputs have -?\d+\.\d dB; give the float model$"
    with pytest.raises(BadModel, match=message):
        check(session, other, file)


def test_a_float_model_that_does_not_run_is_refused(session: Session) -> None:
    net, other = (
        f"net (float[2,4] x) => (float[2,4] y) {{ [last] y = {last} }}" for last in ("Abs(x)", "custom.No(x)")
    )
    with pytest.raises(BadModel, match="put back, they do not run: "):
        check(session, build(other), build(net))


NOISE = """net (float[2,4] x) => (float[2,4] y) {
    [noise] n = RandomNormalLike(x)
    [sum] y = Add(x, n)
}"""


@pytest.mark.parametrize("text", [NOISE, "net (float[2,4] x) => (float[2,4] y) { [unknown] y = custom.Own(x) }"])
def test_what_onnxruntime_does_not_run_or_repeat_is_not_compared(session: Session, text: str) -> None:
    check(session, build(text.replace("Add(x, n)", "Sub(x, n)")), build(text))


def test_outputs_that_are_no_numbers_are_not_compared(session: Session) -> None:
    text = "net (float[2,4] x) => (float[2,4] y) { [div] y = Mul(x, nan) }"
    check(session, build(text, {"nan": np.float32(0)}), build(text, {"nan": np.float32(np.nan)}))
