"""Many scenarios on all cores: `make simulate`. `make simulate SEED=17` plays one and tells what happens in it."""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # which would warn that it finds no folder

from simulation.scenario import Played, Stage, play, scenario_of

CHUNK = 20
"""Seeds that a process takes at a time."""

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A file system in memory, where there is one."""


@cache
def _stage(root: str) -> Stage:
    """The stage of this process."""
    gc.freeze()
    gc.disable()  # or it walks through all of the libraries again and again
    sys.unraisablehook = lambda _: None  # a dead process writes nothing, not even what its files still held
    return Stage(Path(tempfile.mkdtemp(dir=root)))


def played(seeds: Sequence[int], root: str) -> list[Played]:
    """What happened in these scenarios."""
    stage = _stage(root)
    found = [play(scenario_of(seed, stage.reference), stage) for seed in seeds]
    gc.collect()
    return found


def many(count: int, root: str) -> int:
    """Play the scenarios of so many seeds, and print what happened; how many failed."""
    begun, failed, happened, ends = time.monotonic(), list[int](), Counter[str](), Counter[str]()
    parts = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, part in enumerate(pool.map(played, parts, repeat(root)), 1):
            for found in part:
                happened.update(found.happened)
                ends.update(found.ends)
                if found.wrong:
                    failed.append(found.scenario.seed)
                    print(f"\nseed {failed[-1]}: {found.scenario}\n    " + "\n    ".join(found.wrong), flush=True)
            if number % 50 == 0:
                print(f"{part[-1].scenario.seed} of {count} seeds, {len(failed)} failed", flush=True)
    print(f"\n{count} seeds, {ends.total()} runs in {time.monotonic() - begun:.0f} s")
    for title, counter in (("faults that happened", happened), ("how processes ended", ends)):
        print(f"\n{title}")
        for what, times in sorted(counter.items()):
            print(f"{times:>9}  {what}")
    print(f"\n{len(failed)} failed: {failed}")
    return len(failed)


def one(seed: int, root: str) -> int:
    """Play the scenario of a seed, and print what happens in it; how much does not hold."""
    stage = Stage(Path(root), tells=True)
    scenario = scenario_of(seed, stage.reference)
    print(f"seed {seed}, {scenario.world}")
    found = play(scenario, stage)
    print("\n".join([*found.told, *(found.wrong or ["everything holds"])]))
    return len(found.wrong)


def main() -> None:
    """Read the arguments, and play."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100_000, metavar="N", help="how many scenarios")
    parser.add_argument("--seed", type=int, metavar="SEED", help="play this one alone, and tell what happens")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=IN_MEMORY) as root:
        failed = many(asked.seeds, root) if asked.seed is None else one(asked.seed, root)
    sys.exit(min(failed, 1))
