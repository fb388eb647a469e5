"""The loop of a run: what its mode prepares and proposes; how candidates are measured, judged and accepted; and the
proof of the best.

To add a mode, write a function here and a line in `MODES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qdqtune.errors import writing
from qdqtune.graph.saving import CONSTANTS, ConstantFile
from qdqtune.placement.insertion import Inserter
from qdqtune.search import Strategy, TwoStage, best_of, products_left_in_float, ratios_to_float, untried
from qdqtune.search.by_latency import LatencySearch, placement_within
from qdqtune.search.by_rule import RuleSearch
from qdqtune.search.costs.output_noise import Noise
from qdqtune.search.costs.units import weights_by_family
from qdqtune.search.cut import CutSearch
from qdqtune.search.front import FrontSearch
from qdqtune.search.region import WITHIN_LIMITS, RegionSearch
from qdqtune.search.regions import cache
from qdqtune.search.subgraph import with_quiet_seeds
from qdqtune.system.writing import atomic_write
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import judge
from qdqtune.tuning.bench import UNTIMED, Bench
from qdqtune.tuning.contexts import busy
from qdqtune.tuning.folder import BASELINE, FRONT, RAW, REGION_MODELS
from qdqtune.tuning.observer import SEARCHING, Observer, Observers, Silent, State
from qdqtune.tuning.proof import chosen_by_rule, prove, prove_front
from qdqtune.tuning.result import Result, RunLogWriter, conclude, earlier_result
from qdqtune.tuning.rounding_noise import binding_noise_of, noise_of, noise_of_bits
from qdqtune.tuning.run import Run, open_run, prepared, rule_costs, try_metric
from qdqtune.tuning.settings import EFFORTS, Settings
from qdqtune.tuning.shipping import accepted
from qdqtune.tuning.store import PROPOSED, BatchRecord
from qdqtune.tuning.subgraph_mode import profile
from qdqtune.types import Measurement, Placement, Proposal, Trial

UNHURRIED = 2.0
"""A search is hurried if less than this multiple of its builds' least time is left. Chosen, not measured."""


@dataclass(frozen=True)
class Mode:
    """A mode made ready for one run: `strategy` proposes candidates. `end` is called with all trials after the search,
    and may write files. `notes` are for the user. `observers` are told of each trial before the run's own observer.
    `shortfall` tells the user what the time budget left out before the search."""

    strategy: Strategy
    end: Callable[[Sequence[Trial]], None] = lambda history: None
    notes: tuple[str, ...] = ()
    observers: tuple[Observer, ...] = ()
    shortfall: str | None = None


# ---------------------------------------------------------------- cut


def cut(run: Run) -> Mode:
    """Mode cut: learn costs of fusion groups from layer times of builds, or else from the latency of builds."""
    if not run.settings.is_timed:
        return Mode(rule_search(run))  # costs by rule, where nothing is timed
    subject, noise = run.subject, noise_of(run)
    if (by_layers := cut_search(run, noise)) is not None:
        if run.settings.front and noise is not None:
            return Mode(FrontSearch(by_layers, noise))
        return Mode(by_layers)
    suggestions = subject.suggestions() if run.budget.can_learn else {}
    if (noise := binding_noise_of(run)) is not None:
        suggestions[WITHIN_LIMITS] = placement_within(subject.shaped, subject.possible, noise, noise.levels(())[0])
    seeds = {**subject.foremost(), **suggestions, **weights_by_family(run.format_shares)}
    strategy: Strategy = LatencySearch(subject.shaped, subject.possible, seeds, run.width)
    if subject.numbers.wide is not None and not run.budget.is_late:
        strategy = TwoStage(rule_search(run), strategy, run.budget.builds)
    return Mode(strategy)


def rule_search(run: Run) -> RuleSearch:
    costs = rule_costs(run.settings, run.subject).learned([(Placement(), run.bench.layers())])
    return RuleSearch(costs, noise_of_bits(run), run.settings.is_timed)


