"""The processor: what /proc/cpuinfo tells of it, and whether another one emulates it."""

from pathlib import Path

import pytest

from qdqtune.engines.machine import architecture, emulated_on, instruction_sets, processor_name


def test_the_processor_is_described_by_cpuinfo() -> None:
    cpuinfo = "model name\t: Quick 3000\nflags\t\t: sse avx2 avx_vnni\n"
    assert processor_name(cpuinfo) == "Quick 3000"
    assert instruction_sets("x86_64", cpuinfo) == ("avx2", "avx_vnni")


def test_an_emulator_may_show_the_instruction_sets_of_the_real_processor() -> None:
    assert instruction_sets("aarch64", "flags\t\t: sse avx2 avx_vnni\n") == ()
    assert instruction_sets("aarch64", "Features\t: asimd asimddp i8mm\n") == ("asimddp", "i8mm")


def program(folder: Path, machine: int, *, big: bool = False) -> Path:
    """The beginning of an ELF program for a machine."""
    path = folder / "program"
    kind = b"\2\2" if big else b"\2\1"
    path.write_bytes(b"\x7fELF" + kind + bytes(12) + machine.to_bytes(2, "big" if big else "little"))
    return path


@pytest.mark.parametrize(
    ("machine", "runs", "real"),
    [
        ("aarch64", 62, "x86"),  # qemu-aarch64 on x86
        ("aarch64", 183, ""),
        ("x86_64", 183, "ARM"),  # x86 under box64
        ("x86_64", 62, ""),
        ("x86_64", 3, ""),  # a Python of 32 bits
        ("aarch64", 40, ""),
        ("aarch64", 9999, ""),
        ("s390x", 22, ""),
    ],
)
def test_an_emulator_is_a_program_of_another_processor(machine: str, runs: int, real: str, tmp_path: Path) -> None:
    assert emulated_on(machine, program(tmp_path, runs)) == real


def test_no_emulator_is_seen_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert emulated_on("aarch64", tmp_path / "missing") == ""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert emulated_on("aarch64", script) == ""
    assert emulated_on("aarch64", program(tmp_path, 21, big=True)) == "POWER"


def test_this_processor_is_not_emulated_by_itself() -> None:
    assert emulated_on() != architecture()
