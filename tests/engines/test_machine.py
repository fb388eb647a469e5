"""The processor: what /proc/cpuinfo tells of it, and whether another one emulates it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qdqtune.engines import machine
from qdqtune.engines.machine import architecture, emulated_on, instruction_sets, processor_name

SetProcessor = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("name", "cpuinfo", "expected"),
    [
        ("x86_64", "model name\t: Quick 3000\nflags\t\t: sse avx2 avx_vnni\n", ("avx2", "avx_vnni")),
        ("aarch64", "model name\t: Quick 3000\nflags\t\t: sse avx2 avx_vnni\n", ()),  # by an emulator, of the real one
        ("aarch64", "model name\t: Quick 3000\nFeatures\t: asimd asimddp i8mm\n", ("asimddp", "i8mm")),
    ],
)
def test_the_processor_is_described_by_cpuinfo(
    name: str, cpuinfo: str, expected: tuple[str, ...], set_processor: SetProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_processor(name, cpuinfo)
    monkeypatch.setattr(machine, "emulated_on", lambda: "")
    assert processor_name() == "Quick 3000"
    assert instruction_sets() == expected


def program(number: int) -> bytes:
    """The beginning of an ELF program for a machine."""
    return b"\x7fELF\2\1" + bytes(12) + number.to_bytes(2, "little")


@pytest.mark.parametrize(
    ("name", "running", "real"),
    [
        ("aarch64", program(62), "x86"),  # qemu-aarch64 on x86
        ("aarch64", program(183), ""),
        ("x86_64", program(183), "ARM"),  # x86 under box64
        ("aarch64", program(9999), ""),
        ("s390x", program(62), ""),
        ("aarch64", b"#!/bin/sh\n", ""),
        ("aarch64", None, ""),
    ],
)
def test_an_emulator_is_a_program_of_another_processor(
    name: str, running: bytes | None, real: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    set_processor: SetProcessor,
) -> None:  # fmt: skip
    if running is not None:
        (tmp_path / "program").write_bytes(running)
    set_processor(name, "")
    monkeypatch.setattr(machine, "RUNNING", tmp_path / "program")
    assert emulated_on() == real


def test_this_processor_is_not_emulated_by_itself() -> None:
    assert emulated_on() != architecture()
