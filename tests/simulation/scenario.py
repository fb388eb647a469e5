"""Whole runs with faults, each drawn from one seed, and what must hold of them whatever happens.

A scenario is a sequence of processes that give the same command: some meet faults, the last one meets none. What it
leaves is compared with what a run leaves that meets none at all.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

from qdqtune.errors import (
    BadState,
    BaselineFailed,
    Cancelled,
    EngineFailure,
    EngineUnavailable,
    Failure,
    OutputError,
)
from qdqtune.tuning.loop import tune
from qdqtune.tuning.observer import Silent, State
from qdqtune.tuning.settings import STATE
from qdqtune.tuning.store import job_of, read_journal
from qdqtune.types import Trial
from runs import contents, mixed, write
from simulation.disk import Died
from simulation.machine import KINDS, MARK, Ended, Fault, Machine
from simulation.worlds import ASKS, KINDS_OF_WORLDS, METRIC, OFTEN, SCORE, World

OF_THE_MACHINE = OutputError, EngineUnavailable, EngineFailure, BaselineFailed
"""What a run may say when something of the machine fails: none blames the user."""

TEMPORARY = re.compile(r"^tmp/|\.qdqtune-|worker-\w{8}\.tmp(/|$)")
"""Names of what is temporary."""

ENDING = "kill", "torn", "power", "interrupt"
"""Faults that only end a process: what it has written until then is what any run writes."""

SHIPPED = "baseline.onnx", "optimized_final.onnx", "placement.yaml", "summary.json"

MOVING = "jump", "delay", "silent"
"""Faults by which time passes."""

STRANGERS = {"notes.txt": b"mine", "out/notes.txt": b"mine, too"}
"""Files of the user's that no run has to do with."""

LATE_BUILDS = 24
"""How many builds may begin after the end of a time budget: the best so far is proven by two comparisons of four
builds, and those that a worker has lost are made again. Some room is left for a front, whose files are several."""

VARYING = ("run.json", "logs/", ".qdqtune", "autotune_cache.json", "subgraphs/", "region_models/")
"""Files in the output folder whose content tells when things happened, or in which order."""


@dataclass(frozen=True)
class Scenario:
    """The faults of each process in turn; one more process without faults follows. `repeats`: and yet another."""

    world: World
    processes: tuple[tuple[Fault, ...], ...] = ()
    repeats: bool = False
    seed: int = 0


class Told(Silent):
    """The keys of all trials that a run has told the user as measured."""

    def __init__(self) -> None:
        self.trials: list[str] = []

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        is_lost = isinstance(trial.result, Failure) and trial.result.is_transient
        if not is_lost:
            self.trials.append(job_of(trial))


@dataclass
class Whole:
    """What a run leaves that meets no fault."""

    history: tuple[Trial, ...]
    files: dict[str, bytes]
    records: frozenset[str]
    events: Counter[str]


@dataclass
class Stage:
    """The folder in which scenarios play, one after the other, and what runs without faults leave there."""

    root: Path
    tells: bool = False
    whole: dict[World, Whole] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = write(mixed(), self.root)
        (self.root / SCORE).write_text(METRIC)

    @cached_property
    def given(self) -> dict[str, bytes]:
        """The user's files."""
        self.strangers()
        files = self.model, self.model.with_suffix(".npz"), self.root / SCORE
        return {**STRANGERS, **{path.name: path.read_bytes() for path in files}}

    @property
    def out(self) -> Path:
        return self.root / "out"

    def strangers(self) -> None:
        """Put an empty stage in order."""
        for name, data in STRANGERS.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_bytes(data)

    def clear(self) -> None:
        """Make room for another scenario."""
        shutil.rmtree(self.out, ignore_errors=True)
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self.given:
                path.unlink()
        self.strangers()
        (self.root / "tmp").mkdir()

    def machine(self, world: World, seed: int) -> Machine:
        machine = Machine(self.root, seed, world.noise)
        machine.tells = self.tells
        return machine

    def reference(self, world: World) -> Whole:
        """What a run in this world leaves that meets no fault; it is made once."""
        if world not in self.whole:
            self.clear()
            machine = self.machine(world, 0)
            with machine.installed():
                ended = machine.process((), lambda: tune(world.settings(self.model)))
                if ended.error is not None:
                    raise ended.error
            files = self.left()
            lines = frozenset(map(_essence, files.get(f"out/{STATE}", b"").decode().splitlines()))
            self.whole[world] = Whole(ended.result.history, files, lines, Counter(machine.events))
        return self.whole[world]

    def left(self) -> dict[str, bytes]:
        """All files but the user's; those that tell times, without content."""
        found = {name: data for name, data in contents(self.root).items() if name not in self.given}
        return {name: _timeless(name, data) for name, data in found.items()}


TRIAL = re.compile(r'^{"key": "trial:(\w+)", .*"crc": "\w+"}$')
"""The line of a trial, with its key."""

