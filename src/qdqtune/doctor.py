"""`qdqtune doctor`: which engines work on this machine, on what they run, and what to install for the others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qdqtune.engines import MODULES, EngineSpec, one_line
from qdqtune.errors import QdqtuneError
from qdqtune.runner import Runner

PRETENDS = "fake"
"""The engine that is always there, since it measures nothing."""

AHEAD_OF_TIME = {"tensorrt-rtx": {"target": "sm89"}}
"""Options with which an engine builds for a device that is not there."""

NEEDS = {
    "onnxruntime": (("onnxruntime",), "pip install onnxruntime"),
    "openvino": (("openvino",), "pip install 'qdqtune[openvino]'"),
    "tensorrt": (("tensorrt", "cuda"), "pip install 'qdqtune[tensorrt]'"),
    "tensorrt-rtx": (("tensorrt_rtx_bindings", "cuda"), "pip install 'qdqtune[tensorrt-rtx]'"),
}
"""The Python packages without which an engine cannot be opened, and the command that installs them."""

ISA = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "avx512_bf16", "amx_bf16", "asimddp", "i8mm", "sve")
"""Flags of /proc/cpuinfo that decide which kernels run."""
NO_DOT_PRODUCT = "no dot products in hardware: int8 gains are moderate"

OPENING_SECONDS = 120.0
NVIDIA_SMI_SECONDS = 30.0
QUERY = ("--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader")


@dataclass(frozen=True)
class EngineState:
    """One engine: whether it runs models here, only builds them, or neither; why, and what would help."""

    name: str
    status: Literal["usable", "builds only", "missing"]
    version: str = ""
    device: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Processor:
    """The CPU: the cores that this process may use, instruction sets for low precision, and what follows for int8."""

    name: str
    cores: int
    isa: tuple[str, ...]
    consequence: str


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as nvidia-smi tells."""

    name: str
    driver: str
    compute_capability: str
    memory: str


@dataclass(frozen=True)
class Diagnosis:
    """All that `qdqtune doctor` says. `gpu_note` tells why there is no GPU."""

    engines: tuple[EngineState, ...]
    processor: Processor
    gpus: tuple[Gpu, ...]
    gpu_note: str

    @property
    def is_usable(self) -> bool:
        """Whether an engine that measures something can be used, if only to build."""
        return any(e.status != "missing" for e in self.engines if e.name != PRETENDS)


def examine(log_dir: Path, names: Sequence[str] = tuple(MODULES)) -> Diagnosis:
    """Try the engines, each in a process of its own, and look at the hardware. What does not work is in the answer."""
    gpus, note = find_gpus()
    return Diagnosis(tuple(engine_state(name, log_dir) for name in names), processor(), gpus, note)


def engine_state(name: str, log_dir: Path) -> EngineState:
    """Open one engine without options, or where that fails and it can, for a device that is not there."""
    try:
        told = _described(EngineSpec(name), log_dir)
        return EngineState(name, "usable", told["version"], told["device"])
    except QdqtuneError as error:
        reason = one_line(error)
    packages, command = NEEDS.get(name, ((), ""))
    if not all(importlib.util.find_spec(package) for package in packages):
        return EngineState(name, "missing", reason=reason.removesuffix(f": {command}"), remedy=command)
    if name in AHEAD_OF_TIME:
        with contextlib.suppress(QdqtuneError):
            told = _described(EngineSpec(name, AHEAD_OF_TIME[name]), log_dir)
            return EngineState(name, "builds only", told["version"], told["device"], reason)
    return EngineState(name, "missing", reason=reason)


def _described(spec: EngineSpec, log_dir: Path) -> dict[str, str]:
    with Runner(spec, time_limit_s=OPENING_SECONDS, log_dir=log_dir) as runner:
        return runner.describe()


def processor(cpuinfo: str | None = None, machine: str | None = None) -> Processor:
    """The CPU, of the text of /proc/cpuinfo (this machine's if None)."""
    if cpuinfo is None:
        with contextlib.suppress(OSError):
            cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", cpuinfo or "", re.MULTILINE))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    machine = machine or platform.machine()
    name = fields.get("model name") or platform.processor() or machine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(name, cores, tuple(flag for flag in ISA if flag in flags), _consequence(machine, flags))


def _consequence(machine: str, flags: Collection[str]) -> str:
    if not flags:
        return "instruction sets unknown: only a measurement tells what int8 gains"
    if machine.lower() in ("aarch64", "arm64"):
        if "i8mm" in flags:
            return "int8 matrix products in hardware: int8 gains most here"
        return "int8 dot products in hardware: int8 gains much" if "asimddp" in flags else NO_DOT_PRODUCT
    if "amx_int8" in flags:
        return "AMX: int8 matrix products in hardware, int8 gains most here"
    if {"avx_vnni", "avx512_vnni"} & set(flags):
        return "VNNI: int8 dot products in hardware, int8 gains much"
    return "no VNNI: weights take 7 bits, for sums of two 8-bit products saturate, and int8 gains are moderate"


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The NVIDIA GPUs, or why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "no NVIDIA driver: there is no nvidia-smi"
    try:
        done = subprocess.run([program, *QUERY], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              timeout=NVIDIA_SMI_SECONDS)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {one_line(error)}"
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    found = tuple(Gpu(*row) for row in rows if len(row) == QUERY[0].count(",") + 1)
    if done.returncode or not found:
        return (), f"nvidia-smi finds none: {one_line(done.stderr.strip() or done.stdout)}"
    return found, ""
