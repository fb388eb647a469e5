"""What `doctor --qualify` says of engines that do what we claim, and of engines that do not: each check can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaded_modules import CUDA, absent
from qdqtune.commands import qualification, qualification_graphs
from qdqtune.commands.doctor import DoctorOptions
from qdqtune.commands.qualification import CHECKS, DEEPER, ITSELF
from qdqtune.engines import Built, Engine, EngineSpec
from qdqtune.errors import EngineUnavailable
from qdqtune.tuning.observer import Silent
from qdqtune.types import Layer, Tensors
from trtexec_stand_in import stand_in
from workers import Workers, open_here

CONVOLUTIONS, ATTENTION, FUSED = "convolutions", "transformer, heads of 16", "transformer, fused qkv"
DYNAMIC, W8, FP8, MEMORY = "dynamic shapes", "weights of 8 bits", "fp8", "2^46 values"
REAL = EngineSpec("onnxruntime", {"threads": 1})
FAKE = EngineSpec("fake")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves of the checks those that are named, of their subjects some, and makes graphs smaller."""

    def leave(names: str, *subjects: str) -> None:
        chosen = [check for check in CHECKS if check.name in names.split(", ")]
        assert len(chosen) == len(names.split(", "))
        kept = [replace(c, subjects=tuple(s for s in c.subjects if s in subjects)) for c in chosen]
        assert all(check.subjects for check in kept)
        monkeypatch.setattr(qualification, "CHECKS", kept)

    monkeypatch.setattr(qualification_graphs, "SIDE", 8)
    return leave


def qualified(spec: EngineSpec) -> dict[tuple[str, str], tuple[str, str]]:
    """What was seen, by check and subject."""
    done = qualification.qualify(DoctorOptions(engine=spec), Silent())
    assert done.holds == all(seen.state != "not held" for check in done.checks for seen in check.seen)
    return {(check.name, seen.subject): (seen.state, seen.told) for check in done.checks for seen in check.seen}


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

GRAPH_CHECKS = "float, pairs, layers, layer times, 8 bits, numbers, memory"
GRAPHS = CONVOLUTIONS, ATTENTION, FUSED, DYNAMIC, W8, FP8


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_on_a_cpu_all_graphs_hold(name: str, only: Any) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    only(GRAPH_CHECKS, *GRAPHS, MEMORY)
    seen = qualified(EngineSpec(name, {"threads": 1}))
    assert not broken(seen)
    assert {subject for (_, subject), (state, _) in seen.items() if state == "not applicable"} == {FP8}
    assert "FP8" in seen["pairs", FP8][1]