AS_PROPOSED = re.compile(r'(, )?"(origin|pattern|crc)": "[^"]*"|, "(predicted|wants_layers)": [^,}]*')
"""What the record of a trial tells of how it was proposed when it was measured."""


def _essence(line: str) -> str:
    """A line of the state file without that."""
    if line.startswith('{"key": "float:'):
        return '{"key": "float:"}'  # it holds times
    return AS_PROPOSED.sub("", line) if TRIAL.match(line) else line


def _timeless(name: str, data: bytes) -> bytes:
    if name.endswith("/summary.json"):
        summary = json.loads(data)
        return json.dumps({k: v for k, v in summary.items() if not k.endswith("seconds")}).encode()
    short = name.removeprefix("out/")
    return b"" if short.startswith(VARYING) else data


# ---------------------------------------------------------------- drawing


def scenario_of(seed: int, reference: Callable[[World], Whole]) -> Scenario:
    """The scenario of a seed."""
    return replace(drawn(Random(seed), reference), seed=seed)


def drawn(random: Random, reference: Callable[[World], Whole], world: World | None = None) -> Scenario:
    """A scenario, by default in any world. Faults lie where a run without faults has events."""
    if world is None:
        asks = random.choice(("nothing", "nothing", "nothing", *ASKS))
        world = World(random.choice(OFTEN), *random.choice(KINDS_OF_WORLDS), asks=asks)
    events = reference(world).events
    processes = tuple(
        tuple(_fault(random, events) for _ in range(random.choice((1, 1, 2)))) for _ in range(random.choice((1, 1, 2)))
    )
    return Scenario(world, processes, repeats=random.random() < 0.2)


def _fault(random: Random, events: Mapping[str, int]) -> Fault:
    where = random.choice(("write", "write", "record", "message", "build", "rounds", "start"))
    what = random.choice(KINDS[where])
    times = random.choice((1, 1, 2, 3, 10**9)) if what not in ("interrupt", "cancel") else random.choice((1, 1, 1, 2))
    return Fault(where, what, random.randrange(max(1, events[where])), times)


# ---------------------------------------------------------------- playing


@dataclass
class Played:
    """What became of a scenario: what happened in it, and what does not hold."""

    scenario: Scenario
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)


def play(scenario: Scenario, stage: Stage) -> Played:
    """Play a scenario, and see what does not hold."""
    expected = stage.reference(scenario.world)
    stage.clear()
    machine, played = stage.machine(scenario.world, scenario.seed), Played(scenario)
    lines = tuple[str, ...]()
    with machine.installed():
        for number, faults in enumerate([*scenario.processes, (), *([()] * scenario.repeats)]):
            is_last = number >= len(scenario.processes)
            machine.happened = Counter()
            told = Told()
            asked = scenario.world.settings(stage.model)
            ended = machine.process(faults, lambda asked=asked, told=told: tune(asked, told), asked.time_budget)
            played.happened.update(machine.happened)
            happened = machine.happened.total()
            played.ends[_ending(ended)] += 1
            if stage.tells:
                events = f"{dict(machine.events)} events; {dict(machine.happened) or 'no fault'}"
                played.told.append(f"process {number + 1}: {faults}\n{ended.trace}{_ending(ended)} after {events}\n")
            wrong = [*_badly_ended(ended, machine), *_left_behind(ended, happened, stage)]
            if machine.late["build"] > LATE_BUILDS:
                wrong.append(f"it begins {machine.late['build']} builds after its time")
            if "power" in " ".join(machine.happened) and isinstance(ended.error, Died):
                machine.disk.lose_power(lambda safe, size: machine.random.randint(safe, size))
            machine.disk.forget()
            machine.clean_up()
            wrong += _left_behind(Ended(), 0, stage)
            wrong += _forgotten(lines, told, stage)
            wrong += _remembered(stage)
            wrong += _changed(stage)
            is_comparable = scenario.world.asks != "little time"
            if is_comparable and all(what.endswith(ENDING) for what in played.happened):
                wrong += _half_written(expected, stage)
            lines = _lines(stage)
            if is_last and is_comparable:
                is_moved = any(word in what for what in played.happened for word in MOVING)
                wrong += _differing(ended, scenario, expected, stage, is_moved=is_moved)
                opening = int(scenario.world.asks == "metric")  # a metric runs the float model when it is opened
                if number > len(scenario.processes) and machine.events["build"] > opening:
                    wrong.append("a finished run measures again")
            played.wrong += [f"process {number + 1}: {text}" for text in wrong]
            del ended
            machine.processes = []
    return played


def _ending(ended: Ended) -> str:
    if isinstance(ended.error, Died):
        return "killed, as planned,"
    return "result" if ended.error is None else type(ended.error).__name__