def cut_search(run: Run, noise: Noise | None) -> CutSearch | None:
    """The search that learns from layer times; None if the engine reports none, or there is no time to get them."""
    if not run.budget.can_learn:
        return None
    subject, layers = run.subject, run.bench.layers()
    if not any(layer.time_ms for layer in layers):
        return None
    first, left = subject.foremost(), run.budget.seconds_left
    usual = min(run.budget.builds, EFFORTS["default"].builds["cut"])
    needed = UNHURRIED * usual * run.bench.trial_seconds / run.learning_width
    fallbacks = {name: p for name, p in subject.suggestions().items() if name not in first}
    is_hurried = left is not None and left < needed and not run.settings.front
    if noise is not None and is_hurried:  # a build tells as much in the time of a few simulated placements
        noise = replace(noise, simulate=None)
    return CutSearch(
        model=subject.shaped,
        possible=subject.possible,
        float_layers=layers,
        seeds=first,
        plan=run.settings.plan,
        noise=noise,
        fallbacks=fallbacks,
        width=run.learning_width,
        format_shares=run.format_shares,
        contexts=run.shares,
        is_hurried=is_hurried,
    )


# ---------------------------------------------------------------- region


def region(run: Run) -> Mode:
    """Mode region: vary placements pattern by pattern; first as mode cut does, if the engine reports layer times."""
    settings, subject, noise = run.settings, run.subject, binding_noise_of(run)
    _tell_of_16_bits(run)
    run.observer.patterns(subject.tuned)
    by_region = RegionSearch(
        model=subject.shaped,
        patterns=subject.tuned,
        possible=subject.possible,
        seeds={
            **subject.suggestions(),
            **weights_by_family(run.format_shares),
        },
        cached=cache.read_cache(settings.pattern_cache) if settings.pattern_cache else {},
        config=settings.config,
        plan=settings.plan,
        seed=settings.seed,
        noise=noise,
        width=run.width,
    )
    strategy: Strategy = by_region
    if settings.seed_builds > 0 and (by_cut := cut_search(run, noise)) is not None:
        by_cut = replace(by_cut, seeds={**by_region.from_cache(), **by_cut.seeds})
        strategy = TwoStage(by_cut, by_region, settings.seed_builds)
    folder = run.output.clear(REGION_MODELS)
    run.output.claim(folder / CONSTANTS)
    files = dict[str, Path]()
    for pattern in subject.tuned:
        first = pattern.instances[0]
        files[pattern.digest] = run.output.claim(folder / f"region_{first.id}_level_{first.level}.onnx")

    def end(history: Sequence[Trial]) -> None:
        if history:
            _write_regions(files, history, run)

    return Mode(strategy, end)


def _tell_of_16_bits(run: Run) -> None:
    if run.subject.numbers.wide is not None:
        run.observer.note(f"`mode` {run.settings.mode} places pairs of 8 bits only; `mode` cut also those of 16")


def _write_regions(files: Mapping[str, Path], history: Sequence[Trial], run: Run) -> None:
    """For each pattern (given by its digest), write the model with the last accepted placement that changed it, or with
    the best placement of the search if there is none. The models share one file of constants."""
    inserter = Inserter(run.subject.model, run.subject.ranges, run.subject.numbers)
    folder, best = run.output.path / REGION_MODELS, best_of(history)
    won = {t.proposal.pattern: t.placement for t in history if t.accepted}
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with ConstantFile(folder / CONSTANTS) as constants:
        for pattern, file in files.items():
            with atomic_write(file) as fresh:
                constants.save(inserter.insert(won.get(pattern, best)), fresh)


# ---------------------------------------------------------------- subgraph


def subgraph(run: Run) -> Mode:
    """Mode subgraph: time every distinct fusion group alone, then try on the whole model what gained."""
    _tell_of_16_bits(run)
    search, progress, notes, shortfall = profile(run)
    run.candidates.write_whole(search.all_accepted, run.settings.output_dir / RAW)
    noise = binding_noise_of(run)
    search = replace(search, by_cut=cut_search(run, noise) if search.incremental else None)
    return Mode(with_quiet_seeds(search, noise), notes=notes, observers=(progress,), shortfall=shortfall)


