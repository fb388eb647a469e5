"""What rounding does to the outputs is measured once, and read from the state file by later runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from models import feeds
from qdqtune.calibration.scales import Ranges
from qdqtune.engines.execution import EXECUTION
from qdqtune.engines.formats import numeric_format
from qdqtune.errors import Failure
from qdqtune.numerics.simulation import Sensitivities
from qdqtune.tuning import rounding_noise
from qdqtune.tuning.observer import Silent
from qdqtune.tuning.rounding_noise import noise_of
from qdqtune.tuning.run import Run
from qdqtune.tuning.store import Caveat, Store
from qdqtune.types import Edge, WeightFormat
from refusals import or_raise
from runs import write
from weight_only_nets import MODEL, SHARES, W8


def run_of(tmp_path: Path, **more: Any) -> Run:
    """A run on a model of products alone."""
    subject = SimpleNamespace(
        shaped=MODEL,
        ranges=Ranges({}),
        numbers=numeric_format("onnxruntime", "int8"),
        possible=frozenset(),
        accuracy=feeds(MODEL),
    )
    usual = {
        "subject": subject,
        "settings": SimpleNamespace(front=True, model=write(MODEL, tmp_path)),
        "limits": SimpleNamespace(are_set=False, max_noise=None),
        "budget": SimpleNamespace(is_late=False, builds=1, deadline=None),
        "bench": SimpleNamespace(trial_seconds=1.0),
        "observer": Silent(),
        "execution": EXECUTION,
    }
    return cast(Run, SimpleNamespace(**usual | more))


@pytest.mark.parametrize(("deadline", "is_cut_short"), [(None, False), (0.0, True)])
def test_tensors_that_a_time_budget_could_not_tell_apart_are_measured_again(
    deadline: float | None, is_cut_short: bool, tmp_path: Path
) -> None:
    run, caveat = run_of(tmp_path, budget=SimpleNamespace(builds=1, deadline=deadline)), Caveat()
    assert rounding_noise._Alone(run, 0.0, 0.5).measured("storing weights", dict.fromkeys(SHARES, W8), caveat)
    assert caveat == Caveat(is_hurried=is_cut_short)


def test_noise_that_cannot_be_measured_counts_the_same_for_all_and_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rounding_noise, "each_value", lambda *_, **__: {})
    monkeypatch.setattr(rounding_noise, "sensitivities", lambda *_, **__: or_raise(Failure("run", "no kernel")))
    with Store(tmp_path / "state.yaml", {}) as store:
        run = run_of(tmp_path, store=store)
        vars(run.subject)["possible"] = frozenset({Edge("x", "n", 0)})
        assert rounding_noise._Alone(run, 0.0, 0.5).tensors() == {"x": 1.0}
        assert store.values("sensitivity:", Sensitivities) == {"0": Sensitivities({})}


@pytest.mark.usefixtures("workers")
def test_that_of_dynamic_quantization_includes_the_activations(tmp_path: Path) -> None:
    dynamic = WeightFormat(8, dynamic=True)
    shares = {edge: {W8: 0.6, dynamic: 0.4} for edge in SHARES}
    with Store(tmp_path / "state.yaml", {}) as store:
        noise = noise_of(run_of(tmp_path, format_shares=shares, store=store))
    assert noise is not None
    for edge in SHARES:
        assert 1.1 * noise.of_weight(edge, W8) < noise.of_weight(edge, dynamic) < 10 * noise.of_weight(edge, W8)
