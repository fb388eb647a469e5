from pathlib import Path

import numpy as np
import pytest

from engine_contract import EngineContract, built_by, model_of
from layer_reports import RESIDUAL, RESIDUAL_WEIGHTS, text_model
from models import build, feeds, normal, ranges, run, sqnr
from qdqtune.engines import EngineSpec, open_engine
from qdqtune.engines.facts import MOVED_ACROSS
from qdqtune.engines.machine import products_saturate
from qdqtune.errors import BadOption, EngineFailure
from qdqtune.placement.insertion import insert
from qdqtune.placement.possible import possible_edges
from qdqtune.types import Placement, QType

pytest.importorskip("openvino")


SPEC = EngineSpec("openvino")


class TestOpenVino(EngineContract):
    spec = SPEC
    saved = "saved.xml"
    subjects = (*EngineContract.subjects, "residual", "transformer, heads of 16", "weights of 8 bits")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "f64"}, "has no precision 'f64'; it has f32, f16, bf16"),
        ({"provider": "x"}, "no option 'provider'; it has threads, precision"),
    ],
)
def test_bad_options_of_openvino_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        open_engine(EngineSpec("openvino", options))


def test_openvino_says_its_precision_and_wants_symmetric_numbers() -> None:
    engine = open_engine(EngineSpec("openvino", {"precision": "bf16", "threads": 2}))
    assert (engine.describe()["precision"], engine.describe()["threads"]) == ("bf16", "2")
    numbers = engine.numeric_format("int8")
    assert (numbers.activation, numbers.symmetric, numbers.reduced_weights) == (QType.INT8, True, products_saturate())
    assert (numbers.bias, numbers.drop_clamps, numbers.shared_scale_ops) == ("float", False, MOVED_ACROSS)
    with pytest.raises(BadOption, match="`quant_type` int8"):
        engine.numeric_format("fp8")


def test_openvino_refuses_in_its_own_words_without_its_source_places(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match=r"^OpenVINO: Model wasn't fully converted.*NoSuchOp") as refusal:
        built_by(open_engine(SPEC), model_of("y = NoSuchOp(x)", "1"), tmp_path)
    assert ".cpp" not in str(refusal.value)
    assert ".cpp" in (tmp_path / "build.log").read_text()


def test_openvino_computes_what_pairs_between_a_concat_and_a_convolution_say(tmp_path: Path) -> None:
    """It takes steps of 1 for those of an int8 pair there."""
    text = """net (float[1,8,9,9] x, float[1,8,9,9] z) => (float[1,6,9,9] y) {
        [join] c = Concat <axis=1> (x, z)
        [read] y = Conv <pads=[1,1,1,1]> (c, w)
    }"""
    model = build(text, {"w": normal(6, 16, 3, 3)})
    samples, engine = feeds(model), open_engine(SPEC)
    found = ranges(model, samples)
    placement = Placement(frozenset(e for e in possible_edges(model, found) if e.tensor in "cw"))
    quantized = insert(model, placement, found, engine.numeric_format("int8"))
    built = built_by(engine, quantized.to_proto(), tmp_path)
    assert sqnr(run(quantized, samples), [built.run(sample) for sample in samples]) > 60


def test_openvino_saves_an_ir_with_float32_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_by(open_engine(SPEC), text_model(RESIDUAL, RESIDUAL_WEIGHTS), tmp_path)
    built.save(tmp_path / "s.xml")
    weights = sum(np.asarray(v).nbytes for v in RESIDUAL_WEIGHTS.values())
    assert (tmp_path / "s.bin").stat().st_size >= weights
    with pytest.raises(EngineFailure, match="'xml' extension"):
        built.save(tmp_path / "s.ir")
    monkeypatch.setattr("openvino.save_model", lambda _, path, **__: Path(path).write_text("<net/>"))
    with pytest.raises(EngineFailure):
        built.save(tmp_path / "broken.xml")
