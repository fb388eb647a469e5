"""Numbers of engines are known without the engine's library."""

from collections.abc import Callable

import pytest

from loaded_modules import absent
from qdqtune.engines import MODULES
from qdqtune.engines.formats import numeric_format, portable, usual_precision, weight_formats
from qdqtune.engines.providers import PROVIDERS
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
    with pytest.raises(BadOption, match="unknown engine 'gpu'; there are cuda, fake"):
        numeric_format("gpu", "int8")


@pytest.mark.parametrize(
    ("engine", "version", "wanted"),
    [("tensorrt", "11.4.0", "fp16"), ("tensorrt", "8.6.1", "fp32"), ("tensorrt-rtx", "1.7", "fp16"),
     ("trtexec", "", "fp16"), ("trtexec", "8.6", "fp32"), ("onnxruntime", "1.31", "fp32"), ("fake", "", "fp32")],
)  # fmt: skip
def test_the_usual_precision_is_that_of_the_engine(engine: str, version: str, wanted: str) -> None:
    assert usual_precision(engine, version) == wanted


A53 = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid\n"
A76 = "Features\t: fp asimd evtstrm aes atomics asimdhp asimdrdm lrcpc dcpop asimddp\n"
V1 = "Features\t: fp asimd evtstrm asimddp sve i8mm bf16\n"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "activation", "reduced"),
    [
        ("aarch64", A53, QType.INT8, False),
        ("aarch64", A76, QType.UINT8, False),
        ("aarch64", V1, QType.UINT8, False),
        ("arm64", "", QType.UINT8, False),  # macOS and Windows tell nothing, and all that run them have dot products
        ("aarch64", "flags\t\t: avx2 fma\n", QType.UINT8, False),  # an emulator that shows the real processor
        ("x86_64", "flags\t\t: sse avx2 avx_vnni\n", QType.UINT8, False),
        ("AMD64", "flags\t\t: avx2 avx512_vnni\n", QType.UINT8, False),
        ("x86_64", "flags\t\t: avx2 amx_int8\n", QType.UINT8, False),
        ("x86_64", "flags\t\t: sse avx2 avx512f\n", QType.UINT8, True),
        ("x86_64", "", QType.UINT8, True),
    ],
)
def test_numbers_of_onnx_runtime_follow_the_processor(
    machine: str, cpuinfo: str, activation: QType, reduced: bool, set_processor: Callable[[str, str], None]
) -> None:
    set_processor(machine, cpuinfo)
    numbers = numeric_format("onnxruntime", "int8")
    assert (numbers.activation, numbers.reduced_weights) == (activation, reduced)
    assert not numbers.symmetric  # a pair can replace a Relu
    assert (numbers.bias, numbers.drop_clamps) == ("int32", True)


@pytest.mark.parametrize("cpuinfo", [A53, A76])
def test_portable_numbers_are_the_same_on_every_processor(
    cpuinfo: str, set_processor: Callable[[str, str], None]
) -> None:
    set_processor("x86_64", "flags\t\t: avx2\n")
    plain = numeric_format("onnxruntime", "int8")
    set_processor("aarch64", cpuinfo)
    on_arm = numeric_format("onnxruntime", "int8")
    assert portable("onnxruntime", on_arm) == plain == portable("onnxruntime", plain)
    assert portable("openvino", numeric_format("openvino", "int8")).reduced_weights
    assert [found.name for found in weight_formats("onnxruntime", narrow=True) if found.dynamic] == ["d7"]


@pytest.mark.parametrize("engine", ["tensorrt", "qnn", "fake", "cuda"])
def test_numbers_of_gpus_and_npus_depend_on_no_processor(engine: str) -> None:
    with pytest.raises(BadOption, match=f"{engine} takes the same numbers with every processor: leave `portable` out"):
        portable(engine, numeric_format(engine, "int8"))
