"""The loop: propose, measure, judge, accept; and at the end prove. Every mode runs through here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import islice

from qdqtune.engines import threads_of
from qdqtune.engines.build_queue import Urgency
from qdqtune.numerics.accuracy import concern
from qdqtune.search import Strategy, as_foretold, best_of, foreseen, ratios_to_float
from qdqtune.search.front import FrontSearch
from qdqtune.system.writing import write_json
from qdqtune.timing.limits import outcome
from qdqtune.timing.ratios import Plan, judge
from qdqtune.tuning import advice
from qdqtune.tuning.accepting import accepted
from qdqtune.tuning.answer import recalled, remember
from qdqtune.tuning.budget import Budget, builds_of
from qdqtune.tuning.folder import RUN, SUMMARY
from qdqtune.tuning.front import prove_front
from qdqtune.tuning.modes.table import MODES
from qdqtune.tuning.observer import SEARCHING, Observer, Several, Silent, State
from qdqtune.tuning.proof import Proof, begin_proof, lost, prove
from qdqtune.tuning.result import Result
from qdqtune.tuning.rewritten import with_rewrites
from qdqtune.tuning.run import Run, open_run, prepared, written_once
from qdqtune.tuning.run_log import RunLogWriter
from qdqtune.tuning.settings import Settings
from qdqtune.tuning.stopwatch import Stopwatch
from qdqtune.tuning.summary import summary_of, write_records
from qdqtune.types import Placement, Proposal, Trial


def tune(settings: Settings, observer: Observer | None = None) -> Result:
    """Find the fastest placement for a model on an engine, and write it to the output folder.

    Stop it at any time: the same call goes on where it was.

    Raises:
        QdqtuneError: see `errors`; BaselineFailed if the engine cannot run the float model.
        KeyboardInterrupt: everything measured so far is in the state file.
    """
    log, watch = RunLogWriter(), Stopwatch(settings)
    observer = Several((log, watch, observer or Silent()))
    with prepared(settings, observer) as ready:
        if (before := recalled(ready)) is not None:
            return before
        if (note := advice.busy(settings.engine)) is not None:
            observer.note(note)
        with written_once(ready) as constants, open_run(with_rewrites(ready, constants), constants) as run:
            result, is_done = _finished(run, watch, log)
        if is_done:
            remember(result, ready)
        return result


def _finished(run: Run, watch: Stopwatch, log: RunLogWriter) -> tuple[Result, bool]:
    """Search and prove, and write down what came out; and whether the same command would find nothing more."""
    settings, budget = run.settings, run.budget
    if not budget.is_late:
        run.bench.layers()  # kept for whoever looks at the run, as long as the float build is at hand
    mode = MODES[settings.mode](run)
    run.observer.stage(SEARCHING)
    history = search(mode.strategy, run, Several((*mode.observers, run.observer)), budget)
    shortfall = budget.shortfall(history)
    run.bench.stand_alone()
    if history or settings.time_budget is None:
        run.observer.stage("proving the result on fresh builds")
    by_points = mode.strategy if isinstance(mode.strategy, FrontSearch) and history else None
    front = prove_front(history, run, by_points) if settings.front else None
    proof = front.proof if front else prove(history, run)
    run.runner.build_queue.close()
    history = [*history, *front.trials] if front else history
    write_records(history, proof, run)
    summary = summary_of(history, proof, run) | ({"front": front.rows(run.subject.mix)} if front else {})
    recorded = mode.record(history, proof.placement)
    if history or not budget.is_late:
        run.bench.layers(proof.placement)
    summary |= {**recorded.summary, "seconds": round(watch.whole, 3)}
    shipped = next((t.accuracy for t in history if t.placement == proof.placement and t.accuracy is not None), None)
    warning = None if shipped is None else concern(shipped)
    doubts = [warning, shortfall, None if proof.ratio is None else advice.wide(proof.ratio)]
    if proof.ratio is None:
        doubts += [advice.undecided(history, settings.plan), None if history else budget.excuse]
    doubts += [advice.elsewhere(threads_of(settings.engine), [(s.threads, s.ratio) for s in proof.standings])]
    doubts = [*lost(proof.standings, run.subject.mix), *doubts]
    notes = (*run.subject.notes, *run.found.notes, *recorded.notes, *proof.notes, *filter(None, doubts))
    told = log.content(history, run, notes, watch.session)
    for name, content in {SUMMARY: summary, RUN: told, **recorded.files}.items():
        write_json(settings.output_dir / name, content)
    result = Result(proof.shipped, proof.placement, proof.ratio, summary, tuple(history), notes, recorded)
    return result, shortfall is None and (not budget.is_late or _is_proven(proof, history, run))


def _is_proven(proof: Proof, history: Sequence[Trial], run: Run) -> bool:
    """Whether what the search was for has proven itself, so that more time for the proof would change nothing."""
    is_told = proof.ratio is not None or not run.subject.rewrites.names
    return bool(history) and is_told and proof.placement == best_of(history) and not run.settings.front


def search(strategy: Strategy, run: Run, observer: Observer, budget: Budget) -> list[Trial]:
    """Trials until the strategy has no more ideas, or the budget is spent."""
    plan, started = run.settings.plan, time.monotonic()
    history: list[Trial] = []
    while not budget.is_spent(history) and (batch := strategy.propose(history)):
        best = next((t for t in reversed(history) if t.accepted), None)
        trials: list[Trial] = []
        batch = batch[: budget.room(history)]
        foresee = partial(_foresee, strategy, history, batch, run)
        with closing(run.bench.measured(len(history) + 1, batch, best_of(history), foresee)) as measured:
            for trial, replayed in measured:
                trials.append(run.limits.judged(trial, trials, plan, run.bench.metric))
                known = [*history, *accepted(trials, plan, best)]
                state = _state(known, plan, budget, time.monotonic() - started, replayed)
                observer.trial(trials[-1], outcome(trials[-1], plan), state)
                if budget.is_spent([*history, *trials]):
                    break
        history += accepted(trials, plan, best)
        run.bench.keep_only(best_of(history))
    return history


def _foresee(strategy: Strategy, history: Sequence[Trial], batch: Sequence[Proposal], run: Run) -> None:
    """Give idle builders the candidates likely to come next; failing that, the files that the proof will need if
    nothing beats the best candidate expected so far."""
    room, plan = run.budget.room(history) - len(batch), run.settings.plan
    room = max(0, min(builders := run.runner.build_queue.builders, room))
    coming = tuple(islice(foreseen(strategy, history, batch, plan), room))
    run.bench.begin(coming, Urgency.NEXT)
    begin_proof(best_of(as_foretold(history, batch, plan)) if len(coming) < builders else Placement(), run)


def _state(trials: Sequence[Trial], plan: Plan, budget: Budget, seconds: float, replayed: bool) -> State:
    best, built, left = best_of(trials), builds_of(trials), budget.seconds_left
    pace = seconds / built * (budget.builds - built)
    expected = (pace if left is None else max(0.0, min(pace, left))) + budget.proof_seconds
    floats, last = ratios_to_float(trials, plan), trials[-1]
    own, against = judge(last, plan), floats[last.against]
    ratio = None if own is None else own.scaled(against)
    # As --builds has it: the float model's build counts.
    return State(1 + built, 1 + budget.builds, floats[best], best, seconds, expected, replayed, ratio, against)
