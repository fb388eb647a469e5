"""Compares model files as they lie on disk: on fresh builds, in interleaved rounds, until it is decided.

`Comparer.compare` answers for two files in a context; the proof and `qdqtune compare` use it. `SharedBuilds` compares
many files with the same builds of one, as a front does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from qdqtune.engines.runner import Handle
from qdqtune.errors import BaselineFailed, EngineRefused, Failure, rewording
from qdqtune.graph.loading import files_of
from qdqtune.graph.saving import nbytes
from qdqtune.system.checks import content_digest
from qdqtune.timing.pairing import compare_builds, fresh_pairs
from qdqtune.timing.ratios import (
    PAIRS,
    Plan,
    Ratio,
    across_builds,
    as_many_pairs_as_needed,
    is_wide,
    on_these_builds,
    wants_builds,
)
from qdqtune.tuning.contexts import Context
from qdqtune.tuning.run import Run
from qdqtune.tuning.shipping import Compared
from qdqtune.tuning.store import Store
from qdqtune.types import Deaf, Listener, Measurement

SIDE_BY_SIDE = 512 * 2**20
"""If two model files have more bytes together, only one pair of builds is held at a time, else two. Chosen, not
measured."""

LEAST_SECONDS = 3.0
"""How long a file of a front is compared with one build at least, if its rounds last so long. All files then see the
same slow changes of the machine. Chosen, not measured."""

MOST_TRIES = 3
"""How often a comparison is tried if its worker is killed, too slow or short of memory. Chosen, not measured."""

T = TypeVar("T")


@dataclass(frozen=True)
class ComparisonRequest:
    """Asks for the time of file `b` over that of file `a` in a context. Keys of its records are `key`, the context's
    suffix and the number of the pair of builds."""

    key: str
    a: Path
    b: Path
    context: Context


@dataclass(frozen=True)
class Comparer:
    """Compares files by a plan. Pair number n of builds has the seed `seed` + n.

    `store` keeps results and is asked first; results of files whose content has changed do not count. `lacks` tells
    whether work of so many seconds would end too late. After a transient failure a comparison is tried again, up to
    `tries` times in all. Unless b is slower, a wide interval is made narrower with
    up to `precise_pairs` pairs of builds.
    """

    plan: Plan
    seed: int
    listener: Listener = field(default_factory=Deaf)
    store: Store | None = None
    lacks: Callable[[float], bool] = lambda _: False
    tries: int = 1
    precise_pairs: int = 0

    @classmethod
    def of(cls, run: Run) -> Self:
        """The comparer for the proof of a run."""
        settings = run.settings
        floats, plan = run.bench.floats, settings.proof_plan
        rounds = plan.looks[0] * plan.round_seconds(floats.turn_seconds, floats.start_seconds)
        pair = (2 * floats.build_seconds + rounds) / len(settings.thread_counts)
        told = run.observer, run.store, run.budget.lacks, MOST_TRIES, int(settings.precision_seconds / pair)
        return cls(plan, settings.seed, *told)

    def compare(self, asked: ComparisonRequest, *, pairs: int | None = None, only_not_slower: bool = False) -> Compared:
        """Compare two files on so many pairs of fresh builds, by default on as many as it takes to decide.
        `only_not_slower`: it is enough to see that b is not slower."""
        begun = time.monotonic()

        def wants_more(ratios: Sequence[Ratio]) -> bool:
            seconds = time.monotonic() - begun  # more pairs take about as long as all before
            is_settled = only_not_slower and on_these_builds(ratios).median <= 1
            if wants_builds(ratios, self.plan) and not is_settled:
                return not self.lacks(seconds)
            found, has_more = across_builds(ratios, self.plan), 2 * len(ratios) <= self.precise_pairs
            return has_more and found.verdict != "slower" and is_wide(found) and not self.lacks(seconds)

        measure = partial(self._pairs, asked)
        measured = as_many_pairs_as_needed(measure, self.plan, wants_more) if pairs is None else measure(range(pairs))
        return Compared.of(measured, self.plan, asked.context.threads)

    def _pairs(self, asked: ComparisonRequest, numbers: Sequence[int]) -> list[Measurement]:
        """Rounds of the pairs of builds with these numbers; those that are not in the store side by side, unless the
        files are large."""
        files = self.contents(asked.a, asked.b)
        of = f"{asked.key}{asked.context.suffix}"
        keys = {number: f"comparison:{of}:{number} {files}" for number in numbers}
        known = {number: self.recorded(key) for number, key in keys.items()}
        measured = {number: result for number, result in known.items() if result is not None}
        missing = [number for number in numbers if number not in measured]
        size = PAIRS if nbytes(asked.a) + nbytes(asked.b) <= SIDE_BY_SIDE else 1
        turns = [missing[at : at + size] for at in range(0, len(missing), size)]
        for done, turn in enumerate(turns):
            try:
                results = self.repeated(partial(self._fresh, asked, turn, len(turns) - done))
            except EngineRefused as refused:
                self.refuse(keys[turn[0]], refused.failure)
                raise
            for number, result in zip(turn, results, strict=True):
                self.record(keys[number], result)
                measured[number] = result
        return [measured[number] for number in numbers]

    def _fresh(self, asked: ComparisonRequest, numbers: Sequence[int], turns: int) -> list[Measurement]:
        """Rounds of fresh pairs of builds. `turns` such calls are left, this one included: all have to fit in the time
        that is left."""
        begun = time.monotonic()
        seeds = [self.seed + number for number in numbers]
        names = [f"final_{number}{asked.context.log_suffix}" for number in numbers]

        def is_late() -> bool:
            return self.lacks(turns * (time.monotonic() - begun))  # the next look takes about as long as all before

        runner, files = asked.context.runner, (asked.a, asked.b)
        runner.feed(asked.context.mix)
        return fresh_pairs(runner, *files, self.plan, seeds, names, is_late, self.listener)

    def contents(self, a: Path, b: Path) -> str:
        """The digests of the content of two models, a part of the keys of their results; empty without a store."""
        return "" if self.store is None else f"{content_digest(files_of(a))} {content_digest(files_of(b))}"

    def recorded(self, key: str) -> Measurement | None:
        """The stored rounds of a pair of builds; None if there are none, or fewer than in a first look.

        Raises:
            EngineRefused: the engine refused them.
        """
        samples = None if self.store is None else self.store.get(key, Measurement)
        return samples if samples is not None and len(samples.a) >= self.plan.looks[0] else None

    def record(self, key: str, result: Measurement) -> None:
        if self.store is not None:
            self.store.put(key, result)

    def refuse(self, key: str, failure: Failure) -> None:
        if self.store is not None:
            self.store.refuse(key, failure)

    def repeated(self, measure: Callable[[], T]) -> T:
        """Measure, and again after transient failures, up to `tries` times in all while time is left: the same command
        goes on from there."""
        for _ in range(self.tries - 1):
            try:
                return measure()
            except EngineRefused as refused:
                if not refused.is_transient or self.lacks(0.0):
                    raise
        return measure()


class SharedBuilds:
    """Numbered builds of the user's file in a context; many files are compared with them, one after the other. If the
    engine does not run `given`, builds of `baseline`, the float model as we write it, take their place. A context
    manager.

    `builds` counts the builds of all comparisons, those included that were found in the store.
    """

    def __init__(self, comparer: Comparer, context: Context, given: Path, baseline: Path) -> None:
        self._comparer, self._context = comparer, context
        self._given, self._baseline = given, baseline
        self._handles: dict[int, Handle | None] = {}
        self._kept = PAIRS if 2 * nbytes(given) <= SIDE_BY_SIDE else 0
        self.builds = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._unload(list(self._handles))

    def is_open(self, number: int) -> bool:
        """Whether comparing with that build takes no further build of the user's file."""
        return number in self._handles

    def compare(
        self, number: int, digest: str, file: Path, look: Callable[[Handle], None] | None = None
    ) -> Measurement:
        """Rounds of a fresh build of a file, of the placement with that digest, against the build of that number; from
        the store where it has them, unless the build is to be shown to `look` and the engine makes it."""
        if number not in self._handles:
            self._unload([other for other in self._handles if other >= self._kept])
            self._handles[number] = None
            self.builds += 1
        self.builds += 1
        contents = self._comparer.contents(self._given, file)
        key = f"comparison:front:{digest}{self._context.suffix}:{number} {contents}"
        known = self._comparer.recorded(key)
        if known is not None and look is None:
            return known
        try:
            result = self._comparer.repeated(partial(self._fresh, number, file, look))
        except EngineRefused as refused:
            self._comparer.refuse(key, refused.failure)
            raise
        self._comparer.record(key, result)
        return result

    def _fresh(self, number: int, file: Path, look: Callable[[Handle], None] | None) -> Measurement:
        runner, comparer = self._context.runner, self._comparer
        handle = runner.load(file, f"front_{number}{self._context.log_suffix}_{file.stem}", fresh=True)
        try:
            if look is not None:
                look(handle)
            shared, begun = self._handle(number), time.monotonic()

            def is_decided(found: Ratio) -> bool:
                return found.verdict != "undecided" and time.monotonic() - begun >= LEAST_SECONDS

            return compare_builds(runner, shared, handle, comparer.plan, comparer.seed + number, is_decided)
        finally:
            runner.unload(handle)

    def _handle(self, number: int) -> Handle:
        found = self._handles[number]
        for file, name, what in ((self._given, "given", "given model"), (self._baseline, "baseline", "float model")):
            if found is None:
                log_name = f"front_{number}{self._context.log_suffix}_{name}"
                with rewording(f"the engine does not build the {what} again", BaselineFailed):
                    try:
                        found = self._context.runner.load(file, log_name, fresh=True)
                    except EngineRefused as refused:
                        if name != "given" or refused.is_transient:  # else the float model takes its place
                            raise
        assert found is not None  # else it has raised
        self._handles[number] = found
        return found

    def _unload(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (handle := self._handles.pop(number)) is not None:
                self._context.runner.unload(handle)
