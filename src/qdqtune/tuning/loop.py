"""The loop of a run in every mode: propose candidates, measure, judge and accept them; at the end prove the best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from qdqtune.search import Strategy, best_of, products_left_in_float, ratios_to_float
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import judge
from qdqtune.tuning.contexts import busy
from qdqtune.tuning.folder import BASELINE, FRONT
from qdqtune.tuning.modes import MODES
from qdqtune.tuning.observer import SEARCHING, Observer, Observers, Silent, State
from qdqtune.tuning.proof import chosen_by_rule, prove, prove_front
from qdqtune.tuning.result import Result, RunLogWriter, conclude
from qdqtune.tuning.rewritten import with_rewrites
from qdqtune.tuning.run import Run, open_run, prepared
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.shipping import accepted
from qdqtune.types import Placement, Trial


def tune(settings: Settings, observer: Observer | None = None, begun: float | None = None) -> Result:
    """Find the fastest placement for a model on an engine, and write it to the output folder.

    It may be stopped at any time: the same call goes on where it was stopped. A time budget counts from `begun`, by
    `time.monotonic`, or from now on.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
        KeyboardInterrupt: everything measured so far is in the state file.
    """
    log = RunLogWriter()
    observer = Observers((log, observer or Silent()))
    with prepared(settings, observer, begun) as ready:
        if (note := busy(settings.engine, settings.machine)) is not None:
            observer.note(note)
        chosen = with_rewrites(ready) if settings.is_timed else ready
        with open_run(chosen) as run:
            return _searched_and_proven(run, log)


def _searched_and_proven(run: Run, log: RunLogWriter) -> Result:
    settings, budget = run.settings, run.budget
    if budget.can_learn:
        run.bench.layers()  # while the float build is loaded; kept in the state file for the report
    mode = MODES[settings.mode](run)
    run.observer.stage(SEARCHING)
    history, shortfall = search(mode.strategy, run, Observers((*mode.observers, run.observer)))
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
    late = shortfall or mode.shortfall
    return conclude(run, history, proof, of_mode=mode.notes, front=rows, shortfall=late, log=log)


def search(strategy: Strategy, run: Run, observer: Observer) -> tuple[list[Trial], str | None]:
    """The trials of a search, which ends when the strategy proposes nothing more or the budget is spent; and what to
    tell the user if time has ended it. No more pairs are tried once a trial has shown that the engine runs none of them
    in 8 bits."""
    plan, budget, started = run.settings.plan, run.budget, time.monotonic()
    history: list[Trial] = []
    pace: float | None = None
    reserve = 0.0

    def room() -> int:
        return budget.room(history, pace, reserve) or int(budget.is_brief(history))

    while room():
        batch = strategy.propose(history)
        if any(products_left_in_float(trial, run.subject.shaped, plan) for trial in history):
            batch = [p for p in batch if not p.placement.edges]
        batch = batch[: room()]  # which proposing may have left none, as it may measure what rounding does to outputs
        if not batch:
            break
        begun = time.monotonic()
        best = next((t for t in reversed(history) if t.accepted), None)
        trials: list[Trial] = []
        known, measured_count = history, 0
        is_brief = not budget.room(history, pace, reserve)
        measured = run.bench.measured(len(history) + 1, batch, best_of(history), is_brief=is_brief)
        with closing(measured):
            for trial, replayed in measured:
                measured_count += not replayed
                trials.append(run.limits.judged(trial, trials, plan, run.bench.metric))
                known = [*history, *accepted(trials, plan, best, run.slower([*history, *trials]))]
                state = _state(known, run, time.monotonic() - started, replayed=replayed)
                observer.trial(trials[-1], outcome(trials[-1], plan), state)
        if measured_count:
            pace = (time.monotonic() - begun) / measured_count
        history = known
        reserve = budget.reserve(ratios_to_float(history, plan)[best_of(history)])
        if budget.deadline is not None:
            run.bench.deadline = budget.deadline - reserve
        run.bench.keep_only(best_of(history))
    return history, budget.shortfall(history, pace, reserve)


def _state(trials: Sequence[Trial], run: Run, seconds: float, *, replayed: bool) -> State:
    budget, plan, last = run.budget, run.settings.plan, trials[-1]
    expected = seconds / len(trials) * (budget.builds - len(trials))
    if budget.seconds_left is not None:
        expected = max(0.0, min(expected, budget.seconds_left))
    floats, ratio = ratios_to_float(trials, plan), judge(last, plan)
    against = floats[last.against]
    return State(
        builds=1 + len(trials),
        limit=1 + budget.builds,
        best_ratio=floats[best_of(trials)],
        best=best_of(trials),
        seconds=seconds,
        seconds_left=expected + budget.proof_seconds(1),
        replayed=replayed,
        ratio=None if ratio is None else ratio.scaled(against),
        against_ratio=against,
        missed=run.limits.why_refused(last),
        timed=run.settings.is_timed,
        judged=run.settings.has_samples,
    )
