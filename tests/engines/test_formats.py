"""Numbers of engines are known without the engine's library."""

import pytest

from loaded_modules import absent
from qdqtune.engines import MODULES
from qdqtune.engines.formats import numeric_format, usual_precision
from qdqtune.engines.provider_table import PROVIDERS
from qdqtune.errors import BadOption
from qdqtune.types import QType


@pytest.mark.parametrize("engine", sorted(MODULES))
@pytest.mark.parametrize("quant_type", ["int8", "fp8"])
def test_every_engine_names_its_numbers_without_its_library(engine, quant_type, monkeypatch):
    absent(monkeypatch, "tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "openvino")
    if quant_type == "fp8" and engine in ("onnxruntime", "openvino", *PROVIDERS):
        with pytest.raises(BadOption, match="no FP8"):
            numeric_format(engine, quant_type)
    else:
        numbers = numeric_format(engine, quant_type)
        assert (numbers.weight is QType.FP8) == (quant_type == "fp8")


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(BadOption, match="unknown engine 'gpu'; there are coreml, cuda, directml, fake"):
        numeric_format("gpu", "int8")


@pytest.mark.parametrize(
    ("engine", "version", "wanted"),
    [("tensorrt", "11.4.0", "fp16"), ("tensorrt", "8.6.1", "fp32"), ("tensorrt-rtx", "1.7", "fp16"),
     ("trtexec", "", "fp16"), ("trtexec", "8.6", "fp32"), ("onnxruntime", "1.31", "fp32"), ("fake", "", "fp32")],
)  # fmt: skip
def test_the_usual_precision_is_that_of_the_engine(engine: str, version: str, wanted: str) -> None:
    assert usual_precision(engine, version) == wanted
