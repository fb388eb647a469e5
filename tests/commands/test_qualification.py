"""What `doctor --qualify` says of engines that do what we claim, and of engines that do not: each check can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaded_modules import CUDA, absent
from qdqtune.commands import qualification
from qdqtune.commands.doctor import DoctorOptions, Gpu
from qdqtune.commands.qualification import CHECKS, DEEPER, ITSELF
from qdqtune.engines import Built, EngineSpec
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning.observer import Silent
from qdqtune.types import Layer, Tensors
from trtexec_stand_in import stand_in
from workers import Workers, open_here

CONVOLUTIONS, ATTENTION, FUSED = "convolutions", "transformer, heads of 16", "transformer, fused qkv"
DYNAMIC, W8, FP8 = "dynamic shapes", "weights of 8 bits", "fp8"
REAL = EngineSpec("onnxruntime", {"threads": 1})
FAKE = EngineSpec("fake")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves of the checks those that are named, of their subjects some, and makes graphs smaller."""

    def leave(names: str, *subjects: str) -> None:
        chosen = [check for check in CHECKS if check.name in names.split(", ")]
        assert len(chosen) == len(names.split(", "))
        kept = [c._replace(subjects=tuple(s for s in c.subjects if s in subjects)) for c in chosen]
        assert all(check.subjects for check in kept)
        monkeypatch.setattr(qualification, "CHECKS", kept)

    monkeypatch.setattr(qualification, "SIDE", 8)
    return leave


def qualified(spec: EngineSpec) -> dict[tuple[str, str], tuple[str, str]]:
    """What was seen, by check and subject."""
    done = qualification.qualify(DoctorOptions(engine=spec), Silent())
    return {(seen.check, seen.subject): (seen.state, seen.told) for seen in done.checks}


def test_a_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qualification, "is_simulated", lambda name: name == "fake")
    with pytest.raises(EngineUnavailable, match="fake is a simulator on this machine, whose times mean nothing, and"):
        qualified(FAKE)


def the_one(spec: EngineSpec) -> tuple[str, str]:
    (seen,) = qualified(spec).values()
    return seen


def broken(seen: dict[tuple[str, str], tuple[str, str]]) -> set[tuple[str, str]]:
    return {where for where, (state, _) in seen.items() if state == "not held"}


# Engines that do what we claim

GRAPH_CHECKS = "builds, layers, 8 bits, numbers"


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_on_a_cpu_all_graphs_hold(name: str, only: Any) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    only(GRAPH_CHECKS, CONVOLUTIONS, "residual", ATTENTION, FUSED, DYNAMIC, W8, FP8)
    seen = qualified(EngineSpec(name, {"threads": 1}))
    assert not broken(seen)
    assert {subject for (_, subject), (state, _) in seen.items() if state == "not applicable"} == {FP8}
    assert "FP8" in seen["builds", FP8][1]


