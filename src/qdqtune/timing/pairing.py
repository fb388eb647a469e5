"""Takes rounds on the engine: of two builds, or of fresh builds of two files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qdqtune.engines.runner import Handle, Runner
from qdqtune.timing.ratios import Plan, Ratio, Rounds, compare, compare_pairs
from qdqtune.types import Listener, Measurement, Tensors


def rounds_of(runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int, samples: Sequence[Tensors] = ()) -> Rounds:
    """A function that takes rounds of two builds, for `ratios.compare`; for `samples` see `Runner.rounds`."""
    return lambda first, count: runner.rounds(
        a,
        b,
        count,
        seed=seed,
        first_round=first,
        turn_seconds=plan.turn_seconds,
        warmup=plan.warmup,
        samples=samples,
    )


def compare_builds(
    runner: Runner, a: Handle, b: Handle, plan: Plan, seed: int, decided: Callable[[Ratio], bool] | None = None
) -> Measurement:
    return compare(rounds_of(runner, a, b, plan, seed), plan, decided=decided)


@contextmanager
def fresh_builds(runner: Runner, a: Path, b: Path, log_name: str) -> Iterator[tuple[Handle, Handle]]:
    """A new build of each file, even if others are loaded. b comes first: the memory to read it is free again when a,
    usually the float model and larger, is read."""
    with ExitStack() as stack:
        handles: list[Handle] = []
        for file in (b, a):
            handle = runner.load(file, f"{log_name}_{file.stem}", fresh=True)
            stack.callback(runner.unload, handle)
            handles.append(handle)
        yield handles[1], handles[0]


def fresh_pairs(
    runner: Runner,
    a: Path,
    b: Path,
    plan: Plan,
    seeds: Sequence[int],
    log_names: Sequence[str],
    is_late: Callable[[], bool] = lambda: False,
    listener: Listener | None = None,
) -> list[Measurement]:
    """Build both files several times, each pair with a seed and a name, and compare all pairs in turns until they are
    decided: see `ratios.compare_pairs`."""
    with ExitStack() as stack:
        pairs = []
        for seed, log_name in zip(seeds, log_names, strict=True):
            pair = stack.enter_context(fresh_builds(runner, a, b, log_name))
            pairs.append(rounds_of(runner, *pair, plan, seed))
        return compare_pairs(pairs, plan, is_late=is_late, listener=listener)