MODES: Mapping[str, Callable[[Run], Mode]] = {"cut": cut, "region": region, "subgraph": subgraph}


# ---------------------------------------------------------------- the run


def tune(settings: Settings, observer: Observer | None = None, begun: float | None = None) -> Result:
    """Find the fastest placement for a model on an engine, and write it to the output folder.

    It may be stopped at any time; the same call continues. A time budget counts from `begun` (by `time.monotonic`), by
    default from now.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
        KeyboardInterrupt: everything measured so far is in the state file.
    """
    log = RunLogWriter()
    observer = Observers((log, observer or Silent()))
    with prepared(settings, observer, begun) as ready:
        if (note := busy(settings.engine, settings.machine)) is not None:
            observer.note(note)
        try_metric(ready)
        with open_run(ready) as run:
            return _searched_and_proven(run, log)


REPORTED_SHARE = 0.1
"""A hurried search, which does not use layers, asks for the float model's layers if that takes at most this share of
the time left. Chosen, not measured."""


def _searched_and_proven(run: Run, log: RunLogWriter) -> Result:
    settings, budget = run.settings, run.budget
    can_learn, left = budget.can_learn, budget.seconds_left or 0.0
    # While the float build is loaded; kept in the state file for the report, where it takes little of a hurried search.
    run.bench.layers(lacks=lambda seconds: not can_learn and seconds > REPORTED_SHARE * left)
    mode = MODES[settings.mode](run)
    run.observer.stage(SEARCHING)
    history, shortfall = search(mode.strategy, run, Observers((*mode.observers, run.observer)))
    run = replace(run, budget=run.budget.slowed(slowdown(history, ratios_to_float(history, settings.plan), run.bench)))
    run.bench.stand_alone()
    if settings.is_timed and (history or settings.time_budget is None):
        run.observer.stage("proving the result on fresh builds")
    run.candidates.write_whole(Placement(), settings.output_dir / BASELINE)
    run.output.clear(FRONT)  # that of an earlier run would lie beside another result
    rows = None
    if settings.front:
        proof, rows = prove_front(history, run)
    else:
        proof = prove(history, run) if settings.is_timed else chosen_by_rule(history, run)
    for at, trial in enumerate(history):
        if trial.placement in run.bench.asked_metrics:  # the proof may have asked for it after the search
            history[at] = run.limits.with_metric(trial, run.bench.metric)
    mode.end(history)
    late = mode.shortfall or shortfall
    if (earlier := earlier_result(run, proof, late)) is not None:
        return earlier
    return conclude(run, history, proof, mode_notes=mode.notes, front=rows, shortfall=late, log=log)


