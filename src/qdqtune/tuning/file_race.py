"""Races of model files on disk: each is built anew several times, and all builds are timed in the same rounds until it
is decided which file is faster. Used by the proof of a run, by fronts and by `qdqtune compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from qdqtune.engines import builds_for
from qdqtune.engines.runner import Handle, Runner
from qdqtune.errors import EngineRefused, Failure
from qdqtune.graph.loading import files_of, nbytes
from qdqtune.system.checks import content_digest
from qdqtune.timing.race import Block, Comparisons, decided_files, is_imprecise, race, taking_rounds, wants_more_builds
from qdqtune.timing.ratios import BLOCK_LOOKS, FEWEST_BUILDS, USUAL_BUILDS, Plan
from qdqtune.tuning.contexts import View
from qdqtune.tuning.shipping import Compared
from qdqtune.tuning.store import Caveat, Store
from qdqtune.types import Array, Deaf, Listener, Times, Turn

SIDE_BY_SIDE = 512 * 2**20
"""If two builds of each file would take more bytes, one of each is held at a time. Chosen, not measured."""

MOST_BYTES = 2 * 2**30
"""Bytes of the files in one race at most, but at least one file against its opponents. Chosen, not measured."""

SINGLES, FEWEST_SINGLES, SINGLES_SECONDS = 200, 100, 20.0
"""Single inferences of each file for percentiles; the fewest that will do; and the most seconds for those of all files.
Chosen, not measured."""

MOST_TRIES = 3
"""How often a block of rounds is tried if its worker is killed, too slow or out of memory. Chosen, not measured."""


@dataclass(frozen=True)
class Tail:
    """The 50th, 90th and 99th percentile of a file's single inferences, in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Array, shares: Sequence[float]) -> Self:
        """From seconds [inference, workload], where workloads have these shares."""
        order = np.argsort(seconds, axis=None)
        weights = np.cumsum(np.broadcast_to(shares, seconds.shape).ravel()[order])
        places = np.searchsorted(weights, np.array([0.5, 0.9, 0.99]) * weights[-1])
        return cls(*(1e3 * seconds.ravel()[order[places]]).tolist())

    @property
    def in_words(self) -> str:
        return f"p50 {self.p50:.4g} ms, p90 {self.p90:.4g} ms, p99 {self.p99:.4g} ms"


@dataclass(frozen=True)
class FileRace:
    """The measured blocks of a race between files, and the conditions under which files are compared."""

    blocks: tuple[Block, ...]
    plan: Plan
    views: tuple[View, ...]

    @property
    def builds(self) -> int:
        return sum(len(block.times.seconds) for block in self.blocks)

    def compared(self, a: int, b: int) -> tuple[Compared, ...]:
        """File number b against file number a, under each condition."""
        return tuple(Compared.of(self.blocks, a, b, self.plan, view) for view in self.views)


