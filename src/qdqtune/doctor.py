"""`qdqtune doctor`: which engines work on this machine, on what they run, and what to install for the others."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qdqtune.engines import MODULES, EngineSpec, one_line
from qdqtune.errors import EngineUnavailable, QdqtuneError
from qdqtune.runner import Runner

PRETENDS = "fake"
"""The engine that is always there, since it measures nothing."""

AHEAD_OF_TIME = {"tensorrt-rtx": {"target": "sm89"}}
"""Options with which an engine builds for a device that is not there."""

INSTALL = {
    "onnxruntime": "pip install onnxruntime",
    "openvino": "pip install 'qdqtune[openvino]'",
    "tensorrt": "pip install 'qdqtune[tensorrt]'",
    "tensorrt-rtx": "pip install 'qdqtune[tensorrt-rtx]'",
    "trtexec": "install TensorRT, and put its bin folder on PATH",
}

ISA = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "avx512_bf16", "amx_bf16", "asimddp", "i8mm", "sve")
"""Flags of /proc/cpuinfo that decide which kernels run."""
DOT_PRODUCTS = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm"})

OPENING_SECONDS = 120.0
NVIDIA_SMI = ("--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader")


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
    """The CPU: its instruction sets for low precision, and what follows from them for int8."""

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
    gpu_note: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether an engine that measures something can be used, if only to build."""
        return any(e.status != "missing" for e in self.engines if e.name != PRETENDS)


def examine(log_dir: Path, names: Sequence[str] = tuple(MODULES)) -> Diagnosis:
    """Try every engine, each in a process of its own, and look at the hardware. Nothing here fails."""
    gpus, note = gpus_of(_nvidia_smi())
    return Diagnosis(tuple(engine_state(name, log_dir) for name in names), processor(_cpuinfo()), gpus, note)


def engine_state(name: str, log_dir: Path) -> EngineState:
    """Open one engine without options, or if that fails and it can, for a device that is not there."""
    try:
        return _opened(EngineSpec(name), log_dir, "usable")
    except QdqtuneError as error:
        reason = one_line(error)
    if name in AHEAD_OF_TIME:
        try:
            state = _opened(EngineSpec(name, AHEAD_OF_TIME[name]), log_dir, "builds only")
        except QdqtuneError:
            pass
        else:
            return EngineState(name, state.status, state.version, state.device, reason)
    return EngineState(name, "missing", reason=reason, remedy=INSTALL.get(name, ""))


def _opened(spec: EngineSpec, log_dir: Path, status: Literal["usable", "builds only"]) -> EngineState:
    with Runner(spec, time_limit_s=OPENING_SECONDS, log_dir=log_dir / spec.name) as runner:
        told = runner.describe()
    return EngineState(spec.name, status, told["version"], told["device"])