@pytest.mark.usefixtures("workers")
def test_without_its_gpu_an_engine_is_asked_for_builds_and_layers_only(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    absent(monkeypatch, *CUDA)
    only(GRAPH_CHECKS, DYNAMIC, W8)
    seen = qualified(EngineSpec("tensorrt-rtx", {"target": "sm89"}))
    assert not broken(seen)
    assert {check for (check, _), (state, _) in seen.items() if state == "not applicable"} == {"numbers"}
    assert "device is not present" in seen["numbers", DYNAMIC][1]


@pytest.mark.usefixtures("workers")
def test_the_fake_engine_holds_but_for_8_bits(only: Any) -> None:
    """Its model of costs fuses no product without a pair behind it."""
    only("builds, layers, 8 bits, numbers, times", CONVOLUTIONS, DYNAMIC, ITSELF, DEEPER)
    assert broken(qualified(FAKE)) == {("8 bits", CONVOLUTIONS), ("8 bits", DYNAMIC)}


@pytest.mark.usefixtures("workers")
def test_what_stands_in_for_trtexec_holds(tmp_path: Path, only: Any) -> None:
    only("builds, layers", DYNAMIC)
    seen = qualified(EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")}))
    assert {(name, told) for (name, _), (state, told) in seen.items() if state != "held"} == set()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", ["cut", "region", "subgraph"])
def test_searches_end(mode: str, only: Any) -> None:
    only("search", mode)
    state, told = the_one(FAKE)
    assert (state, told[:8]) == ("held", "proven, ")


# Engines that do not


class AlteredModel:
    """A model that reports other layers, or computes something else."""

    def __init__(self, built: Built, layers: Any, outputs: Any) -> None:
        self._built, self._layers, self._outputs = built, layers, outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built, name)

    def run(self, inputs: Tensors) -> dict[str, Any]:
        return self._outputs(self._built.run(inputs))

    def layers(self, inputs: Tensors, runs: int) -> tuple[Layer, ...]:
        return self._layers(self._built.layers(inputs, runs))


def alter(workers: Workers, layers: Any = lambda x: x, outputs: Any = lambda x: x, file: str = "quantized") -> None:
    """Alter the models of files of a name; engines of calibration and simulation stay as they are."""

    def opener(spec: EngineSpec) -> Any:
        engine = open_here(spec)
        if "fuse" in spec.options:
            return engine

        def build(model: Path, log: Path) -> Any:
            built = type(engine).build(engine, model, log)
            return AlteredModel(built, layers, outputs) if model.stem == file else built

        return SimpleNamespace(describe=engine.describe, numeric_format=engine.numeric_format, build=build)

    workers.opener = opener


def last(layers: tuple[Layer, ...], **changes: Any) -> tuple[Layer, ...]:
    """The layers with the last that computes a product changed."""
    at = max(i for i, layer in enumerate(layers) if layer.kind == "compute" and len(layer.nodes) > 2)
    return (*layers[:at], replace(layers[at], **changes), *layers[at + 1 :])


@pytest.mark.parametrize("file", ["float", "quantized"])
def test_an_engine_that_refuses_a_file(file: str, only: Any, workers: Workers) -> None:
    only("builds", CONVOLUTIONS)
    workers.refused = lambda b: "no kernel" if b.path.stem == file and b.engine == "fake" else None
    assert the_one(FAKE) == ("not held", f"{file}.onnx is not built: no kernel")


@pytest.mark.parametrize(("changed", "reason"), [
    (lambda layers: last(layers, nodes=("/relu_7",)), "nodes in no layer"),
    (lambda layers: (*layers, layers[-1], layers[0]), "nodes in several layers"),
    (lambda layers: (*layers, Layer("x", ("nobody",), "FP32", 0.1, "compute")), "names that are no nodes: nobody"),
    (lambda layers: last(layers, kind="copy"), "products outside of layers that compute: /conv_6"),
    *((lambda layers, ms=ms: last(layers, time_ms=ms), "sensible times") for ms in (None, -1.0, np.nan, np.inf)),
    (lambda layers: (*layers, Layer("odd", (), "", 10.0, "unknown")), "sensible times"),
])  # fmt: skip
def test_layers_of_other_nodes_or_without_sensible_times(changed: Any, reason: str, only: Any, workers: Any) -> None:
    only("layers", CONVOLUTIONS)
    alter(workers, layers=changed)
    state, told = the_one(REAL)
    assert (state, reason in told) == ("not held", True)


@pytest.mark.usefixtures("workers")
def test_an_engine_that_times_no_layers_is_not_to_blame(only: Any) -> None:
    only("layers", CONVOLUTIONS)
    assert the_one(EngineSpec("fake", {"hide_times": True}))[0] == "held"


@pytest.mark.parametrize(("graph", "changed", "reason"), [
    (CONVOLUTIONS, lambda layers: last(layers, precision="FP32"), ", the first: /conv_6 (Conv) runs in float"),
    (CONVOLUTIONS, lambda layers: tuple(replace(layer, precision="") for layer in layers), "none of "),
    (W8, lambda layers: (Layer("x", ("weight_a_256x512_DequantizeLinear",), "FP32", 0.1, "quantize"), *layers[2:]),
     "does not draw weights"),
])  # fmt: skip
def test_products_that_lose_their_8_bits(graph: str, changed: Any, reason: str, only: Any, workers: Workers) -> None:
    only("8 bits", graph)
    alter(workers, layers=changed)
    state, told = the_one(REAL)
    assert (state, reason in told) == ("not held", True)


@pytest.mark.parametrize(("file", "factor"), [("float", 1.02), ("quantized", 1.2), ("quantized", np.nan)])
def test_outputs_that_are_off(file: str, factor: float, only: Any, workers: Workers) -> None:
    only("numbers", CONVOLUTIONS)
    alter(workers, outputs=lambda outputs: {name: factor * y for name, y in outputs.items()}, file=file)
    assert the_one(REAL)[0] == "not held"


@pytest.mark.parametrize(("subject", "slower"), [
    (ITSELF, lambda build: 2.0 if build.log.stem.endswith("_1") else 1.0),
    (DEEPER, lambda build: 0.1 if build.path.stem == "deeper" else 1.0),
])  # fmt: skip
def test_times_that_tell_equal_files_apart_or_no_others(subject: str, slower: Any, only: Any, workers: Workers) -> None:
    only("times", subject)
    workers.slower = slower
    assert the_one(FAKE)[0] == "not held"


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("result", "told"), [
    ({"improved": True, "ratio": None}, "ships that is not proven"),
    ({"improved": True, "ratio": SimpleNamespace(verdict="undecided")}, "ships that is not proven"),
    ({"improved": False, "ratio": None, "file": Path("none.onnx")}, "the engine does not run what ships: "),
])  # fmt: skip
def test_a_search_that_ships_what_it_may_not(result: Any, told: str, only: Any, monkeypatch: Any) -> None:
    only("search", "cut")
    monkeypatch.setattr(qualification, "tune", lambda *_: SimpleNamespace(**result))
    assert told in the_one(FAKE)[1]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("capability", "state"), [("8.6", "not applicable"), ("[N/A]", "held")])