@dataclass(frozen=True)
class Racer:
    """Races files on a runner whose inputs are the workloads of `views`. Build number n has the seed `seed` + n.

    Blocks are looked up in the state file `store` by the content of the files. `lacks` says whether work of so many
    seconds would end too late. Wide intervals are narrowed with more builds, for up to `precision_seconds`. A block has
    `builds` builds of each file, one if files are large.
    """

    runner: Runner
    plan: Plan
    seed: int
    views: tuple[View, ...]
    listener: Listener = field(default_factory=Deaf)
    store: Store | None = None
    lacks: Callable[[float], bool] = lambda _: False
    precision_seconds: float = 0.0
    builds: int = USUAL_BUILDS

    def race(self, files: Sequence[Path], comparisons: Comparisons, name: str) -> FileRace:
        """Race files until each comparison of files number (a, b) is decided, or more builds would not decide it. Names
        of the builds' logs begin with `name`.

        Raises:
            EngineRefused: the engine fails on one of the files.
        """
        is_large = self.runner.memory is not None or 2 * sum(map(nbytes, files)) > SIDE_BY_SIDE
        builds = FEWEST_BUILDS if is_large else self.builds
        contents = "" if self.store is None else ":".join(content_digest(files_of(file)) for file in files)
        rounds = ",".join(map(str, self.plan.looks))
        keys = [f"race:{contents}:{builds}:{n}:{rounds}" for n in range(BLOCK_LOOKS[-1])]
        blocks: list[Block] = []
        seconds = 0.0  # of a block that was measured in this session

        def is_known() -> bool:
            return self.store is not None and self.store.has(keys[len(blocks)])

        for look in BLOCK_LOOKS:
            while len(blocks) < look:
                self.listener.progress(len(blocks), look)
                begun, is_measured = time.monotonic(), not is_known()
                blocks.append(self._block(files, keys[len(blocks)], comparisons, builds, len(blocks), name))
                if is_measured:
                    seconds = time.monotonic() - begun
                if len(blocks) < look and self.lacks(seconds):
                    return FileRace(tuple(blocks), self.plan, self.views)
            of_views = [[block.at(view.shares) for block in blocks] for view in self.views]
            if look == BLOCK_LOOKS[-1] or self.lacks(seconds):
                break
            if not any(wants_more_builds(seen, comparisons, self.plan) for seen in of_views):
                # The next look takes about as long as all before. What an earlier session has left wide stays so.
                has_time = 0 < 2 * len(blocks) * seconds <= self.precision_seconds or is_known()
                if not has_time or not any(is_imprecise(seen, comparisons, self.plan) for seen in of_views):
                    break
        return FileRace(tuple(blocks), self.plan, self.views)

    def together(self, opponents: Sequence[Path], files: Sequence[Path]) -> Sequence[Path]:
        """The first files whose builds fit into memory together with those of the opponents; at least one."""
        each = builds_for(self.runner.mix)
        room = MOST_BYTES - each * sum(map(nbytes, opponents))
        sizes = [each * nbytes(file) for file in files]
        count = 1
        while count < len(files) and sum(sizes[: count + 1]) <= room:
            count += 1
        return files[:count]

    def refused(self, files: Sequence[Path]) -> dict[Path, Failure]:
        """The files that the engine fails to run even alone, each with its failure; for use after a failed race."""
        failures = dict[Path, Failure]()
        for file in files:
            try:
                with self.runner.loaded(file, f"alone_{file.stem}", fresh=True) as handle:
                    self.runner.timed(handle, 1, 0.0)
            except EngineRefused as refused:
                failures[file] = refused.failure
        return failures

    def tails(self, files: Sequence[Path], caveat: Caveat | None = None) -> tuple[tuple[Tail, ...], ...]:
        """For each file and each of the `views`, percentiles from single inferences, which the files run in turn. Empty
        if inferences take too long, time is over, the engine fails, or starts a process for each measurement; `caveat`
        then says whether another attempt may succeed."""
        caveat = caveat or Caveat()
        if self.runner.starts_processes:
            return ()
        try:
            with ExitStack() as stack:
                builds = [self.runner.loaded(file, f"single_{at}", fresh=True) for at, file in enumerate(files)]
                handles = [stack.enter_context(build) for build in builds]
                turns = self.runner.turns(handles, 0.0)
                each = len(files) * sum(turn.seconds for turn in turns)
                counts = [count for count in (SINGLES, FEWEST_SINGLES) if count * each <= SINGLES_SECONDS]
                count = next((n for n in counts if not self.lacks(n * each)), 0)
                if not count:
                    caveat.is_hurried = bool(counts)
                    return ()
                single = [Turn(1, 1, turn.seconds) for turn in turns]
                warmup = self.plan.warmups(max(turn.seconds for turn in turns))
                times = self.runner.rounds(handles, range(count), seed=self.seed, turns=single, warmup=warmup)
        except EngineRefused as refused:
            caveat.is_lost = refused.is_transient
            return ()
        seconds = [np.array(rounds) for rounds in times.seconds]
        return tuple(tuple(Tail.of(one, view.shares) for view in self.views) for one in seconds)

    def _block(
        self, files: Sequence[Path], key: str, comparisons: Comparisons, builds: int, number: int, name: str
    ) -> Block:
        """The rounds of fresh builds, from the state file if it has them under this key."""
        caveat = Caveat()

        def repeated() -> Times:
            for _ in range(MOST_TRIES - 1):
                try:
                    return self._fresh(files, comparisons, builds, number, name, caveat)
                except EngineRefused as refused:
                    if not refused.is_transient or self.lacks(0.0):
                        raise
            return self._fresh(files, comparisons, builds, number, name, caveat)

        if self.store is None:
            return Block(repeated(), builds)
        return Block(self.store.memo(key, Times, repeated, caveat), builds)

    def _fresh(
        self, files: Sequence[Path], comparisons: Comparisons, builds: int, number: int, name: str, caveat: Caveat
    ) -> Times:
        """Build files and time them. The float model, which is first and largest, is built last, when the memory for
        reading the others is free again."""
        begun, runner = time.monotonic(), self.runner

        def is_late() -> bool:
            caveat.is_hurried = self.lacks(time.monotonic() - begun)
            return caveat.is_hurried

        stems = [file.stem for file in files]
        names = [stem if stems.count(stem) == 1 else f"{stem}_{at}" for at, stem in enumerate(stems)]
        with ExitStack() as stack:
            handles = list[Handle]()
            for place in reversed(range(len(files) * builds)):
                file, copy = files[place // builds], number * builds + place % builds
                build = runner.loaded(file, f"{name}_{copy}_{names[place // builds]}", fresh=True)
                handles.insert(0, stack.enter_context(build))
            take = taking_rounds(runner, handles, self.plan, self.seed + number)
            leave = decided_files(comparisons, builds, self.plan, [view.shares for view in self.views])
            return race(take, len(handles), self.plan.looks, leave, is_late)
