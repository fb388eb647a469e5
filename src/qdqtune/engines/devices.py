"""Devices: the cores and the GPU of one worker, and how those of this host are divided among several workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired, run

from qdqtune.engines import CPU_PROVIDER, TENSORRT_FAMILY, EngineSpec
from qdqtune.errors import BadOption, EngineUnavailable, one_line

LEASE_SECONDS = 30.0
"""How long a worker waits for a device whose last user is still ending: a GPU's memory is freed late."""

NVIDIA_SMI_SECONDS = 30.0
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Device:
    """Cores that no other worker uses, and a GPU by its number, or "". Without cores nothing is pinned. A device that a
    cluster has yet to find will have at `least` so many cores."""

    name: str = ""
    cores: tuple[int, ...] = ()
    gpu: str = ""
    least: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that show a process its GPU only."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its cores and its GPU, each of which only one worker may hold."""
        return (*(f"core-{core}" for core in self.cores), *([f"gpu-{self.gpu}"] if self.gpu else ()))


ANYWHERE = Device()
"""No device of its own: a single worker shares the machine with other processes."""


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes that this thread starts meanwhile run on these cores only. Does nothing without cores, or where the
    system cannot pin."""
    if not cores or sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def leased(device: Device, seconds: float = LEASE_SECONDS) -> Iterator[list[int]]:
    """Hold a device: gives file descriptors, and a process that inherits them holds it until it ends, even by a kill.
    They are sockets with abstract names, which leave no file behind.

    Raises:
        EngineUnavailable: another process still has it after so many seconds.
    """
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    try:
        for part in device.parts if sys.platform == "linux" else ():
            while (taken := _taken(part)) is None:
                if time.monotonic() > until:
                    raise EngineUnavailable(f"{part.replace('-', ' ')} is in use by another run of qdqtune")
                time.sleep(0.05)
            held.append(taken)
        yield [one.fileno() for one in held]
    finally:
        for one in held:
            one.close()


def _taken(part: str) -> socket.socket | None:
    """A socket that holds a core or a GPU; None if another process holds it."""
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lease.bind(f"\0qdqtune-{part}")
    except OSError:
        lease.close()
        return None
    return lease


def is_free(part: str) -> bool:
    """Whether no worker of any run on this host holds this core or GPU."""
    if sys.platform != "linux":
        return True
    taken = _taken(part)
    if taken is not None:
        taken.close()
    return taken is not None


def needs_gpu(spec: EngineSpec) -> bool:
    """Whether an engine runs on a GPU, so that each worker needs one of its own."""
    provider = str(spec.options.get("provider") or CPU_PROVIDER)
    return (spec.name in TENSORRT_FAMILY and not spec.options.get("target")) or provider != CPU_PROVIDER


def cores_for(spec: EngineSpec, given: int | None) -> int:
    """How many cores a worker gets: as many as the engine has threads, unless more are given.

    Raises:
        BadOption: fewer are given.
    """
    threads = spec.options.get("threads")
    least = threads if isinstance(threads, int) and threads > 0 else 1
    if given is not None and given < least:
        raise BadOption(
            f"--cores-per-worker {given} is too few for --threads {least}: threads would wait for each other"
        )
    return given or least


def allot(spec: EngineSpec, workers: int, cores_each: int | None = None) -> tuple[Device, ...]:
    """Devices of this host for so many workers, no two of which share a core or a GPU. Physical cores are divided only
    where there are too few of them.

    Raises:
        BadOption: there are too few cores or GPUs.
    """
    each = cores_for(spec, cores_each)
    gpus = gpus_here() if needs_gpu(spec) else ("",) * workers
    if len(gpus) < workers:
        raise BadOption(f"--workers {workers} wants a GPU each, and this host has {len(gpus)} for us")
    free = [[core for core in cores if is_free(f"core-{core}")] for cores in physical_cores()]
    count, wanted = sum(map(len, free)), workers * each
    if count < wanted:
        is_alone = count == sum(map(len, physical_cores()))
        others = "" if is_alone else ", the others being in use by other runs of qdqtune"
        raise BadOption(
            f"--workers {workers} of {each} core{'s' if each > 1 else ''} each want {wanted} cores, and there are "
            f"{count}{others}: give fewer workers, or fewer --cores-per-worker"
        )
    whole = [cores for cores in free if cores]
    order = [cores[0] for cores in whole] if len(whole) >= wanted else [core for cores in whole for core in cores]
    places = [tuple(order[n * each : (n + 1) * each]) for n in range(workers)]
    return tuple(Device(f"worker-{n + 1}", places[n], gpus[n]) for n in range(workers))


def devices_for(spec: EngineSpec, workers: int, cores_each: int | None = None) -> tuple[Device, ...]:
    """`allot`; a single worker without a number of cores gets none of its own.

    Raises:
        BadOption: there are too few cores or GPUs.
    """
    return (ANYWHERE,) if workers == 1 and cores_each is None else allot(spec, workers, cores_each)


def physical_cores() -> list[list[int]]:
    """The logical cores that this process may use, those of one physical core together, neighbours in order."""
    if not hasattr(os, "sched_getaffinity"):
        return [[core] for core in range(os.cpu_count() or 1)]
    cores: dict[tuple[int, int], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        place = TOPOLOGY / f"cpu{number}" / "topology"
        try:
            package, core = (int((place / name).read_bytes()) for name in ("physical_package_id", "core_id"))
            key = (package, core)
        except (OSError, ValueError):
            key = (0, number)
        cores.setdefault(key, []).append(number)
    return [cores[key] for key in sorted(cores)]


def gpus_here() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA numbers them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in visible.split(",") if name and name != "-1")
    return tuple(index for (index,) in nvidia_smi("index")[0] if index.isdigit())


def nvidia_smi(fields: str, *more: str) -> tuple[list[list[str]], str]:
    """A row of these fields for each GPU of this host, from nvidia-smi; or why there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "no NVIDIA driver: there is no nvidia-smi"
    asked = [program, f"--query-gpu={fields}", "--format=csv,noheader", *more]
    try:
        done = run(asked, stdin=DEVNULL, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {one_line(error)}"
    rows = [row for line in done.stdout.splitlines() if len(row := line.split(", ")) == fields.count(",") + 1]
    if done.returncode or not rows:
        return [], f"nvidia-smi finds none: {one_line(done.stderr.strip() or done.stdout)}"
    return rows, ""
