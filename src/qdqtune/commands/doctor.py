"""`qdqtune doctor`: which engines work on this machine, on what they run, and what to install for the others."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qdqtune.engines import MODULES, EngineSpec, devices
from qdqtune.engines.devices import nvidia_smi
from qdqtune.engines.runner import Runner
from qdqtune.errors import QdqtuneError, one_line

PRETENDS = "fake"
"""The engine that is always there, since it measures nothing."""

AHEAD_OF_TIME = {"tensorrt-rtx": {"target": "sm89"}}
"""Options with which an engine builds for a device that is not there."""

NEEDS = {
    "onnxruntime": (("onnxruntime",), "pip install onnxruntime"),
    "openvino": (("openvino",), "pip install 'qdqtune[openvino]'"),
    "tensorrt": (("tensorrt", "cuda"), "pip install 'qdqtune[tensorrt]'"),
    "tensorrt-rtx": (("tensorrt_rtx_bindings",), "pip install 'qdqtune[tensorrt-rtx]'"),
}
"""The Python packages without which an engine cannot be opened, and the command that installs them."""

OPENING_SECONDS = 120.0


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


def examine(log_dir: Path) -> Diagnosis:
    """Try the engines, each in a process of its own, and look at the hardware. What does not work is in the answer."""
    gpus, note = find_gpus()
    return Diagnosis(tuple(engine_state(name, log_dir) for name in MODULES), processor(), gpus, note)


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


def processor() -> Processor:
    """The CPU of this machine."""
    isa = devices.instruction_sets()
    return Processor(devices.processor_name(), devices.usable_cores(), isa, consequence(platform.machine(), isa))


def consequence(machine: str, isa: Collection[str]) -> str:
    """What the instruction sets of a machine mean for int8."""
    is_arm = machine.lower() in ("aarch64", "arm64")
    if not isa:
        return "no instruction set that is known to matter: only a measurement tells what int8 gains"
    if "i8mm" in isa or "amx_int8" in isa:
        return f"{'I8MM' if is_arm else 'AMX'}: int8 matrix products in hardware, int8 gains most here"
    if is_arm or devices.DOT_PRODUCTS & set(isa):
        return f"{'ASIMDDP' if is_arm else 'VNNI'}: int8 dot products in hardware, int8 gains much"
    return "no VNNI: weights take 7 bits, for sums of two 8-bit products saturate, and int8 gains are moderate"


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The NVIDIA GPUs, or why there is none."""
    rows, reason = nvidia_smi("name,driver_version,compute_cap,memory.total")
    return tuple(Gpu(*row) for row in rows), reason
