"""The cores and the GPUs of this host, and how they are divided among several workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired, run

from qdqtune.engines import EngineSpec
from qdqtune.errors import BadOption, EngineUnavailable, one_line

LEASE_SECONDS = 30.0
"""How long a worker waits for a device in use: the memory of a GPU is freed late. Chosen, not measured."""

NVIDIA_SMI_SECONDS = 30.0
"""How long nvidia-smi may take to answer. Chosen, not measured."""

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Device:
    """Where a worker runs: CPU cores that it does not share (none: not pinned), and a GPU's number or "". With `wants`
    it takes so many free cores of its host, and a free GPU if the engine needs one."""

    name: str = ""
    cores: tuple[int, ...] = ()
    gpu: str = ""
    wants: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}


ANYWHERE = Device()
"""No pinning and no GPU of its own: the device of a single worker, which shares the machine with other processes."""


@contextlib.contextmanager
def reserved(device: Device) -> Iterator[list[int]]:
    """Reserve the cores and the GPU of a device, each by a socket with an abstract name, which leaves no file. Yields
    the sockets' descriptors: a process that inherits them keeps the device until it ends, even if killed. Nothing is
    done if not on Linux.

    Raises:
        EngineUnavailable: one of them is in use.
    """
    parts = [f"core {core}" for core in device.cores] + [f"gpu {device.gpu}"] * bool(device.gpu)
    with contextlib.ExitStack() as stack:
        held: list[int] = []
        for part in parts if sys.platform == "linux" else ():
            lease = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            held.append(lease.fileno())
            try:
                lease.bind(f"\0qdqtune {part}")
            except OSError as error:  # another process has this name
                raise EngineUnavailable(f"{part} is in use by another run of qdqtune") from error
        yield held


def is_free(device: Device) -> bool:
    with contextlib.suppress(EngineUnavailable), reserved(device):
        return True
    return False


@contextlib.contextmanager
def leased(wanted: Device, spec: EngineSpec | None = None) -> Iterator[tuple[Device, list[int]]]:
    """Reserve a device, or one that `wanted` and the engine `spec` need, and let this thread and processes that it
    starts in the block run on its cores only. Yields the device, and what `reserved` does.

    Raises:
        EngineUnavailable: it was in use for `LEASE_SECONDS`.
        BadOption: this host has too few cores.
    """
    until = time.monotonic() + LEASE_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                device = wanted if spec is None or not wanted.wants else allot(spec, 1, wanted.wants)[0]
                held = stack.enter_context(reserved(device))
                break
            except (BadOption, EngineUnavailable) as error:  # its last process is still ending, or another has it
                if wanted.wants > usable_cores():
                    raise
                if time.monotonic() > until:  # other hosts may have some, so only this worker is lost
                    raise EngineUnavailable(str(error)) from error
                time.sleep(0.05)
        if device.cores and sys.platform == "linux":
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, set(device.cores))
        yield device, held


def needs_gpu(spec: EngineSpec) -> bool:
    """Whether each worker needs a GPU of its own: not if it only builds for a GPU elsewhere (option `target`). An
    execution provider without a record is assumed to need one."""
    return (spec.facts.is_gpu and not spec.options.get("target")) or spec.facts.unwatched is not None


def cores_for(spec: EngineSpec, given: int | None) -> int:
    """The cores of each worker: `given`, by default as many as the engine has threads; fewer raise BadOption."""
    threads = spec.options.get("threads")
    least = threads if isinstance(threads, int) and threads > 0 else 1
    if given is not None and given < least:
        raise BadOption(
            f"`cores_per_worker` {given} is too few for `threads` {least}: threads would wait for each other"
        )
    return given or least


def allot(spec: EngineSpec, workers: int, cores_each: int | None = None) -> tuple[Device, ...]:
    """Assign devices of this host to `workers` workers: no two share a core or a GPU, nor a physical core if there are
    enough of them. Raises BadOption if there are too few."""
    each = cores_for(spec, cores_each)
    gpus = gpus_here() if needs_gpu(spec) else ("",) * workers
    if len(gpus) < workers:
        raise BadOption(f"`workers` {workers} wants a GPU each, and this host has {len(gpus)} for us")
    free = [[core for core in together if is_free(Device(cores=(core,)))] for together in physical_cores()]
    count, wanted = sum(map(len, free)), workers * each
    if count < wanted:
        raise BadOption(
            f"`workers` {workers} of {each} core{'s' if each > 1 else ''} each want {wanted} cores, and {count} are "
            "free: give fewer workers, or fewer `cores_per_worker`"
        )
    whole = [cores for cores in free if cores]
    order = [cores[0] for cores in whole] if len(whole) >= wanted else list(chain.from_iterable(whole))
    return tuple(Device(f"worker-{n + 1}", tuple(order[n * each : (n + 1) * each]), gpus[n]) for n in range(workers))


def physical_cores() -> list[list[int]]:
    """The logical cores that this process may use, grouped by physical core, in the order of the sockets."""
    if not hasattr(os, "sched_getaffinity"):
        return [[core] for core in range(os.cpu_count() or 1)]
    cores: dict[tuple[int, int], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        topology = TOPOLOGY / f"cpu{number}" / "topology"
        try:
            package, core = (int((topology / name).read_bytes()) for name in ("physical_package_id", "core_id"))
            key = (package, core)
        except (OSError, ValueError):
            key = (0, number)
        cores.setdefault(key, []).append(number)
    return [cores[key] for key in sorted(cores)]


def gpus_here() -> tuple[str, ...]:
    """CUDA's numbers of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name for name in visible.split(",") if name and name != "-1")
    return tuple(index for (index,) in nvidia_smi("index")[0] if index.isdigit())


def nvidia_smi(fields: str, *more: str) -> tuple[list[list[str]], str]:
    """The `fields` that nvidia-smi prints, a row for each GPU of this host, and ""; or no rows and the reason."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "no NVIDIA driver: there is no nvidia-smi"
    asked = [program, f"--query-gpu={fields}", "--format=csv,noheader", *more]
    try:
        done = run(asked, stdin=DEVNULL, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {one_line(error)}"
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == fields.count(",")]
    if done.returncode or not rows:
        return [], f"nvidia-smi finds none: {one_line(done.stderr.strip() or done.stdout)}"
    return rows, ""


def gpu(device: str) -> tuple[str, str]:
    """Name and driver version of a GPU; "unknown" without nvidia-smi."""
    rows, _ = nvidia_smi("name,driver_version", f"--id={device}")
    return (rows[0][0], rows[0][1]) if rows else ("unknown", "unknown")


def usable_cores() -> int:
    """The number of logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
