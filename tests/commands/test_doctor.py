"""What `examine` finds on machines that differ from this one."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from qdqtune.cli import main
from qdqtune.commands import doctor
from qdqtune.commands.doctor import (
    EnginesState,
    EngineState,
    Gpu,
    Processor,
    consequence,
    engine_options,
    engine_state,
    examine,
    find_gpus,
    this_processor,
)
from qdqtune.engines import MODULES, EngineSpec, devices
from qdqtune.engines.providers import PROVIDERS
from qdqtune.errors import EngineUnavailable
from runs import environment

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


def test_this_processor():
    found = this_processor()
    assert found.cores >= 1
    assert found.name
    assert found.consequence == consequence(platform.machine(), found.isa)


# GPUs


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_gpus(tmp_path, monkeypatch):
    lines = "echo 'NVIDIA A100, 550.54.15, 8.0, 40960 MiB'; echo 'NVIDIA L4, 550.54.15, 8.9, 23034 MiB'"
    nvidia_smi(tmp_path, monkeypatch, f'case "$1" in --query-gpu=*) {lines};; *) exit 3;; esac')
    a100, l4 = Gpu("NVIDIA A100", "550.54.15", "8.0", "40960 MiB"), Gpu("NVIDIA L4", "550.54.15", "8.9", "23034 MiB")
    assert find_gpus() == ((a100, l4), "")


@pytest.mark.parametrize(("script", "note"), [
    ("echo 'NVIDIA-SMI has failed'; exit 9", "nvidia-smi finds none: NVIDIA-SMI has failed"),
    ("echo 'No devices were found'", "nvidia-smi finds none: No devices were found"),
    ("echo broken >&2; exit 1", "nvidia-smi finds none: broken"),
])  # fmt: skip
def test_no_gpu(script, note, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, script)
    assert find_gpus() == ((), note)


def test_no_driver_and_a_driver_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ((), "no NVIDIA driver: there is no nvidia-smi")
    nvidia_smi(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(devices, "NVIDIA_SMI_SECONDS", 0.2)
    gpus, note = find_gpus()
    assert gpus == ()
    assert note.startswith("nvidia-smi does not answer: ")


# Engines


def test_engines_that_work(tmp_path, workers):
    fake, onnxruntime = (engine_state(name, tmp_path) for name in ("fake", "onnxruntime"))
    assert (fake.status, fake.version, fake.device, fake.reason) == ("usable", "1", "cost model", "")
    assert onnxruntime.status == "usable"
    assert onnxruntime.version
    assert onnxruntime.device


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, needed: str = "tensorrt") -> None:
    """A Python package `tensorrt`, for workers. The engine is installed if the package that is `needed` is."""
    (folder / "tensorrt.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(doctor.NEEDS, "tensorrt", ((needed,), "pip install 'qdqtune[tensorrt]'"))


def test_a_library_that_is_not_there(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, "raise ModuleNotFoundError(\"No module named 'tensorrt'\")", "no_such_package")
    assert engine_state("tensorrt", tmp_path) == EngineState(
        "tensorrt", "missing", reason="TensorRT cannot be loaded (No module named 'tensorrt')",
        remedy="pip install 'qdqtune[tensorrt]'",
    )  # fmt: skip


def test_a_library_that_lacks_another_is_not_to_be_installed_again(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, "raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    found = engine_state("tensorrt", tmp_path)
    assert (found.status, found.remedy) == ("missing", "")
    assert "libnvinfer.so.10: cannot open shared object file" in found.reason


def test_a_library_that_kills_its_process(tmp_path, monkeypatch):
    library(tmp_path, monkeypatch, "import os\nos.abort()")
    found = engine_state("tensorrt", tmp_path)
    assert found.status == "missing"
    assert found.reason == (
        "engine 'tensorrt' does not work here: the engine process ended with signal SIGABRT while opening the engine"
    )


class Ahead:
    """An engine that cannot be opened but for another device."""

    def __init__(self, spec: EngineSpec) -> None:
        if not spec.options:
            raise EngineUnavailable("there is no GPU")

    def describe(self) -> dict[str, str]:
        return {"version": "1.7", "device": "none"}


def test_an_engine_that_only_builds(tmp_path, monkeypatch, workers):
    """The package of TensorRT-RTX alone will do for it, which is all that its extra installs: no CUDA."""
    workers.opener = Ahead
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name == "tensorrt_rtx_bindings" or None)
    assert engine_state("tensorrt-rtx", tmp_path) == EngineState(
        "tensorrt-rtx", "builds only", "1.7", "none", "there is no GPU"
    )
    monkeypatch.setattr(doctor, "NEEDS", {})
    assert engine_state("tensorrt", tmp_path) == EngineState("tensorrt", "missing", reason="there is no GPU")


def test_every_engine_is_examined(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "engine_state", lambda name, _: EngineState(name, "missing"))
    found = examine(tmp_path)
    assert [e.name for e in (*found.engines, *found.providers)] == list(MODULES)


def test_another_machine_is_asked_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(doctor.Destination, "facts", lambda _: None)
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda words, **_: commands.append(words) or subprocess.CompletedProcess(words, 5)
    )
    with pytest.raises(SystemExit) as end:
        main.main(["doctor", "--on", "board:/bin/python", "--json"])
    assert (end.value.code, commands[0][-2:]) == (5, ["board", "exec /bin/python -P -m qdqtune doctor --json"])


@pytest.mark.parametrize(
    ("there", "code", "error"), [("exit 5", 5, ""), ("exit 255", 5, "qdqtune doctor on board fails with exit code 255")]
)
def test_what_another_machine_prints_is_the_result(there: str, code: int, error: str) -> None:
    words = f"""
