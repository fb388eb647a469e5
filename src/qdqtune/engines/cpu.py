"""The processor of this machine, as far as integer kernels depend on it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

ISA = ("avx2", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def model_name() -> str:
    """The name of the processor."""
    return _field("model name") or platform.processor() or platform.machine()


def instruction_sets() -> str:
    """The instruction sets that decide which integer kernels run, with spaces between."""
    return " ".join(flag for flag in ISA if flag in _flags())


def products_saturate() -> bool:
    """Whether sums of two u8 x s8 products saturate: on x86 without a dot product, and where nothing is known."""
    return platform.machine().lower() not in ("aarch64", "arm64") and not DOT_PRODUCTS & _flags()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(*names: str) -> str:
    line = re.search(rf"^(?:{'|'.join(names)})\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return line[1].strip() if line else ""


def _flags() -> frozenset[str]:
    return frozenset(_field("flags", "Features").split())


def cores() -> int:
    """Cores that this process may use; more threads than that would wait for each other."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