def test_fp8_on_a_gpu_that_has_none(
    capability: str, state: str, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("builds", FP8)
    monkeypatch.setattr(qualification, "find_gpus", lambda: ((Gpu("A10", "550", capability, "24 GB"),), ""))
    spec = EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")})
    found, told = the_one(spec)
    assert found == state
    assert (told == "GPUs of compute capability 8.6 have no FP8") is (state == "not applicable")


# The command


@pytest.mark.usefixtures("workers")
def test_the_page_the_file_and_the_exit_code(
    call: Any, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    only("builds", CONVOLUTIONS, W8)
    words = ("doctor", "--qualify", "--engine", "fake")
    code, printed, _ = call(*words)
    told = json.loads((tmp_path / "qualification_fake.json").read_text())
    assert (code, told["holds"], told["engine"]["engine"]) == (0, True, "fake")
    states = {seen["subject"]: seen["state"] for seen in told["checks"]}
    assert states == {CONVOLUTIONS: "held", W8: "not applicable"}
    assert f"not applicable: builds, {W8}: fake has no kernels" in printed
    only("8 bits", CONVOLUTIONS)  # for the model of costs a product without a pair behind it runs in float
    code, printed, _ = call(*words, "--json", "-o", "other.json")
    assert code == 4
    assert json.loads(printed)["checks"][0]["state"] == "not held"
    assert json.loads((tmp_path / "other.json").read_text())["holds"] is False
    assert call(*words, "-o", "other.json")[0] == 4
    (tmp_path / "mine.json").write_text("{}")
    assert call(*words, "-o", "mine.json")[0] == 2


@pytest.mark.parametrize(("words", "code", "reason"), [
    ("--qualify --on board", 2, "--qualify"),
    ("-o record.json", 2, "--qualify"),
    ("--qualify --engine trtexec --engine-option trtexec=nowhere", 5, "nowhere"),
])  # fmt: skip
def test_calls_that_are_refused_leave_no_file(
    words: str, code: int, reason: str, call: Any, workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done, _, said = call("doctor", *words.split())
    assert (done, reason in said) == (code, True)
    assert not list(tmp_path.glob("*.json"))
