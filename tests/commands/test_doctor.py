"""What `doctor` finds on other machines than this one, and what `--qualify` says of engines: each check can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from conftest import Call
from loaded_modules import CUDA, absent
from qdqtune.commands import doctor
from qdqtune.commands.doctor import (
    GRAPHS,
    DoctorOptions,
    EnginesState,
    EngineState,
    engine_state,
    examine,
    find_gpus,
    qualify,
)
from qdqtune.engines import EngineSpec, devices, open_engine
from qdqtune.engines.facts import ENGINES
from qdqtune.engines.machine import consequence
from qdqtune.errors import EngineRefused, EngineUnavailable, Failure
from qdqtune.tuning.observer import Silent
from qdqtune.types import Layer, Tensors
from workers import Workers

# Processors


@pytest.mark.parametrize(("isa", "machine", "words"), [
    ("avx2", "x86_64", "no VNNI: weights take 7 bits"),
    ("avx2 avx_vnni", "AMD64", "VNNI: int8 dot products in hardware"),
    ("avx2 avx512_vnni amx_int8", "x86_64", "AMX: int8 matrix products in hardware"),
    ("asimddp", "aarch64", "ASIMDDP: int8 dot products in hardware"),
    ("asimddp i8mm", "arm64", "I8MM: int8 matrix products in hardware"),
    ("", "riscv64", "no instruction set that is known to matter"),
])  # fmt: skip
def test_what_follows_from_instruction_sets(isa, machine, words):
    assert consequence(machine, isa.split()).startswith(words)


# GPUs


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_gpus(tmp_path, monkeypatch):
    lines = "echo 'NVIDIA A100, 550.54.15, 8.0, 40960 MiB'; echo 'NVIDIA L4, 550.54.15, 8.9, 23034 MiB'"
    nvidia_smi(tmp_path, monkeypatch, f'case "$1" in --query-gpu=*) {lines};; *) exit 3;; esac')
    a100, l4 = find_gpus()[0]
    assert a100 == {"name": "NVIDIA A100", "driver": "550.54.15", "compute_capability": "8.0", "memory": "40960 MiB"}
    assert l4["name"] == "NVIDIA L4"


@pytest.mark.parametrize(("script", "note"), [
    ("echo 'L4, 550, 8.9, 1 MiB'; exit 9", "nvidia-smi finds none: L4, 550"),
    ("echo 'No devices were found'", "nvidia-smi finds none: No devices were found"),
    ("echo broken >&2; exit 1", "nvidia-smi finds none: broken"),
    ("exec sleep 60", "nvidia-smi does not answer: "),
])  # fmt: skip
def test_no_gpu(script, note, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(devices, "NVIDIA_SMI_SECONDS", 0.2)
    gpus, found = find_gpus()
    assert (gpus, found.startswith(note)) == ([], True)


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ([], "no NVIDIA driver: there is no nvidia-smi")


# Engines


def test_engines_that_work(workers):
    fake, onnxruntime = (engine_state(name) for name in ("fake", "onnxruntime"))
    assert (fake.status, fake.version, fake.device, fake.reason) == ("usable", "1", "cost model", "")
    assert onnxruntime.status == "usable"
    assert onnxruntime.version
    assert onnxruntime.device


@pytest.mark.parametrize(("text", "needed", "remedy", "reason"), [
    ("", "no_such_package", "pip install 'qdqtune[tensorrt]'", "not installed"),
    ("raise ImportError('libnvinfer.so.10: cannot open shared object file')", "tensorrt", "",
     "libnvinfer.so.10: cannot open shared object file"),
    ("import os\nos.abort()", "tensorrt", "", "the engine process ended with signal SIGABRT while opening the engine"),
])  # fmt: skip
def test_a_library_that_is_missing_lacks_another_or_kills_its_process(
    text: str, needed: str, remedy: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python package `tensorrt`, for workers. The engine is installed if the package that is `needed` is."""
    (tmp_path / "tensorrt.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "tensorrt", replace(ENGINES["tensorrt"], packages=(needed,)))
    found = engine_state("tensorrt")
    assert (found.status, found.remedy) == ("missing", remedy)
    assert reason in found.reason


class Ahead:
    """An engine that cannot be opened but for another device."""

    def __init__(self, spec: EngineSpec) -> None:
        if not spec.options:
            raise EngineUnavailable("there is no GPU")

    def describe(self) -> dict[str, str]:
        return {"version": "1.7", "device": "none"}


def test_an_engine_that_only_builds(monkeypatch, workers):
    """The package of TensorRT-RTX alone will do for it, which is all that its extra installs: no CUDA."""
    workers.opener = Ahead
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorrt_rtx_bindings" or None)
    assert engine_state("tensorrt-rtx") == EngineState("tensorrt-rtx", "builds only", "1.7", "none", "there is no GPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert engine_state("tensorrt") == EngineState("tensorrt", "missing", reason="there is no GPU")


def test_every_engine_is_examined(monkeypatch):
    monkeypatch.setattr(doctor, "engine_state", lambda name: EngineState(name, "missing"))
    found = examine()
    assert [e.name for e in (*found.engines, *found.providers)] == list(ENGINES)


@pytest.mark.parametrize(
    ("there", "code", "error"), [("exit 5", 5, ""), ("exit 255", 5, "qdqtune doctor on board fails with exit code 255")]
)
def test_another_machine_is_asked_by_the_same_command_and_what_it_prints_is_the_result(
    there: str, code: int, error: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(doctor.Destination, "facts", lambda _: None)
    monkeypatch.setattr(
        doctor.Destination, "command", lambda _, words: asked.append(words) or ["sh", "-c", f"echo told; {there}"]
    )
    found, out, err = call("doctor", "--on", "board:/bin/python", "--json")
    assert (found, out, error in err) == (code, "told\n", True)
    assert asked == ["qdqtune doctor --json"]


def test_a_provider_is_examined_where_it_can_exist(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    told = {"version": "1.31", "plugin": "2.7", "device": "an NPU"}
    monkeypatch.setattr(doctor, "_described", lambda spec: told)
    monkeypatch.setattr(doctor, "simulated", lambda name: "a simulator")
    assert engine_state("qnn") == EngineState("qnn", "simulated", "2.7", "an NPU")


# The command


CPU = {"name": "Some CPU", "cores": 4, "isa": ("avx2",), "consequence": "no VNNI"}


def test_the_table(monkeypatch, call):
    engines = (
        EngineState("fake", "usable", "1", "cost model"),
        EngineState("onnxruntime", "usable", "1.31", "Some CPU"),
        EngineState("openvino", "missing", reason="no module", remedy="pip install 'qdqtune[openvino]'"),
    )
    gpus = [{"name": "L4", "driver": "550", "compute_capability": "8.9", "memory": "23034 MiB"}]
    providers = (EngineState("qnn", "missing"),)
    monkeypatch.setattr("qdqtune.cli.commands.examine", lambda: EnginesState(engines, CPU, gpus, "", providers))
    code, printed, _ = call("doctor")
    assert code == 0
    assert re.search("^ qnn +missing *$", printed, re.MULTILINE)
    assert "openvino: no module: pip install 'qdqtune[openvino]'\n" in printed
    assert "CPU: Some CPU, 4 cores (avx2); no VNNI\n" in printed
    assert "GPU: L4, 23034 MiB, compute capability 8.9, driver 550\n" in printed
    assert [line.split() for line in printed.splitlines() if line.startswith((" onnx", " open"))] == [
        ["onnxruntime", "usable", "1.31", "Some", "CPU"],
        ["openvino", "missing"],
    ]


@pytest.mark.parametrize(("status", "code"), [("usable", 0), ("builds only", 0), ("missing", 5)])
def test_the_exit_code_tells_whether_any_engine_is_usable(status, code, monkeypatch, call):
    engines = (EngineState("fake", "usable", "1", "cost model"), EngineState("onnxruntime", status, reason="why"))
    monkeypatch.setattr("qdqtune.cli.commands.examine", lambda: EnginesState(engines, CPU, (), "no driver"))
    found, printed, _ = call("doctor", "--json")
    assert found == code
    told = json.loads(printed)
    assert [e["status"] for e in told["engines"]] == ["usable", status]
    assert (told["processor"]["isa"], told["gpus"], told["gpu_note"]) == (["avx2"], [], "no driver")


# What holds of our claims


PLAIN, DYNAMIC, W8, FP8 = "convolutions", "dynamic shapes", "weights of 8 bits", "fp8"
REAL = EngineSpec("onnxruntime", {"threads": 1})
FAKE = EngineSpec("fake")


def qualified(spec: EngineSpec, *graphs: str) -> dict[str, dict[str, tuple[str, str]]]:
    """What was seen, by subject and check."""
    seen: dict[str, dict[str, tuple[str, str]]] = {}
    for one in qualify(DoctorOptions(engine=spec), Silent(), graphs).checks:
        seen.setdefault(one.subject, {})[one.check] = one.state, one.told
    return seen


def test_a_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "simulated", lambda name: f"{name} is a simulator")
    with pytest.raises(EngineUnavailable, match="fake is a simulator, and claims are about devices"):
        qualified(FAKE)


def test_a_graph_that_is_refused_is_not_taken_for_a_lack_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = EngineRefused(Failure("build", "no such kernel"))
    monkeypatch.setattr(doctor, "quantize", Mock(side_effect=refused))
    assert {*qualified(FAKE, PLAIN)[PLAIN].values()} == {("not held", "no such kernel")}


# Engines that do what we claim


@pytest.mark.usefixtures("workers")
def test_without_its_gpu_an_engine_is_asked_for_builds_and_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    absent(monkeypatch, CUDA)
    for checks in qualified(EngineSpec("tensorrt-rtx", {"target": "sm89"}), DYNAMIC, W8).values():
        assert [checks[name][0] for name in ("layers", "8 bits")] == ["held", "held"]
        assert checks["numbers"] == ("not applicable", "the engine only builds here: its device is not present")


# Engines that do not


def alter(workers: Workers, layers: Any = lambda x: x, outputs: Any = lambda x: x, file: str = "quantized") -> None:
    """Models of files of a name report other layers, or compute something else; engines of calibration and simulation
    stay as they are."""

    def opener(spec: EngineSpec) -> Any:
        engine = open_engine(spec)
        if "fuse" in spec.options:
            return engine

        def build(model: Path, log: Path) -> Any:
            built = type(engine).build(engine, model, log)
            if model.stem != file:
                return built
            wrong = {"run": lambda x: outputs(built.run(x)), "layers": lambda x, runs: layers(built.layers(x, runs))}
            return SimpleNamespace(**wrong, time=built.time, close=built.close)

        return SimpleNamespace(describe=engine.describe, numeric_format=engine.numeric_format, build=build)

    workers.opener = opener


def last(layers: tuple[Layer, ...], **changes: Any) -> tuple[Layer, ...]:
    """The layers with the last that computes a product changed."""
    at = max(i for i, layer in enumerate(layers) if layer.kind == "compute" and len(layer.nodes) > 2)
    return (*layers[:at], replace(layers[at], **changes), *layers[at + 1 :])


@pytest.mark.parametrize("file", ["float", "quantized"])
def test_an_engine_that_refuses_a_file(file: str, workers: Workers) -> None:
    workers.refused = lambda b: "no kernel" if b.path.stem == file and b.engine == "fake" else None
    assert {*qualified(FAKE, PLAIN)[PLAIN].values()} == {("not held", f"{file}.onnx is not built: no kernel")}


def times(factor: float) -> Callable[[Tensors], Tensors]:
    return lambda outputs: {name: factor * y for name, y in outputs.items()}


WEIGHT = Layer("x", ("weight_a_256x512_DequantizeLinear",), "FP32", 0.1, "quantize")


@pytest.mark.parametrize(("check", "graph", "fault", "reason"), [
    ("layers", PLAIN, {"layers": partial(last, nodes=("/relu_7",))}, "nodes in no layer"),
    ("layers", PLAIN, {"layers": lambda layers: (*layers, layers[-1], layers[0])}, "nodes in several layers"),
    ("layers", PLAIN, {"layers": lambda layers: (*layers, Layer("x", ("nobody",), "FP32", 0.1, "compute"))},
     "names that are no nodes: nobody"),
    ("layers", PLAIN, {"layers": partial(last, kind="copy")}, "products outside of layers that compute: /conv_"),
    *(("layers", PLAIN, {"layers": partial(last, time_ms=ms)}, "sensible times")
      for ms in (None, -1.0, np.nan, np.inf)),
    ("layers", PLAIN, {"layers": lambda layers: (*layers, Layer("odd", (), "", 10.0, "unknown"))},
     "sensible times"),
    ("8 bits", PLAIN, {"layers": partial(last, precision="FP32")}, " layers: /conv_6 (Conv) runs in float"),
    ("8 bits", PLAIN, {"layers": lambda layers: tuple(replace(layer, precision="") for layer in layers)},
     "0 of "),
    ("8 bits", W8, {"layers": lambda layers: (WEIGHT, *layers[2:])}, "does not draw weights"),
    ("numbers", PLAIN, {"outputs": times(1.02), "file": "float"}, "dB"),
    ("numbers", PLAIN, {"outputs": times(1.2)}, "dB"),
    ("numbers", PLAIN, {"outputs": times(np.nan)}, "nan dB"),
])  # fmt: skip
def test_layers_and_outputs_of_an_engine_that_are_wrong(check, graph, fault, reason, workers):
    alter(workers, **fault)
    state, told = qualified(REAL, graph)[graph][check]
    assert (state, reason in told) == ("not held", True), told


@pytest.mark.usefixtures("workers")
def test_an_engine_that_times_no_layers_is_not_to_blame() -> None:
    assert qualified(EngineSpec("fake", {"hide_times": True}), PLAIN)[PLAIN]["layers"][0] == "held"


def test_a_device_without_fp8(workers: Workers) -> None:
    workers.refused = lambda b: "no kernel" if b.path.stem == "quantized" and b.engine == "fake" else None
    assert {*qualified(FAKE, FP8)[FP8].values()} == {("not applicable", "the device has no FP8: no kernel")}


# The command


@pytest.mark.usefixtures("workers")
def test_the_page_and_the_exit_code(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GRAPHS", {W8: GRAPHS[W8]})
    words = ("doctor", "--qualify", "--engine", "fake")
    code, printed, _ = call(*words, "--json")
    told = json.loads(printed)
    assert (code, told["holds"], told["engine"]["engine"]) == (0, True, "fake")
    assert {(seen["subject"], seen["state"]) for seen in told["checks"]} == {(W8, "not applicable")}
    monkeypatch.setattr(doctor, "GRAPHS", {name: GRAPHS[name] for name in (PLAIN, W8)})
    code, printed, _ = call(*words)
    assert code == 4  # for the model of costs a product without a pair behind it runs in float
    assert "of 6 checks 3 not applicable, 2 held, 1 not held" in printed
    assert re.search(rf"not applicable +layers +{W8} +fake has no kernels", printed)


@pytest.mark.parametrize(("words", "code", "reason"), [
    ("--on board", 2, "--qualify"),
    ("--engine trtexec --engine-option trtexec=nowhere", 5, "nowhere"),
])  # fmt: skip
def test_calls_that_are_refused(words: str, code: int, reason: str, call: Any) -> None:
    done, _, said = call("doctor", "--qualify", *words.split())
    assert (done, reason in said) == (code, True)
