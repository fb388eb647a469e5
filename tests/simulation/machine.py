"""A machine with a clock, a disk and processes of engines, on which a run goes from its beginning to its end.

The code under test is all of `tune`, the parent's half of the worker processes included. Simulated are the operating
system's part (starting and ending processes, their pipes, the clock, the disk) and what the engines compute.
"""

import gc
import hashlib
import os
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from qdqtune.engines import EngineSpec, devices, pool, process, runner, worker
from qdqtune.engines.execution import wait_for
from qdqtune.errors import Cancelled, EngineFailure, QdqtuneError
from qdqtune.system.writing import SCRATCH, TEMPORARY, WORKERS, sweep
from qdqtune.tuning.settings import STATE
from qdqtune.types import Times
from simulation.clock import Clock
from simulation.disk import Died, Disk
from simulation.engines import Remembering
from simulation.threads import Threads

AT_WRITES = ("full", "short", "kill", "torn", "power", "interrupt")
AT_STARTS = ("no process", "no engine", "kill", "interrupt")
AT_MESSAGES = (
    "lost", "silent", "no memory", "no room", "delay", "jump", "wall", "kill", "power", "interrupt", "cancel",
)  # fmt: skip
KINDS = {
    "write": AT_WRITES, "record": AT_WRITES, "start": AT_STARTS,
    "message": AT_MESSAGES, "build": AT_MESSAGES, "rounds": AT_MESSAGES,
}  # fmt: skip
"""Where something can go wrong, and what. Records are writes to the state file, builds and rounds are messages."""

MARK = "(simulated)"
"""Stands in whatever an engine says because the simulation let it fail."""

CORES = 4

ORDER_OF = lru_cache(maxsize=4096)(worker.order_of)
"""As `worker.order_of`, with a memory."""

ONE_AFTER_THE_OTHER = SimpleNamespace(submit=lambda do: SimpleNamespace(result=do))
"""In place of the threads of a `ThreadPoolExecutor`."""

DELAYS, JUMPS = (0.01, 2.0, 100.0, 7000.0), (60.0, 1e4, 1e7)
"""Seconds by which answers come late, and by which clocks jump."""


@dataclass(frozen=True)
class Fault:
    """Something goes wrong at events of one kind, from number `at` on, `times` times in a row."""

    where: str
    what: str
    at: int
    times: int = 1


