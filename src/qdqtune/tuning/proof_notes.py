"""What users read about the proof: decisions and comparisons as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qdqtune.tuning import advice
from qdqtune.tuning.shipping import Attempt, Compared, first_faster, is_slower
from qdqtune.types import Failure, Mix

CHANGES_ALONE = "no pair is worth its time here: what ships is the float model {}"


def notes_of(attempt: Attempt, model: str, changes: str) -> Iterator[str]:
    """Why a file did not ship, and whether the user's file, named `model`, could not be compared with it. `changes` is
    what was done to that without pairs, see `Subject.changes`."""
    for one in attempt.contexts:
        if isinstance(one.given, Failure):
            yield f"the engine does not run {model} as it is, so it was not compared: {one.given.reason}"
    edges = f"a candidate of {len(attempt.placement)} edges" if attempt.placement else f"the float model {changes}"
    first, last = first_faster(attempt.to_float), attempt.to_float[-1]
    match attempt.verdict:
        case "pairs do not pay" if attempt.without_pairs is not None:
            speedup = attempt.without_pairs.ratio.speedup
            yield f"{edges} did not prove more than its rewrites: {speedup} the speed without its pairs"
        case "slower elsewhere":
            here = f"{first.ratio.speedup} the speed of float{at_threads(first.threads)}"
            yield f"{edges} is no gain where it may run: {here}, but {last.ratio.speedup}{at_threads(last.threads)}"
        case "not faster than given":
            slowest = max(attempt.to_given, key=lambda ratio: ratio.median)
            yield f"{edges} did not prove faster than {model}: {advice.unproven(slowest, model)}"
        case "misses the limits":
            yield f"{edges} proved faster, and was not taken: {attempt.missed}"
        case "not faster":
            yield f"{edges} did not prove faster on fresh builds: {advice.unproven(first.ratio)}"


def at_threads(count: int | None) -> str:
    """The phrase " at N threads"; empty if the engine has no number of threads."""
    return "" if count is None else f" at {count} thread{'s' * (count != 1)}"


def slower_workloads(contexts: Sequence[Compared], mix: Mix) -> Iterator[str]:
    """A line for each of several workloads that is slower in what ships, with the context in which that is worst."""
    for number, workload in enumerate(mix if contexts and contexts[0].by_workload else ()):
        alone = [one.by_workload[number] for one in contexts]
        worst = max(alone, key=lambda one: one.ratio.median)
        if is_slower(worst):
            at = at_threads(worst.threads) if len(contexts) > 1 else ""
            yield (
                f"{workload.name} alone ({workload.share:.0%} of the calls) got slower: {worst.ratio.speedup} the "
                f"speed of float{at}; the others gain more than it loses"
            )
