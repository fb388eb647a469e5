"""Decisions of the proof as sentences."""

import pytest

from qdqtune.engines.runner import as_workloads
from qdqtune.timing.ratios import Ratio
from qdqtune.tuning.proof_notes import notes_of, slower_workloads
from qdqtune.tuning.shipping import Attempt, AttemptVerdict, Compared, InContext
from qdqtune.types import Edge, Failure, Placement, Workload

FAST, SLOW = Compared(Ratio(0.5, 0.4, 0.625), 1.0, 0.5, 1), Compared(Ratio(2.0, 1.6, 2.5), 1.0, 2.0, 4)
IT = "a candidate of 1 edges"


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        ("ships", None),
        ("is float", None),
        ("pairs do not pay", f"{IT} did not prove more than its rewrites: 0.50x [0.40x, 0.62x] the speed without"),
        (
            "slower elsewhere",
            f"{IT} is no gain where it may run: 2.00x [1.60x, 2.50x] the speed of float at 1 thread, but 0.50x "
            "[0.40x, 0.62x] at 4 threads",
        ),
        ("not faster than given", f"{IT} did not prove faster than m.onnx: 0.50x"),
        ("not faster", f"{IT} did not prove faster on fresh builds: 2.00x [1.60x, 2.50x] the speed of float"),
    ],
)
def test_why_a_file_did_not_ship(verdict: AttemptVerdict, note: str | None) -> None:
    contexts = InContext(FAST), InContext(SLOW)
    notes = list(notes_of(Attempt(Placement.of([Edge("t", "n", 0)]), contexts, verdict, SLOW), "m.onnx", ""))
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_a_users_file_that_the_engine_does_not_run_is_told() -> None:
    attempt = Attempt(Placement(), (InContext(Failure("build", "no kernel"), FAST),), "ships")
    (note,) = notes_of(attempt, "m.onnx", "")
    assert note == "the engine does not run m.onnx as it is, so it was not compared: no kernel"


def test_a_workload_that_got_slower_is_noted() -> None:
    mix = as_workloads((Workload({}, 0.8, "decode"), Workload({}, 0.2, "prefill")))
    slow, fast = Compared(Ratio(1.25, 1.2, 1.3), 1.0, 1.25, 4), Compared(Ratio(0.5, 0.4, 0.6), 1.0, 0.5, 4)
    one, four = (
        Compared(Ratio(0.8, 0.7, 0.9), 1.0, 0.8, count, by_workload=(fast, x)) for count, x in ((1, fast), (4, slow))
    )
    assert list(slower_workloads([one], mix)) == []
    (line,) = slower_workloads([one, four], mix)
    assert line.startswith(
        "prefill alone (20% of the calls) got slower: 0.80x [0.77x, 0.83x] the speed of float at 4 th"
    )
