"""A line for every candidate: its speed with the interval, all in times as fast as float, and why it is not taken."""

from io import StringIO

import pytest
from rich.console import Console

from qdqtune.cli import progress
from qdqtune.errors import Failure
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.observer import State
from qdqtune.types import Accuracy, Edge, Measurement, Placement, Proposal, Trial

PAIR, OTHER = Placement.of([Edge("a")]), Placement.of([Edge("b")])
TIMED = Measurement((1.0,), (1.0,))
FASTER, BEST = Ratio(0.5, 0.4, 0.625), Ratio(0.8, 0.8, 0.8)


def told(outcome: str, ratio: Ratio | None, *, best: Placement, best_ratio: float, against: float = 1.0) -> str:
    result = Failure("build", "no kernel") if ratio is None else TIMED
    opponent = Placement() if against == 1.0 else OTHER
    trial = Trial(3, Proposal("static", PAIR), opponent, result, accuracy=Accuracy(15.14))
    state = State(
        3, 11, best_ratio, best, 1.0, None, replayed=False, ratio=ratio, against_ratio=against, missed="20 dB"
    )
    line = progress.line(trial, outcome, state)
    head = f"   3   3/11 builds  best {1 / best_ratio:.2f}x  static: "
    assert line.startswith(head)
    return line.removeprefix(head)


def test_a_note_above_the_picture_breaks_between_words() -> None:
    screen = StringIO()
    with progress.Progress(Console(file=screen, force_terminal=True, width=40), is_moving=True) as live:
        live.note("the machine is busy, so that intervals will be wide")
    assert "note: the machine is busy, so that \nintervals will be wide\n" in screen.getvalue()


@pytest.mark.parametrize(
    ("outcome", "ratio", "best", "best_ratio", "against", "words"),
    [
        ("faster", FASTER, PAIR, 0.5, 1.0, "faster than float: the best so far"),
        ("faster", FASTER, OTHER, 0.45, 1.0, "not taken: another of this batch is faster"),
        ("faster", FASTER, OTHER, 0.502, 1.0, "not taken: as fast as another of this batch within noise, which is"),
        ("undecided", FASTER, OTHER, 0.625, 0.625, "not taken: not clearly faster than the best's 1.60x"),
        ("undecided", BEST, OTHER, 0.625, 0.625, "not taken: not any faster than the best's 1.60x"),
        ("undecided", FASTER, PAIR, 0.5, 0.52, "as fast as the best's 1.92x within noise, and more exact: the best"),
        ("slower", BEST, OTHER, 0.5, 0.5, "slower than the best's 2.00x"),
        ("inaccurate", FASTER, Placement(), 1.0, 1.0, "not taken: 20 dB"),
        ("inaccurate", BEST, OTHER, 0.5, 0.5, "not taken: not any faster than the best's 2.00x; 20 dB"),
        ("failed", None, Placement(), 1.0, 1.0, "failed: no kernel"),
    ],
)
def test_a_line_says_how_fast_and_why_not(
    outcome: str, ratio: Ratio | None, best: Placement, best_ratio: float, against: float, words: str
) -> None:
    speed = "" if ratio is None else f"{ratio.speedup}, "
    line = told(outcome, ratio, best=best, best_ratio=best_ratio, against=against)
    assert line.startswith(speed + words)


def test_steps_of_a_long_stage_are_told_now_and_then(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.shown() as observer:
        observer.stage("calibrating on x.npz")
        for step in range(1, 41):
            now += 1.0
            observer.progress(step, 80)
        observer.note("the machine is busy")
    assert capsys.readouterr().err.splitlines() == [
        "calibrating on x.npz",
        "calibrating on x.npz: 10 of 80, about 1 min 10 s left",
        "calibrating on x.npz: 20 of 80, about 1 min 0 s left",
        "calibrating on x.npz: 30 of 80, about 50 s left",
        "calibrating on x.npz: 40 of 80, about 40 s left",
        "note: the machine is busy",
    ]
