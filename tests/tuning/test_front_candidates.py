"""Candidates of a front that the search itself has not built."""

from pathlib import Path

import pytest

from qdqtune.tuning.loop import tune
from runs import settings

pytestmark = pytest.mark.usefixtures("workers")


def test_what_no_search_has_built_is_a_point_like_any_other(model: Path) -> None:
    result = tune(settings(model, mode="cut", front=True, builds=25, min_sqnr=None))
    rows, fresh = result.summary["front"], {}
    for trial in (t for t in result.history if t.proposal.origin == "front"):
        assert trial.layers  # prices learn from them
        fresh[trial.sqnr_db] = trial
    row = rows[-1]  # more exact than all that the search for speed looks at
    assert row["ratio"] == pytest.approx(fresh[row["sqnr_db"]].proposal.predicted, rel=0.1)
    (note,) = (note for note in result.notes if note.startswith(f"the front has {len(rows)} points of "))
    assert "no others are predicted that differ" in note