from qdqtune.cli.main import main
from qdqtune.commands.doctor import Destination
Destination.facts = lambda _: None
Destination.command = lambda *_: ["sh", "-c", "echo told; {there}"]
main(["doctor", "--on", "board"])"""
    done = subprocess.run([sys.executable, "-c", words], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, error in done.stderr) == (code, "told\n", True)


def test_a_provider_is_examined_where_it_can_exist(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engine_state("qnn", tmp_path).reason == "not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    told = {"version": "1.31", "plugin": "2.7", "device": "an NPU"}
    monkeypatch.setattr(doctor, "_described", lambda spec, folder: told)
    monkeypatch.setattr(doctor, "is_simulated", lambda name: True)
    assert engine_state("qnn", tmp_path) == EngineState(
        "qnn", "simulated", "2.7", "an NPU", takes=PROVIDERS["qnn"].notes
    )

    def refused(spec, folder):
        raise EngineUnavailable(f"no device: {PROVIDERS['cuda'].install}")

    monkeypatch.setattr(doctor, "_described", refused)
    assert engine_state("cuda", tmp_path).reason == "no device"


# The command


CPU = Processor("Some CPU", 4, ("avx2",), "no VNNI")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: EnginesState, *arguments: str):
    monkeypatch.setattr("qdqtune.cli.checks.examine", lambda _: found)
    with pytest.raises(SystemExit) as end:
        main.main(["doctor", *arguments])
    return end.value.code, capsys.readouterr().out


def test_the_table(monkeypatch, capsys):
    engines = (
        EngineState("fake", "usable", "1", "cost model"),
        EngineState("onnxruntime", "usable", "1.31", "Some CPU"),
        EngineState("openvino", "missing", reason="no module", remedy="pip install 'qdqtune[openvino]'"),
    )
    takes = PROVIDERS["qnn"].notes
    gpus, providers = (Gpu("L4", "550", "8.9", "23034 MiB"),), (EngineState("qnn", "missing", takes=takes),)
    code, printed = run(monkeypatch, capsys, EnginesState(engines, CPU, gpus, "", providers))
    assert code == 0
    assert re.search(rf"^ qnn +missing +{re.escape(takes)} *$", printed, re.MULTILINE)
    assert "openvino: no module: pip install 'qdqtune[openvino]'\n" in printed
    assert "CPU: Some CPU, 4 cores (avx2); no VNNI\n" in printed
    assert "GPU: L4, 23034 MiB, compute capability 8.9, driver 550\n" in printed
    assert [line.split() for line in printed.splitlines() if line.startswith((" onnx", " open"))] == [
        ["onnxruntime", "usable", "1.31", "Some", "CPU"],
        ["openvino", "missing"],
    ]


@pytest.mark.parametrize(("status", "code"), [("usable", 0), ("builds only", 0), ("missing", 5)])
def test_the_exit_code_tells_whether_any_engine_is_usable(status, code, monkeypatch, capsys):
    engines = (EngineState("fake", "usable", "1", "cost model"), EngineState("onnxruntime", status, reason="why"))
    found, printed = run(monkeypatch, capsys, EnginesState(engines, CPU, (), "no driver"), "--json")
    assert found == code
    told = json.loads(printed)
    assert [e["status"] for e in told["engines"]] == ["usable", status]
    assert (told["processor"]["isa"], told["gpus"], told["gpu_note"]) == (["avx2"], [], "no driver")


def test_every_option_of_every_real_engine_is_listed_with_its_type_and_default() -> None:
    listed = {(engine, option.name): option for option in engine_options() for engine in option.engines}
    assert listed.keys() == {(name, one.name) for name, kind in doctor.OPTIONS.items() for one in fields(kind)}
    assert doctor.OPTIONS.keys() == MODULES.keys() - {"fake", *PROVIDERS}
    for name in ("onnxruntime", "tensorrt", "tensorrt-rtx", "trtexec"):
        assert doctor.OPTIONS[name] is get_type_hints(import_module(MODULES[name]).create)["options"]
    told = listed["onnxruntime", "threads"]
    assert (told.takes, told.default) == ("integer", "1")
    assert (listed["openvino", "precision"].takes, listed["tensorrt", "opt_shapes"].takes) == ("text", "values by name")
