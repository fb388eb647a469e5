"""False wins of equal builds: a file meets itself as a tuned file meets the user's own, again and again.

Every comparison is that of the proof: fresh builds of either side, looks at preset rounds, Student's t over builds.
Each setting is an engine at a number of threads, alone or beside as many such comparisons as the cores hold. What is
promised is at most one false win in a thousand comparisons; "builds differ" is the standard deviation of the median
ratio of a pair of builds, beside "rounds differ" of the ratios within one: what a build has of its own for good.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zoo
from cores import pinned, shares

from qdqtune.calibration.samples import open_samples
from qdqtune.engines import EngineSpec
from qdqtune.engines.runner import Runner
from qdqtune.errors import EngineRefused
from qdqtune.graph.loading import load
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.contexts import View
from qdqtune.tuning.file_race import Racer
from qdqtune.tuning.settings import EFFORTS

MOST_BUILDS = 24
"""Builds of a file in one comparison, at most."""


@dataclass(frozen=True)
class Setting:
    """An engine at a number of threads, on so many models side by side; `slot` in seconds."""

    engine: str
    threads: int
    jobs: int
    slot: float


@dataclass(frozen=True)
class Seen:
    """One comparison: what it said, the log of the median ratio of each pair of builds, the spread of the ratios within
    a pair, and the seconds that it took."""

    verdict: str
    medians: tuple[float, ...]
    within: float
    seconds: float


def compared(entry: zoo.Entry, setting: Setting, seeds: range, until: float) -> list[Seen]:
    """Comparisons of a file with itself, one for each seed, as long as there is time."""
    model = load(entry.path, fix_inputs=entry.fixed)
    plan, seen = Plan(EFFORTS["default"].proof, turn_seconds=setting.slot), []
    with (
        TemporaryDirectory() as folder,
        Runner(EngineSpec(setting.engine, {"threads": setting.threads}), log_dir=Path(folder)) as runner,
    ):
        runner.feed(open_samples(entry.data, model, limit=1, fixed=entry.fixed).first(1)[0])
        for seed in seeds:
            if time.time() > until:
                break
            begun = time.monotonic()
            try:
                racer = Racer(runner, plan, MOST_BUILDS * seed, (View(None, (1.0,)),))
                race = racer.race([entry.path, entry.path], [(0, 1)], f"same_{seed}")
            except EngineRefused as refused:
                raise SystemExit(f"{entry.name} does not run: {refused}") from refused
            (found,) = race.compared(0, 1)
            pairs = [block.times.pair(n, block.builds + n) for block in race.blocks for n in range(block.builds)]
            logs = [np.log(np.asarray(pair.b) / np.asarray(pair.a)) for pair in pairs]
            medians = tuple(float(np.median(x)) for x in logs)
            within = float(np.median([1.4826 * np.median(np.abs(x - np.median(x))) for x in logs]))
            seen.append(Seen(found.ratio.verdict, medians, within, time.monotonic() - begun))
    return seen


def of_setting(entry: zoo.Entry, setting: Setting, count: int, seconds: float) -> Iterator[Seen]:
    """As many comparisons as are asked for, each job pinned to cores of its own."""
    width = max(2, setting.threads)
    places = shares(max(setting.jobs, len(os.sched_getaffinity(0)) // width))[: setting.jobs]
    until, share = time.time() + seconds, -(-count // setting.jobs)
    with pinned(places) as pool:
        jobs = [
            partial(compared, entry, setting, range(n * share, min(count, (n + 1) * share)), until)
            for n in range(setting.jobs)
        ]
        for done in as_completed([pool.submit(job) for job in jobs]):
            yield from done.result()


def row(entry: zoo.Entry, setting: Setting, seen: Sequence[Seen]) -> list[str]:
    """The line of a setting."""
    medians = np.array([m for one in seen for m in one.medians])
    where = "alone" if setting.jobs == 1 else f"{setting.jobs} side by side"
    count = [sum(one.verdict == verdict for one in seen) for verdict in ("faster", "slower")]
    wide = [100 * float(np.std(medians)), 100 * float(np.median([one.within for one in seen]))]
    seconds = float(np.mean([one.seconds for one in seen]))
    return [
        entry.name,
        f"{setting.engine}, {setting.threads}, {where}",
        str(len(seen)),
        *map(str, count),
        *(f"{w:.2f} %" for w in wide),
        f"{100 * float(np.max(np.abs(medians))):.2f} %",
        f"{seconds:.2f}",
    ]


def main() -> None:
    arguments = zoo.parser(__doc__, ())
    arguments.add_argument("--engines", nargs="+", default=["onnxruntime"])
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 8], help="threads of the engines")
    arguments.add_argument("--jobs", type=int, nargs="+", help="how many side by side (default: one; and all that fit)")
    arguments.add_argument("--count", type=int, default=200, help="comparisons of each setting (%(default)s)")
    arguments.add_argument("--slot", type=float, default=0.02, help="seconds of a slot (%(default)s)")
    arguments.add_argument("--seconds", type=float, default=3600.0, help="most that a setting takes (%(default)s)")
    given = arguments.parse_args()
    zoo.print_machine()
    cores, rows = len(os.sched_getaffinity(0)), []
    for entry in zoo.find(given.models, given.names):
        for engine in given.engines:
            for threads in given.threads:
                for jobs in given.jobs or sorted({1, max(1, cores // max(2, threads))}):
                    setting = Setting(engine, threads, jobs, given.slot)
                    if seen := list(of_setting(entry, setting, given.count, given.seconds)):
                        rows.append(row(entry, setting, seen))
                        print("  ".join(rows[-1]), flush=True)
    columns = ["model", "engine, threads", "comparisons", "faster", "slower"]
    zoo.print_table([*columns, "builds differ", "rounds differ", "at most", "seconds each"], rows)


if __name__ == "__main__":
    main()
