"""The loop: propose, measure, judge, accept; and at the end prove. Every mode runs through here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdqtune.measurement.accuracy import concern
from qdqtune.measurement.limits import outcome, wins
from qdqtune.measurement.timing import Plan, judge, overlap
from qdqtune.search import Strategy, best_of, ratios_to_float
from qdqtune.tuning import advice
from qdqtune.tuning.answer import recalled, remember
from qdqtune.tuning.diary import Diary
from qdqtune.tuning.folder import RUN, SUMMARY
from qdqtune.tuning.front import prove_front
from qdqtune.tuning.modes.table import MODES
from qdqtune.tuning.observer import Observer, Several, Silent, State
from qdqtune.tuning.proof import prove
from qdqtune.tuning.records import summary_of, write_json, write_records
from qdqtune.tuning.result import Result
from qdqtune.tuning.run import Run, open_run, prepared
from qdqtune.tuning.settings import Settings
from qdqtune.types import Trial

PROOF_SHARE = 0.3
"""Of a time budget, what the proof may take."""

LEAST_ROUNDS = 12
"""Rounds without which a comparison decides nothing."""

ALIKE = 1.01
"""Medians within this factor, whose intervals overlap, cannot be told apart."""


def tune(settings: Settings, observer: Observer | None = None) -> Result:
    """Find the fastest placement for a model on an engine, and write it to the output folder.

    Stop it at any time: the same call goes on where it was.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
        KeyboardInterrupt: everything measured so far is in the state file.
    """
    started, diary = time.monotonic(), Diary()
    observer = Several((diary, observer or Silent()))
    if (note := advice.busy(settings.engine)) is not None:
        observer.note(note)
    with prepared(settings, observer) as ready:
        if (before := recalled(ready)) is not None:
            return before
        with open_run(ready) as run:
            result = _finished(run, started, diary)
        if settings.time_budget is None:  # else there may be more to find
            remember(result, ready)
        return result


def _finished(run: Run, started: float, diary: Diary) -> Result:
    """Search and prove, and write down what came out; `started` is when the run began, by the monotonic clock."""
    budget = Budget.of(run, started)
    settings = replace(run.settings, proof=budget.proof)
    run = replace(run, settings=settings)
    run.bench.deadline = budget.deadline
    run.bench.float_layers()  # kept for whoever looks at the run, as long as the float build is at hand
    mode = MODES[settings.mode](run)
    run.observer.stage("searching")
    history = search(mode.strategy, run, Several((*mode.observers, run.observer)), budget)
    run.observer.stage("proving the result on fresh builds")
    front = prove_front(history, run) if settings.front else None
    proof = front.proof if front else prove(history, run)
    write_records(history, proof, run)
    summary = summary_of(history, proof, run) | ({"front": front.rows()} if front else {})
    recorded = mode.record(history, proof.placement)
    run.bench.layers(proof.placement)
    told = diary.content(history, run)
    summary |= {**recorded.summary, "seconds": round(time.monotonic() - started, 3)}
    shipped = next((t.accuracy for t in history if t.placement == proof.placement and t.accuracy is not None), None)
    warning = None if shipped is None else concern(shipped)
    doubts = [None if proof.ratio is None else advice.wide(proof.ratio)]
    if proof.ratio is None:
        doubts += [advice.undecided(history, settings.plan), None if history else budget.excuse]
    notes = (*run.subject.notes, *recorded.notes, *proof.notes, *filter(None, (warning, *doubts)))
    told = {**told, "notes": notes}
    for name, content in {SUMMARY: summary, RUN: told, **recorded.files}.items():
        write_json(settings.output_dir / name, content)
    return Result(proof.shipped, proof.placement, proof.ratio, summary, tuple(history), notes, recorded)


@dataclass(frozen=True)
class Budget:
    """What a search may spend: builds, of which one candidate may take `each`; and time, None without a limit.

    `deadline` is when it has to end, by `time.monotonic`, so that one more candidate and the proof have theirs.
    `proof` is when the proof looks.
    """

    builds: int
    each: int
    deadline: float | None
    proof: tuple[int, ...]

    @staticmethod
    def of(run: Run, started: float) -> Budget:
        """The budget of a run that has started at that time, and whose search begins now."""
        settings = run.settings
        if settings.time_budget is None:
            return Budget(settings.search_builds, settings.trial_builds, None, settings.proof)
        build = run.bench.float_build_seconds
        each_round = 4 * max(run.bench.float_seconds, settings.plan.slot_seconds)
        most = int(PROOF_SHARE * settings.time_budget / (2 * each_round))
        proof = tuple(n for n in settings.proof if n <= most) or (max(LEAST_ROUNDS, min(most, settings.proof[0])),)
        reserve = build + each_round * settings.plan.looks[0] + 2 * (2 * build + each_round * proof[0])
        return Budget(settings.search_builds, settings.trial_builds, started + settings.time_budget - reserve, proof)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the search has to end."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def excuse(self) -> str | None:
        """Why nothing was tried, if that is for want of time."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return None
        return "--time-budget had no room for a candidate: calibration and proof need it all; give more"

    def is_spent(self, trials: Sequence[Trial]) -> bool:
        """Whether no further candidate may be tried."""
        left = self.seconds_left
        return _builds(trials) + self.each > self.builds or (left is not None and left <= 0)


def search(strategy: Strategy, run: Run, observer: Observer, budget: Budget) -> list[Trial]:
    """Trials until the strategy has no more ideas, or the budget is spent."""
    plan, started = run.settings.plan, time.monotonic()
    history: list[Trial] = []
    while not budget.is_spent(history) and (batch := strategy.propose(history)):
        against = best_of(history)
        trials: list[Trial] = []
        for proposal in batch:
            if budget.is_spent([*history, *trials]):
                break
            trial, replayed = run.bench.measure(len(history) + len(trials) + 1, proposal, against)
            trials.append(run.limits.judged(trial, trials, plan, run.bench.metric))
            known = [*history, *accepted(trials, plan)]
            state = _state(known, plan, budget, time.monotonic() - started, replayed)
            observer.trial(trials[-1], outcome(trials[-1], plan), state)
        history += accepted(trials, plan)
        run.candidates.keep_only(best_of(history))
    return history


def accepted(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """The trials of one batch, the fastest of those that won marked as accepted; the most accurate of those that
    cannot be told apart from it."""
    won = [(ratio, t) for t in trials if wins(t, plan) and (ratio := judge(t, plan))]
    if not won:
        return list(trials)
    fastest, _ = min(won, key=lambda pair: (pair[0].median, -pair[1].number))
    alike = [(ratio, t) for ratio, t in won if ratio.median <= ALIKE * fastest.median and overlap(ratio, fastest)]
    # Whole dB: less is no reason to prefer one to another.
    _, chosen = min(alike, key=lambda pair: (-round(pair[1].exactness), pair[0].median, -pair[1].number))
    return [replace(t, accepted=t is chosen) for t in trials]


def _state(trials: Sequence[Trial], plan: Plan, budget: Budget, seconds: float, replayed: bool) -> State:
    best, builds, left = best_of(trials), _builds(trials), budget.seconds_left
    pace = seconds / builds * (budget.builds - builds)
    expected = pace if left is None else min(pace, left)
    floats, last = ratios_to_float(trials, plan), trials[-1]
    own, against = judge(last, plan), floats[last.against]
    ratio = None if own is None else own.scaled(against)
    return State(builds, budget.builds, floats[best], best, seconds, expected, replayed, ratio, against)


def _builds(trials: Sequence[Trial]) -> int:
    return sum(t.builds for t in trials)