def search(strategy: Strategy, run: Run, observer: Observer) -> tuple[list[Trial], str | None]:
    """Run a search until the strategy proposes nothing more or the budget is spent. Once a trial shows that the engine
    has no 8-bit kernels, no more pairs are tried. Returns the trials, and a message if time ended it or much is
    left."""
    plan, budget, started = run.settings.plan, run.budget, time.monotonic()
    history: list[Trial] = []
    under, batches = run.settings.time_budget, run.store.values(PROPOSED, BatchRecord)
    recorded = {int(n): batch for n, batch in batches.items() if not (batch.is_lacking and batch.under == under)}
    next_number = max(recorded, default=-1) + 1
    pace: float | None = None
    reserve, is_repeated = 0.0, False

    def room() -> int:
        return budget.room(history, pace, reserve) or int(budget.is_brief(history))

    while recorded or room():
        ratios, against, is_recorded = ratios_to_float(history, plan), best_of(history), bool(recorded)
        ratio_of_best = ratios[against]
        if is_recorded:
            earlier = recorded.pop(min(recorded))
            opponent = next((p for p in ratios if p.digest == earlier.against), None)
            if opponent is None:  # limits have changed, or it is to be measured again
                continue
            # The last batch may have been interrupted; the search has gone on without what the others lack.
            most = budget.room(history, pace, reserve) if opponent == against and not recorded else 0
            batch, against = _recorded(earlier, opponent, history, run.bench, most), opponent
        else:
            batch = list(strategy.propose(history))
            if any(products_left_in_float(trial, run.subject.shaped, plan) for trial in history):
                batch = [p for p in batch if not p.placement.edges]
            if not batch or not room():  # proposing may take long, as it may measure what rounding does to outputs
                break
            record = BatchRecord(against.digest, tuple(batch), is_lacking=run.store.has_lost, under=under)
            run.store.put(f"{PROPOSED}{next_number}", record, order="deterministic")
            next_number += 1
            batch = batch[: room()]
        begun = time.monotonic()
        best = next((t for t in reversed(history) if t.accepted), None)
        trials: list[Trial] = []
        known, measured_count = history, 0
        is_brief = not is_recorded and not budget.room(history, pace, reserve)
        number = len(history) + 1
        measured = run.bench.measured(number, batch, against, is_brief=is_brief, is_recorded=is_recorded)
        with closing(measured):
            for trial, replayed in measured:
                measured_count += not replayed
                is_repeated |= replayed
                trials.append(run.limits.judged(trial, trials, plan, run.bench.metric))
                slower = run.slower([*history, *trials])
                known = [*history, *accepted(trials, plan, best, slower, ratios[against] / ratio_of_best)]
                state = _state(known, run, time.monotonic() - started, replayed=replayed)
                observer.trial(trials[-1], outcome(trials[-1], plan), state)
        if measured_count:
            pace = (time.monotonic() - begun) / measured_count
        history = known
        stale = next((n for n, trial in enumerate(reversed(history)) if trial.accepted), 0)
        ratios = ratios_to_float(history, plan)
        budget = run.budget.slowed(slowdown(history, ratios, run.bench))
        reserve = budget.reserve(ratios[best_of(history)], stale)
        if is_repeated:  # an earlier session has proven too little: no haste in this one
            reserve = max(0.0, reserve)
        if budget.deadline is not None:
            run.bench.deadline = budget.deadline - reserve
        run.bench.keep_only(best_of(history))
    return history, budget.shortfall(history, pace, reserve)


def _recorded(
    batch: BatchRecord, against: Placement, history: Sequence[Trial], bench: Bench, most: int
) -> list[Proposal]:
    """The proposals of a batch of an earlier session that the state file has, and so many others that there are `most`
    in all if that is more; without those in the history."""
    proposals = list(untried(batch.proposals, history))
    asked = [Trial(0, proposal, against, UNTIMED) for proposal in proposals]
    known = [trial.proposal for trial in asked if bench.known(trial, is_recorded=True) is not None]
    missing = [proposal for proposal in proposals if proposal not in known][: max(0, most - len(known))]
    return [proposal for proposal in proposals if proposal in known or proposal in missing]


def slowdown(history: Sequence[Trial], ratios: Mapping[Placement, float], bench: Bench) -> float:
    """How much longer than expected the best model took in its last race, as a factor of at least 1: other work may
    have started on the machine. `ratios` are those of placements to float."""
    for trial in reversed(history):
        if isinstance(trial.result, Measurement) and trial.against in ratios:
            expected = ratios[trial.against] * bench.floats.seconds
            return max(1.0, float(np.median(trial.result.a)) / expected)
    return 1.0


def _state(trials: Sequence[Trial], run: Run, seconds: float, *, replayed: bool) -> State:
    budget, plan, last = run.budget, run.settings.plan, trials[-1]
    expected = seconds / len(trials) * max(0, budget.builds - len(trials))
    if budget.seconds_left is not None:
        expected = max(0.0, min(expected, budget.seconds_left))
    floats, ratio = ratios_to_float(trials, plan), judge(last, plan)
    return State(
        builds=1 + len(trials),
        limit=1 + budget.builds,
        best_ratio=floats[best_of(trials)],
        best=best_of(trials),
        seconds=seconds,
        seconds_left=expected + budget.proof_seconds(1),
        replayed=replayed,
        ratio=None if ratio is None else ratio.scaled(floats[last.against]),
        missed=run.limits.why_refused(last),
        timed=run.settings.is_timed,
        judged=run.settings.has_samples,
    )
