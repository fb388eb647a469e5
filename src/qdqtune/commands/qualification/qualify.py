"""Checks all claims about an engine, and says what held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, Literal, get_args

from qdqtune.commands.doctor import DoctorOptions, find_gpus, this_processor
from qdqtune.commands.inputs import execution_of
from qdqtune.commands.qualification.checks import CHECKS, Check
from qdqtune.commands.qualification.engine_at_hand import BrokenError, EngineAtHand, NotApplicableError, opened
from qdqtune.commands.shown import Shown, Table
from qdqtune.engines.machine import is_simulated, simulated
from qdqtune.errors import EngineUnavailable, QdqtuneError
from qdqtune.tuning.observer import Observer
from qdqtune.version import __version__

State = Literal["held", "not held", "not applicable"]


@dataclass(frozen=True)
class Seen:
    """Whether a claim held for one subject, what was seen or why it did not, and the seconds that it took."""

    subject: str
    state: State
    told: str
    seconds: float


@dataclass(frozen=True)
class CheckResult:
    """What a check saw of each subject."""

    name: str
    claim: str
    seen: tuple[Seen, ...]

    def count(self, state: State) -> int:
        """For how many subjects that is so."""
        return sum(seen.state == state for seen in self.seen)

    @property
    def state(self) -> State:
        """Not held if the claim did not hold for a subject, not applicable if it is to none."""
        order: tuple[State, ...] = ("not held", "held", "not applicable")
        return next(state for state in order if self.count(state))


@dataclass(frozen=True, repr=False)
class Qualification(Shown):
    """What held of the claims about an engine. `engine` is its description, `machine` names the hardware."""

    engine: Mapping[str, str]
    machine: Mapping[str, str]
    results: tuple[CheckResult, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no claim failed."""
        return all(result.state != "not held" for result in self.results)

    def in_words(self) -> str:
        """How many of the claims held."""
        counts = Counter(result.state for result in self.results)
        told = ", ".join(f"{counts[state]} {state}" for state in get_args(State) if counts[state])
        engine = f"{self.engine['engine']} {self.engine['version']} on {self.engine['device']}"
        return f"{engine}: of {len(self.results)} claims {told}; {self.seconds:.0f} s"

    def table(self) -> Table:
        """A row for each claim."""
        rows = []
        for r in self.results:
            asked, seconds = len(r.seen) - r.count("not applicable"), sum(seen.seconds for seen in r.seen)
            held = f"{r.count('held')} of {asked}" if asked else ""
            rows.append((r.name, r.claim, r.state, held, f"{seconds:.0f}"))
        columns = ("check", "claim", "result", "held for", "seconds")
        return Table(columns, rows, left=columns[:4])

    def notable(self) -> list[tuple[str, str, State, str]]:
        """Check, subject, state and reason of what did not hold, and then of what is not applicable, once a reason."""
        told = [(r.name, s.subject, s.state, s.told) for r in self.results for s in r.seen]
        reasons = {row[3]: row for row in reversed(told) if row[2] == "not applicable"}
        return [*(row for row in told if row[2] == "not held"), *reversed(reasons.values())]

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "qdqtune": __version__,
            "engine": dict(self.engine),
            "machine": dict(self.machine),
            "holds": self.holds,
            "seconds": round(self.seconds, 1),
            "checks": [{**asdict(result), "state": result.state} for result in self.results],
        }


def qualify(options: DoctorOptions, observer: Observer) -> Qualification:
    """Check the claims about an engine on this machine.

    Raises:
        EngineUnavailable, BadOption: the engine cannot be opened, or is simulated.
    """
    begun = monotonic()
    if is_simulated(options.engine_name):
        told = simulated(options.engine_name)
        raise EngineUnavailable(f"{told}, and most claims are about times: leave `qualify` out, check and compare work")
    with opened(options.spec(), observer, execution_of(options)) as engine:
        results = tuple(CheckResult(check.name, check.claim, tuple(_seen(engine, check))) for check in CHECKS)
        cpu, gpus = this_processor(), find_gpus()[0]
        machine = {"cpu": f"{cpu.name}, {cpu.cores} cores, {' '.join(cpu.isa)}"}
        machine["gpu"] = "; ".join(f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in gpus)
        return Qualification(engine.described, machine, results, monotonic() - begun)


def _seen(engine: EngineAtHand, check: Check) -> Iterator[Seen]:
    for subject in check.subjects:
        engine.observer.stage(f"{check.name}: {subject}")
        begun, state = monotonic(), get_args(State)[0]
        try:
            told = check.look(engine, subject)
        except NotApplicableError as error:
            state, told = "not applicable", str(error)
        except (BrokenError, QdqtuneError) as error:
            state, told = "not held", str(error)
        yield Seen(subject, state, told, round(monotonic() - begun, 2))