class Process:
    """The process of an engine, as the operating system shows it to the parent."""

    stdin = stdout = None

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.pid = len(machine.processes) + 1
        self.session: worker.Session | None = None
        self.code: int | None = None
        self.answer: tuple[bool, Any] | None = None
        self.due: float | None = None  # when the answer arrives; None: never

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            self.machine.clock.advance(timeout or 0.0)
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self.code

    def end(self, code: int) -> None:
        """End it, if it has not ended."""
        if self.code is None:
            self.code, self.session = code, None

    def receive(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Begin to answer a request."""
        clock = self.machine.clock
        fault, self.answer, self.due = self.machine.at_message(name), None, clock.now
        if fault == "lost":
            self.end(-9)
        elif fault == "silent":
            self.due = None
        elif fault in ("no memory", "no room"):
            said = "out of memory" if fault == "no memory" else "No space left on device"
            self.answer = False, EngineFailure(f"{said} {MARK}")
        else:
            began = clock.now
            try:
                self.answer = True, self._result(name, arguments)
            except QdqtuneError as error:
                self.answer = False, error
            except (Died, KeyboardInterrupt):
                raise
            except Exception:  # noqa: BLE001  (as in a real worker: a defect or a full disk ends it)
                self.end(1)
            late = self.machine.random.choice(DELAYS) if fault == "delay" else 0.0
            self.due, clock.now = clock.now + late, began

    def _result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        clock = self.machine.clock
        clock.advance(0.05 if name == "build" else 0.001)
        if name == "open":
            self.session = worker.Session(self.machine.engine)
        assert self.session is not None
        if name == "run":  # without threads
            return self.session.run(*arguments[:2], 1)
        if name != "rounds" or not self.machine.noise_of:
            return getattr(self.session, name)(*arguments)
        models, seed, numbers, turns, warmup, samples = arguments
        found: Times | None = None
        for number in numbers:
            self.machine.noisy_round = seed, number
            part = self.session.rounds(models, seed, range(number, number + 1), turns, warmup, samples)
            found = part if found is None else found.extended(part, range(len(models)))
        self.machine.noisy_round = None
        return found


class Channel:
    """The parent's end of the pipes to a process."""

    def __init__(self, machine: "Machine", of: Process) -> None:
        self._process, self._machine = of, machine

    def send(self, message: tuple[str, tuple[Any, ...]], limit: float) -> None:
        if self._process.code is not None:
            raise BrokenPipeError
        self._process.receive(*message)

    def _answers_within(self, seconds: float) -> bool:
        due, ends = self._process.due, self._machine.clock.now + seconds
        is_answered = due is not None and due <= ends
        self._machine.wait_until(due if is_answered and due is not None else ends)
        return is_answered or self._process.code is not None

    def recv(self, limit: float) -> tuple[bool, Any]:
        wait_for(self._answers_within, limit)
        if self._process.answer is None:
            raise EOFError
        answer, self._process.answer = self._process.answer, None
        return answer

    def close(self) -> None:
        """A worker ends when its input closes."""
        self._process.end(1)


class Machine:
    """Owns all that a run does not decide itself. `noise_of` is the seed of the noise of latencies; 0 for none."""

    def __init__(self, root: Path, seed: int = 0, noise_of: int = 0) -> None:
        self.clock, self.disk, self.random = Clock(), Disk(root, self.at_write), Random(seed)
        self.noise_of, self.noisy_round = noise_of, None
        self.temporary = root / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.processes: list[Process] = []
        self.threads = Threads(self.clock, self.random)
        self.faults: Sequence[Fault] = ()
        self.tells = False  # whether it keeps where errors came from
        self._was_short = False
        self.events: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self._ends_at = inf

    # What goes wrong

    def _fault(self, where: str) -> str | None:
        number = self.events[where]
        self.events[where] += 1
        for fault in self.faults:
            if fault.where == where and fault.at <= number < fault.at + fault.times:
                self.happened[f"{where}: {fault.what}"] += 1
                return fault.what
        return None

    def wait_until(self, time: float) -> None:
        """Wait, while other threads of the process run."""
        self.threads.pause(time)
        if self.disk.is_dead:
            raise Died

    def _ends(self, fault: str | None) -> None:
        if fault == "interrupt" and self.threads.current is not self.threads.main:
            self.threads.interrupts += 1
        elif fault == "interrupt":
            raise KeyboardInterrupt
        if fault == "cancel":
            raise Cancelled("cancelled")
        if fault in ("kill", "power"):
            self.disk.die()

    def at_write(self, name: str, *, needs_room: bool) -> str | None:
        """What goes wrong with a write: see `Disk`."""
        fault = self._fault("write") or (self._fault("record") if name.endswith(STATE) else None)
        self._ends(fault)
        if fault in ("full", "short") and not needs_room:
            return None
        if fault == "short" and self._was_short:  # half of the first write fits, and nothing more
            fault = "full"
        self._was_short = fault in ("full", "short")
        if fault == "full":
            raise OSError(28, os.strerror(28))
        return fault

    def at_message(self, name: str) -> str | None:
        """What goes wrong with a request to a worker."""
        if self.clock.now > self._ends_at:
            self.late[name] += 1
        kind = name if name in ("build", "rounds") else None
        fault = self._fault("message") or (self._fault(kind) if kind else None)
        if fault in ("no memory", "no room") and name in ("unload", "feed", "describe"):
            fault = None  # they take none
        self._ends(fault)
        if fault == "jump":
            self.clock.advance(self.random.choice(JUMPS))
        if fault == "wall":
            self.clock.wall += self.random.choice((-1, 1)) * self.random.choice(JUMPS)
        return fault

    # What a run finds

    def engine(self, spec: EngineSpec) -> Any:
        """Opens engines in workers."""
        return Remembering(spec, self._noise, self._aside)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        before, self.disk.is_watching = self.disk.is_watching, False
        try:
            yield
        finally:
            self.disk.is_watching = before

    def _noise(self, content: bytes) -> float:
        """A factor on a latency: of this file in this round."""
        if self.noisy_round is None:
            return 1.0
        text = f"{self.noise_of} {self.noisy_round} {content.hex()}"
        return 0.97 + 0.06 * int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32

    def _popen(self, **_: Any) -> Process:
        fault = self._fault("start")
        self._ends(fault)
        if fault == "no process":
            raise BlockingIOError(11, os.strerror(11))
        self.processes.append(Process(self))
        if fault == "no engine":
            self.processes[-1].end(127)
        return self.processes[-1]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have everything that runs inside run on this machine."""
        system = SimpleNamespace(Popen=self._popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
        with ExitStack() as stack:
            stack.enter_context(self.clock.installed())
            stack.enter_context(self.disk.installed())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(process, "subprocess", system)
            patch.setattr(worker, "leased", lambda *_: nullcontext((devices.ANYWHERE, [])))
            patch.setattr(devices, "physical_cores", lambda: [[core] for core in range(CORES)])
            patch.setattr(devices, "is_free", lambda _: True)
            patch.setattr(runner, "ThreadPoolExecutor", lambda _: nullcontext(ONE_AFTER_THE_OTHER))
            patch.setattr(pool, "ThreadPoolExecutor", lambda count: self.threads.executor(count))
            patch.setattr(pool, "wait", lambda *how: self.threads.wait(*how))
            patch.setattr(process, "Channel", lambda *_, **__: Channel(self, self.processes[-1]))
            patch.setattr(process, "end_group", lambda pid: self.processes[pid - 1].end(-9))
            patch.setattr(process, "python", lambda *_, **__: {})
            patch.setattr(worker, "return_free_memory", lambda: None)
            patch.setattr(worker, "order_of", ORDER_OF)
            patch.setattr(os, "getloadavg", lambda: (self.random.random(), 0.0, 0.0))
            patch.setattr(tempfile, "tempdir", str(self.temporary))
            yield

    def process(self, faults: Sequence[Fault], do: Callable[[], Any], time_budget: float | None = None) -> "Ended":
        """Do something in a process of its own, with these faults. What it asks of workers after so many seconds is
        counted."""
        self.faults, self.events, self.processes = faults, Counter(), []
        self.threads = Threads(self.clock, self.random)
        self.late, self._ends_at = Counter(), self.clock.now + (inf if time_budget is None else time_budget)
        self.disk.begin()
        ended = Ended()
        try:
            ended.result = do()
        except BaseException as error:  # noqa: BLE001  (a process may end in any way)
            ended.error = error
            if self.tells and not isinstance(error, Died):
                ended.trace = "".join(traceback.format_exception(error))
            if self.disk.is_dead and not isinstance(error, Died):
                ended.error = Died()  # what code meets on its way out of a dead process is nobody's concern
            _let_go(error)
        if self.disk.left:
            gc.collect()  # what only a circle of objects holds is closed in time
        ended.open_files = self.disk.end()
        ended.threads = self.threads.others
        ended.workers = sum(one.code is None for one in self.processes)
        for one in self.processes:
            one.end(1)
        return ended

    def clean_up(self) -> None:
        """What a next process does with temporary folders when it starts."""
        for folder in (self.temporary.parent, *self.temporary.parent.rglob("*/")):
            for prefix in (SCRATCH, TEMPORARY, WORKERS):
                sweep(folder, prefix)


@dataclass
class Ended:
    """How a process ended: its result or its error, and what it had not closed or ended."""

    result: Any = None
    error: BaseException | None = None
    open_files: int = 0
    workers: int = 0
    threads: int = 0
    trace: str = ""


def _let_go(error: BaseException | None) -> None:
    """Free what the frames hold through which an error came: its caller has dealt with it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