@pytest.mark.usefixtures("workers")
def test_without_its_gpu_an_engine_is_asked_for_builds_and_layers_only(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    absent(monkeypatch, *CUDA)
    only(GRAPH_CHECKS, DYNAMIC, W8, MEMORY)
    seen = qualified(EngineSpec("tensorrt-rtx", {"target": "sm89"}))
    assert not broken(seen)
    unasked = {check for (check, _), (state, _) in seen.items() if state == "not applicable"}
    assert unasked == {"layer times", "numbers", "memory"}
    assert "device is not present" in seen["numbers", DYNAMIC][1]


@pytest.mark.usefixtures("workers")
def test_the_fake_engine_holds_but_for_8_bits(only: Any) -> None:
    """Its model of costs fuses no product without a pair behind it."""
    only(
        "float, pairs, layers, layer times, 8 bits, numbers, memory, times",
        CONVOLUTIONS,
        DYNAMIC,
        MEMORY,
        ITSELF,
        DEEPER,
    )
    assert broken(qualified(FAKE)) == {("8 bits", CONVOLUTIONS), ("8 bits", DYNAMIC)}


@pytest.mark.usefixtures("workers")
def test_what_stands_in_for_trtexec_holds(tmp_path: Path, only: Any) -> None:
    only("float, pairs, layers", DYNAMIC)
    seen = qualified(EngineSpec("trtexec", {"trtexec": stand_in(tmp_path, "10.16")}))
    assert {(name, told) for (name, _), (state, told) in seen.items() if state != "held"} == set()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("mode", ["cut", "region", "subgraph"])
def test_searches_end(mode: str, only: Any) -> None:
    only("search", mode)
    state, told = the_one(FAKE)
    assert state == "held"
    assert told.startswith("proven, ")


# Engines that do not


@dataclass(frozen=True)
class Altered:
    """An engine whose models report other layers, or compute something else, in files whose name fits."""

    engine: Engine
    layers: Callable[[tuple[Layer, ...]], tuple[Layer, ...]] = lambda layers: layers
    outputs: Callable[[dict[str, Any]], dict[str, Any]] = lambda outputs: outputs
    file: str = "quantized"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def build(self, model: Path, log: Path) -> Any:
        built = self.engine.build(model, log)
        return AlteredModel(built, self) if model.stem == self.file else built


@dataclass(frozen=True)
class AlteredModel:
    built: Built
    how: Altered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def run(self, inputs: Tensors) -> dict[str, Any]:
        return self.how.outputs({} if self.how.file == "boundless" else self.built.run(inputs))

    def layers(self, inputs: Tensors, runs: int, *, saves_memory: bool = False) -> tuple[Layer, ...]:
        return self.how.layers(self.built.layers(inputs, runs))


def alter(workers: Workers, **how: Any) -> None:
    """Make engines `Altered`; those of calibration and simulation stay as they are."""
    workers.opener = lambda spec: open_here(spec) if "fuse" in spec.options else Altered(open_here(spec), **how)


def last(layers: tuple[Layer, ...], **changes: Any) -> tuple[Layer, ...]:
    """The layers with the last that computes a product changed."""
    at = max(i for i, layer in enumerate(layers) if layer.kind == "compute" and len(layer.nodes) > 2)
    return (*layers[:at], replace(layers[at], **changes), *layers[at + 1 :])


@pytest.mark.parametrize(("check", "file"), [("float", "float"), ("pairs", "quantized")])
def test_an_engine_that_refuses_a_file(check: str, file: str, only: Any, workers: Workers) -> None:
    only(check, CONVOLUTIONS)
    workers.refused = lambda b: "no kernel" if b.path.stem == file and b.engine == "fake" else None
    assert the_one(FAKE) == ("not held", f"{file}.onnx is not built: no kernel")


@pytest.mark.parametrize(("changed", "reason"), [
    (lambda layers: last(layers, nodes=("/relu_7",)), "nodes in no layer"),
    (lambda layers: (*layers, layers[-1], layers[0]), "nodes in several layers"),
    (lambda layers: (*layers, Layer("x", ("nobody",), "FP32", 0.1, "compute")), "names that are no nodes: nobody"),
    (lambda layers: last(layers, kind="copy"), "products outside of layers that compute: /conv_6"),
])  # fmt: skip
def test_reports_that_name_the_wrong_layers(changed: Any, reason: str, only: Any, workers: Workers) -> None:
    only("layers", CONVOLUTIONS)
    alter(workers, layers=changed)
    state, told = the_one(REAL)
    assert state == "not held"
    assert reason in told


@pytest.mark.parametrize("changed", [
    *(lambda layers, ms=ms: last(layers, time_ms=ms) for ms in (None, -1.0, float("nan"), float("inf"))),
    lambda layers: (*layers, Layer("odd", (), "", 10.0, "unknown")),
])  # fmt: skip
def test_layers_without_sensible_times(changed: Any, only: Any, workers: Workers) -> None:
    only("layer times", CONVOLUTIONS)
    alter(workers, layers=changed)
    assert the_one(REAL)[0] == "not held"


@pytest.mark.usefixtures("workers")
def test_an_engine_that_times_no_layers_is_not_to_blame(only: Any) -> None:
    only("layer times", CONVOLUTIONS)
    hiding = EngineSpec("fake", {"hide_times": True})
    assert the_one(hiding) == ("not applicable", "the engine gives no times of layers")


@pytest.mark.parametrize(("changed", "reason"), [
    (lambda layers: last(layers, precision="FP32"), "1 of 7 layers, the first: /conv_6 (Conv) runs in float"),
    (lambda layers: tuple(replace(layer, precision="") for layer in layers), "none of 7 layers runs in 8 bits"),
])  # fmt: skip
def test_products_that_lose_their_8_bits(changed: Any, reason: str, only: Any, workers: Workers) -> None:
    only("8 bits", CONVOLUTIONS)
    alter(workers, layers=changed)
    state, told = the_one(REAL)
    assert state == "not held"
    assert told.replace("of 8", "of 7").startswith(reason)


def test_stored_weights_that_are_unpacked_by_a_kernel_of_their_own(only: Any, workers: Workers) -> None:
    only("8 bits", W8)

    def unpacked(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return (Layer("unpack", ("weight_a_256x512_DequantizeLinear",), "FP32", 0.1, "quantize"), *layers[2:])

    alter(workers, layers=unpacked)
    state, told = the_one(REAL)
    assert state == "not held"
    assert "does not draw weights" in told


@pytest.mark.parametrize(("file", "changed"), [
    ("float", lambda outputs: {n: 1.02 * y for n, y in outputs.items()}),
    ("quantized", lambda outputs: {n: 1.2 * y for n, y in outputs.items()}),
    ("quantized", lambda outputs: {n: np.nan * y for n, y in outputs.items()}),
])  # fmt: skip
def test_outputs_that_are_off(file: str, changed: Any, only: Any, workers: Workers) -> None:
    only("numbers", CONVOLUTIONS)
    alter(workers, outputs=changed, file=file)
    assert the_one(REAL)[0] == "not held"


@pytest.mark.parametrize(("subject", "slower"), [
    (ITSELF, lambda build: 2.0 if build.log.stem.endswith("_1") else 1.0),
    (DEEPER, lambda build: 0.1 if build.path.stem == "deeper" else 1.0),
])  # fmt: skip
def test_times_that_tell_equal_files_apart_or_no_others(subject: str, slower: Any, only: Any, workers: Workers) -> None:
    only("times", subject)
    workers.slower = slower
    assert the_one(FAKE)[0] == "not held"


def test_memory_that_seems_to_suffice(only: Any, workers: Workers) -> None:
    only("memory", MEMORY)
    alter(workers, file="boundless")
    assert the_one(REAL) == ("not held", "the request was answered as if nothing had happened")


def test_an_engine_that_stays_without_memory(only: Any, workers: Workers) -> None:
    only("memory", MEMORY)
    spoiled: list[Path] = []

    def refused(build: Any) -> str | None:
        spoiled.extend([build.path] if build.path.stem == "boundless" else [])
        return "out of memory" if spoiled and build.engine == "fake" else None

    workers.refused = refused
    assert the_one(FAKE) == ("not held", "the next request fails: out of memory")


def test_a_search_that_fails(only: Any, workers: Workers) -> None:
    only("search", "cut")
    workers.refused = lambda build: "no kernel" if build.engine == "fake" else None
    state, told = the_one(FAKE)
    assert state == "not held"
    assert "no kernel" in told


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("found", "told"), [
    ({"improved": True, "ratio": None}, "ships that is not proven"),
    ({"improved": True, "ratio": SimpleNamespace(verdict="undecided")}, "ships that is not proven"),
    ({"improved": False, "ratio": None, "file": Path("none.onnx")}, "the engine does not run what ships: "),
])  # fmt: skip
def test_a_search_that_ships_what_it_may_not(found: Any, told: str, only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("search", "cut")
    monkeypatch.setattr(qualification, "tune", lambda *_: SimpleNamespace(**found))
    assert told in the_one(FAKE)[1]


def test_fp8_on_a_gpu_that_has_none(only: Any, workers: Workers) -> None:
    only("pairs", FP8)

    class Older:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def describe(self) -> dict[str, str]:
            return {**self.engine.describe(), "compute_capability": "8.6"}

    workers.opener = lambda spec: Older(open_here(spec))  # type: ignore[assignment,return-value]
    assert the_one(FAKE) == ("not applicable", "GPUs of compute capability 8.6 have no FP8")


# The command


@pytest.mark.usefixtures("workers")
def test_the_page_the_file_and_the_exit_code(
    call: Any, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    only("float, pairs", CONVOLUTIONS, W8)
    words = ("doctor", "--qualify", "--engine", "fake")
    code, printed, _ = call(*words)
    told = json.loads((tmp_path / "qualification_fake.json").read_text())
    assert code == 0
    assert told["holds"]
    assert [(c["name"], c["state"]) for c in told["checks"]] == [("float", "held"), ("pairs", "held")]
    assert told["engine"]["engine"] == "fake"
    assert "not applicable: pairs, weights of 8 bits: fake has no kernels" in printed
    assert "1 of 1" in printed
    only("8 bits", CONVOLUTIONS)  # for the model of costs a product without a pair behind it runs in float
    code, printed, _ = call(*words, "--json", "-o", "other.json")
    assert code == 4
    assert json.loads(printed)["checks"][0]["state"] == "not held"
    assert json.loads((tmp_path / "other.json").read_text())["holds"] is False
    assert call(*words, "-o", "other.json")[0] == 4
    (tmp_path / "mine.json").write_text("{}")
    assert call(*words, "-o", "mine.json")[0] == 2


@pytest.mark.parametrize("words", ["--qualify --on board", "-o record.json"])
def test_options_that_do_not_go_together(
    words: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = call("doctor", *words.split())
    assert code == 2
    assert "--qualify" in said


def test_an_engine_that_is_not_there(
    call: Any, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = call("doctor", "--qualify", "--engine", "trtexec", "--engine-option", "trtexec=nowhere")
    assert code == 5
    assert "nowhere" in said
    assert not list(tmp_path.glob("*.json"))