def _badly_ended(ended: Ended, machine: Machine) -> list[str]:
    """Anything but a result, an error that the faults explain in one line, or the end that a fault brings."""
    error, happened = ended.error, " ".join(machine.happened)
    if error is None:
        return []
    if isinstance(error, Died):
        return [] if any(word in happened for word in ("kill", "torn", "power")) else ["it died by itself"]
    if isinstance(error, KeyboardInterrupt):
        return [] if "interrupt" in happened else ["it was interrupted by itself"]
    if isinstance(error, Cancelled):
        return [] if "cancel" in happened else ["it was cancelled by itself"]
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, OF_THE_MACHINE) and machine.happened and len(str(error).splitlines()) == 1:
        return []
    return [f"it ends with {told}"]


def _left_behind(ended: Ended, happened: int, stage: Stage) -> list[str]:
    """Files, processes and locks that a process leaves. A killed one leaves temporary ones to the next."""
    if isinstance(ended.error, Died):
        return []
    if isinstance(ended.error, KeyboardInterrupt) and happened > 1:
        return []  # interrupted again on its way out, it leaves the rest to the end of the process and to the next
    wrong = []
    if ended.workers:
        wrong.append(f"{ended.workers} workers go on")
    if ended.threads:
        wrong.append(f"{ended.threads} threads go on")
    if ended.open_files:
        wrong.append(f"{ended.open_files} files stay open")
    names = {str(p.relative_to(stage.root)) for p in stage.root.rglob("*")}
    if isinstance(ended.error, KeyboardInterrupt):
        return wrong  # it may have been removing some: that is up to the next one
    left = sorted(filter(TEMPORARY.search, names))
    if left:
        wrong.append(f"it leaves {left[:3]}")
    return wrong


def _lines(stage: Stage) -> tuple[str, ...]:
    path = stage.out / STATE
    return tuple(path.read_bytes().decode().split("\n")[:-1]) if path.exists() else ()


def _forgotten(before: tuple[str, ...], told: Told, stage: Stage) -> list[str]:
    """Records that were written, or measurements that the user was told of, and that are gone."""
    now = _lines(stage)
    wrong = []
    if now[: len(before)] != before:
        wrong.append(f"of {len(before)} records {sum(line not in now for line in before)} are lost")
    kept = {found[1] for found in map(TRIAL.match, now) if found}
    if missing := set(told.trials) - kept:
        wrong.append(f"{len(missing)} trials that were told are not in the state file")
    return wrong


def _remembered(stage: Stage) -> list[str]:
    """Failures of the machine that are remembered as if they were the model's."""
    text = "\n".join(_lines(stage))
    wrong = [f"the state file says {word}" for word in (MARK, '"timeout"', '"crash"', '"resources"') if word in text]
    try:
        journal = read_journal(stage.out / STATE) if (stage.out / STATE).exists() else None
    except BadState as error:
        return [str(error)]
    lines = [] if journal is None else journal.lines.values()
    if any(line.failure is not None and line.failure.is_transient for line in lines):
        wrong.append("the state file holds a transient failure")
    return wrong


def _changed(stage: Stage) -> list[str]:
    """The user's files that a run has changed."""
    return [
        f"{name} is changed"
        for name, data in stage.given.items()
        if not (stage.root / name).exists() or (stage.root / name).read_bytes() != data
    ]


def _half_written(expected: Whole, stage: Stage) -> list[str]:
    """Results that are there, but not as a whole run leaves them."""
    wrong = []
    for name in (f"out/{name}" for name in SHIPPED):
        if (stage.root / name).exists():
            try:
                is_whole = _timeless(name, (stage.root / name).read_bytes()) == expected.files[name]
            except ValueError:
                is_whole = False
            wrong += [] if is_whole else [f"{name} is half written"]
    return wrong


def _differing(ended: Ended, scenario: Scenario, expected: Whole, stage: Stage, *, is_moved: bool) -> list[str]:
    """How what is there at the end differs from what a run leaves that meets no fault. `is_moved`: clocks jumped, or
    answers came late."""
    if ended.error is not None:
        return []
    state = f"out/{STATE}"
    left = stage.left()
    lines = left.get(state, b"").decode().splitlines()
    lost = expected.records.difference(map(_essence, lines))
    kinds = sorted({line.split('"')[3].partition(":")[0] for line in lost})
    has_noise = any(kind.startswith("sensitivity") for kind in kinds)
    is_by_time = scenario.world.time_budget is not None or scenario.world.mode == "front" or has_noise
    if is_moved and is_by_time:
        return []  # time is used up; noise is measured for a while, and points of a front are compared for some seconds
    wrong = []
    if ended.result.history != expected.history:
        wrong.append("the history differs")
    names = {n for n in left if not n.startswith("out/logs/")} ^ {n for n in expected.files if "out/logs/" not in n}
    if names:
        wrong.append(f"there are other files: {sorted(names)[:4]}")
    same = [n for n in expected.files if n != state and n in left and left[n] != expected.files[n]]
    if same:
        wrong.append(f"other content: {same[:4]}")
    if kinds:
        wrong.append(f"other records of {kinds}")
    return wrong
