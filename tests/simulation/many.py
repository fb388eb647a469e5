"""Many scenarios on all cores: `make simulate`. `make simulate SEED=17` plays one and tells what happens in it."""

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from math import inf
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # which would warn that it finds no folder

from simulation.scenario import Stage, play, scenario_of

CHUNK = 20
"""Seeds that a process takes at a time."""

IN_MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""

SHOWN = 20
"""Failures that are told in full."""


@dataclass
class Tally:
    """What happened in some scenarios."""

    seeds: int = 0
    processes: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add what happened in others."""
        self.seeds += other.seeds
        self.processes += other.processes
        self.happened.update(other.happened)
        self.ends.update(other.ends)
        self.failed |= other.failed


@contextmanager
def folder() -> Iterator[str]:
    """A folder in memory, which is gone afterwards."""
    path = tempfile.mkdtemp(prefix="simulation-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@cache
def _stage(root: str) -> Stage:
    """The stage of this process."""
    gc.freeze()
    gc.disable()  # or it walks through all of the libraries again and again
    sys.unraisablehook = lambda _: None  # a dead process writes nothing, not even what its files still held
    return Stage(Path(tempfile.mkdtemp(dir=root)))


def played(seeds: range, root: str, ends: float) -> Tally:
    """What happened in these scenarios; in none after the time `ends`."""
    tally, ours = Tally(), _stage(root)
    for seed in seeds if time.monotonic() < ends else ():
        scenario = scenario_of(seed, ours.reference)
        found = play(scenario, ours)
        tally.seeds += 1
        tally.processes += sum(found.ends.values())
        tally.happened.update(found.happened)
        tally.ends.update(found.ends)
        if found.wrong:
            tally.failed[seed] = [str(scenario), *found.wrong]
    gc.collect()
    return tally


def many(first: int, count: int, processes: int, minutes: float = inf) -> int:
    """Play the scenarios of so many seeds, or as many as so many minutes allow, and print what happened; how many
    failed."""
    begun, total, told = time.monotonic(), Tally(), 0.0
    parts = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    context = multiprocessing.get_context("spawn")
    with folder() as root, ProcessPoolExecutor(processes, context) as pool:
        for tally in pool.map(played, parts, repeat(root), repeat(begun + 60 * minutes)):
            total.add(tally)
            for seed, wrong in tally.failed.items():
                if len(total.failed) <= SHOWN:
                    print(f"\nseed {seed}: " + "\n    ".join(wrong), flush=True)
            if (spent := time.monotonic() - begun) > told + 60:
                told = spent
                print(f"{total.seeds} of {count} seeds, {len(total.failed)} failed, {spent:.0f} s", flush=True)
    seconds = time.monotonic() - begun
    print(f"\n{total.seeds} seeds from {first}, {total.processes} runs in {seconds:.0f} s on {processes} processes")
    print(f"{60 * total.processes / seconds:.0f} runs a minute\n\nfaults that happened")
    for what, times in sorted(total.happened.items()):
        print(f"{times:>9}  {what}")
    print("\nhow processes ended")
    for what, times in total.ends.most_common():
        print(f"{times:>9}  {what}")
    print(f"\n{len(total.failed)} failed: {sorted(total.failed)[:200]}")
    if total.failed:
        print(f"to play one again: make simulate SEED={min(total.failed)}")
    return len(total.failed)


def one(seed: int) -> int:
    """Play the scenario of a seed, and print what happens in it; how much does not hold."""
    with folder() as root:
        ours = Stage(Path(root), tells=True)
        scenario = scenario_of(seed, ours.reference)
        print(f"seed {seed}, {scenario.world}")
        found = play(scenario, ours)
        for text in found.told:
            print(text)
        print("\n".join(found.wrong) or "everything holds")
        return len(found.wrong)


def main() -> None:
    """Read the arguments, and play."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000, metavar="N", help="how many scenarios")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--minutes", type=float, default=inf, metavar="N", help="begin no more scenarios after that")
    parser.add_argument("--seed", type=int, metavar="SEED", help="play this one alone, and tell what happens")
    asked = parser.parse_args()
    failed = many(asked.first, asked.seeds, asked.processes, asked.minutes) if asked.seed is None else one(asked.seed)
    sys.exit(min(failed, 1))
